"""/v1/files and /v1/batches: OpenAI's files of requests, answered in the background by the same endpoints."""
