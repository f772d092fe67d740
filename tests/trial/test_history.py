"""What earlier trials measured of the difference between processes: bounded, checked, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndd_engine.trial.estimates import Usual
from ndd_engine.trial.outcome import MOST_DEVICES, MOST_TRIALS, PairVariances, cache_folder


def test_trials_add_up_by_device(tmp_path: Path) -> None:
    history = PairVariances(tmp_path / "sub" / "processes.json")
    assert history.usual("a") == Usual()
    for _ in range(10):
        history.add("a", Usual(0.02**2, 7.0))
    assert PairVariances(history.path).usual("a").sd > 0.017
    assert history.usual("b") == Usual()


def test_the_file_is_bounded(tmp_path: Path) -> None:
    history = PairVariances(tmp_path / "processes.json")
    for number in range(MOST_DEVICES + 5):
        history.add(f"gpu {number}", Usual())
    for _ in range(MOST_TRIALS + 5):
        history.add("gpu 9", Usual())
    devices = json.loads(history.path.read_text())["devices"]
    assert len(devices) == MOST_DEVICES and len(devices["gpu 9"]) == MOST_TRIALS
    assert "gpu 0" not in devices


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[" * 100_000, '{"devices": 3}', '{"devices": {"a": 3}}', '{"devices": {"a": [[1], ["x", 2]]}}',
        '{"devices": {"a": [[NaN, 3], [0.0001, 0], [1e999, 2]]}}', '{"devices": {"a": [[1e9, 1e9]]}}',
    ],
)  # fmt: skip
def test_damage_and_implausible_values_do_not_count(tmp_path: Path, text: str) -> None:
    path = tmp_path / "processes.json"
    path.write_text(text)
    assert PairVariances(path).usual("a").sd <= 0.03
    for implausible in (25.0, float("nan")):
        PairVariances(path).add("a", Usual(implausible, 7.0))
    assert PairVariances(path).usual("a").sd <= 0.03


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "processes.json").mkdir()
    for path in (tmp_path / "file" / "processes.json", tmp_path / "processes.json"):
        PairVariances(path).add("a", Usual(0.0004, 7.0))
        assert PairVariances(path).usual("a") == Usual()


def test_it_lies_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ndd-console"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ndd-console"
