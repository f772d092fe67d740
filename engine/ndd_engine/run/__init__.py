"""The run: folder, lock, record and control. What it executes is an argument: own training, ranks, or a script."""
