"""Loads training data: item sources, batch order, loader workers, and a probe of their cost."""
