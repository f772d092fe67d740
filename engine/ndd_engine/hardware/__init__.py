"""Which card and which machine this is, and the sampler of their counters."""
