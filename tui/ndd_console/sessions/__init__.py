"""A run, or a screen for work in a thread, from its start to its end in this process."""
