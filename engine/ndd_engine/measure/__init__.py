"""What turns running code into measurements: clocks, profiler captures, stack samples, FLOP counts, reporting."""
