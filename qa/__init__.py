"""Whether the program keeps its promises: hostile inputs, planted faults, ranks, intervals of trials, GPUs."""
