"""Predicts memory and time of a training run before it starts.

allocator      a simulation of CUDA's caching allocator
estimate       the allocations of a step, fitted through two recordings; peak memory and step time at any batch size
step_probes    records and times real steps, on the CPU or a GPU
fakes          traces for a GPU that is not in this machine, from fake tensors: allocations and operations
loops          such traces at other sizes, and with loops of any length
launches       step time of a GPU that is not there: host and GPU as two timelines
absent         memory and time on a GPU that is not in this machine
rank_memory    one rank of several in a single process
budget         chooses and times blocks that compute again for a memory budget; what would make a configuration fit
outlook        memory and time of one configuration, for `check` and the Python API
probe_process  the same in a subprocess, for the wizard and the start of a run
"""
