"""The candidates of the table of changes for a training on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OWN, kind
from ndd_engine.graphs import why_no_graph
from ndd_engine.hardware.gpu import Machine
from ndd_watch.changes import Candidate, Situation

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


@dataclass(frozen=True, slots=True)
class Place:
    """What the candidates depend on besides the configuration. gpu: whether there is a CUDA GPU.

    cores: whole cores usable by this process. capability: of the GPU, None if unknown. bf16: whether the CPU has
    native bf16, None if unknown.
    """

    gpu: bool
    cores: int
    capability: tuple[int, int] | None = None
    bf16: bool | None = None

    @classmethod
    def of(cls, machine: Machine, cpuinfo: Path = Path("/proc/cpuinfo")) -> Place:
        """As detected."""
        found = machine.chosen
        return cls(
            machine.device != "cpu",
            max(int(machine.host.usable_cpus), 1),
            found.compute_capability if found is not None else None,
            _has_bf16(cpuinfo),
        )

    def situation(self, config: Config) -> Situation:
        """That of a configuration."""
        amp, ranks = config.precision.amp, config.parallel.ranks
        here = Situation(
            flatten(config.model_dump(mode="json")),
            **asdict(self),
            model=KNOWN.get(kind(config.workload) or "", frozenset()),
        )
        scales = amp == "fp16" or (amp == "auto" and here.old)  # as `make_precision` chooses
        no_graph = why_no_graph(self.gpu, ranks, scales, config.optimizer.name) or ""
        # The ranks of a machine share its cores.
        return replace(here, cores=max(self.cores // ranks, 1), no_graph=no_graph)

    def of_script(self, seen: Mapping[str, Any], device: str, threads: int | None) -> Situation:
        """That of a script. seen: its recorded configuration."""
        known = flatten({key: value for key, value in seen.items() if key != "script"})
        here = Situation({**known, "run.threads": threads}, **asdict(self), script=True)
        return replace(here, gpu=device.startswith("cuda"))


def _has_bf16(cpuinfo: Path) -> bool | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else bool(BF16_FLAGS & set(flags))


def matching(all_candidates: Sequence[Candidate], only: Sequence[str]) -> set[str]:
    """Names of the candidates selected by name or group. Raises KeyError with the first unknown one."""
    found: set[str] = set()
    for wanted in only:
        names = {
            candidate.name for candidate in all_candidates if wanted in (candidate.name, candidate.group)
        }
        if not names:
            raise KeyError(wanted)
        found |= names
    return found
