"""`ndd-console gpu`."""

from __future__ import annotations

from ndd_console.words.machine import machine_blocks
from ndd_engine.hardware.detect import detect

from .options import command, json_option
from .printing import show


@command("0, also without a CUDA GPU", "gpu", "gpu --json")
@json_option
def gpu(as_json: bool) -> None:
    """Shows memory, limits and the other processes of each GPU."""
    # Importing torch takes seconds: skip it unless there is a GPU that it could see.
    machine = detect(use_torch=False)
    if machine.gpus:
        machine = detect(use_torch=True)
    show(machine.to_dict() if as_json else machine_blocks(machine))
