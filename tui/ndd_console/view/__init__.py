"""Pure functions that turn a value and a size into rows of styled text."""
