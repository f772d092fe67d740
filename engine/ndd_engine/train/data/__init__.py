"""Loading training data: where items come from, batches in order, loader workers, and a probe of their cost."""
