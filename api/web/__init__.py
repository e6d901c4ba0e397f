"""The web pages and the OpenAPI description."""
