"""A process of a trial: the gate that lets it train, changes that are in effect, and what its copy does not contain."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed import SUBJECTS
from tests.tiers import few
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from ndd_engine.script.command import UNWRITTEN, linked
from ndd_watch import FOLDER, LINKED, SITE
from ndd_watch.changes import OF_SCRIPTS, make
from ndd_watch.outside import _STARTS, Outside
from ndd_watch.switches import Cache, Switch
from ndd_watch.trying import Trainer, gate

# The loader is made once, before the first step, and has its arguments by place; the loop may undo changes.
SCRIPT = """
import gc
import os
import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        noise = random.random() if "random" in sys.argv else 0.0
        return torch.full((3, 8, 8), index + noise), torch.ones(1)

model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Images(), 8, False, None, None, 0)
if "undoes" in sys.argv:
    loader.num_workers = 0
    os.environ["SEEN"] = "other"
while True:
    for x, y in loader:
        if "undoes" in sys.argv:
            gc.enable()
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        if "writes" in sys.argv:
            open(sys.argv[-1], "w").write("x")
"""


def ready(
    folder: Path,
    *words: str,
    script: tuple[str, ...] = ("-c", SCRIPT),
    outside: bool = False,
    given: dict[str, str] | None = None,
    variables: dict[str, str] | None = None,
    **changes: Any,
) -> tuple[dict[str, Any] | None, str]:
    """(what a process of a trial says after some steps, None if it ended before that; its errors)."""
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s")
        Path(f"{short}/ranks").mkdir()
        server.listen(1)
        sides = [{key.replace("__", "."): value for key, value in changes.items()}]
        spec = {
            "socket": f"{short}/s", "sides": sides, "given": given or {},
        }  # fmt: skip
        environment = {
            **os.environ, **UNWRITTEN, **(variables or {}), FOLDER: f"{short}/ranks", "PYTHONPATH": str(SITE),
            "NDD_WATCH_TRY": json.dumps(spec),
            LINKED: "" if outside else linked(Path(short), folder / "original"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, *script, *words], env=environment, cwd=short, stderr=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            while not select([server], [], [], 1.0)[0]:
                assert process.poll() is None, process.stderr.read()
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as lines:
                assert json.loads(lines.readline()) == {"rank": 0, "ranks": 1, "here": None}
                told = [lines.readline()]
                train = {"do": "train", "side": 0, "lead": 0, "steps": 10}
                for command in (train, {"do": "facts"}) if '"ready"' in told[0] else ():
                    lines.write(json.dumps(command) + "\n")
                    lines.flush()
                    told.append(lines.readline())
            errors = process.stderr.read()
    return (json.loads(told[-1])["sides"][0] if '"sides"' in told[-1] else None), errors


@pytest.mark.long
def test_changes_of_the_start_are_in_effect_for_a_loader_that_is_made_once(tmp_path: Path) -> None:
    side, errors = ready(
        tmp_path, loader__cache=True, loader__prefetch=3, loader__workers=1, speed__channels_last=True,
        speed__flush_denormal=True,
    )  # fmt: skip
    assert side is not None, errors
    settings = side["settings"]
    assert all(settings[key][2] for key in ("loader.workers", "speed.channels_last", "speed.flush_denormal"))
    assert settings["loader.prefetch"][1:3] == ["3", True]
    # Workers that are forked share the items that were read before.
    assert settings["loader.cache"][1:3] == ["true", True] and "64 items" in settings["loader.cache"][3]
    assert side["steps_per_epoch"] == 8  # a change that acts between epochs is measured over whole ones


@pytest.mark.long
@pytest.mark.parametrize("word", few(["", "random", "undoes"], 1))
def test_what_is_in_effect_is_read_back(tmp_path: Path, word: str) -> None:
    """Items are cached unless they differ."""
    given = {"arg.size": "8", "arg.lr": "1", "env.SEEN": "mine", "arg.other": "3", "env.OTHER": "3"}
    workers = {"loader__workers": 1} if word == "undoes" else {"loader__cache": True}
    side, errors = ready(
        tmp_path, *word.split(), "--size", "8", "lr=1", given=given, variables={"SEEN": "mine"},
        run__gc_every_steps=5, **workers,
    )  # fmt: skip
    assert side is not None, errors
    found = {key: tuple(value[:3]) for key, value in side["settings"].items()}
    undone, cached = word == "undoes", word == ""
    assert found == {
        **({"loader.workers": ("1", "0", False)} if undone else {}),
        **({} if undone else {"loader.cache": ("True", "true" if cached else "false", cached)}),
        "run.gc_every_steps": ("5", "0", False) if undone else ("5", "5", True),
        "env.SEEN": ("mine", "other", False) if undone else ("mine", "mine", True),
        "arg.size": ("8", "8", True),
        "arg.lr": ("1", "1", True),
        "arg.other": ("3", "not given", False),
        "env.OTHER": ("3", "not set", False),
    }


@pytest.mark.long
def test_a_trial_on_a_gpu_keeps_the_losses_of_the_first_steps(tmp_path: Path) -> None:
    """They arrive some steps late, several at a time."""
    script = str(SUBJECTS / "on_gpu.py"), "60", "0.3", "0.3", "1"
    side, errors = ready(tmp_path, script=script)
    assert side is not None, errors
    assert side["device"] == "cuda:0" and len(side["losses"]) >= 5
    assert len(set(side["losses"])) == 1  # the learning rate is 0


@pytest.mark.long
@pytest.mark.parametrize("allowed", few([False, True], 1))
def test_a_trial_does_not_write_into_the_original_folder(tmp_path: Path, allowed: bool) -> None:
    original = tmp_path / "original"
    original.mkdir()
    side, errors = ready(tmp_path, "writes", str(original / "weights.txt"), outside=allowed)
    assert (side is not None) == allowed == (original / "weights.txt").exists()
    if not allowed:
        assert str(original / "weights.txt") in errors


BLOCKS = """
import random
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if "buffers" in sys.argv:
            self.seen += 1
        if "generator" in sys.argv:
            x = x * random.random()
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), *(Block() for _ in range(6)), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    optimizer.zero_grad()
    model(torch.randn(2048, 32)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize("word", few(["", "buffers", "generator"], 2))
def test_a_script_stays_within_a_memory_budget_or_the_change_is_refused(tmp_path: Path, word: str) -> None:
    """Six blocks keep 5 MB each; a block that changes something elsewhere cannot compute again."""
    script = "-c", BLOCKS
    if word:
        side, errors = ready(tmp_path, word, script=script, memory__budget="100MB")
        why = {"buffers": "it changes its buffers", "generator": "it draws from Python's random generator"}
        assert side is None and f": {why[word]}" in errors and "cannot be made" in errors
        return
    plain, errors = ready(tmp_path, script=script, memory__budget="9GB")
    assert plain is not None, errors
    assert plain["settings"]["memory.budget"][1:3] == ["no block", True]
    most = used_mb(plain)
    side, errors = ready(tmp_path, script=script, memory__budget=f"{most - 12:.0f}MB")
    assert side is not None, errors
    _, levels, in_effect, _ = side["settings"]["memory.budget"]
    assert in_effect and len(levels.split(", ")) > 1
    assert most - 30 < used_mb(side) <= most - 12
    # The training is the same, to the bit.
    losses = [dict(zip(one["loss_steps"], one["losses"], strict=True)) for one in (plain, side)]
    assert len(losses[0].keys() & losses[1].keys()) > 3
    assert all(losses[1][step] == loss for step, loss in losses[0].items() if step in losses[1])


def used_mb(side: dict[str, Any]) -> float:
    """The most that is in use in a step, in MB."""
    return float(side["settings"]["memory.budget"][3].split()[2])


def test_every_change_of_a_script_is_read_back() -> None:
    assert not [key for key, change in OF_SCRIPTS.items() if change.applied is Switch.applied]


def of_optimizer(optimizer: torch.optim.Optimizer, value: str) -> Any:
    """The change of its implementation."""
    steps = SimpleNamespace(optimizers=lambda: [optimizer])
    return make("optimizer.implementation", value, SimpleNamespace(steps=steps))


@pytest.mark.parametrize(("undone", "value"), [(False, "foreach"), (True, "loop")])
def test_the_flags_of_an_optimizer_are_read_back(undone: bool, value: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    change = of_optimizer(optimizer, "foreach")
    change.switch(True)
    if undone:  # as a scheduler of the script's own might
        optimizer.param_groups[0]["foreach"] = False
    assert change.applied()[:2] == (value, not undone)


@pytest.mark.parametrize(
    ("dataset", "workers", "in_effect"),
    [("TensorDataset", 2, True), ("Subset", 2, None), ("Images", 2, False), ("TensorDataset", 0, False)],
)
def test_whether_batches_are_gathered_in_workers_is_known_by_the_dataset(
    dataset: str, workers: int, in_effect: bool | None
) -> None:
    loader = {"dataset": dataset, "workers": workers}
    assert make("loader.fetch", "auto", SimpleNamespace(loader=loader)).applied()[1] is in_effect


@pytest.mark.parametrize(
    ("value", "scales", "takes"), [("fp16", False, False), ("fp16", True, True), ("bf16", False, True)]
)
def test_fp16_is_not_in_effect_without_a_gradient_scaler(value: str, scales: bool, takes: bool) -> None:
    steps = SimpleNamespace(finite=SimpleNamespace(scales=scales))
    change = make("precision.amp", value, SimpleNamespace(modules=SimpleNamespace(around=[]), steps=steps))
    change.switch(True)
    model = torch.nn.Linear(4, 1)
    (around,) = change.observer.modules.around
    around(lambda module, x: module(x))(model, torch.randn(2, 4))
    _, in_effect, why = change.applied()
    assert in_effect is takes and ("bf16" in why) != takes


@pytest.mark.parametrize("subset", [False, True])
def test_whole_batches_of_tensors_are_those_of_single_items(subset: bool) -> None:
    tensors = torch.arange(40.0).reshape(20, 2), torch.arange(20)
    data: Any = TensorDataset(*tensors)
    if subset:
        data = Subset(data, [19, 3, 5, 7, 1])
    usual = list(DataLoader(data, batch_size=3))
    original = _MapDatasetFetcher.fetch
    change = make("loader.fetch", "auto", SimpleNamespace(loader={}))
    assert change.applied()[:2] == ("item", False)
    try:
        change.switch(True)
        whole = list(DataLoader(data, batch_size=3))
        other = list(DataLoader([torch.ones(2)] * 4, batch_size=2))  # type: ignore[arg-type,var-annotated]
    finally:
        _MapDatasetFetcher.fetch = original  # type: ignore[method-assign]
    assert change.applied()[:2] == ("auto", True)
    assert all(
        torch.equal(a, b)
        for one, same in zip(usual, whole, strict=True)
        for a, b in zip(one, same, strict=True)
    )
    assert [batch.shape for batch in other] == [(2, 2), (2, 2)]


def test_a_fused_step_finds_its_counter_on_the_device_of_its_parameter() -> None:
    # In torch.optim.adam, `_init_group` creates `step` beside the parameter only for the flags fused and capturable,
    # and the fused kernel takes the raw pointer of what is there. The meta device stands for a GPU.
    parameter = torch.nn.Parameter(torch.ones(4, device="meta"))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    optimizer.state[parameter] = {
        "step": torch.tensor(3.0), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter),
    }  # fmt: skip
    of_optimizer(optimizer, "fused").switch(True)
    assert optimizer.state[parameter]["step"].device == parameter.device


@pytest.mark.parametrize(("made", "value"), [("fused", "foreach"), ("fused", "loop"), ("foreach", "fused")])
def test_the_implementation_changes_and_changes_back_under_a_gradient_scaler(made: str, value: str) -> None:
    def weights(switched: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{made: True})  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        change = of_optimizer(optimizer, value)
        for step in range(6):
            if switched and step in (2, 4):
                change.switch(step == 2)
                # As an optimizer that was made so: only a fused one unscales by itself.
                unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
                assert unscales == ((value if step == 2 else made) == "fused")
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(8, 4)) - 1).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [float(weight) for weight in model.weight.detach().flatten()]

    assert weights(True) == pytest.approx(weights(False), rel=1e-5)


