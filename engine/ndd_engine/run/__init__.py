"""A run while it lives: what it executes, requests to it, its socket; and deleting those that have ended."""
