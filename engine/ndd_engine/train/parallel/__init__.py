"""Training in several processes (ranks) that share one model: DDP and FSDP2."""
