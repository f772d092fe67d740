"""Predicts memory and time of a training run before it starts.

allocator      a simulation of CUDA's caching allocator; `blocks` and `rules` are its parts
trace          the allocations and frees of a step, and a fit through two traces for other batch sizes
linearity      fits two recorded steps and checks a third
recording      records traces of real steps, on the CPU or a GPU
fakes          traces for a GPU that is not in this machine, from fake tensors
memory         peak memory at any batch size, from fitted traces
steptime       step time at any batch size, from a few measured ones
probing        measures one configuration: traces and step times
probe_process  the same in a subprocess, for the wizard
outlook        memory and time of one configuration
configured     the same from its draft, for `check` and the Python API
"""
