"""Whether the intervals of trials contain the truth."""
