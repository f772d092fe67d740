"""Short measurements before training: which size, which settings take effect, what a micro-batch costs."""
