"""Widgets and the terminal driver: rows and lists, the canvas of the live screen, and private names of Textual."""
