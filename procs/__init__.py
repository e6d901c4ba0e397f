"""The pipeline: each file is one actor."""
