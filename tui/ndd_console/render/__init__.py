"""Blocks as HTML, as text, and as rows of a screen."""
