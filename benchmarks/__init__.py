"""Benchmarks of ndd-console itself. They print ratios and times, and assert nothing. See __main__."""
