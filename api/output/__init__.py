"""From the chunks of one request to its answer, plain or streamed."""
