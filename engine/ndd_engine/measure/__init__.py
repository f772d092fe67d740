"""Measures running code: phase clocks, profiler captures, profiled steps, FLOP counts, and their events."""
