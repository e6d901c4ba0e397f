"""The version, which imports nothing, so that every process and the build can ask for it."""

__version__ = "0.2.0"
