"""What a scratch copy does not contain is seen before it happens: places, hosts and programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ndd_watch.trying import _STARTS, Outside

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
def test_every_way_to_start_a_program_is_seen_and_refused(event: str) -> None:
    (seen,), (refused,) = told(event, STARTS[event])
    assert "date" in seen and refused == f"starts another program ({seen})"


@pytest.mark.parametrize("event", list(_STARTS))
@pytest.mark.parametrize("package", ["torch", "triton", "wandb"])
def test_programs_of_compilers_and_trackers_are_their_own_affair(event: str, package: str) -> None:
    assert told(event, STARTS[event], f"/opt/lib/site-packages/{package}/code.py") == ([], [])


def test_programs_of_other_packages_are_named_and_python_is_not_refused() -> None:
    given = STARTS["subprocess.Popen"]
    assert told("subprocess.Popen", given, "/opt/lib/site-packages/other/code.py") == (
        [" ".join(given[1])],
        [],
    )
    # A launcher of the user's: what it starts is observed, and refuses by itself.
    words = [sys.executable, "worker.py"]
    assert told("subprocess.Popen", (sys.executable, words, None, None)) == ([" ".join(words)], [])


@pytest.mark.parametrize(
    "words",
    [
        ["nvidia-smi", "-L"],
        ["/usr/bin/uname", "-p"],
        ["git", "rev-parse", "HEAD"],
        ["/bin/sh", "-c", "nvidia-smi -L"],
    ],
)
def test_programs_that_change_nothing_are_not_named(words: list[str]) -> None:
    assert told("subprocess.Popen", (words[0], words, None, None)) == ([], [])


@pytest.mark.parametrize(
    "words",
    [["git", "commit"], ["git"], ["/bin/sh", "-c", "nvidia-smi > out.txt"], ["sh", "-c", "ls; date"], []],
)
def test_programs_that_may_change_something_are_named(words: list[str]) -> None:
    seen, refused = told("subprocess.Popen", ("git", words, None, None))
    assert len(seen) == len(refused) == 1


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
