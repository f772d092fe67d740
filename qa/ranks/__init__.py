"""Runs of several ranks: stragglers, failures, what they cost and need."""
