"""The version of ndd-console."""

__version__ = "0.5.0"
