"""The result of a trial in figures and in one sentence, and how much pairs of processes differ on this machine."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_engine.config import Config
from ndd_engine.errors import UsageError
from ndd_engine.files import open_regular, write_text
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import counted, duration, finite, size
from ndd_watch.changes import TABLE

from .blocks import MOST_PAIRS
from .estimates import CONFIDENCE, DIFFERENT, FLOOR, METHOD, Estimate, Usual, pooled
from .trial_request import SideFacts, TrialRequest, not_in_effect

# Maximum relative difference of losses that count as close.
CLOSE = 0.01
# A change of these keys changes what is trained, so that losses are not comparable, unless the table of changes has it.
_OTHER_TRAINING = ("workload.", "optimizer.", "schedule.", "clip.", "run.seed", "batch.sequence")


def differences(base: Config, change: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that differ, with both values."""
    return changed_items(flatten(base.model_dump(mode="json")), flatten(change.model_dump(mode="json")))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def changed_items(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both values; None where a key is missing."""
    pairs = ((key, (a.get(key), b.get(key))) for key in dict.fromkeys((*a, *b)))
    return {key: (one, other) for key, (one, other) in pairs if one != other}


def effect(facts: SideFacts, changed: Iterable[str]) -> tuple[bool | None, str]:
    """(whether the changed settings are in effect, why not), as verified by the run itself."""
    verified = {key: facts.settings[key] for key in changed if key in facts.settings}
    if missing := not_in_effect(verified):
        return False, "; ".join(missing)
    # A setting at its default has nothing to verify, but may be read back.
    known = [in_effect or requested == applied for requested, applied, in_effect, _ in verified.values()]
    return (True if known and all(known) else None), ""


def compare_losses(
    base: Sequence[float], change: Sequence[float], changed: Iterable[str], items: tuple[int, int]
) -> tuple[str, str]:
    """(same, close, differs or not comparable; why) of the first losses of both sides."""
    other = [key for key in changed if key.startswith(_OTHER_TRAINING) and key not in TABLE]
    if other:
        return "not comparable", f"a different {', '.join(other)} changes what is trained"
    if items[0] != items[1]:
        return "not comparable", f"{items[1]:,} items per step instead of {items[0]:,}"
    count = min(len(base), len(change))
    if not count:
        return "not comparable", "no loss was recorded"
    steps = f"the first {count:,} losses" if count > 1 else "the first loss"
    pairs = list(zip(base[:count], change[:count], strict=True))
    if all(a == b for a, b in pairs):
        return "same", f"{steps} {'are' if count > 1 else 'is'} bitwise identical"
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return "differs", f"{steps} {'include' if count > 1 else 'is'} NaN or infinity"
    apart = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
    verdict = "close" if apart <= CLOSE else "differs"
    differ = "differ" if count > 1 else "differs"
    return verdict, f"{steps} {differ} by up to {apart * 100:.2g} % (close: up to {CLOSE * 100:.0f} %)"


def same_steps(*every: SideFacts) -> list[list[float]]:
    """The first losses of each, of the same steps, as far as their steps are known."""
    if not all(facts.loss_steps for facts in every):
        return [facts.losses for facts in every]
    known = [dict(zip(facts.loss_steps, facts.losses, strict=True)) for facts in every]
    steps = sorted(set.intersection(*map(set, known)))
    return [[losses[step] for step in steps] for losses in known]


def startup_s(side: Mapping[str, Any]) -> float:
    """Seconds before training, plus the excess time of the slower first steps. side: the fields of SideFacts."""
    slow = (side.get("warmup_s") or 0.0) - side.get("warmup_steps", 0) * (side.get("step_s") or 0.0)
    return float(side["prepare_s"] + max(slow, 0.0))


def break_even(base: SideFacts, change: SideFacts) -> int | None:
    """Optimizer steps after which a candidate with a longer startup breaks even; None if it is not faster."""
    if not base.items_per_s or not change.items_per_s or base.prepare_s is None or change.prepare_s is None:
        return None
    saved_s = change.items_per_step * (1 / base.items_per_s - 1 / change.items_per_s)
    if saved_s <= 0:
        return None
    return math.ceil(max(startup_s(vars(change)) - startup_s(vars(base)), 0) / saved_s)


def result(
    request: TrialRequest,
    verdict: str,
    reason: str,
    found: Estimate | None,
    sides: tuple[SideFacts, SideFacts],
    changed: Sequence[str],
    seconds: float,
    note: str = "",
    doubt: str = "",
    load: str = "",
) -> TrialEvent:
    """The event. reason: why it is inconclusive or failed. sides: baseline, candidate. note: why losses are unknown.

    doubt: a reason why losses may differ that is not the change. load: see TrialEvent.
    """
    base, change = sides
    in_effect, why_not = effect(change, changed)
    loss, loss_text = "not comparable", note
    losses = same_steps(base, change)
    if base.losses and change.losses:
        items = (base.items_per_step, change.items_per_step)
        loss, loss_text = compare_losses(losses[0], losses[1], changed, items)
        if loss == "differs" and doubt:
            loss_text += f"; {doubt}"
    event = TrialEvent(
        sets=list(request.sets),
        against=request.base.name,
        verdict=verdict,
        text="",
        ratio=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        confidence=CONFIDENCE,
        abba_blocks=found.blocks if found else 0,
        pairs=found.pairs if found else 0,
        df=round(found.df, 2) if found else None,
        method=found.method if found else "",
        between=found.between if found else None,
        seconds=round(seconds, 3),
        budget_s=request.budget_s,
        device=change.device_name or base.device_name,
        in_effect=in_effect,
        not_in_effect=why_not,
        loss=loss,
        loss_text=loss_text,
        break_even_steps=break_even(base, change) if verdict == "faster" else None,
        base=base.to_dict(),
        change=change.to_dict(),
        cause=request.cause,
        load=load if change.device == "cpu" and found is not None else "",
    )
    return replace(event, text=sentence(event, reason))


def sentence(event: TrialEvent, reason: str = "") -> str:
    """The result in one sentence."""
    head = event.verdict
    if event.ratio is not None:
        head += "" if event.verdict in DIFFERENT else ":"
        head += f" {with_interval(f'{times(event.ratio)}x', event.confidence, event.low, event.high, times)}"
        head += f", {counted(event.abba_blocks, 'ABBA block')} in {duration(event.seconds)}"
        if source := interval_source(event):
            head += f", {source}"
    # "out of memory on cuda:0 in forward" repeats the verdict.
    parts = [reason if reason.startswith(head) else head + (f": {reason}" if reason else "")]
    if event.load:
        parts.append(under_load(event))
    if event.in_effect is not None:
        parts.append("in effect" if event.in_effect else f"not in effect: {event.not_in_effect}")
    before, after = event.base.get("peak_bytes"), event.change.get("peak_bytes")
    if before is not None and after is not None:
        same = abs(after - before) < FLOOR * before
        parts.append(
            f"peak memory {size(after)}, unchanged" if same else f"peak memory {size(before)} → {size(after)}"
        )
    if event.loss in ("same", "close"):
        parts.append("losses identical" if event.loss == "same" else "losses close")
    elif event.loss == "differs":
        parts.append(event.loss_text or "losses differ")
    if event.break_even_steps:
        parts.append(breaks_even(event.break_even_steps))
    return "; ".join(parts)


def under_load(event: TrialEvent) -> str:
    """That the ratio is one on a busy machine; "" if it is not."""
    return f"{event.load}, and on a free machine the ratio may be another" if event.load else ""


def interval_source(event: TrialEvent) -> str:
    """What the interval of a trial comes from, in words; "" if that is unknown."""
    if event.method == METHOD:
        return "both sides in one process"
    if not event.pairs:
        return ""
    text = f"interval from {counted(event.pairs, 'pair')} of processes"
    if event.between is not None:
        text += f" and the usual difference between processes, {event.between * 100:.2g} %"
    return text


def breaks_even(steps: int) -> str:
    """In words."""
    return f"breaks even after {counted(steps, 'step')}"


def with_interval(
    value: str,
    confidence: float,
    low: float | None,
    high: float | None,
    form: Callable[[float], str] = "{:.3g}".format,
) -> str:
    """ "1.42x (95 % CI 1.38 to 1.47)"; only the value if there is no interval. form: of its ends."""
    if low is None or high is None:
        return value
    return f"{value} ({confidence * 100:.0f} % CI {form(low)} to {form(high)})"


def times(ratio: float) -> str:
    """A ratio with three significant digits: 1.42, 12.3."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


# Devices, and trials of each, that are kept.
MOST_DEVICES, MOST_TRIALS = 16, 40
_MOST_BYTES = 1 << 18
# Variances are clipped to this: more comes from a disturbed machine.
_MOST = 0.03**2


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ndd-console, or ~/.cache/ndd-console."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path("~/.cache").expanduser()) / "ndd-console"


class PairVariances:
    """Variances between pairs of processes, by device. path: of the file (default: in the user's cache)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "processes.json"

    def usual(self, device: str) -> Usual:
        """The usual difference on a device: that of earlier trials pooled with the default."""
        return pooled(self._read().get(device, []))

    def add(self, device: str, measured: Usual) -> None:
        """Keep what a trial measured; the oldest are forgotten."""
        if not device or not math.isfinite(measured.variance):
            return
        found = self._read()
        trials = [*found.pop(device, []), _clipped(measured.variance, measured.df)][-MOST_TRIALS:]
        devices = dict([*found.items(), (device, trials)][-MOST_DEVICES:])
        body = {name: [[one.variance, one.df] for one in some] for name, some in devices.items()}
        with suppress(OSError, UsageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"version": 1, "devices": body}, indent=1))

    def _read(self) -> dict[str, list[Usual]]:
        """What is plausible of the file, {} without one."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                body = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        devices = body.get("devices") if isinstance(body, dict) else None
        if not isinstance(devices, dict):
            return {}
        known = {name: _usuals(some) for name, some in list(devices.items())[-MOST_DEVICES:]}
        return {name: some for name, some in known.items() if some}


def _usuals(entries: Any) -> list[Usual]:
    found = []
    for entry in entries[-MOST_TRIALS:] if isinstance(entries, list) else []:
        if isinstance(entry, list) and len(entry) == 2:
            value, df = map(finite, entry)
            if value is not None and df is not None and df > 0:
                found.append(_clipped(value, df))
    return found


def _clipped(variance: float, df: float) -> Usual:
    return Usual(min(max(variance, -_MOST), _MOST), min(df, float(MOST_PAIRS)))
