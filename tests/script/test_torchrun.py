"""`ndd-console run -- torchrun …` with real ranks (gloo): which one is late and where, and ranks that fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from script_help import CONSOLE, environment, report
from script_help import events as events_of
from tests.torch_exit import ABORTED

from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import EndEvent, Event, MarkEvent, RanksEvent, WindowEvent

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
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def run(
    folder: Path, *options: str, status: int = 0, observed: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with two ranks, under the console. more: environment variables."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    console = (*CONSOLE, "run", "--run", "it", "--") if observed else ()
    for _ in range(4):
        done = subprocess.run(
            [*console, *TORCHRUN, "--nproc-per-node", "2", *options, "train.py"], cwd=folder, capture_output=True,
            text=True, timeout=170, check=False, env=environment(OMP_NUM_THREADS="1", **more),
        )  # fmt: skip
        if ABORTED not in done.stdout + done.stderr:
            break
        if observed:
            shutil.rmtree(folder / "runs", ignore_errors=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def events(folder: Path) -> list[Event]:
    return events_of(folder, "it")


def windows(folder: Path) -> list[RanksEvent]:
    return [event for event in events(folder) if isinstance(event, RanksEvent)]


def phases_close(found: list[RanksEvent]) -> None:
    """Phases, exchange and skew add up to the wall time of the same steps."""
    assert found
    for event in found:
        outside = ("own", "wait", "cpu", *ASIDES)
        own = (
            sum(each[2] for name, each in event.columns_us.items() if name not in outside) * 1e3 * event.steps
        )
        assert own + event.exchange_ns + event.skew_ns == pytest.approx(event.wall_ns, rel=0.005)


@pytest.mark.long
def test_a_rank_with_slow_data_is_named_with_phase_and_line(tmp_path: Path) -> None:
    run(tmp_path, STEPS="90", FAULT="0.02")
    found = report(tmp_path, "it")
    ranks = found["ranks"]
    assert ranks["world"] == 2 and ranks["strategy"] == "ddp"
    assert (ranks["late"]["rank"], ranks["late"]["phase"]) == (1, "data_wait")
    assert ranks["late"]["phase_ns"] > 40 * 10**6
    assert "train.py:" in ranks["late"]["where"] and "decode" in ranks["late"]["where"]
    assert any(one["cause"] == "straggler" for one in found["findings"])
    phases_close(windows(tmp_path))
    # Rank 0 waits for its 80 ms, so this is skew and no exchange.
    assert ranks["skew_s"] > 0.02 and ranks["exchange_s"] > 0
    last = events(tmp_path)[-1]
    assert isinstance(last, EndEvent) and (last.status, last.step) == ("done", 90)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "compiled", "no_sync", "alone"])
def test_every_way_to_exchange(tmp_path: Path, mode: str) -> None:
    """Observed or not, the losses are the same; the straggler is named; without one, none is at the end."""
    late, even = tmp_path / "late", tmp_path / "even"
    run(late, MODE=mode, STEPS="120", FAULT="0.005")
    losses = [(late / f"loss-{rank}").read_text() for rank in range(2)]
    run(late, MODE=mode, STEPS="120", FAULT="0.005", observed=False)
    assert losses == [(late / f"loss-{rank}").read_text() for rank in range(2)]
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
