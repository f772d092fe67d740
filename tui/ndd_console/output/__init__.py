"""A run as text: progress lines and the console log."""
