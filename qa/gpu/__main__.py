"""`python -m benchmarks.gpu [--quick]`: measure this machine's GPU; write one Markdown file, and one of JSON beside it.

It runs in this Python and needs no index; `make gpu` installs what it needs first (see setup). Each part is a process
of its own with a time limit, so a crash, a hang or missing memory costs only that part. The files are rewritten
whenever there is a new figure.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from .parts import FULL_S, MACHINE, QUICK_S, parts
from .setup import BEGAN, EXIT_INTERRUPTED, EXIT_NO_GPU, EXIT_USAGE, HOW, options, say, unmet, unusable


def main() -> int:
    """Returns 0 if every part ran to its end, whatever its figures; 1 if not; 3 without a GPU; 130 if interrupted.

    2 for a wrong option, a package that is missing, or a file that cannot be written.
    """
    begin = time.monotonic()
    program = "make gpu ARGS=…" if HOW in os.environ else "python -m benchmarks.gpu"
    given = options(__doc__, program)
    effort = "smoke" if given.cpu else "quick" if given.quick else "full"
    wanted = tuple(part for part in parts() if not given.only or part.words & {*given.only, MACHINE})
    known = set().union(*(part.words for part in parts()))
    if unknown := [name for name in given.only if name not in known]:
        say(f"unknown part {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
        return EXIT_USAGE
    limit_s = given.budget or (QUICK_S if effort == "quick" else FULL_S)
    if effort == "full" and given.budget is None and BEGAN in os.environ:
        begin -= time.time() - float(os.environ[BEGAN])  # with installing it has to end within the hour, too
    say("importing what the parts need; the first time this may take minutes")
    try:
        lacking = unmet(sys.executable)
        why = "" if given.cpu or lacking else unusable(sys.executable)
    except KeyboardInterrupt:
        say("interrupted; nothing was measured")
        return EXIT_INTERRUPTED
    if lacking:
        say(f"{sys.executable} cannot run this: {lacking}")
        return EXIT_USAGE
    if why:
        say(f"make gpu needs an NVIDIA GPU: {why}")
        return EXIT_NO_GPU
    # Only now: they import packages that may have been missing.
    from .session import Session, adopt

    path = given.output or Path(time.strftime("gpu-%Y-%m-%d-%H%M%S.md"))
    session = Session(
        wanted,
        "cpu" if given.cpu else "cuda",
        effort,
        begin + limit_s,
        limit_s,
        path.absolute(),
        tuple(given.only),
    )
    session.page.command = command(given)
    say(f"writing {path}; Ctrl-C stops and keeps it")
    adopt()
    return session.run()


def command(given: argparse.Namespace) -> str:
    """How it was called, without the name of the file."""
    words = [name for name, on in (("--quick", given.quick), ("--cpu", given.cpu)) if on]
    words += [word for name in given.only for word in ("--only", name)]
    words += ["--budget", f"{given.budget:g}"] if given.budget else []
    if HOW not in os.environ:
        return shlex.join(["python", "-m", "benchmarks.gpu", *words])
    return f"make gpu ARGS={shlex.quote(shlex.join(words))}" if words else "make gpu"


if __name__ == "__main__":
    sys.exit(main())
