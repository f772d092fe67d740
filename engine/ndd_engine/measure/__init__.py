"""Measures running code: phase clocks, profiler captures, stack samples, FLOP counts, and their events."""
