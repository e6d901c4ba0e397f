"""The web page and the description of the API."""
