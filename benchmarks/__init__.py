"""Measurements of ndd-console itself: commands that print ratios and times, never assertions. See __main__."""
