"""Small scripts that must do the same whether they are observed or not, and what compares the two.

The cases of a kind are in a text file. A case begins with `=== name`, and these lines may follow:

    run: COMMAND    of a shell; RUN marks what is observed (default: RUN python train.py)
    steps: 10 20    optimizer steps of each process that trains, where the script does not print them as "STEPS n";
                    "-" where they are not compared
    until: NAME     a file that a process of it writes after its end; the files are compared once it is there
    needs: NAME     a package without which it is skipped; several lines, several packages
    python: 3.12    the lowest version of Python for it

The other lines are `train.py`, and those after a line `file NAME:` are another file. `kit.py` lies beside them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
KIT = HERE / "kit.py"
_HEADERS = ("run", "steps", "until", "needs", "python")
# Seconds after which a command is said to hang, and how many more the console may take.
_LIMIT_S, _CONSOLE_S = 150.0, 20.0
# Between the two signals that end a command which hangs.
_GRACE_S = 3.0
HANGS = "hangs"

_STATUS = re.compile(r"(done|failed|interrupted|terminated|stopped)\b[:, ]")
_STEPS = re.compile(r"([\d,]+) optimizer steps?(, [\d,]+ \S+)* in .+; last loss ")
_REASON = re.compile(r"\bafter ([\d,]+) steps?\b")
_TRUE = re.compile(r"^STEPS (\d+)\b", re.MULTILINE)
# What differs from one run to the next: addresses, process ids, the time in the log lines of torch.
_VARIES = re.compile(
    r"0x[0-9a-fA-F]{6,}|\bpid \d+|(?<=/proc/)\d+|(?<=\bprocess )\d{2,}|(?<=[/(])(?:same|pymp|tmp)[-\w]+|"
    r"\b[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ \d+|\[W\d{3,4} [^\]]*?\d\d:\d\d:\d\d\.\d+ |"
    r"(?<=\b[A-Z]{4}:)\d{4}-\S+ \S+ \d+:\d+|(?<=\bERROR:)\d{4}-\S+ \S+ \d+:\d+|"
    r"(?<=: line \d: ) *\d+(?= [A-Z])"
)


@dataclass(frozen=True)
class Case:
    """steps: None if the script prints them; () if they are not compared. python: its lowest version."""

    kind: str
    name: str
    run: str
    files: Mapping[str, str]
    steps: tuple[int, ...] | None = None
    until: str = ""
    needs: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 9)

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class Result:
    """status: of the command, 128 + N after signal N, or "hangs". said: what the console wrote; [] if not observed."""

    status: int | str
    out: str
    errors: list[str]
    files: Mapping[str, str]
    said: list[str] = field(default_factory=list)


def parse() -> list[Case]:
    """All cases, in the order of their files. Raises ValueError."""
    found: list[Case] = []
    for path in sorted(HERE.glob("*.txt")):
        parts = re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        found += [_case(path.stem, part) for part in parts]
    names = Counter(case.name for case in found)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"more than one case has the name {twice[0]}")
    return found


def _case(kind: str, text: str) -> Case:
    name, _, rest = text.partition("\n")
    lines = rest.rstrip("\n").split("\n")
    given: dict[str, list[str]] = {}
    while lines and (header := re.fullmatch(r"(\w+): (.+)", lines[0])) and header[1] in _HEADERS:
        given.setdefault(header[1], []).append(header[2].strip())
        del lines[0]
    files: dict[str, list[str]] = {"train.py": []}
    current = files["train.py"]
    for line in lines:
        if new := re.fullmatch(r"file (\S+):", line):
            current = files.setdefault(new[1], [])
        else:
            current.append(line)
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"{kind}: a case cannot have the name {name!r}")
    steps = given.get("steps")
    major, minor = given.get("python", ["3.9"])[0].split(".")
    return Case(
        kind,
        name,
        given.get("run", ["RUN python train.py"])[0],
        {key: "\n".join(part) + "\n" for key, part in files.items()},
        None if steps is None else tuple(int(word) for word in steps[0].split() if word != "-"),
        given.get("until", [""])[0],
        tuple(given.get("needs", ())),
        (int(major), int(minor)),
    )


def lacks(case: Case, python: str = sys.executable) -> str:
    """Why a case cannot run with this Python; "" if it can."""
    need = " and ".join(f"find_spec({name!r})" for name in case.needs) or "True"
    ask = f"import sys; from importlib.util import find_spec; print(sys.version_info >= {case.python}, bool({need}))"
    version, packages = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.split()
    if version != "True":
        return f"needs Python {case.python[0]}.{case.python[1]}"
    return "" if packages == "True" else f"needs {', '.join(case.needs)}"


def run_case(case: Case, observed: bool, folder: Path, python: str = sys.executable) -> Result:
    """Run a case in a new folder within this one. python: that of the script; the console has the present one."""
    work, runs = folder / "work", folder / "runs"
    for path in (work, runs):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    shutil.copy(KIT, work)
    for name, text in case.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, encoding="utf-8")
    status, out, errors = _run(_command(case, observed, runs), work, observed, python)
    end = time.monotonic() + _LIMIT_S
    while case.until and not (work / case.until).exists() and time.monotonic() < end:
        time.sleep(0.05)
    lines, said = split(errors, runs) if observed else (errors.splitlines(), [])
    kept = [plain(line, folder) for line in lines if line.strip()]
    found = Result(status, plain(out, folder), kept, _tree(work), said)
    shutil.rmtree(work, ignore_errors=True)
    return found


def _command(case: Case, observed: bool, runs: Path) -> str:
    if not observed:
        return case.run.replace("RUN ", "")
    numbers = iter(range(1000))
    # -P: the folder of the case is no place for packages of the console.
    console = f"{sys.executable} -P -m ndd_console run --headless --runs {runs} --run "
    return re.sub(
        r"\bRUN ", lambda _: f"{console}{case.name.replace('_', '-')}-{next(numbers)} -- ", case.run
    )


def _run(command: str, work: Path, observed: bool, python: str) -> tuple[int | str, str, str]:
    removed = ("PYTHONPATH", "NDD_WATCH")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(removed)}
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    status: int | str = HANGS
    try:
        out, errors = process.communicate(timeout=_LIMIT_S + _CONSOLE_S * observed)
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    except subprocess.TimeoutExpired:
        out, errors = _end(process)
    return status, out.decode(errors="replace"), errors.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End a command that hangs. The console ends what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    return b"", b""


def split(errors: str, runs: Path) -> tuple[list[str], list[str]]:
    """Standard error: the lines of the script, and those of the console.

    What the console tells of a run that goes on, such as a dead worker or a hang, has its name in front.
    Each summary of the console begins with the status of the run, or with a finding before it, and ends with the folder
    of its record.
    """
    theirs: list[str] = []
    ours: list[str] = []
    for line in errors.splitlines():
        if line.startswith("ndd-console: "):
            ours.append(line)
            continue
        theirs.append(line)
        if not line.startswith(f"record: {runs}"):
            continue
        begin = next((at for at in range(len(theirs) - 1, -1, -1) if _STATUS.match(theirs[at])), None)
        if begin is not None:
            begin -= begin > 0 and theirs[begin - 1].startswith("finding: ")
            ours += theirs[begin:]
            del theirs[begin:]
    return theirs, ours


def plain(text: str, folder: Path) -> str:
    """A text without what differs from one run to the next."""
    return _VARIES.sub("_", text.replace(str(folder), "_"))


def _tree(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and os.access(path, os.R_OK) and "__pycache__" not in path.parts:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return found


def told(said: list[str]) -> int:
    """The steps that the console tells of all processes."""
    found = [match for line in said if (match := _STEPS.match(line))]
    if not found:
        found = [match for line in said if _STATUS.match(line) and (match := _REASON.search(line))]
    return sum(int(match[1].replace(",", "")) for match in found)


def differences(case: Case, bare: Result, observed: Result) -> list[str]:
    """What is not the same; [] if all is."""
    found = []
    if bare.status == HANGS:
        found.append("it hangs also when it is not observed")
    if bare.status != observed.status:
        found.append(f"exit status: {bare.status} -> {observed.status}")
    if bare.out != observed.out:
        found.append(f"output: {_first(bare.out, observed.out)}")
    before, after = Counter(bare.errors), Counter(observed.errors)
    found += [f"standard error has also: {line[:160]!r}" for line in list(after - before)[-3:]]
    found += [f"standard error lacks: {line[:160]!r}" for line in list(before - after)[-3:]]
    names = sorted(bare.files.keys() | observed.files.keys())
    if changed := [name for name in names if bare.files.get(name) != observed.files.get(name)]:
        found.append(f"files: {', '.join(changed[:6])}")
    true = case.steps
    if true is None:
        true = tuple(int(number) for number in _TRUE.findall(bare.out))
        if not true:
            found.append("it tells no steps")
    if true and observed.status != HANGS and sum(true) != (steps := told(observed.said)):
        words = " / ".join(line for line in observed.said if _STATUS.match(line) or _STEPS.match(line))
        found.append(f"steps: {sum(true)} -> {steps} ({words[:300] or 'no summary'})")
    return found


def _first(bare: str, observed: str) -> str:
    """The first line that differs."""
    one, two = [*bare.splitlines(), ""], [*observed.splitlines(), ""]
    pairs = ((b, o) for b, o in zip(one, two, strict=False) if b != o)
    before, after = next(pairs, (one[-2:][0], two[-2:][0]))
    return f"{before[:160]!r} -> {after[:160]!r}"
