"""Runs of several ranks: late ranks, failures, what they cost and need."""
