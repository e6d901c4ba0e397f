"""/v1/chat/completions and /v1/completions: OpenAI's older two, and the fields that all of our APIs share."""
