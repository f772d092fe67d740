"""Tuning: measures each candidate setting on top of the best so far, and keeps it only if it helps.

Ratios are never multiplied. The kept settings are measured against the baseline in separate trials, because the trials
that selected a setting overestimate its speedup. A setting that such a trial does not confirm is dropped again.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ndd_engine.child import ChildError, StoppedError, spec_of, ticker
from ndd_engine.config import Config, Draft, anywhere, changed_toml, read, to_toml
from ndd_engine.errors import ConfigError, NddError, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Machine
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import number, printable
from ndd_engine.train.preflight import preflight

from .candidates import SET, Candidate, Place, candidates, matching
from .confirm import unconfirmed
from .outcome import breaks_even, with_interval
from .request import Base, Measure, Progress, TrialRequest
from .sides import SideProcess
from .trial import run_trial

State = Literal["waiting", "measuring", "kept", "dropped", "skipped"]

NOT_ASKED = "not selected with --only"

# Number of candidates of a group that are not faster, after which the rest of the group is skipped.
PATIENCE = {"workers": 2, "micro": 1}


@dataclass(frozen=True, slots=True)
class TuningRow:
    """A candidate and its result.

    trial: vs. the best so far. to_start: all settings kept so far, including this one, vs. the baseline. reason: why
    it was kept, dropped or skipped.
    """

    candidate: Candidate
    state: State
    trial: TrialEvent | None = None
    to_start: TrialEvent | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TuningState:
    """How far tuning is. toml: the resulting configuration, "" until done. text: the result in one sentence.

    stopped: interrupted, or failed (text says why); the rows hold what was measured.
    """

    rows: tuple[TuningRow, ...]
    stage: str
    progress: Progress | None = None
    elapsed_s: float = 0.0
    done: bool = False
    toml: str = ""
    text: str = ""
    stopped: bool = False

    @property
    def kept(self) -> tuple[TuningRow, ...]:
        """The rows whose settings are in the result."""
        return tuple(row for row in self.rows if row.state == "kept")

    @property
    def final(self) -> TrialEvent | None:
        """The result vs. the baseline; None if nothing was kept, or it was not measured."""
        return self.kept[-1].to_start if self.kept else None

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "rows": [
                {
                    "name": row.candidate.name,
                    "title": row.candidate.title,
                    "sets": list(row.candidate.sets),
                    "state": row.state,
                    "reason": row.reason,
                    "trial": asdict(row.trial) if row.trial else None,
                    "to_start": asdict(row.to_start) if row.to_start else None,
                }
                for row in self.rows
            ],
            "elapsed_s": self.elapsed_s,
            "stopped": self.stopped,
            "text": self.text,
            "toml": self.toml,
        }


def run_tuning(
    base: Base,
    budget_s: float = 60.0,
    only: Sequence[str] = (),
    tell: Callable[[TuningState], None] = lambda state: None,
    stop: threading.Event | None = None,
    measure: Measure = run_trial,
    machine: Machine | None = None,
) -> TuningState:
    """Tune. budget_s: of each trial, up to two per candidate. only: names or groups of candidates, () for all.

    stop: once set, the current trial is cancelled, and the result is what was measured so far. Raises UsageError for
    mistakes before anything is measured, and what the first trial raises.
    """
    tuning = _Tuning(base, budget_s, only, tell, stop or threading.Event(), measure)
    with tempfile.TemporaryDirectory(prefix="ndd-tune-") as folder:
        return tuning.run(Path(folder), machine)


@dataclass
class _Tuning:
    """One run of tuning."""

    base: Base
    budget_s: float
    only: Sequence[str]
    tell: Callable[[TuningState], None]
    stop: threading.Event
    measure: Measure

    def __post_init__(self) -> None:
        self._begun = time.monotonic()
        self._state = TuningState((), "starting")
        self._kept: list[str] = []

    def run(self, folder: Path, machine: Machine | None) -> TuningState:
        draft = read(self.base.config, self.base.sets, self.base.workload)
        rough = preflight(draft, use_torch=False)
        machine = machine or detect(rough.run.device, use_torch=False)
        self._say("preparing")
        config = start_config(self.base, draft, folder, self._say, self.stop)
        # Write everything out, so that all trials start from the same configuration.
        path = folder / "start.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        self._start = replace(self.base, config=path, workload=None, sets=())
        self._say("preparing", rows=self._rows(candidates(config, Place.of(machine))))
        trouble = ""
        for index in range(len(self._state.rows)):
            if self.stop.is_set():
                break
            try:
                self._try(index)
            except NddError as error:
                if not any(row.trial for row in self._state.rows):
                    raise
                trouble = str(error)
                break
        return self._finish(machine, trouble)

    def _rows(self, found: Sequence[Candidate]) -> tuple[TuningRow, ...]:
        try:
            wanted = matching(found, self.only) if self.only else {candidate.name for candidate in found}
        except KeyError as error:
            names = ", ".join(dict.fromkeys(candidate.name for candidate in found))
            raise UsageError(
                f"--only {printable(str(error.args[0]))}: no such candidate; allowed: {names}"
            ) from None
        why = {one.name: one.missing or ("" if one.name in wanted else NOT_ASKED) for one in found}
        return tuple(
            TuningRow(one, "skipped" if why[one.name] else "waiting", reason=why[one.name]) for one in found
        )

    def _try(self, index: int) -> None:
        candidate = self._state.rows[index].candidate

        def put(**changes: Any) -> None:
            rows = list(self._state.rows)
            rows[index] = replace(rows[index], **changes)
            self._say(self._state.stage, rows=tuple(rows))

        if self._state.rows[index].state != "waiting":
            return
        if why := self._not_now(candidate):
            put(state="skipped", reason=why)
            return
        put(state="measuring")
        self._say(f"measuring {candidate.title}")
        trial = self._run("the best so far", self._kept, candidate.sets)
        if trial.verdict == "stopped":
            put(state="skipped", trial=trial, reason="stopped before it was measured")
            return
        kept, why = _judged(trial, self._config())
        if not kept:
            put(state="dropped", trial=trial, reason=why)
            return
        before = self._state.final
        put(state="kept", trial=trial, reason=why)
        if self.stop.is_set():
            self._kept += candidate.sets
            return
        self._say(f"confirming {candidate.title} vs. the baseline")
        total = self._run("the baseline", (), (*self._kept, *candidate.sets))
        if trouble := unconfirmed(total, before):
            put(state="dropped", to_start=total, reason=trouble)
            return
        self._kept += candidate.sets
        put(to_start=total)

    def _run(self, name: str, kept: Sequence[str], sets: Sequence[str]) -> TrialEvent:
        base = replace(self._start, name=name, sets=tuple(kept))
        request = TrialRequest(base, tuple(sets), self.budget_s)
        return self.measure(request, lambda progress: self._say(self._state.stage, progress), self.stop)

    def _not_now(self, candidate: Candidate) -> str:
        """Why a candidate is not measured on top of the kept settings; "" if it is."""
        group = candidate.group
        tried = [row for row in self._state.rows if group and row.candidate.group == group and row.trial]
        failed = len([row for row in tried if row.state == "dropped"])
        if tried and tried[-1].state == "dropped" and failed >= PATIENCE.get(group, len(tried) + 1):
            return f"{tried[-1].candidate.title} did not help"
        # If bf16 helps, fp16 with its loss scaling gains nothing more.
        if group == "amp" and any(row.state == "kept" for row in tried):
            return f"{tried[0].candidate.title} was kept"
        try:
            changed = read(self._start.config, (*self._kept, *candidate.sets)).resolve()
        except ConfigError as error:
            return "; ".join(problem.message for problem in error.problems)
        return SET if changed == self._config() else ""

    def _config(self) -> Config:
        """The configuration with the kept settings."""
        return read(self._start.config, self._kept).resolve()

    def _finish(self, machine: Machine, trouble: str) -> TuningState:
        cut_short = "not reached" if not trouble else f"not reached: {trouble}"
        rows = tuple(
            TuningRow(row.candidate, "skipped", reason=cut_short)
            if row.state in ("waiting", "measuring")
            else row
            for row in self._state.rows
        )
        stopped = self.stop.is_set() or bool(trouble)
        self._state = replace(self._state, rows=rows, stopped=stopped)
        text = _summary(self._state) + (f"; stopped: {trouble}" if trouble else "")
        device = machine.chosen.name if machine.chosen is not None else machine.host.cpu
        heading = f"Written by tune from {self.base.name}, on {device}.\n{text}"
        heading = "\n".join(map(printable, heading.splitlines()))
        toml = changed_toml(self._config(), heading, _reasons(rows))
        self._say("done", done=True, toml=toml, text=text)
        return self._state

    def _say(self, stage: str, progress: Progress | None = None, **changes: Any) -> None:
        elapsed = time.monotonic() - self._begun
        self._state = replace(self._state, stage=stage, progress=progress, elapsed_s=elapsed, **changes)
        self.tell(self._state)


def start_config(
    base: Base, draft: Draft, folder: Path, tell: Callable[[str], None], stop: threading.Event
) -> Config:
    """Resolve the draft: choose size "auto" by measurement and make the data path absolute.

    folder: for an intermediate file. Raises NddError if no size can be chosen, or when stopped.
    """
    if draft.size != "auto":
        return anywhere(draft.resolve())
    try:
        with SideProcess(spec_of(base.config, base.workload, base.sets)) as side:
            text = side.choose(ticker("choosing the model size", tell, stop))
    except StoppedError:
        raise StoppedError("stopped before anything was measured") from None
    except ChildError as error:
        raise NddError(f"the model size cannot be chosen: {error}") from None
    chosen = folder / "chosen.toml"
    chosen.write_text(text, encoding="utf-8")
    return read(chosen).resolve()


def _judged(trial: TrialEvent, config: Config) -> tuple[bool, str]:
    """Whether a candidate is kept, and why (not)."""
    if trial.verdict != "faster":
        # Without a ratio the trial's own sentence says what happened.
        more = "; raise --budget" if trial.verdict == "inconclusive" else ""
        return False, trial.text if trial.ratio is None else trial.verdict + more
    if trial.in_effect is False:
        return False, f"faster, but not in effect: {trial.not_in_effect}"
    if trial.loss == "differs":
        return False, f"faster, but the losses differ: {trial.loss_text}"
    even = trial.break_even_steps
    if even is not None and config.run.max_steps is not None and even > config.run.max_steps:
        return False, f"{breaks_even(even)}, and the run has {number(config.run.max_steps)}"
    parts = ["faster"]
    if even:
        parts.append(breaks_even(even))
    if trial.loss == "close":
        parts.append("losses close, not identical")
    elif trial.loss == "not comparable":
        parts.append(f"losses not comparable{f' ({trial.loss_text})' if trial.loss_text else ''}")
    return True, "; ".join(parts)


def _summary(state: TuningState) -> str:
    tried = [row for row in state.rows if row.state in ("kept", "dropped")]
    count = f"{len(state.kept)} of {len(tried)} measured settings help"
    if unclear := len([row for row in tried if row.trial and row.trial.verdict == "inconclusive"]):
        count += f", {unclear} inconclusive"
    if not state.kept:
        return f"{count}: the configuration is unchanged"
    final = state.final
    if final is None or final.ratio is None:
        return f"{count}; their total was not measured vs. the baseline"
    return f"{count}; total {_figures(final)} vs. the baseline, measured directly"


def _reasons(rows: Sequence[TuningRow]) -> dict[str, str]:
    """By key, what tuning found about its value."""
    reasons: dict[str, str] = {}
    for row in rows:
        if row.trial is None or row.state not in ("kept", "dropped"):
            continue
        for item in row.candidate.sets:
            key, _, value = item.partition("=")
            if row.state == "kept":
                reasons[key] = f"kept by tune: {_figures(row.trial)} vs. the best so far"
            else:
                found = ", ".join(filter(None, (_figures(row.trial), row.reason)))
                reasons[key] = printable(
                    "; ".join(filter(None, (reasons.get(key), f"tried {value}: {found}")))
                )
    return reasons


def _figures(trial: TrialEvent) -> str:
    """ "1.42x (95 % CI 1.38 to 1.47)", "" without a ratio."""
    if trial.ratio is None:
        return ""
    return with_interval(f"{trial.ratio:.3g}x", trial.confidence, trial.low, trial.high)
