"""Parts "overhead": `overhead loop`, engine vs. bare loop, with the device clock on and off, in blocks of one process;
and `overhead screen`, the engine under the live screen vs. headless.

The device clock is switched between blocks: off, no step carries events. On the CPU there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.common import Compared, Options, as_ratio, compared, say, summarise
from benchmarks.engine import ONLY_STEPS, TINY, TINY_WORKLOAD, Engine, engine
from benchmarks.loop import Beside, keep_memory

from ndd_watch.clock import NEVER

from .figures import FAIL, INFO, PASS, UNCLEAR, Task, one_line

TARGET = 0.99
PAIRS = 8  # of blocks with the screen and without
# (name, workload, settings); --quick runs the first two.
CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tiny step", TINY_WORKLOAD, TINY),
    ("chartext small", "chartext", ("workload.size=small",)),
    ("eeg", "eeg", ()),
    ("chartext guide", "chartext", ("workload.size=guide", "workload.dropout=0.0")),
)


def measure(given: Task) -> None:
    """Measure one part."""
    {"loop": loop, "screen": screen}[given.args[0]](given)


def screen(given: Task) -> None:
    """Measure in a real terminal."""
    from benchmarks.screen import beside_a_run  # imports packages that may be missing

    full = given.effort == "full"
    table = beside_a_run(Options(given.effort, given.device, pairs=PAIRS if full else None))
    notes = "; ".join(table.notes)
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        interval = cells["95 % CI of the median"]
        value = cells["median"] + (f" (95 % CI {interval})" if interval else "")
        verdict = {"reached": PASS, "not reached": FAIL}.get(cells["by the median"], INFO)
        given.put(row[0], value, cells["target"], verdict, notes)
        notes = ""


def loop(given: Task) -> None:
    """Measure the cases."""
    keep_memory()
    for name, workload, sets in CASES[: int(given.of(len(CASES), 2, 1))]:
        say(f"overhead: {name}")
        settings = (*sets, *ONLY_STEPS, f"run.device={given.device}", "precision.amp=off")
        if given.left_s < 15:
            given.skip(name, "no time left")
            continue
        try:
            with engine(workload, settings) as subject:
                compare_all(given, name, subject)
        except Exception as error:  # noqa: BLE001  continue with the other cases
            given.put(name, "not measured", f"≥ {TARGET}", FAIL, one_line(f"{type(error).__name__}: {error}"))


def compare_all(given: Task, name: str, subject: Engine) -> None:
    """Three comparisons of one case: both engines with the bare loop, and with each other."""
    clock, both = subject.prepared.clock, Beside(subject, given.of(0.6, 0.25, 0.05))
    on_gpu = subject.prepared.device.type == "cuda"

    def with_engine(timing: bool) -> float:
        if on_gpu:  # whether some of the next steps carry events, or none
            clock.gpu.due = 0 if timing else NEVER
        return both.engine()

    on, off = partial(with_engine, True), partial(with_engine, False)
    first = "engine with device timing / bare loop" if on_gpu else "engine / bare loop"
    found = compare(given, f"{name}: {first}", both.bare, on)
    given.put(f"{name}: step of the bare loop", f"{1e3 / found.baseline:.2f} ms")
    for what, baseline, side in (
        ("engine without device timing / bare loop", both.bare, off),
        ("device timing on / off", off, on),
    ):
        if on_gpu:
            compare(given, f"{name}: {what}", baseline, side)
        else:
            given.skip(f"{name}: {what}")


def compare(given: Task, name: str, baseline: Callable[[], float], side: Callable[[], float]) -> Compared:
    """One ratio of rates with its interval against the target."""
    found = compared(baseline, side, int(given.of(16, 6, 2)), given.of(20.0, 5.0, 2.0))
    put_ratio(given, name, found.values, found.note)
    return found


def put_ratio(given: Task, name: str, values: Sequence[float], note: str) -> None:
    """The median of ratios against the target."""
    found = summarise(values)
    text = as_ratio(found.median)
    if found.interval is not None:
        text += f" (95 % CI {as_ratio(found.interval[0])} to {as_ratio(found.interval[1])})"
    verdict, reason = judged(found.median, found.interval)
    given.put(name, text, f"≥ {TARGET}", verdict, "; ".join(filter(None, (reason, note))))


def judged(median: float, interval: tuple[float, float] | None) -> tuple[str, str]:
    """(verdict, why). A median below the target fails only if the whole interval is below it."""
    if median >= TARGET:
        return PASS, ""
    if interval is None:
        return UNCLEAR, "too few pairs for an interval"
    return (UNCLEAR, "the interval includes the target") if interval[1] >= TARGET else (FAIL, "")
