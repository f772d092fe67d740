"""The observer of a training script: measures its steps from inside its process, without a change to the script.

Standard library and the script's own torch only; Python 3.9 and later, torch 2.1 and later. `site/sitecustomize.py`
loads this folder by its path as the package `_ndd_watch`, so that nothing of ours is on the script's `sys.path`.

    site        the way in: found through PYTHONPATH
    install     hooks torch once it is imported; a process is watched from its first backward pass on
    mapped      the memory that others read: counters, rows of steps, lines
    phases      the phases of a step, by index
    clock       the phase clock
    device      the clock of a GPU and values on it, read without waiting; the engine's own runs use it, too
    copies      times copies to a GPU
    allocations which lines allocate GPU memory, on request
    probes      operations of ours inside functions of torch
    compilers   keeps torch's compiler out of our functions
    hooks       the hooks on torch
    modules     calls of modules: forward passes and evaluations
    optimizers  their steps as torch wraps them, and the closures that these take
    waits       where a rank waits for others
    steps       counts steps, and decides which are timed by phase
    ends        where steps of the training end, of one or several optimizers
    by_hand     steps without an optimizer and without `backward`
    graphs      whether the script keeps the graphs of earlier steps, or carries one from step to step
    slowing     tells when steps have become slower, so that another close look is worth it
    passes      counts passes over the data, and compares first batches
    finite      skipped updates, losses that are not finite
    garbage     times garbage collections, and decides when they happen
    looks       looks at tensors without running code of the script
    attributes  reads attributes without running code of the script
    exceptions  tells our exceptions from the script's
    own         which code is the script's own, and where it makes loaders and optimizers
    library     functions of Python's library as they were at the start
    listening   hears what functions return, and learns where batches come from
    profiler    profiles one step; the engine's own runs use it, too
    called      what the user's lines call in libraries, in such a profile
    asides      decides which evaluations and checkpoints are profiled
    sizes       counts what may grow, in such a step
    tables      finds embeddings whose gradients have values for rows that nothing reads, in such a step
    denormals   finds denormal numbers, and whether the processor is slow with them
    collecting  looks at what an evaluation keeps whose memory grows
    holders     which containers and tensors grow, and who refers to them, on request
    origin      finds the first thing that is not finite in a step
    timed_calls the profiler of one thread from Python 3.12 on
    blocking    times waits for a GPU that no profiler sees
    captures    captures a few steps with torch's profiler
    frameworks  what Hugging Face's Trainer and Lightning know of a run
    changes     the table of changes: every setting that can be tried
    switches    how they are made without an edit; a cache of items is one of them
    gate        lets a loop train in runs, on command; that of the engine's own runs, too
    trying      a process of a trial
    requests    what the console asks for
    outside     what the script does outside its working directory
    process     what Linux knows of the process
    emit        writes the events of the record
"""

from pathlib import Path

# Goes to the front of PYTHONPATH. It contains only sitecustomize.py.
SITE = Path(__file__).resolve().parent / "site"
# Environment variable with the folder for the records; without it nothing is watched.
FOLDER = "NDD_WATCH"
# The same with the folder for the traces of profiler captures, and with that for snapshots of a full GPU memory.
CAPTURES, MEMORY = "NDD_WATCH_CAPTURES", "NDD_WATCH_MEMORY"
# The same with the folder of a scratch copy, and after a colon the folder that is copied: nothing else may be changed.
LINKED = "NDD_WATCH_LINKED"
# A file in the folder of a scratch copy: what a process wanted to do there, which is not allowed.
REFUSED = "refused"
