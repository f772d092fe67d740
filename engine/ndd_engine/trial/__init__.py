"""Measures candidate vs. baseline on this machine: trials in ABBA blocks, tuning, claims, comparison of runs."""
