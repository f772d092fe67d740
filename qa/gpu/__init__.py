"""Measures on a machine with an NVIDIA GPU what cannot be tested without one, and writes one Markdown file."""
