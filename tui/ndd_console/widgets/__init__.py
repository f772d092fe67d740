"""The one widget of the console: a canvas of rows."""
