"""What has grown from the first profiled step to the newest one, so that steps take longer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ndd_engine.record.events import FunctionsEvent
from ndd_engine.text import printable, size, span

from .finding import MOST_OF
from .view import View, place

# Counts that have grown by so many, and by this factor; by that, the share of a function has grown.
MORE, TIMES_MORE = 8, 1.5
# Earlier steps in the graph of a loss: fewer may be meant so.
LEAST_STEPS_BACK = 3
# Bytes that a step reads or writes more than the first one did.
MORE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Grown:
    """What has grown from the first profiled step to the newest one. title: the end of the finding's title."""

    title: str
    evidence: str
    advice: str
    where: str | None = None


COUNTS = {
    "hooks": ("hooks of {}", "register hooks once, before training, or remove each with handle.remove()"),
    "parameters": ("parameters in {}", "call add_param_group once for each parameter"),
    "handlers": ("handlers of the logger {}", "add a handler once: each one writes every message again"),
    "state": (
        "entries of the state of {}",
        "change parameters in place (parameter.copy_(new) under torch.no_grad()) instead of making new ones; drop the "
        "state of those that are gone (optimizer.state.pop(old)), and bound lists in it",
    ),
}
# Of these, a training that adds some in part of its steps is at fault also while nothing is slower.
ADDED, EACH_STEP = ("hooks", "handlers"), 0.1


def profiles(view: View) -> tuple[FunctionsEvent, FunctionsEvent] | None:
    """The first and the newest profiled step; None if there is only one."""
    first, newest = view.snapshot.first_functions, view.snapshot.functions
    return None if first is None or newest is None or first.step >= newest.step else (first, newest)


def carried(view: View) -> Grown | None:
    """A graph of earlier steps that is carried to the next one."""
    newest = view.snapshot.functions
    back = newest.sizes.get("graph:", 0) if newest is not None else 0
    if newest is None or back < LEAST_STEPS_BACK:
        return None
    return Grown(
        f"through the graphs of at least {back:,} earlier steps",
        f"the graph of the loss of step {newest.step:,} contains nodes of at least {back:,} earlier steps",
        "detach what one step passes to the next (state = state.detach()), and call backward() without "
        "retain_graph=True",
        view.script_line("carries"),
    )


def counted(view: View, least: float = MORE, kinds: Collection[str] | None = None) -> Grown | None:
    """Something that can be counted, such as hooks: of these kinds (all), at least so many more."""
    if (pair := profiles(view)) is None:
        return None
    first, newest = pair
    each_step = EACH_STEP * (newest.step - first.step)
    counts = [
        (now - before, key, before, now)
        for key, now in newest.sizes.items()
        if now - (before := first.sizes.get(key, 0)) >= max(least, MORE) and now >= TIMES_MORE * before
        and (kind := key.partition(":")[0]) in (kinds or COUNTS)
        # Layers that begin to train add some state once.
        and (kind != "state" or (before and now - before >= each_step))
    ]  # fmt: skip
    if not counts:
        return None
    _, key, before, now = max(counts)
    kind, _, name = key.partition(":")
    text, advice = COUNTS[kind]
    what = text.format(printable(name))
    evidence = f"{what}: {before:,} in step {first.step:,}, {now:,} in step {newest.step:,}"
    return Grown(f"while {what} grow from {before:,} to {now:,}", evidence, advice, view.script_line(kind))


def function(view: View, begin_ns: float, now_ns: float, at_once: bool) -> Grown | None:
    """What takes most of the growth from one time of a step to another: a function of the user, or a line of the loop.

    at_once: the step takes longer since one moment.
    """
    if (pair := profiles(view)) is None:
        return None
    first, newest = pair
    # A profiled step takes longer than others.
    slower, earlier = max(newest.wall_ns / now_ns, 1.0), max(first.wall_ns / begin_ns, 1.0)
    functions = {(row[0], row[2]): row[4] / earlier for row in first.functions}
    lines = {_called(row): row[6] / earlier for row in first.calls}
    least = MOST_OF * (now_ns - begin_ns)

    def grew(now: float, before: float) -> bool:
        return now - before >= least and now / now_ns >= TIMES_MORE * before / begin_ns

    rows = [
        (now, before, *row[:3])
        for row in newest.functions
        if grew(now := row[4] / slower, before := functions.get((row[0], row[2]), 0.0))
    ]
    calls = [
        (now, before, row)
        for row in newest.calls
        if grew(now := row[6] / slower, before := lines.get(_called(row), 0.0))
    ]
    innermost = min(rows, default=None)
    call = max(
        (one for one in calls if innermost is None or (one[2][0], one[2][2]) == (innermost[2], innermost[4])),
        default=None, key=lambda one: one[0],
    )  # fmt: skip
    longer, usual = ("longer", _AT_ONCE) if at_once else ("longer and longer", _USUAL)
    if innermost is not None:
        now, before, file, line, name = innermost
        title, where = f"where {printable(name)} takes {longer}", place(file, line, name)
        subject, advice = where, usual
    elif call is None:
        return None
    if call is not None:
        _, _, (file, line, name, made, *_) = call
        at, what = place(file, line, name), printable(made)
        advice = next((text for names, text in _CALLS if made.rpartition(".")[2] in names), usual)
        if innermost is None:
            now, before, where = call[0], call[1], at
            title, subject = f"where {what} takes {longer}", f"{what}, called at {at},"
        else:
            title, where = f"{title}, in {what}", at
    seen = f"{subject} took {span(before)} of step {first.step:,}, and {span(now)} of step {newest.step:,}"
    moved = [
        f"{verb} {size(amount)} instead of {size(first.sizes.get(kind, 0))}"
        for kind, verb in _MOVED.items()
        if (amount := newest.sizes.get(kind, 0)) >= max(TIMES_MORE * first.sizes.get(kind, 0), MORE_BYTES)
    ]
    if moved:
        title += f", while a step {' and '.join(moved)}"
        advice = _FILES
    return Grown(title, seen, advice, where)


# What a step has moved through files and pipes.
_MOVED = {"read:": "reads", "written:": "writes"}
_FILES = "append what is new to the file, and do not write or read all of it again in each step"
_USUAL = "let it do as much work in each step: keep running sums or a deque with maxlen, and join lists once at the end"
_AT_ONCE = "find what it does more of from this step on, or what it waits for"
_JOIN = "join once, after the loop: each time, all that was there before is copied"
# What is called, and what to do where it takes longer and longer.
_CALLS = (
    (
        ("sort", "sorted", "median", "percentile", "quantile"),
        "sort once after the loop, or keep a bounded window",
    ),
    (("cat", "stack", "concatenate", "concat", "vstack", "hstack", "append", "join"), _JOIN),
    (("deepcopy",), "copy only what is new: all that was there before is copied each time"),
    (("dump", "dumps", "write_text", "to_csv", "to_json", "save"), _FILES),
)


def _called(row: tuple[str, int, str, str, str, int, int, str]) -> tuple[str, int, str, str]:
    return row[0], row[1], row[2], row[3]
