"""Scripts of several ranks under torchrun (gloo): which one is late and where, failures, requests, and trials."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from script_help import CONSOLE, environment, report, start
from script_help import events as events_of
from tests.torch_exit import ABORTED
from tests.waiting import LIMIT_S, contains, until

from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import EndEvent, Event, MarkEvent, RanksEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.channel import send

# FAULT: seconds of an item's decoding on rank 1. Further settings come from the environment.
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MODE, FAULT, STEPS = os.environ.get("MODE", "ddp"), float(os.environ.get("FAULT", "0")), int(os.environ["STEPS"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

def decode(index):
    if rank == 1 and FAULT:
        time.sleep(FAULT)
    return torch.full((64,), index / 1000)

class Items(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.001)
        return decode(index), torch.ones(1)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
if MODE == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    model = net
elif MODE == "compiled":
    model = DistributedDataParallel(torch.compile(net, backend="eager"))
elif MODE == "alone":
    model = net
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Items()
step = micro = 0
while step < STEPS:
    for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        last = MODE != "no_sync" or micro % 2
        with nullcontext() if last else model.no_sync():
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
        micro += 1
        if not last:
            continue
        if MODE == "alone":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        exec(os.environ.get("EACH", ""))
        if step >= STEPS:
            break
with open(f"loss-{rank}", "w") as file:
    file.write(float(loss).hex())
dist.destroy_process_group()
"""
# By its name, what runs of the script is found.
NAME = f"ranks{os.getpid()}.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(
    folder: Path, *options: str, status: int = 0, observed: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with two ranks, under the console. more: environment variables."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(SCRIPT)
    console = (*CONSOLE, "run", "--run", "it", "--") if observed else ()
    for _ in range(4):
        done = subprocess.run(
            [*console, *TORCHRUN, *options, NAME], cwd=folder, capture_output=True,
            text=True, timeout=170, check=False, env=environment(**ONE_THREAD, **more),
        )  # fmt: skip
        if ABORTED not in done.stdout + done.stderr:
            break
        if observed:
            shutil.rmtree(folder / "runs", ignore_errors=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def events(folder: Path) -> list[Event]:
    return events_of(folder, "it")


def losses(folder: Path) -> list[str]:
    """The last one of each rank."""
    return [(folder / f"loss-{rank}").read_text() for rank in (0, 1)]


def windows(folder: Path) -> list[RanksEvent]:
    return [event for event in events(folder) if isinstance(event, RanksEvent)]


def phases_close(found: list[RanksEvent]) -> None:
    """Phases, exchange and skew add up to the wall time of the same steps."""
    assert found
    for event in found:
        outside = ("own", "wait", "cpu", *ASIDES)
        means = sum(each[2] for name, each in event.columns_us.items() if name not in outside)
        own = means * 1e3 * event.steps
        assert own + event.exchange_ns + event.skew_ns == pytest.approx(event.wall_ns, rel=0.005)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and a run of it, in which rank 1 is late; its trials are without that fault."""
    folder = tmp_path_factory.mktemp("ranks")
    run(folder, STEPS="90", FAULT="0.02")
    for left in folder.glob("loss-*"):
        left.unlink()
    return folder


@pytest.mark.long
def test_a_rank_with_slow_data_is_named_with_phase_and_line(recorded: Path) -> None:
    found = report(recorded, "it")
    ranks = found["ranks"]
    assert ranks["world"] == 2 and ranks["strategy"] == "ddp"
    assert (ranks["late"]["rank"], ranks["late"]["phase"]) == (1, "data_wait")
    assert ranks["late"]["phase_ns"] > 40 * 10**6
    assert f"{NAME}:" in ranks["late"]["where"] and "decode" in ranks["late"]["where"]
    assert any(one["cause"] == "straggler" for one in found["findings"])
    phases_close(windows(recorded))
    # Rank 0 waits for its 80 ms, so this is skew and no exchange.
    assert ranks["skew_s"] > 0.02 and ranks["exchange_s"] > 0
    # A trial of this run, in another test, may follow.
    last = next(event for event in reversed(events(recorded)) if isinstance(event, EndEvent))
    assert (last.status, last.step) == ("done", 90)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "compiled", "no_sync", "alone"])
def test_every_way_to_exchange(tmp_path: Path, mode: str) -> None:
    """Observed or not, the losses are the same; the straggler is named; without one, none is at the end."""
    late, even = tmp_path / "late", tmp_path / "even"
    run(late, MODE=mode, STEPS="120", FAULT="0.02")
    seen = losses(late)
    run(late, MODE=mode, STEPS="120", FAULT="0.02", observed=False)
    assert losses(late) == seen
    found = windows(late)
    phases_close(found)
    last = found[-1].late
    assert last is not None and (last["rank"], last["phase"]) == (1, "data_wait")
    assert found[-1].strategy == {"fsdp2": "fsdp2", "alone": ""}.get(mode, "ddp")
    run(even, MODE=mode, STEPS="300")
    assert windows(even)[-1].late is None
    assert not any(one["cause"] == "straggler" for one in report(even, "it")["findings"])


@pytest.mark.budget(30)
@pytest.mark.long
def test_a_killed_rank_is_the_reason(tmp_path: Path) -> None:
    kill = "if step == 20 and rank == 1: time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
    done = run(tmp_path, STEPS="4000", EACH=kill, status=1)
    end = events(tmp_path)[-1]
    assert isinstance(end, EndEvent) and end.status == "failed" and "rank 1 (" in end.reason
    assert "ndd_console" not in done.stderr.replace(str(tmp_path), "")


@pytest.mark.slow
def test_an_elastic_restart_goes_on_in_the_same_record(tmp_path: Path) -> None:
    fail = (
        "if step == 60 and rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': "
        "time.sleep(1); raise ValueError('planted')"
    )
    share = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run(tmp_path, "--max-restarts", "1", STEPS="100", EACH=fail, FAULT="0.005", **share)
    seen = events(tmp_path)
    (mark,) = [event for event in seen if isinstance(event, MarkEvent) and "restart 1" in event.text]
    assert mark.step == 60 and "rank 1" in mark.text and "planted" in mark.text
    end = seen[-1]
    assert isinstance(end, EndEvent) and (end.status, end.step) == ("done", 160)
    steps = [event.step for event in seen if isinstance(event, RanksEvent)]
    assert steps == sorted(steps) and steps[-1] == 160
    assert sum(event.steps for event in seen if isinstance(event, WindowEvent)) == 160


@pytest.mark.slow
@pytest.mark.budget(40)
def test_ranks_pause_after_the_same_step_and_each_is_captured(tmp_path: Path) -> None:
    each = "open(f'step-{rank}', 'w').write(str(step)); time.sleep(0.002)"
    options = {"STEPS": "1500", "EACH": each}
    (tmp_path / NAME).write_text(SCRIPT)
    directory = RunDir(tmp_path / "runs" / "it")

    def at() -> list[int]:
        return [int((tmp_path / f"step-{rank}").read_text()) for rank in (0, 1)]

    words = ("run", "--run", "it", "--", *TORCHRUN, NAME)
    with start(tmp_path, *words, **ONE_THREAD, **options) as process:
        until(lambda: contains(directory.events, '"window"'))
        send(directory.control_socket, "pause")
        until(lambda: contains(directory.events, '"pause"'))
        stood = first, second = at()
        assert abs(first - second) <= 1  # written after the optimizer's step, in which they pause
        time.sleep(1.0)
        assert at() == stood
        send(directory.control_socket, "kernels")
        send(directory.control_socket, "resume")
        shown = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 0, shown
    observed = losses(tmp_path)
    run(tmp_path, observed=False, **options)
    assert losses(tmp_path) == observed
    marks = [event for event in events(tmp_path) if isinstance(event, MarkEvent)]
    (pause,), (resume,) = ([mark for mark in marks if mark.kind == kind] for kind in ("pause", "resume"))
    assert pause.step == resume.step
    assert {path.name for path in directory.path.glob("capture*")} == {"capture.json", "capture.rank-1.json"}


# Trials: all ranks train the same steps, and none is left behind.


ENDLESS = {**ONE_THREAD, "STEPS": "1000000"}


def processes() -> list[psutil.Process]:
    """What runs of the script."""
    return [one for one in psutil.process_iter(["cmdline"]) if NAME in (one.info["cmdline"] or ())]


def tried(folder: Path, *words: str, **more: str) -> dict[str, Any]:
    """The result of a trial, which leaves no process and no file behind."""
    before = sorted(path.name for path in folder.iterdir())
    done = subprocess.run(
        [*CONSOLE, "try", "it", *words, "--json"], cwd=folder, env=environment(**ENDLESS, **more), text=True,
        capture_output=True, timeout=250, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before
    until(lambda: not processes(), "a rank was left behind")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.long
@pytest.mark.budget(60)
def test_all_ranks_are_switched_together(recorded: Path) -> None:
    event = tried(recorded, "--set", "optimizer.implementation=foreach", "--budget", "30")
    assert event["method"] == "one process" and event["in_effect"] is True, event["text"]
    for side in (event["base"], event["change"]):
        # Four items on each of two ranks.
        assert (side["ranks"], len(side["rank_peaks"]), side["items_per_step"]) == (2, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_pairs_of_launchers_compare_losses_and_what_a_step_consists_of(recorded: Path, mode: str) -> None:
    event = tried(recorded, "--set", "loader.workers=1", "--budget", "60", MODE=mode)
    assert event["pairs"] >= 1 and event["in_effect"] is True, event["text"]
    assert event["loss"] == "same" and len(event["base"]["losses"]) == 10
    for side in (event["base"], event["change"]):
        assert side["ranks"] == 2 and side["parts_ns"]["exchange"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "verdict", "named"),
    [
        ("raise ValueError('planted')", "failed", "rank 1: ValueError: planted"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "out of memory",
            "rank 1: its process was killed by signal 9",
        ),
    ],
)
def test_the_rank_that_dies_is_named_and_the_others_end(
    recorded: Path, fault: str, verdict: str, named: str
) -> None:
    each = f"if step == 4 and rank == 1 and os.environ.get('FAULTY'): {fault}"
    event = tried(recorded, "--env", "FAULTY=1", "--budget", "40", EACH=each)
    assert event["verdict"] == verdict and named in event["text"], event["text"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_leave_no_rank(recorded: Path, tmp_path: Path, number: signal.Signals) -> None:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    process = start(tmp_path, "try", "it", "--set", "run.gc_every_steps=10", "--budget", "200", **ENDLESS)
    assert process.stderr is not None
    next(line for line in process.stderr if "measuring" in line)
    assert len(processes()) >= 3
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    if number == signal.SIGINT:
        assert process.returncode == 130
    until(lambda: not processes(), "a rank was left behind")
