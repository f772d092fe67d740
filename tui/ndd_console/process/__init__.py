"""Processes and terminals: detaching, captured output, a lost terminal, work in a thread."""
