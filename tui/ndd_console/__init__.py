"""The console: command line, screens and terminal handling over ndd_engine."""
