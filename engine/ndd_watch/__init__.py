"""The observer of a training script: measures its steps from inside its process, without a change to the script.

Standard library and the script's own torch only; Python 3.9 and later, torch 2.1 and later. `site/sitecustomize.py`
loads this folder by its path as the package `_ndd_watch`, so that nothing of ours is on the script's `sys.path`.

    site      the way in: found through PYTHONPATH
    install   hooks torch once it is imported; a process is watched from its first backward pass on
    clock     the phase clock
    steps     finds where a step ends
    hooks     the hooks on torch
    waits     where a rank waits for others, and what it tells of its steps
    monitor   times generators, on Python 3.12 and later
    places    where in the script loaders and optimizers are made
    modules   hooks of the modules that the script calls
    own       which code is the script's own
    census    learns what a step calls
    profiler  profiles one step; the engine's own runs use it, too
    frameworks  what Hugging Face's Trainer and Lightning know of a run
    changes   what a trial can change from outside
    trying    a process of a trial
    outside   what the script writes outside its working directory
    process   what Linux knows of the process
    record    writes one JSON file per process
"""

from pathlib import Path

# Goes to the front of PYTHONPATH. It contains only sitecustomize.py.
SITE = Path(__file__).resolve().parent / "site"
# Environment variable with the folder for the records; without it nothing is watched.
FOLDER = "NDD_WATCH"
