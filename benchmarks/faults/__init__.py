"""Plants one fault at a time, and looks whether the console names it, and whether its fix gains what it says."""
