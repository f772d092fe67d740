"""The observer of a training script: measures its steps from inside its process, without a change to the script.

Standard library and the script's own torch only; Python 3.9 and later, torch 2.1 and later. `site/sitecustomize.py`
loads this folder by its path as the package `_ndd_watch`, so that nothing of ours is on the script's `sys.path`.

    site        the way in: found through PYTHONPATH
    install     hooks torch once it is imported; a process is watched from its first backward pass on
    mapped      the memory that others read: counters, rows of steps, lines; what Linux knows of the process
    clock       the phase clock, which own training uses, too, and that of a GPU
    blocking    times of copies to a GPU, and of waits for it
    holders     which containers and tensors grow, and who refers to them; which lines allocate GPU memory; on request
    probes      operations of ours inside functions of torch; hears what functions return
    apart       keeps observer and script apart: the library's functions as they were, exceptions, torch's compiler
    hooks       the hooks on torch
    modules     calls of modules: forward passes and evaluations
    loops       where steps of the training end, its optimizers, and its passes over the data
    waits       where a rank waits for others
    steps       counts steps, with an optimizer or without, and decides which are timed by phase
    slowing     what makes steps slower: kept graphs, garbage, what grows, large tables, denormal numbers
    finite      skipped updates, and the first thing in a step that is not finite
    looks       looks at tensors and attributes without running code of the script; which code is its own
    profiler    profiles one step, evaluations and checkpoints; the engine's own runs use it, too
    call_times  how long functions take: Python's profiler, or one of ours
    attribution  to which function the time of a profile belongs, and what it is spent with; also of workers
    called      what the user's lines call in libraries, in such a profile
    collecting  looks at what an evaluation keeps whose memory grows
    receiving   what the process that trains does with batches of workers; own training uses it, too
    workers     observes a loader's worker from inside its process
    worker_profile  which functions take a worker's time
    sheet       the small memory of a worker that others can read
    captures    captures a few steps with torch's profiler
    lines       which line of the user's code runs at any moment of a captured step
    frameworks  what Hugging Face's Trainer and Lightning know of a run
    changes     the table of changes: every setting that can be tried
    switches    how they are made without an edit; a cache of items is one of them
    recompute   blocks of a model that compute again in backward, for a memory budget; own training uses it
    turns       what each block of a model holds in a step, and the cheapest to compute again; also for own training
    fitting     the changes that need both: blocks that are given, or chosen in steps of the script
    trying      a process of a trial: its gate and its changes
    outside     what a script does outside its folder, from its first line on; refuses it in a scratch copy
    whose       whose an exception or a file is: ours, the library's or the script's
    window_facts  what a window tells beside the times of its phases; own training tells it by the same code
    emit        writes the events of the record, and obeys what the console asks for
"""

import os as _os

# Goes to the front of PYTHONPATH. It contains only sitecustomize.py.
SITE = _os.path.join(_os.path.dirname(_os.path.realpath(__file__)), "site")
# Environment variable with the folder for the records; without it nothing is watched.
FOLDER = "NDD_WATCH"
# The same with the folder for the traces of profiler captures, and with that for snapshots of a full GPU memory.
CAPTURES, MEMORY = "NDD_WATCH_CAPTURES", "NDD_WATCH_MEMORY"
# The same with the folder of a scratch copy, and after a colon the folder that is copied: nothing else may be changed.
LINKED = "NDD_WATCH_LINKED"
# A file in the folder of a scratch copy: what a process wanted to do there, which is not allowed.
REFUSED = "refused"
