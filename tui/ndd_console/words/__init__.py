"""Facts in words: blocks that know nothing of where they are shown."""
