"""Scripts on a GPU, which is a fake one here: its clock, losses that arrive late, and nothing that waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from observed import SUBJECTS, Ran, run
from tests.tiers import few

from ndd_engine.diagnose import diagnose
from ndd_engine.hardware.detect import detect
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.script.command import Command
from ndd_engine.script.follower import Follower

pytestmark = pytest.mark.long

MS = 1e6
UUID = "aaaaaaaa-0000-0000-0000-000000000001"


def on_gpu(
    folder: Path,
    forward_ms: float,
    backward_ms: float,
    host_ms: float,
    *words: str,
    seconds: int = 2,
    profile_s: str = "0",
) -> Ran:
    """Trains for some seconds; the observer times every step by phase."""
    folder.mkdir(exist_ok=True)
    ran = run(
        folder, "on_gpu.py", *map(str, (seconds, forward_ms, backward_ms, host_ms)), *words, NDD_WATCH_SHARE="10",
        NDD_WATCH_PROFILE_S=profile_s, CUDA_VISIBLE_DEVICES="1",
    )  # fmt: skip
    assert ran.status == 0, ran.errors
    return ran


def device_ns(ran: Ran, last: int = 0) -> dict[str, float]:
    """Of each phase in a step, over all windows or the last ones."""
    windows: list[dict[str, Any]] = [one for one in ran.of("window")[-last:] if one["device_steps"]]
    count = sum(one["device_steps"] for one in windows)
    assert count >= 2  # few steps of a busy machine are timed
    sums: dict[str, float] = {}
    for window in windows:
        for name, body in window["phases"].items():
            if name == "evaluate":  # of all, not of a step
                continue
            sums[name] = sums.get(name, 0.0) + (body["device_ns"] or 0.0) * window["device_steps"] / count
    return sums


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A training that waits for nothing but its loss, which it reads with `float`."""
    return on_gpu(tmp_path_factory.mktemp("plain"), 4.0, 8.0, 0.0, "float", profile_s="0.3")


def losses_of(ran: Ran) -> list[tuple[int, float]]:
    """(step, loss) of the windows that have one; each is the one that the script prints."""
    found = [one["last_loss"] for one in ran.of("window") if one["loss"] is not None]
    assert all(loss == pytest.approx(float(ran.word("loss"))) for _, loss in found)
    return found


def test_a_phase_takes_as_long_as_its_kernels_though_the_host_is_faster(plain: Ran) -> None:
    found = device_ns(plain)
    # Marks lie between the launches, so that a phase on the device is the sum of its kernels. A host that is held up
    # adds to it.
    assert found["forward"] > 3.9 * MS and found["backward"] > 7.9 * MS
    assert plain.word("waits") == "0"


def test_losses_arrive_without_waiting_and_belong_to_their_step(plain: Ran) -> None:
    losses = losses_of(plain)
    assert len(losses) >= 3
    assert [step for step, _ in losses] == sorted({step for step, _ in losses})
    assert losses[-1][0] <= int(plain.word("steps"))


def test_a_script_that_reads_its_loss_is_told_where(plain: Ran) -> None:
    text = (SUBJECTS / "on_gpu.py").read_text().splitlines()
    line = next(at for at, found in enumerate(text, 1) if "float(loss)" in found)
    waits = [wait for profile in plain.of("functions") for wait in profile["waits"]]
    expected = {("on_gpu.py", line, "<module>", "float", 1)}
    assert waits and {(Path(wait[0]).name, *wait[1:5]) for wait in waits} == expected


def test_its_memory_and_which_gpu_of_the_machine_it_is_are_told(plain: Ran) -> None:
    memory = plain.of("memory")[-1]
    assert (memory["free_bytes"], memory["total_bytes"], memory["growth_bytes"]) == (700, 1000, 200)
    run = plain.of("run")[-1]
    assert run["device"] == "cuda:0" and run["gpu"] == {
        "uuid": UUID, "name": "NVIDIA L4", "total_bytes": 1000, "capability": [8, 9], "visible": "1",
    }  # fmt: skip


