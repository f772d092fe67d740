"""Training one model in several processes (ranks): DDP and FSDP2."""
