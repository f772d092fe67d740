"""Training: a run from its configuration to its end, with evaluation, checkpoints and control."""
