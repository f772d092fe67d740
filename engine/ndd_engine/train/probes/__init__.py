"""Short measurements before training: model size, settings in effect, cost of a micro-batch."""
