"""`ndd-console export`."""

from __future__ import annotations

import click

from ndd_engine.record.rundir import find_run
from ndd_engine.text import number, size

from .completion import run_names
from .options import Asked, command, flag, gathered, json_option, output_option
from .printing import say, show


@command(
    "0 written, 1 no checkpoint or a damaged one, 2 usage error",
    "export baseline -o weights.safetensors",
    "export baseline --checkpoint best -o weights.pt",
    "export baseline --module encoder -o encoder.pt",
    "export baseline --checkpoint 1200 -o weights.pt --force",
)
@click.argument("run", shell_complete=run_names)
@output_option("Output file, required: .safetensors, .pt, .pth or .bin.")
@click.option(
    "--checkpoint", default="latest", show_default=True, metavar="WHICH",
    help="Checkpoint: latest, best (by evaluate.metric), or a step.",
)  # fmt: skip
@click.option(
    "--module",
    metavar="NAME",
    help="Only this module of the model, or a stateful object of the factory (an EMA).",
)
@flag("--force", help="Replace an existing file.")
@json_option
@gathered
def export(asked: Asked) -> None:
    """The file contains the model's state_dict with the names of its parameters and buffers, without the optimizer.

    Load it with torch.load or with safetensors.torch.load_model; ndd-console is not needed for that.
    """
    if asked.output is None:
        raise click.UsageError("Missing option '-o': name a .safetensors or .pt file.")
    directory = find_run(asked.root, asked.run)
    from ndd_engine.train.checkpoint import FORMATS, export  # torch comes with it

    done = export(directory, asked.output, asked.checkpoint, asked.module, asked.force)
    if asked.as_json:
        show(
            {
                "file": str(done.path), "run": directory.name, "checkpoint": done.saved.path.name,
                "step": done.saved.step, "metric": done.saved.metric, "module": done.module or None,
                "tensors": done.tensors, "parameters": done.parameters, "bytes": done.bytes, "tied": dict(done.tied),
            }
        )  # fmt: skip
        return
    part = f"{done.module} of " if done.module else ""
    say(
        f"wrote {done.path}: {part}{directory.name} at step {number(done.saved.step)}, {number(done.tensors)} tensors, "
        f"{number(done.parameters)} elements, {size(done.bytes)}"
    )
    for name, kept in done.tied.items():
        say(f"{name} is tied to {kept} and stored once; safetensors.torch.load_model restores both")
    if FORMATS[asked.output.suffix.lower()] == "torch":
        load = f"model.load_state_dict(torch.load({str(asked.output)!r}, weights_only=True))"
    else:
        load = f"safetensors.torch.load_model(model, {str(asked.output)!r})"
    show([load])
