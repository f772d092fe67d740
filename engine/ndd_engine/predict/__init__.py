"""Predicts memory and time of a training run before it starts.

allocator      a simulation of CUDA's caching allocator
estimate       peak memory and step time at any batch size, from fitted traces and a few measured times
step_probes    measures one configuration: traces of real steps, and step times
fakes          traces for a GPU that is not in this machine, from fake tensors: allocations and operations
loops          such traces at other sizes, and with loops of any length
kernels        how long an operation takes on a GPU, from its shapes and the GPU's specifications
launches       step time of a GPU that is not there: host and GPU as two timelines
absent         memory and time on a GPU that is not in this machine
rank_memory    what one of several ranks holds
probe_process  probes in a subprocess, for the wizard
outlook        memory and time of one configuration, for `check` and the Python API
"""
