"""What a run will need before it starts: memory and time.

allocator      a model of CUDA's caching allocator
trace          what a step allocates and frees, and the family of traces behind two of them
recording      such traces of real steps, on the host and on a card
fakes          such traces of a card that is not here
memory         the peak at any batch, replayed from a family
steptime       the time of a step at any batch, from a few measured ones
probing        measures one configuration: its traces and its times
probe_process  the same in a process of its own, asked by the wizard
outlook        all of it for one configuration, for `check`
"""
