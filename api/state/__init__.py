"""What api processes keep for later requests: one SQLite database."""
