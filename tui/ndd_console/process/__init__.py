"""Processes and terminals: detaching, captured output, a lost terminal, a screen over a thread."""
