"""The HTTP server itself: connections, limits, keys, errors; it knows nothing of models."""