def test_copies_and_evaluations_are_timed_apart_and_nothing_is_read_while_a_graph_is_captured(
    tmp_path: Path,
) -> None:
    ran = on_gpu(tmp_path, 3.0, 1.0, 0.0, "captures", "copies", "evaluates")
    assert not ran.marks("not timed on the GPU") and not ran.marks("the observation ended")
    steps = int(ran.word("steps"))
    assert steps == ran.total("steps")
    # An evaluation is in no device time of a step.
    found = device_ns(ran)
    assert found["forward"] > 2.9 * MS and found["to_device"] > 0
    assert ran.phases()["to_device"] > 0.05 * sum(ran.phases().values())
    # After every third step. What is queued when the script ends, for at most 100 ms, is not known.
    spent = sum(one["phases"].get("evaluate", {}).get("device_ns") or 0 for one in ran.of("window"))
    assert spent >= 2.9 * MS * (steps // 3 - 10)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("copies", "mode"), ("copies", "subclass")])
def test_a_mode_or_a_class_of_tensors_of_the_script_sees_its_own_calls_only(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """torch gives `__torch_function__` what torch.Tensor has under the name of a method (THPVariable_to)."""
    ran = on_gpu(tmp_path, 1.0, 1.0, 1.0, *words)
    if "subclass" in words:
        assert ran.word("kinds") == "Image"
        return
    seen = ran.out.split("seen ")[1].split()
    # `to` and `item` once in each step since then; what reads the loss of a step calls `item`, too, and is not seen.
    assert seen[:3] == [seen[4], seen[4], "0"] and int(seen[4]) > 5
    assert losses_of(ran)


@pytest.mark.slow
def test_a_scaled_loss_is_shown_unscaled_and_a_phase_on_another_stream_is_timed(tmp_path: Path) -> None:
    ran = on_gpu(tmp_path, 2.0, 2.0, 1.0, "scaled", "streams")
    assert losses_of(ran) and device_ns(ran)["backward"] > 1.9 * MS
    assert not ran.marks("not timed on the GPU")


@pytest.mark.slow
@pytest.mark.parametrize("word", ["warms", "apart"])
def test_a_gpu_is_timed_though_the_first_loss_is_on_the_cpu(tmp_path: Path, word: str) -> None:
    ran = on_gpu(tmp_path, 4.0, 8.0, 0.0, word)
    assert device_ns(ran)["forward"] > 3.9 * MS
    assert ran.of("run")[-1]["device"] == "cuda:0" and ran.of("memory")
    if word == "warms":
        losses = [one["loss"] for one in ran.of("window") if one["loss"] is not None]
        assert losses[-1] == pytest.approx(float(ran.word("loss")))


@pytest.mark.slow
def test_a_training_that_moves_to_another_gpu_is_timed_there(tmp_path: Path) -> None:
    ran = on_gpu(tmp_path, 4.0, 8.0, 0.0, "moves", seconds=3)
    assert list(dict.fromkeys(one["device"] for one in ran.of("run"))) == ["", "cuda:0", "cuda:1"]
    assert device_ns(ran, last=4)["forward"] > 3.9 * MS
    assert not ran.marks("not timed on the GPU") and ran.word("waits") == "0"


@pytest.mark.parametrize(
    ("word", "what", "reason"),
    few(
        [
            ("broken", "steps are not timed", "not callable"),
            ("uncounted", "memory of the GPU is not", "getDeviceStats"),
        ],
        1,
    ),
)
def test_an_error_of_the_clock_or_the_allocator_costs_its_figures_only(
    tmp_path: Path, word: str, what: str, reason: str
) -> None:
    ran = on_gpu(tmp_path, 1.0, 1.0, 1.0, word)
    (mark,) = ran.marks(what)
    assert reason in mark["text"] and not ran.marks("the observation ended")
    assert int(ran.word("steps")) == ran.total("steps")
    if word == "uncounted":
        assert not ran.of("memory") and ran.total("device_steps") > 5


def causes(ran: Ran) -> list[str]:
    """What the diagnosis says of the run."""
    state = RunState()
    directory = RunDir(ran.folder)
    follower = Follower(
        directory, Command(("python", "t.py"), Path("/")), detect("cpu", use_torch=False),
        lambda event: state.fold(1.0, event), ran.folder / "records",
    )  # fmt: skip
    follower.finish()
    return [item.cause for item in diagnose(state.snapshot())]


@pytest.mark.slow
def test_the_diagnosis_of_a_script_is_that_of_its_device(tmp_path: Path) -> None:
    """Of the host, all times of the first one are waits for its full queue; those of the second one are its own."""
    assert causes(on_gpu(tmp_path / "slow", 20.0, 20.0, 0.0, seconds=4)) == ["healthy"]
    starved = on_gpu(tmp_path / "starved", 1.0, 1.0, 40.0, seconds=4)
    # The device waits in the phase of the host, between the steps.
    assert causes(starved) == ["user-code"] and device_ns(starved)["other"] > 39 * MS


@pytest.mark.slow
@pytest.mark.parametrize("word", ["casts", "inside"])
def test_casts_and_copies_within_the_forward_pass_are_no_copies_to_the_gpu(tmp_path: Path, word: str) -> None:
    ran = on_gpu(tmp_path, 0.1, 0.1, 0.0, word)
    assert "to_device" not in ran.phases()
    assert not device_ns(ran).get("to_device")
