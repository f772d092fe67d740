"""Recordings that torch made elsewhere: profiler traces and memory snapshots. Reading them executes nothing."""
