"""Processes and terminals: detaching, captured output, a lost terminal, a screen for work in a thread."""
