"""What the candidates of the table of changes depend on: this machine, and what trains on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OWN, kind
from ndd_engine.graphs import why_no_graph
from ndd_engine.hardware.gpu import Machine
from ndd_watch.changes import Place

from .outcome import flatten

# What is known of the models and data of workloads: batches gathered from tensors in memory, a decoder whose loop is
# unrolled by the compiler, and what their models use.
KNOWN = {
    "chartext": frozenset({"in memory", "attention"}),
    "eeg": frozenset({"in memory"}),
    "antispoof": frozenset({"convolutions"}),
    "finetune": frozenset({"attention"}),
    "summarise": frozenset({"unrolled"}),
    OWN: frozenset({"attention", "convolutions"}),
}
# Flags of CPUs with native bf16; others convert, which is slower than fp32.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})


def place_of(machine: Machine, cpuinfo: Path = Path("/proc/cpuinfo")) -> Place:
    """A machine, as detected."""
    chosen, bf16 = machine.chosen, None
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if flags := [line.partition(":")[2].split() for line in lines if line.startswith("flags")]:
        bf16 = not BF16_FLAGS.isdisjoint(flags[0])
    capability = chosen.compute_capability if chosen is not None else None
    return Place(machine.device != "cpu", max(int(machine.host.usable_cpus), 1), capability, bf16)


def trained(place: Place, config: Config) -> Place:
    """A machine on which a configuration is trained."""
    amp, ranks = config.precision.amp, config.parallel.ranks
    scales = amp == "fp16" or (amp == "auto" and place.old)  # as `make_precision` chooses
    return replace(
        place,
        cores=max(place.cores // ranks, 1),  # the ranks of a machine share them
        settings=flatten(config.model_dump(mode="json")),
        model=KNOWN.get(kind(config.workload) or "", frozenset()),
        no_graph=why_no_graph(place.gpu, ranks, scales, config.optimizer.name) or "",
    )


def observed(place: Place, seen: Mapping[str, Any], device: str, threads: int | None) -> Place:
    """A machine on which a script was observed. seen: its recorded configuration."""
    known = flatten({key: value for key, value in seen.items() if key != "script"})
    return replace(
        place, gpu=device.startswith("cuda"), settings={**known, "run.threads": threads}, script=True
    )
