"""The library of ndd-console: trains, times, records. Imports no user interface."""

__version__ = "0.1.0"
