"""Detection of GPUs and host, and the sampler of their counters."""
