"""Configurations of the fine-tuning workload for its tests, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import torch
from problems_help import refused

from ndd_engine.config import read
from ndd_engine.config.schema import Config
from ndd_engine.workloads import finetune_data
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import Settings

TINY = (
    "workload.size=tiny", "workload.layers=1", "workload.width=16", "workload.document_chars=600",
    "batch.sequence=64",
)  # fmt: skip


def configured(*sets: str) -> Config:
    """The tiny size, and `sets` on top of it."""
    return read(None, ["workload.name=finetune", *TINY, *sets]).resolve()


def prepared(*sets: str) -> Workload:
    """The same, prepared, with weights of a fixed seed."""
    torch.manual_seed(1)
    return prepare(configured(*sets))


def documents(*sets: str) -> finetune_data.DocumentData:
    """The data alone."""
    return finetune_data.read(Settings.of(configured(*sets)))


def told(*sets: str) -> str:
    """The problems of a configuration, which building the workload must refuse too."""
    config = configured(*sets)
    return refused(config)


def own(path: Path, *sets: str) -> tuple[str, ...]:
    """Settings for a user's data of which two documents train and one evaluates."""
    return (f"workload.data={path}", "workload.examples=2", "workload.eval_examples=1", *sets)
