"""`ndd-console gpu`."""

from __future__ import annotations

import click

from ndd_console.view.machine import machine_lines
from ndd_engine.hardware.detect import detect

from .options import epilog, json_option
from .printing import print_json, print_lines


@click.command(epilog=epilog("0, also without a CUDA GPU", "gpu", "gpu --json"))
@json_option
def gpu(as_json: bool) -> None:
    """Show the GPUs and the host: memory, limits, other processes, and how each value was detected."""
    # Importing torch takes seconds: skip it unless there is a GPU that it could see.
    machine = detect(use_torch=False)
    if machine.cards:
        machine = detect(use_torch=True)
    if as_json:
        print_json(machine.to_dict())
    else:
        print_lines(machine_lines(machine))