TF32 = """
import sys

import torch

from ndd_watch.changes import OF_SCRIPTS, make

matmul = torch.backends.cuda.matmul
if sys.argv[1] == "newer":
    matmul.fp32_precision = "tf32"
wanted = sys.argv[2] == "on"
change = make("precision.tf32", wanted, None)
change.switch(True)
with torch.backends.cudnn.flags(enabled=False):
    print(matmul.allow_tf32, *change.applied()[:2])
change.switch(False)
print(getattr(matmul, "fp32_precision", None), change.applied()[0])
"""
NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "api, wanted, switched, after",
    [
        ("older", "on", "True true True", f"{'none' if NEWER else None} false"),
        pytest.param(
            "newer", "off", "False false True", "tf32 true",
            marks=pytest.mark.skipif(not NEWER, reason="torch before 2.9"),
        ),
    ],
)  # fmt: skip
def test_tf32_is_switched_in_scripts_that_use_either_api_of_torch(
    api: str, wanted: str, switched: str, after: str
) -> None:
    # `get_float32_matmul_precision` raises where only `fp32_precision` was set (Context.cpp). The switches are global,
    # so this runs in a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", TF32, api, wanted], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [switched, after]


class Loop(Trainer):
    """Each step takes a second and waits a tenth of it; between runs, an hour passes."""

    def __init__(self, commands: list[dict[str, Any]]) -> None:
        self.commands = iter(commands)
        self.told: list[dict[str, Any]] = []
        self.seconds, self.steps, self.side, self.rests = 0.0, 0, -1, False
        self.by_side: list[int] = []
        self.gate = gate(self, self.receive, self.told.append)

    def receive(self) -> dict[str, Any]:
        assert self.rests
        self.seconds += 3600
        if (command := next(self.commands, None)) is None:
            raise EOFError
        return command

    def settle(self) -> Iterator[None]:
        yield
        yield

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        self.rests = True
        yield
        self.rests = False

    def begin(self, command: dict[str, Any]) -> None:
        self.side = command["side"]

    def now(self) -> float:
        return self.seconds

    def waited(self) -> float:
        return self.steps / 10

    def facts(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def run(self) -> None:
        """Train as long as the gate lets it."""
        self.gate()
        while True:
            assert not self.rests
            self.seconds, self.steps = self.seconds + 1, self.steps + 1
            self.by_side.append(self.side)
            self.gate()


def test_runs_are_trained_and_timed_on_command() -> None:
    train = {"do": "train", "side": 0, "lead": 2, "steps": 3}
    loop = Loop([train, {"do": "facts"}, {**train, "side": 1, "lead": 0, "steps": 1}])
    with pytest.raises(EOFError):
        loop.run()
    assert loop.told == [
        {"ready": {"steps": 2}},
        {"seconds": 3.0, "waited_s": pytest.approx(0.3)},
        {"steps": 7},
        {"seconds": 1.0, "waited_s": pytest.approx(0.1)},
    ]
    assert loop.by_side == [-1, -1, *[0] * 5, 1]


# Arguments of the audit events with which Python starts a program.
STARTS: dict[str, tuple[Any, ...]] = {
    "subprocess.Popen": ("sh", ["sh", "-c", "date >> out.txt"], None, None),
    "os.system": (b"date >> out.txt",),
    "os.exec": ("/bin/date", ("date",), None),
    "os.posix_spawn": (Path("/bin/date"), ["date"], {}),
}


def told(
    event: str, given: tuple[Any, ...], file: str = "/home/user/train.py"
) -> tuple[list[str], list[str]]:
    """(what was seen, what was refused), if code of this file does something."""
    refused: list[str] = []
    outside = Outside(refused.append)
    space: dict[str, Any] = {"heard": outside.audit, "event": event, "given": given}
    exec(compile("heard(event, given)", file, "exec"), space)
    assert outside.seen == sum(map(len, outside.to_dict().values()))
    return [one for found in outside.to_dict().values() for one in found], refused


@pytest.mark.parametrize("event", list(_STARTS))
def test_every_way_to_start_a_program_is_seen_and_refused_unless_a_package_does(event: str) -> None:
    (seen,), (refused,) = told(event, STARTS[event])
    assert "date" in seen and refused == f"starts another program ({seen})"
    # Programs of compilers and trackers are their own affair; those of other packages are named.
    for package in ("torch", "triton", "wandb"):
        assert told(event, STARTS[event], f"/opt/lib/site-packages/{package}/code.py") == ([], [])
    assert told(event, STARTS[event], "/opt/lib/site-packages/other/code.py") == ([seen], [])


@pytest.mark.parametrize(
    ("words", "named", "refused"),
    [
        (["nvidia-smi", "-L"], False, False),
        (["/usr/bin/uname", "-p"], False, False),
        (["git", "rev-parse", "HEAD"], False, False),
        (["/bin/sh", "-c", "nvidia-smi -L"], False, False),
        (["git", "commit"], True, True),
        (["git"], True, True),
        (["/bin/sh", "-c", "nvidia-smi > out.txt"], True, True),
        (["sh", "-c", "ls; date"], True, True),
        ([], True, True),
        # A launcher of the user's: what it starts is observed, and refuses by itself.
        ([sys.executable, "worker.py"], True, False),
    ],
)
def test_programs_that_may_change_something_are_named_and_others_are_not(
    words: list[str], named: bool, refused: bool
) -> None:
    found = told("subprocess.Popen", (words[0] if words else "git", words, None, None))
    assert (len(found[0]), len(found[1])) == (named, refused)


WATCHED = {FOLDER: "/records", "PYTHONPATH": f"/more:{SITE}"}


@pytest.mark.parametrize(
    ("options", "environment", "refused"),
    [
        ([], None, False),
        (["-u", "-W", "ignore"], WATCHED, False),
        (["-I"], None, True),
        (["-uS"], WATCHED, True),
        (["-m", "it"], {**WATCHED, "PYTHONPATH": "/more"}, True),
        ([], {}, True),
    ],
)
def test_a_python_process_that_is_not_observed_is_another_program(
    options: list[str], environment: dict[str, str] | None, refused: bool
) -> None:
    words = ["python3", *options, "work.py"]
    assert len(told("subprocess.Popen", ("python3", words, None, environment))[1]) == refused
    assert len(told("os.posix_spawn", ("/usr/bin/python3", words, environment))[1]) == refused


def test_git_of_a_library_only_reads() -> None:
    for words, refused in ((["git", "-C", "/x", "cat-file", "-p", "HEAD"], 0), (["git", "add", "x"], 1)):
        for file in ("/home/user/train.py", "/opt/lib/site-packages/git/cmd.py"):
            assert len(told("subprocess.Popen", ("git", words, None, None), file)[1]) == refused


@pytest.mark.parametrize(
    ("database", "written"),
    [
        ("/elsewhere/steps.db", "/elsewhere/steps.db"),
        (b"/elsewhere/steps.db", "/elsewhere/steps.db"),
        (Path("/elsewhere/steps.db"), "/elsewhere/steps.db"),
        ("file:///elsewhere/steps.db?mode=rwc", "/elsewhere/steps.db"),
        ("file:/elsewhere/steps.db?mode=ro", ""),
        ("file:steps?mode=memory", ""),
        (":memory:", ""),
        ("", ""),
        ("/tmp/steps.db", ""),
    ],
)
def test_a_database_is_written_where_it_is_opened(database: Any, written: str) -> None:
    seen, refused = told("sqlite3.connect", (database,))
    assert seen == ([written] if written else []) and len(refused) == len(seen)


@pytest.mark.parametrize("event", ["socket.connect", "socket.sendto"])
@pytest.mark.parametrize(
    ("address", "remote"),
    [
        (("192.0.2.1", 80), True),
        (("2001:db8::1", 443, 0, 0), True),
        (("127.0.0.1", 80), False),
        (("localhost", 80), False),
        (("::1", 80, 0, 0), False),
        ("/run/some.socket", False),
        ((object(), 80), False),
        ((), False),
    ],
)
def test_connections_to_other_hosts_are_seen_and_refused(event: str, address: Any, remote: bool) -> None:
    seen, refused = told(event, (None, address))
    named = f"{address[0]}:{address[1]}" if remote else ""
    assert (seen, refused) == (([named], [f"connects to {named}"]) if remote else ([], []))


def test_the_observers_own_files_are_written_also_below_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDD_WATCH", str(tmp_path / "runs" / "ranks"))
    refused: list[str] = []
    outside = Outside(refused.append, str(tmp_path))
    outside.writes(str(tmp_path / "runs" / "ranks" / "pid-1"))
    assert refused == []
    outside.writes(str(tmp_path / "weights.pt"))
    assert refused == [f"writes to {(tmp_path / 'weights.pt').resolve()}, outside its folder"]


@pytest.mark.parametrize(("method", "shared"), [("fork", True), ("spawn", False)])
def test_only_workers_that_are_forked_share_cached_items(method: str, shared: bool) -> None:
    data = TensorDataset(torch.arange(16.0))
    loader = DataLoader(data, 4, num_workers=1, multiprocessing_context=method)
    change = Cache(True, SimpleNamespace())
    change._before_workers(loader)
    _, in_effect, why = change.applied()
    assert in_effect is shared and ("16 items" if shared else method) in why
    with torch.no_grad():  # an evaluation has no say in it
        other = Cache(True, SimpleNamespace())
        other._before_workers(loader)
    assert method not in other.applied()[2]
