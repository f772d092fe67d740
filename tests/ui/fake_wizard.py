"""A wizard with instant hardware detection, probes and measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.wizard import Field, Preview
from ndd_console.words.blocks import Block, NamedValues
from ndd_engine.errors import NddError
from ndd_engine.wizard.proposals import Answers, Batch, Measured, Model, Proposal
from ndd_engine.wizard.ranking import handful, pareto

GB = 1 << 30
FREE = 12 * GB


def proposal(
    size: str, sequence: int, micro: int, accumulation: int, memory_gb: float, step_s: float
) -> Proposal:
    """A proposal; shorter sequences have a disadvantage."""
    cost = "" if sequence == 256 else f"context of {sequence} instead of 256 characters, so items are smaller"
    parameters = {"guide": 10_900_000, "medium": 2_700_000}[size]
    return Proposal(
        Model(size, sequence, "bf16"), Batch(micro, accumulation), "host", 0, parameters, int(memory_gb * GB), FREE,
        step_s, 5_000_000, float(sequence), cost=cost, item="segment", token="character",
    )  # fmt: skip


ROWS = (
    proposal("guide", 256, 64, 2, 6.1, 0.118),
    proposal("guide", 256, 128, 1, 11.2, 0.102),
    proposal("guide", 256, 256, 1, 21.9, 0.203),
    proposal("guide", 128, 128, 1, 5.4, 0.055),
    proposal("medium", 256, 128, 1, 4.0, 0.041),
    replace(
        proposal("medium", 128, 128, 1, 2.2, 0.021),
        doubt="compiled steps fuse operations and use their own memory pools",
    ),
)
TOML = (
    "# Proposed for NVIDIA GeForce RTX 4080 SUPER: highest throughput.",
    "[batch]",
    "micro = 128 # predicted peak 11.2 GiB of 12.9 GiB, measured 11.3 GiB",
)


class FakeWizard:
    """Like `WizardJob`. Work runs until `go_on` is called."""

    machine: ClassVar[list[Block]] = [
        NamedValues(
            (
                ("GPU", "NVIDIA GeForce RTX 4080 SUPER"),
                ("memory", "16.0 GiB, 12.9 GiB free (NVML)"),
                ("in use", "2.1 GiB used (python (pid 812) 2.1 GiB)"),
            )
        ),
        NamedValues((("device", "cuda:0 (the only GPU)"),)),
    ]
    stage = "probing guide, sequence 256: timing micro-batch 16"
    notes: tuple[str, ...] = ()
    advice, recommended = "", None

    def __init__(self) -> None:
        self.goal, self.trouble, self.error = 0, "", ""
        self.rows: tuple[Proposal, ...] = ()
        self.verified: tuple[Proposal, ...] = ()
        self.busy = False
        self.stopped = 0
        self.saved: list[Proposal] = []
        self.cannot_save = self.cannot_show = ""
        self.there = True
        self.edited = False

    @property
    def table(self) -> tuple[Proposal, ...]:
        return tuple(handful(self.rows, Answers()))

    @property
    def best(self) -> tuple[Proposal, ...]:
        return tuple(pareto(self.rows))

    def progress(self) -> tuple[float, float | None]:
        return 0.4, 9.0

    def workloads(self) -> tuple[StartRow, ...]:
        return (
            StartRow("chartext", "character-level text model", "sizes tiny, mini, small, medium, guide"),
            StartRow("eeg", "EEG forecasters", "sizes guide, large, lstm, gru"),
        )

    def choose(self, place: int) -> tuple[str, ...]:
        return (
            "465,231 characters, segments of 256",
            f"{1_723 + place:,} training segments, 256 characters each",
        )

    def fields(self) -> tuple[Field, ...]:
        goals = ("highest throughput", "low memory use")
        meaning = "as many items per second as possible within the limits below"
        return (
            Field("goal", goals[self.goal % 2], meaning, [{}]),
            Field("effective batch", "128", "items per optimizer step", [{}]),
            Field("minimum sequence", "128", "shorter sequences need less memory", [{}]),
        )

    def change(self, place: int, by: int) -> str:
        if place == 0:
            self.goal += by
        return self.trouble

    def problem(self) -> str:
        return self.trouble

    def probe(self) -> None:
        self.busy, self.rows = True, ()

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        self.busy, self.verified = True, chosen

    def go_on(self) -> None:
        """Finish the running work."""
        if self.verified:
            self.verified = tuple(
                replace(one, measured=Measured((one.step_s or 0) * 1.03, int((one.memory_bytes or 0) * 1.01)))
                for one in self.verified
            )
        else:
            self.rows = ROWS
        self.busy = False

    def working(self) -> bool:
        return self.busy

    def failed(self) -> str:
        return "" if self.busy else self.error

    def suggested(self) -> tuple[Proposal, ...]:
        return ROWS[1:2] + ROWS[4:5]

    def preview(self, chosen: Proposal) -> Preview:
        if self.cannot_show:
            raise NddError(self.cannot_show)
        self.edited = False
        diff = ("--- mine.toml (current)", "+++ mine.toml (new)", "-micro = 64", "+micro = 128")
        return Preview(TOML, "mine.toml", self.there, diff if self.there else ())

    def changed(self) -> bool:
        return self.edited

    def save(self, chosen: Proposal) -> str:
        if self.cannot_save:
            raise NddError(self.cannot_save)
        self.saved.append(chosen)
        return "mine.toml"

    def stop(self) -> None:
        self.stopped += 1
        self.busy = False
