"""The record of a run: events, the fold to a Snapshot, the run directory, the control socket. Imports no torch."""
