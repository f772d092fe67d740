"""Commands: what they are called, which ones keep the observer out, and their arguments and variables as changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.command import (
    LINKED,
    Command,
    check_contained,
    command_of,
    environment,
    in_copy,
    kept_out,
    scratch,
)
from ndd_engine.script.trials import started
from ndd_watch.outside import Outside


def command(text: str, folder: Path = Path("/somewhere")) -> Command:
    return Command(tuple(text.split()), folder)


@pytest.mark.parametrize(
    ("text", "title", "name"),
    [
        ("python train.py --lr 3", "train.py", "train"),
        ("python -u -m my.package.fit", "my.package.fit", "fit"),
        ("torchrun --nproc-per-node 2 my/train.py", "train.py", "train"),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", "train.py", "train"),
        ("bash run/all.sh", "all.sh", "all"),
        ("fit-model --fast", "fit-model", "fit-model"),
        ("python -c pass", "python -c", "python-c"),
    ],
)
def test_a_run_is_called_like_its_script(text: str, title: str, name: str) -> None:
    assert (command(text).title, command(text).run_name) == (title, name)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("python -I train.py", True),
        ("python3.11 -uE train.py", True),
        ("/usr/bin/python -W error -S t.py", True),
        ("python -u train.py -I", False),
        ("python -m fit -E", False),
        ("python -c S", False),
        ("bash -I", False),
        ("python -X dev -W Ignore t.py", False),
        ("python", False),
    ],
)
def test_options_of_python_that_keep_the_observer_out_are_refused(text: str, refused: bool) -> None:
    assert bool(kept_out(text.split())) == refused


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for text in ("python train.py --x", "python -u -W ignore train.py", "python -m fit", "python -c 1"):
        command(text, tmp_path).check()
    for text, named in (
        ("python -u trian.py", str(tmp_path)),
        ("--fast python train.py", "--fast"),
        ("missing.py --x", "python missing.py"),
        ("", "command"),
    ):
        with pytest.raises(UsageError, match=named):
            command(text, tmp_path).check()


def test_the_path_of_a_run_is_known_to_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is started from another shell, without the `PYTHONPATH=... ` that was before the command of the run."""
    monkeypatch.setenv("PYTHONPATH", "../lib")
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    command("python train.py", tmp_path).keep(run)
    monkeypatch.delenv("PYTHONPATH")
    assert command_of(run).path == "../lib" and command("python train.py", tmp_path).path == ""
    # Of an earlier version.
    run.command.write_text('{"command": ["python", "train.py"], "folder": "/"}')
    assert command_of(run).path == ""
    # The observer is found before it.
    made = environment(Path("/r"), Path("/s"), {"PYTHONPATH": "/mine", "A": "b"})
    assert made == {"PYTHONPATH": "/s:/mine", "A": "b", "NDD_WATCH": "/r"}


@pytest.mark.parametrize(
    ("before", "name", "after", "old"),
    [
        ("python t.py --batch-size 32 --lr 1", "batch-size", "python t.py --batch-size 64 --lr 1", "32"),
        ("python t.py --batch_size=32", "batch-size", "python t.py --batch_size=64", "32"),
        ("python t.py -b 32", "b", "python t.py -b 64", "32"),
        ("python t.py train.batch=32 seed=1", "train.batch", "python t.py train.batch=64 seed=1", "32"),
        ("python t.py", "batch-size", "python t.py --batch-size 64", "default"),
        ("torchrun --nnodes=1 t.py seed=1", "batch", "torchrun --nnodes=1 t.py seed=1 batch=64", "default"),
        ("python t.py seed=1 -v", "batch", "python t.py seed=1 -v --batch 64", "default"),
    ],
)
def test_an_argument_is_replaced_where_it_stands(before: str, name: str, after: str, old: str) -> None:
    found = started(command(before), [f"arg.{name}=64"], {})
    assert found.command == command(after)
    assert found.changed == {f"arg.{name}": (old, "64")}
    (advice,) = found.advice
    assert after in advice


def test_a_variable_is_set() -> None:
    bare = command("python t.py")
    found = started(bare, ["env.OMP_NUM_THREADS=2", "loader.workers=1"], {"OMP_NUM_THREADS": "8"})
    assert (found.command, found.environment) == (bare, {"OMP_NUM_THREADS": "2"})
    assert found.changed == {"env.OMP_NUM_THREADS": ("8", "2")}


