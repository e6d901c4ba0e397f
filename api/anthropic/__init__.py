"""/v1/messages: Anthropic's API, on top of chat."""
