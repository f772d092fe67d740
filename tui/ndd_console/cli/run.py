"""`ndd-console run`."""

from __future__ import annotations

from pathlib import Path

import click

from ndd_console.process.terminal import interactive
from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.script.command import Command
from ndd_engine.script.script_run import ScriptRequest
from ndd_engine.text import printable

from .options import Asked, command, count, flag, gathered, name_option

LOGGERS = ("tensorboard", "wandb", "mlflow", "project")


@command(
    "that of the command, 2 if it does not exist or cannot be observed",
    "run -- python train.py --batch-size 64",
    "run -- torchrun --nproc-per-node 2 train.py",
    "run --headless --run baseline -- python -m my_package.train",
    "run --memory-history -- python train.py",
    "run --log tensorboard --log wandb=offline -- python train.py",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@name_option("the script and a number")
@flag("--headless", help="No screen: the output of the command goes through unchanged.")
@flag(
    "--memory-history",
    help="Record which lines allocate GPU memory, and write a snapshot if it runs out: about 2 us per allocation.",
)
@count(
    "--kernels-every", type=click.IntRange(min=0), default=0,
    help="On a GPU, capture a few steps with the profiler every N optimizer steps; 0: only with key k.",
)  # fmt: skip
@click.option(
    "--log", "loggers", metavar="LOGGER[=VALUE]", multiple=True,
    help="Also log to tensorboard, wandb=offline, wandb=online or mlflow=FILE; project=NAME; repeatable.",
)  # fmt: skip
@gathered
def run(asked: Asked) -> int:
    """COMMAND is what you call to train; it is not changed.

    Its Python processes are observed from their first backward pass on. In a terminal, the live screen shows them, and
    `l` shows the output of the command. The ranks on this machine are compared: `r` shows which one the others wait
    for. Ctrl-C is passed on. The run continues if the terminal is closed.
    """
    for word in asked.loggers:
        if word.partition("=")[0] not in LOGGERS:
            raise UsageError(f"--log {printable(word)}: unknown logger; allowed: {', '.join(LOGGERS)}")
    sets = [f"log.{word}" if "=" in word else f"log.{word}=true" for word in asked.loggers]
    screen = interactive() and not asked.headless
    request = ScriptRequest(
        Command(asked.words, Path.cwd()),
        asked.root,
        asked.name,
        screen,
        memory_history=asked.memory_history,
        kernels_every=asked.kernels_every,
        log=read(None, sets).resolve().log,
    )
    request.command.check()
    if screen:
        from ndd_console.sessions.training import observe_console

        return observe_console(request, asked.ascii)
    from ndd_console.sessions.headless import observe_headless

    return observe_headless(request)
