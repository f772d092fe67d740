"""`ndd-console card`: what was detected, and why it is believed."""

from __future__ import annotations

import json

import click

from ndd_console.view.machine import machine_lines as describe
from ndd_engine.hardware.gpu import detect


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def gpu(as_json: bool) -> None:
    """Show the card and the machine, with the reason for every detected value."""
    # torch costs seconds to import: it is asked only where there is a card for it to see.
    machine = detect(use_torch=False)
    if machine.cards:
        machine = detect(use_torch=True)
    if as_json:
        click.echo(json.dumps(machine.to_dict(), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(describe(machine)))
