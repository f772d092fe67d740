"""What a run will need before it starts: memory and time."""
