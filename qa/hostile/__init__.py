"""Hostile attempts against the program; `make hostile` makes them all, `make test` a few of each kind."""
