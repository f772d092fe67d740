"""Runs the cases in order, and saves each outcome at once, so that an interrupted suite can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import say

from .cases import Case
from .outcome import Measured, Outcome, same_change
from .plants import neighbours, write_module

Json = dict[str, Any]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
# Seconds of a trial of the proposed fix, and the share of that for a trial of the cure if that is a different change.
FIX_S = 24.0
CURE_SHARE = 0.75
# Seconds beyond the expected duration of a task before it counts as hung.
PATIENCE_S = 240.0
NO_FINDING = ("healthy", "too-short")


class TaskError(Exception):
    """A task failed; the message says where its output is."""


@dataclass(frozen=True)
class Suite:
    """folder: for outcomes and the files of each case. trials: whether to measure fixes. budget_s: of each trial."""

    folder: Path
    trials: bool = True
    budget_s: float = FIX_S

    @property
    def record(self) -> Path:
        """One outcome per line."""
        return self.folder / "cases.jsonl"

    def kept(self) -> list[Outcome]:
        """The newest outcome of each completed case; a torn last line is ignored."""
        return list(
            {outcome.case: outcome for outcome in read_lines(self.record, Outcome.from_json)}.values()
        )

    def run(self, cases: Sequence[Case], resume: bool) -> list[Outcome]:
        """Run all cases; with `resume` only those without an outcome. Returns the outcomes of `cases`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.record.unlink(missing_ok=True)
        done = {outcome.case: outcome for outcome in self.kept() if not outcome.error}
        begin = time.monotonic()
        for number, case in enumerate(cases, start=1):
            if case.name in done:
                continue
            outcome = self.carry_out(case)
            done[case.name] = outcome
            append(self.record, outcome.to_json())
            say(f"{number:3} of {len(cases)}  {time.monotonic() - begin:5.0f} s  {described(outcome)}")
        return [done[case.name] for case in cases if case.name in done]

    def carry_out(self, case: Case) -> Outcome:
        """One case: the run, its diagnosis, and the trials that verify it."""
        folder = self.folder / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if case.factory:
            write_module(folder)
        begin = time.monotonic()
        outcome = Outcome.of(case)
        try:
            with neighbours(case.busy, case.asleep) as pids:
                outcome = self._carry_out(case, folder, pids)
        except TaskError as error:
            outcome = replace(outcome, error=str(error))
        return replace(outcome, seconds=round(time.monotonic() - begin, 1))

    def _carry_out(self, case: Case, folder: Path, pids: tuple[int, ...]) -> Outcome:
        found = task(
            folder,
            "run",
            {
                "workload": case.workload_name, "sets": case.all_sets(folder), "folder": str(folder / "runs"),
                "seconds": case.seconds, "to_end": case.to_end, "neighbours": pids, "alone": bool(pids) and self.trials,
            },
        )  # fmt: skip
        if found["status"] == "failed":
            raise TaskError(f"the run failed: {found['reason']}")
        findings = found["findings"]
        verdict = findings[0]
        sets = next((tuple(change["sets"]) for change in verdict["changes"] if change["sets"]), ())
        outcome = Outcome.of(
            case,
            named=verdict["cause"],
            title=verdict["title"],
            confidence=verdict["confidence"],
            found=tuple((finding["cause"], finding["ceiling"]) for finding in findings),
            fix=sets,
            outside=bool(verdict["changes"]) and not verdict["changes"][0]["sets"],
            foreign=round(found["foreign"], 2),
        )
        if not self.trials or not case.proved:
            return outcome
        if sets and verdict["cause"] not in NO_FINDING:
            outcome = replace(
                outcome, tried=self._trial(case, folder, "fix", sets, verdict["cause"], self.budget_s)
            )
        if case.kind != "fault":
            return outcome
        if case.busy:
            alone = found["alone"] or {"ratio": None, "low": None, "high": None}
            verdict_alone = "not measured" if found["alone"] is None else "measured"
            text = "the run was too slow to measure between two stops of its neighbours"
            measured = Measured((), verdict_alone, alone["ratio"], alone["low"], alone["high"], 0.0, text)
            return replace(outcome, cured=measured)
        if outcome.tried is not None and same_change(sets, case.cure):
            return replace(outcome, cured=outcome.tried)
        if case.cure:
            outcome = replace(
                outcome, cured=self._trial(case, folder, "cure", case.cure, None, self.budget_s * CURE_SHARE)
            )
        return outcome

    def _trial(
        self, case: Case, folder: Path, name: str, sets: tuple[str, ...], cause: str | None, budget_s: float
    ) -> Measured:
        body = {
            "what": "trial", "workload": case.workload_name, "sets": case.all_sets(folder), "change": sets,
            "budget_s": max(budget_s, case.trial_s), "cause": cause,
        }  # fmt: skip
        try:
            return Measured.of_trial(task(folder, name, body))
        except TaskError as error:
            # The diagnosis remains valid.
            return Measured(sets, "not measured", None, None, None, 0.0, str(error))


def task(folder: Path, name: str, body: Json) -> Json:
    """The result of one task in a separate process, whose output goes to <name>.log. Raises TaskError.

    Processes that it leaves behind (loader workers, sides of a trial) are killed.
    """
    request, result = folder / f"{name}.task.json", folder / f"{name}.json"
    request.write_text(json.dumps({"what": "run", **body}, indent=1), "utf-8")
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "qa.faults.child",
        str(request.absolute()),
        str(result.absolute()),
    ]
    expected = float(body.get("seconds", 0) or body.get("budget_s", 0))
    log = folder / f"{name}.log"
    # Runs in the case's folder, so that it does not pick up files of the current one by accident.
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # A compiler cache of its own, so that compiling costs as much as the first time.
    compiled = str(folder.absolute() / f"{name}-compiled")
    environment = {**os.environ, "PYTHONPATH": places, "TORCHINDUCTOR_CACHE_DIR": compiled}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            cwd=folder, env=environment,
        )  # fmt: skip
        try:
            status = process.wait(expected + PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise TaskError(f"{name} hung; see {log}") from None
        finally:
            _end_group(process)
    if status or not result.exists():
        raise TaskError(f"{name} ended with status {status}: {_last_line(log)}; see {log}")
    found: Json = json.loads(result.read_text("utf-8"))
    return found


def described(outcome: Outcome) -> str:
    """One line per case, while the suite runs."""
    if outcome.error:
        return f"{outcome.case}: {outcome.error}"
    ceiling = "" if outcome.ceiling is None else f" (at most {outcome.ceiling:.2f}x)"
    parts = [f"{outcome.case}: {outcome.named}{ceiling}"]
    for name, measured in (("fix", outcome.tried), ("cost", outcome.cured)):
        if measured is not None and measured.ratio is not None:
            parts.append(f"{name} {measured.ratio:.2f}x")
        elif measured is not None:
            parts.append(f"{name}: {measured.verdict}")
    return ", ".join(parts) + ("" if outcome.right else "  << WRONG")


def append(path: Path, line: str) -> None:
    """Add a line to a record, after ending a torn one."""
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + line + "\n")


def read_lines(record: Path, make: Callable[[str], T]) -> list[T]:
    """What `make` returns for each line of a record; torn lines are ignored."""
    found = []
    for line in record.read_text("utf-8").splitlines() if record.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            found.append(make(line))
    return found


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"
