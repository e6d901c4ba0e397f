"""The HTTP edge: OpenAI's shapes on one side, the pipeline's messages on the other; knows nothing of engines."""
