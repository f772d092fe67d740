"""The collective that a rank waits in, from flight recorders as gloo's and NCCL's."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_engine.train.parallel.flight import waiting_in

VALUES: Any = SimpleNamespace(group_name="values")


def entry(group: str, number: int, name: str, retired: bool) -> dict[str, Any]:
    return {
        "process_group": [group, ""], "pg_id": number, "profiling_name": name, "input_sizes": [[8]], "retired": retired,
    }  # fmt: skip


def recorded(monkeypatch: pytest.MonkeyPatch, **traces: Any) -> None:
    """What the recorders of this torch say; a missing one raises."""
    c10d = importlib.import_module("torch._C._distributed_c10d")
    for kind in ("nccl", "fr"):
        trace = traces.get(kind)

        def dump(_collectives: bool, _active: bool, trace: Any = trace) -> bytes:
            if trace is None:
                raise RuntimeError("no such recorder")
            return json.dumps(trace).encode()

        monkeypatch.setattr(c10d, f"_dump_{kind}_trace_json", dump, raising=False)


def trace(*entries: dict[str, Any], **begun: int) -> dict[str, Any]:
    status = {name.removeprefix("pg"): {"last_enqueued_collective": count} for name, count in begun.items()}
    return {"entries": list(entries), "pg_status": status}


def test_the_recorder_of_nccl_counts_beside_that_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    vote = entry("values", 1, "gloo:all_reduce", False)
    nccl = trace(entry("0", 0, "nccl:all_reduce", True), entry("0", 0, "nccl:all_gather", False), pg0=7)
    recorded(monkeypatch, nccl=nccl, fr=trace(vote, pg1=3))
    assert waiting_in(VALUES, None) == (7, "all_gather of [[8]]")


def test_a_group_of_nccl_with_the_number_of_the_votes_is_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = trace(entry("0", 1, "nccl:broadcast", False), pg1=5)
    recorded(monkeypatch, nccl=nccl, fr=trace(entry("values", 1, "gloo:all_reduce", False), pg1=3))
    assert waiting_in(VALUES, None) == (5, "broadcast of [[8]]")


def test_only_one_of_the_recorders_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, fr=trace(entry("0", 0, "gloo:all_reduce", False), pg0=4))
    assert waiting_in(VALUES, None) == (4, "all_reduce of [[8]]")
    recorded(monkeypatch)
    assert waiting_in(VALUES, None) == (None, "")
