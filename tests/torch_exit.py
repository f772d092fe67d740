"""What torch itself does to tests at the exit of a process."""

# A rank with gloo aborts: on some machines in 1 of 4 launches, also unobserved. Tests that launch torchrun start again.
ABORTED = "terminate called without an active exception"
