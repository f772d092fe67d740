"""Tuning: measures each candidate setting on top of the best so far, and keeps it only if it helps.

Ratios are never multiplied. The kept settings are measured against the baseline in separate trials, because the trials
that selected a setting overestimate its speedup. A setting that such a trial does not confirm is dropped again.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ndd_engine.config import Config, changed_toml, read, to_toml
from ndd_engine.config.schema import why_no_graph
from ndd_engine.errors import ConfigError, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Machine
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import factor, number, printable, times
from ndd_engine.train.request import preflight
from ndd_watch.changes import SET, Candidate, Conditions, candidates, needs_losses

from .campaign import Campaign, CampaignState
from .estimates import estimate_of, judged_estimate, over
from .outcome import Base, Measure, breaks_even, flatten, under_load, with_interval
from .trial import run_trial

# Flags of CPUs with native bf16; others convert, which is slower than fp32.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})


def place_of(machine: Machine, cpuinfo: Path = Path("/proc/cpuinfo")) -> Conditions:
    """A machine, as detected."""
    chosen, bf16 = machine.chosen, None
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if flags := [line.partition(":")[2].split() for line in lines if line.startswith("flags")]:
        bf16 = not BF16_FLAGS.isdisjoint(flags[0])
    capability = chosen.compute_capability if chosen is not None else None
    return Conditions(machine.device != "cpu", max(int(machine.host.usable_cpus), 1), capability, bf16)


def trained(place: Conditions, config: Config, model: frozenset[str]) -> Conditions:
    """A machine on which a configuration is trained. model: what is known of it, see Place."""
    amp, ranks = config.precision.amp, config.parallel.ranks
    scales = amp == "fp16" or (amp == "auto" and place.old)  # as `make_precision` chooses
    return replace(
        place,
        cores=max(place.cores // ranks, 1),  # the ranks of a machine share them
        settings=flatten(config.model_dump(mode="json")),
        model=model,
        no_graph=why_no_graph(place.gpu, ranks, scales, config.optimizer.name) or "",
    )


def observed(place: Conditions, seen: Mapping[str, Any], device: str, threads: int | None) -> Conditions:
    """A machine on which a script was observed. seen: its recorded configuration."""
    known = flatten({key: value for key, value in seen.items() if key != "script"})
    script = seen.get("script")
    facts: Mapping[str, Any] = script if isinstance(script, Mapping) else {}
    return replace(
        place, gpu=device.startswith("cuda"), settings={**known, "run.threads": threads}, script=True,
        model=frozenset(name for name in ("attention", "convolutions") if facts.get(name)),
        attention=str(facts.get("attention") or ""),
    )  # fmt: skip


RowState = Literal["waiting", "measuring", "kept", "dropped", "skipped"]

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
    state: RowState
    trial: TrialEvent | None = None
    to_start: TrialEvent | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TuningState(CampaignState[TuningRow]):
    """How far tuning is. toml: the resulting configuration, "" until done. text: the result in one sentence.

    stopped: interrupted, or failed (text says why).
    """

    done: bool = False
    toml: str = ""
    text: str = ""

    @property
    def kept(self) -> tuple[TuningRow, ...]:
        """The rows whose settings are in the result."""
        return tuple(row for row in self.rows if row.state == "kept")

    @property
    def sets(self) -> tuple[str, ...]:
        """The settings that are kept."""
        return tuple(item for row in self.kept for item in row.candidate.sets)

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
    campaign = Campaign(TuningState(), tell, stop, budget_s, measure)
    draft = read(base.config, base.sets, base.workload)
    rough = preflight(draft, use_torch=False)
    machine = machine or detect(rough.run.device, use_torch=False)
    campaign.say("preparing")
    config = campaign.start_config(base, draft)
    found = candidates(trained(place_of(machine), config, draft.model))
    with tempfile.TemporaryDirectory(prefix="ndd-tune-") as folder:
        # Write everything out, so that all trials start from the same configuration.
        path = Path(folder, "start.toml")
        path.write_text(to_toml(config), encoding="utf-8")

        def refused(kept: Sequence[str], sets: Sequence[str]) -> str:
            return SET if read(path, (*kept, *sets)).resolve() == read(path, kept).resolve() else ""

        start = replace(base, config=path, workload=None, sets=())
        state = Tuning(campaign, only).run(start, found, refused, config.run.max_steps)
        device = machine.chosen.name if machine.chosen is not None else machine.host.cpu
        heading = f"Written by tune from {base.name}, on {device}.\n{state.text}"
        heading = "\n".join(map(printable, heading.splitlines()))
        toml = changed_toml(read(path, state.sets).resolve(), heading, _reasons(state.rows))
    campaign.say("done", done=True, toml=toml)
    return campaign.state


class Tuning:
    """Trials of one candidate after another. only: see `run_tuning`. outside: see TrialRequest."""

    def __init__(
        self, campaign: Campaign[TuningState], only: Sequence[str] = (), outside: bool = False
    ) -> None:
        self.campaign, self._only, self._outside = campaign, only, outside

    def run(
        self,
        start: Base,
        found: Sequence[Candidate],
        refused: Callable[[Sequence[str], Sequence[str]], str],
        max_steps: int | None = None,
    ) -> TuningState:
        """Measure the candidates. Raises UsageError, and what the first trial raises.

        start: the baseline. refused: why settings are not measured on top of those kept, "" if they are; it may raise
        ConfigError. max_steps: of the whole run, None if unknown.
        """
        self._start, self._refused, self._max_steps = start, refused, max_steps
        for name in self._only:
            if not any(name in (one.name, one.group) for one in found):
                names = ", ".join(dict.fromkeys(one.name for one in found))
                raise UsageError(f"--only {printable(name)}: no such candidate; allowed: {names}")
        asked = {one.name for one in found if not self._only or {one.name, one.group} & set(self._only)}
        why = {one.name: one.missing or ("" if one.name in asked else NOT_ASKED) for one in found}
        rows = tuple(
            TuningRow(one, "skipped" if why[one.name] else "waiting", reason=why[one.name]) for one in found
        )
        campaign = self.campaign
        campaign.say("preparing", rows=rows)
        campaign.each(rows, self._try)
        trouble = campaign.state.failed
        cut_short = "not reached" if not trouble else f"not reached: {trouble}"
        rows = tuple(_ended(row, cut_short) for row in campaign.state.rows)
        state = replace(campaign.state, rows=rows, stopped=campaign.state.stopped or bool(trouble))
        campaign.state = replace(state, text=_summary(state) + (f"; stopped: {trouble}" if trouble else ""))
        return campaign.state

    def _try(self, index: int, row: TuningRow) -> None:
        campaign, candidate = self.campaign, row.candidate
        if row.state != "waiting":
            return
        if why := self._not_now(candidate):
            campaign.put(index, state="skipped", reason=why)
            return
        campaign.put(index, state="measuring")
        campaign.say(f"measuring {candidate.title}")
        kept, before = campaign.state.sets, campaign.state.final
        trial = self._trial("the best so far", kept, candidate.sets)
        if trial.verdict == "stopped":
            campaign.put(index, state="skipped", trial=trial, reason="stopped before it was measured")
            return
        helps, why = _judged(trial, self._max_steps)
        campaign.put(index, state="kept" if helps else "dropped", trial=trial, reason=why)
        if not helps or campaign.stop.is_set():
            return
        campaign.say(f"confirming {candidate.title} vs. the baseline")
        total = self._trial("the baseline", (), (*kept, *candidate.sets))
        if trouble := unconfirmed(total, before):
            campaign.put(index, state="dropped", to_start=total, reason=trouble)
        else:
            campaign.put(index, to_start=total)

    def _trial(self, name: str, kept: Sequence[str], sets: Sequence[str]) -> TrialEvent:
        base = replace(self._start, name=name, sets=(*self._start.sets, *kept))
        return self.campaign.trial(base, sets, outside=self._outside)

    def _not_now(self, candidate: Candidate) -> str:
        """Why a candidate is not measured on top of the kept settings; "" if it is."""
        group = candidate.group
        tried = [
            row for row in self.campaign.state.rows if group and row.candidate.group == group and row.trial
        ]
        failed = len([row for row in tried if row.state == "dropped"])
        given_up = tried and tried[-1].state == "dropped" and failed >= PATIENCE.get(group, len(tried) + 1)
        if given_up and not candidate.always:
            return f"{tried[-1].candidate.title} did not help"
        if (
            group == "attention"
            and tried
            and tried[-1].trial is not None
            and tried[-1].trial.in_effect is False
        ):
            return f"{tried[-1].candidate.title} was not in effect"
        # If bf16 helps, fp16 with its loss scaling gains nothing more.
        if group == "amp" and any(row.state == "kept" for row in tried):
            return f"{tried[0].candidate.title} was kept"
        try:
            return self._refused(self.campaign.state.sets, candidate.sets)
        except ConfigError as error:
            return "; ".join(problem.message for problem in error.problems)


def _ended(row: TuningRow, cut_short: str) -> TuningRow:
    """A row at the end of tuning: what was not measured, or not confirmed, is not in the result."""
    if row.state in ("waiting", "measuring"):
        return TuningRow(row.candidate, "skipped", reason=cut_short)
    if row.state == "kept" and (row.to_start is None or row.to_start.verdict == "stopped"):
        return replace(
            row, state="skipped", to_start=None, reason=f"{row.reason}, but not confirmed vs. the baseline"
        )
    return row


def _judged(trial: TrialEvent, max_steps: int | None) -> tuple[bool, str]:
    """Whether a candidate is kept, and why (not)."""
    if trial.verdict != "faster":
        # Without a ratio the trial's own sentence says what happened.
        more = "; raise --budget" if trial.verdict == "inconclusive" else ""
        return False, trial.text if trial.ratio is None else trial.verdict + more
    if trial.in_effect is False:
        return False, f"faster, but not in effect: {trial.not_in_effect}"
    if trial.loss == "differs":
        return False, f"faster, but the losses differ: {trial.loss_text}"
    keys = {item.partition("=")[0].strip() for item in trial.sets}
    if trial.loss == "not comparable" and needs_losses(keys):
        return (
            False,
            f"faster, but it may change the numbers, and losses were not compared: {trial.loss_text}",
        )
    even = trial.break_even_steps
    if even is not None and max_steps is not None and even > max_steps:
        return False, f"{breaks_even(even)}, and the run has {number(max_steps)}"
    parts = ["faster"]
    if even:
        parts.append(breaks_even(even))
    if trial.loss == "close":
        parts.append("losses close, not identical")
    elif trial.loss == "not comparable":
        parts.append(f"losses not comparable{f' ({trial.loss_text})' if trial.loss_text else ''}")
    if trial.load:
        parts.append(under_load(trial))
    return True, "; ".join(parts)


def _summary(state: TuningState) -> str:
    tried = [row for row in state.rows if row.state in ("kept", "dropped")]
    count = f"{len(state.kept)} of {len(tried)} measured settings help"
    if unclear := len([row for row in tried if row.trial and row.trial.verdict == "inconclusive"]):
        count += f", {unclear} inconclusive"
    if not state.kept:
        return f"{count}: the baseline is unchanged"
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
    return with_interval(times(trial.ratio), trial.confidence, trial.low, trial.high, factor)


def unconfirmed(total: TrialEvent, before: TrialEvent | None) -> str:
    """Why the final comparison does not confirm the last kept setting; "" if it does, or if it was stopped.

    total: all kept settings vs. the baseline. before: the same without the last one; None if there were none.
    """
    if total.verdict == "stopped":
        return ""
    found = estimate_of(total)
    if found is None:
        return f"faster, but not confirmed vs. the baseline: {total.text}"
    earlier = estimate_of(before) if before is not None else None
    if earlier is not None:
        found = over(found, earlier)
    if total.verdict == "faster" and judged_estimate(found) == "faster":
        return ""
    shown = with_interval(times(found.ratio), total.confidence, found.low, found.high, factor)
    more = ", inconclusive; raise --budget" if total.verdict == "inconclusive" else ""
    return f"faster, but not confirmed vs. the baseline: {shown}{more}"
