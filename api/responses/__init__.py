"""/v1/responses: OpenAI's newer API, on top of chat."""
