"""The record of a run: events, their state as a Snapshot, run directory and control socket. Imports no torch."""
