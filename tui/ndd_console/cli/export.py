"""`ndd-console export`."""

from __future__ import annotations

import click

from ndd_console.words.runs import exported_texts, loading_text
from ndd_engine.record.rundir import find_run

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
    for line in exported_texts(done, directory.name):
        say(line)
    show([loading_text(asked.output, FORMATS[asked.output.suffix.lower()])])
