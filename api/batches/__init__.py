"""/v1/files and /v1/batches: OpenAI's files of requests, which the other endpoints answer in the background."""