@pytest.mark.parametrize(
    ("item", "named"), [("arg.batch", "--arg batch"), ("env.=1", "--env =1"), ("arg.b=32", "32")]
)
def test_what_changes_nothing_is_refused(item: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        started(command("python t.py -b 32"), [item], {})


@pytest.mark.parametrize(
    ("text", "item", "expected"),
    [
        ("python t.py -b 32", "arg.b=64", {"arg.b": "64"}),
        ("torchrun --nproc-per-node 2 t.py", "arg.lr=0.1", {"arg.lr": "0.1"}),
        ("bash all.sh", "env.X=1", {"env.X": "1"}),
        # Options of a launcher are not those of the process that trains.
        ("torchrun --nproc-per-node 2 t.py", "arg.nproc-per-node=4", {}),
        ("torchrun --nproc-per-node=2 -m fit", "arg.nproc-per-node=4", {}),
    ],
)
def test_arguments_and_variables_are_read_back(text: str, item: str, expected: dict[str, str]) -> None:
    assert started(command(text), [item], {}).read_back == expected


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a folder with a script and an environment, its scratch copy); data and a package lie beside and above it."""
    root = tmp_path_factory.mktemp("beside")
    folder = root / "up" / "project"
    files = {
        "up/project/train.py": "", "up/project/src/own.py": "", "up/project/runs/base/events.jsonl": "",
        "up/project/.venv/pyvenv.cfg": "", "up/project/.venv/bin/python": "", "up/data/x.txt": "1",
        "package/__init__.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with (folder / "large.bin").open("wb") as file:
        file.truncate(LINKED + 1)
    (root / "link").symlink_to(folder)
    return folder, scratch(folder, root / "place", folder / "runs")


def test_links_and_empty_folders_are_in_a_copy(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for one in (folder / "empty" / "inner", folder / "parts" / "a", folder / "runs", elsewhere):
        one.mkdir(parents=True)
    (elsewhere / "x.txt").write_text("1")
    for name, target in (
        ("data", elsewhere), ("newest", Path("parts/a")), ("whole", folder / "parts"), ("of_runs", folder / "runs"),
        ("gone", elsewhere / "gone"), ("circle", Path("circle")), ("up", Path("..")), ("x.txt", elsewhere / "x.txt"),
    ):  # fmt: skip
        (folder / name).symlink_to(target)
    copied = scratch(folder, tmp_path / "place", folder / "runs")
    assert (copied / "empty" / "inner").is_dir() and (copied / "data" / "x.txt").read_text() == "1"
    assert (copied / "up").resolve() == tmp_path and (copied / "gone").is_symlink()
    assert not (copied / "runs").exists() and not (copied / "of_runs").exists()
    # What is in the folder is that of the copy; a linked file is copied.
    assert (copied / "newest").resolve() == (copied / "parts" / "a").resolve()
    assert (copied / "whole").resolve() == (copied / "parts").resolve()
    assert (copied / "x.txt").read_text() == "1" and not (copied / "x.txt").is_symlink()
    refused = list[str]()
    outside = Outside(refused.append, str(folder), str(tmp_path / "place"))
    for path in ("data/new.txt", "gone", "up/project/train.py", "newest/new.txt", "whole/new.txt"):
        outside.writes(str(copied / path))
    assert len(refused) == 3
    outside.audit("os.remove", (str(copied / "data"), -1))  # the link only
    assert len(refused) == 3


def test_git_reads_the_history_in_a_copy_and_does_not_write_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()

    def git(where: Path, *words: str) -> str:
        own = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "EMAIL"), "x@example.org")
        environment = {**os.environ, **own, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command = ("git", "-C", str(where), *words)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (folder / ".git").rglob("*") if path.is_file()}

    git(folder, "init", "-q")
    (folder / "train.py").write_text("")
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "First")
    head, before = git(folder, "rev-parse", "HEAD"), contents()
    copied = scratch(folder, tmp_path / "place", folder / "runs")
    assert git(copied, "rev-parse", "HEAD") == head and git(copied, "status", "--porcelain") == ""
    assert (
        "First" in git(copied, "log") and Path(git(copied, "rev-parse", "--show-toplevel").strip()) == copied
    )
    git(copied, "commit", "-q", "--allow-empty", "-m", "Second")
    assert git(copied, "rev-parse", "HEAD^") == head and git(folder, "rev-parse", "HEAD") == head
    assert contents() == before


def test_relative_paths_that_leave_the_folder_reach_the_original(beside: tuple[Path, Path]) -> None:
    folder, copied = beside
    assert copied.name == "project" and not (copied / "runs").exists()
    assert (copied / "../data/x.txt").read_text() == "1"
    for entry in ("src/own.py", "../../package/__init__.py", ".venv/pyvenv.cfg", "large.bin"):
        assert (copied / entry).exists()
    # A copied file is another one; what is linked is the original.
    (copied / "train.py").write_text("changed")
    assert (folder / "train.py").read_text() == ""
    assert (copied / "../data").resolve() == folder.parent / "data"


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("../data/x.txt", True),
        ("../data/new.txt", True),
        ("../../package/__init__.py", True),
        ("large.bin", True),
        ("out.txt", False),
        ("../out.txt", False),  # in the scratch folder, and lost with it
        ("src/own.py", False),
    ],
)
def test_what_a_scratch_copy_links_to_is_not_written(
    beside: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, path: str, refused: bool
) -> None:
    folder, copied = beside
    told = list[str]()
    monkeypatch.chdir(copied)
    outside = Outside(told.append, scratch=str(folder.parents[1] / "place"))
    outside.writes(path)
    assert told == ([f"writes to {Path(path).resolve()}, outside its folder"] if refused else [])


def test_a_path_may_be_relative_to_a_folder_that_is_open(
    beside: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copied = beside
    monkeypatch.chdir(copied)
    told = list[str]()
    outside = Outside(told.append, str(folder), str(folder.parents[1] / "place"))
    opened = os.open(folder, os.O_RDONLY)
    try:
        for event, given in (
            ("os.remove", ("x.txt", opened)), ("os.mkdir", ("new", 0o777, opened)),
            ("os.rename", ("a", "b", -1, opened)), ("os.utime", ("x.txt", None, None, opened)),
        ):  # fmt: skip
            outside.audit(event, given)
            outside.audit(event, tuple(-1 if one == opened else one for one in given))  # in the copy
    finally:
        os.close(opened)
    names = [f"writes to {folder.resolve() / name}" for name in ("x.txt", "new", "b", "x.txt")]
    assert [text.partition(",")[0] for text in told] == names


@pytest.mark.parametrize(
    ("word", "moved"),
    [
        ("{own}/train.py", "{copy}/train.py"),
        ("--data={own}/src", "--data={copy}/src"),
        ("{own}/out.txt", "{copy}/out.txt"),  # it is not there yet
        ("python {own}/train.py > '{own}/log'", "python {copy}/train.py > '{copy}/log'"),
        # Not in the copy, or only linked.
        ("{own}/.venv/bin/python", "{own}/.venv/bin/python"),
        ("{own}/.venv/pyvenv.cfg", "{own}/.venv/pyvenv.cfg"),
        ("{own}/runs/base/events.jsonl", "{own}/runs/base/events.jsonl"),
        ("{own}/large.bin", "{own}/large.bin"),
        # Other folders.
        ("{own}-2/train.py", "{own}-2/train.py"),
        ("/elsewhere{own}/train.py", "/elsewhere{own}/train.py"),
        ("{own}/../data/x.txt", "{own}/../data/x.txt"),
        ("train.py", "train.py"),
    ],
)
def test_whole_paths_below_the_folder_are_those_of_the_copy(
    beside: tuple[Path, Path], word: str, moved: str
) -> None:
    folder, copied = beside
    given, expected = (text.format(own=folder, copy=copied) for text in (word, moved))
    command, changed = in_copy(Command((given,), folder), copied, {"THERE": given, "PATH": given})
    assert (command.words, command.folder) == ((expected,), copied)
    assert changed == ({"THERE": expected} if given != expected else {})


def test_a_folder_that_the_shell_reached_by_a_link_is_known_by_that_name(beside: tuple[Path, Path]) -> None:
    folder, copied = beside
    link = folder.parents[1] / "link"
    command, changed = in_copy(Command((f"{link}/train.py",), folder), copied, {"PWD": str(link)})
    assert (command.words, changed) == ((f"{copied}/train.py",), {"PWD": str(copied)})


def test_everything_that_a_copy_does_not_contain_is_named() -> None:
    seen = {"places": ["/data/x"], "hosts": ["example.org:80"], "programs": ["sh -c date"]}
    with pytest.raises(UsageError, match=r"/data/x and .*:80 and .* sh -c date"):
        check_contained({"script": {"outside": seen}})
    for kind in seen:
        with pytest.raises(UsageError, match="--allow-side-effects"):
            check_contained({"script": {"outside": {kind: ["something"]}}})
    check_contained({"script": {"outside": {kind: [] for kind in seen}}})


@pytest.mark.parametrize("text", ["python", "python -", "python3 -u -", "python -X dev", "python - 7"])
def test_a_script_from_standard_input_cannot_be_started_again(text: str) -> None:
    with pytest.raises(UsageError, match="standard input"):
        command(text).check_repeatable()
    for other in ("python train.py -", "python -u a.py", "python -m fit", "python -c pass", "bash a.sh"):
        command(other).check_repeatable()
