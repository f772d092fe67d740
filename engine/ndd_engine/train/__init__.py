"""Training: the loop, its clock, loaders, precision, evaluation, checkpoints, control."""
