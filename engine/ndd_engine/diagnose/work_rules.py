"""What the model does slowly, by a profiler capture: which module and line, and what would do the same faster.

Loops of sequential steps, projections onto many outputs, many small operators, attention without a fused kernel,
modules that are computed again, and gradients that nothing uses. Each ceiling is that of the part of forward and
backward which the capture has seen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ndd_engine.record.events import KernelsEvent
from ndd_engine.text import counted, finite, number, percent, printable, size, span

from .finding import Change, Finding
from .view import FLOOR, FindingDraft, View, place

CAPTURE = "profiler capture"
# Least iterations of a loop. Nanoseconds of the median operator of a loop that waits for launches rather than computes,
# without and with a GPU. The part of the calls of modules that are to different ones, from which on it is one over
# layers.
LEAST_STEPS, SHORT_NS, SHORT_GPU_NS, LAYERS = 16, 250_000.0, 50_000.0, 0.5
# Outputs of a projection or softmax that are many, and the least share of such.
VOCABULARY, LEAST_VOCABULARY = 8_192, 0.15
# Operators of a step that are many, and the least part of forward and backward that small ones and gaps take.
MANY, MOSTLY = 200, 0.6
# Positions from which on attention is long enough for its kernel to matter.
LEAST_LENGTH = 32
# Convolutions take at least this part of forward and backward where their memory format may matter.
CONVOLVES = 0.3
_PROJECTS = frozenset({"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum"})
_SOFTMAX = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp"})
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})
_ATTENDS = frozenset(
    {"matmul", "bmm", "baddbmm", "einsum", "mul", "div", "dropout", "masked_fill", "masked_fill_", *_SOFTMAX}
)
_BYTES = {"double": 8, "c10::Half": 2, "c10::BFloat16": 2}
_HEADS = "MultiheadAttention"
_CONVOLUTIONS = frozenset({"conv2d", "convolution"})
_FUSED = {"GRUCell": "nn.GRU", "LSTMCell": "nn.LSTM", "RNNCell": "nn.RNN"}


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of operations of record.events.KernelsEvent; shapes: of the tensors that it is given."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    kind: str
    detail: str
    file: str
    line: int
    function: str
    module: str
    owner: str
    forward: float
    backward: float
    calls: int

    @property
    def ns(self) -> float:
        return self.forward + self.backward

    @property
    def where(self) -> str | None:
        """ "train.py:12 in Net.forward"; None if that is unknown."""
        return place(self.file, self.line, self.function) if self.line else None

    @property
    def subject(self) -> str:
        """ "head (Linear)", or the operator where no module of the user is known."""
        if self.module.startswith("("):
            return printable(self.name)
        return module_text(self.module, self.owner)

    @property
    def item_bytes(self) -> int:
        return _BYTES.get(self.kind, 4)


def module_text(name: str, kind: str) -> str:
    """ "head (Linear)"."""
    return printable(name if kind in ("", name) else f"{name} ({kind})")


def operators(capture: KernelsEvent) -> list[Operator]:
    """The longest operators of a capture."""
    found = []
    for (
        name,
        shapes,
        kind,
        detail,
        file,
        line,
        function,
        module,
        owner,
        forward,
        backward,
        calls,
        _,
    ) in capture.operations:
        spent = finite(forward) or 0.0, finite(backward) or 0.0
        found.append(
            Operator(name, _shapes(shapes), kind, detail, file, line, function, module, owner, *spent, calls)
        )
    return found


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """Of "8x64, 192x64"."""
    parts = (part.split("x") for part in text.split(", "))
    return tuple(tuple(map(int, part)) for part in parts if all(one.isdecimal() for one in part))


class Seen:
    """What a capture has seen of the model, with its shares of a step."""

    def __init__(self, view: View, capture: KernelsEvent) -> None:
        self.capture, self._view = capture, view
        self.whole_ns = float(sum(capture.passes.values()))
        self.operators = operators(capture)

    def share(self, forward: float, backward: float) -> float:
        """The share of a step (0..1) of nanoseconds of forward and backward of the capture.

        Time between the operators of backward belongs to all of them alike. What a script computes between its model
        and backward is part of other.
        """
        capture, view = self.capture, self._view
        passes, behind = capture.passes, view.cost("backward").share
        whole = sum(finite(row[3]) or 0.0 for row in capture.modules) or passes.get("backward", 0)
        found = min(backward / whole, 1.0) * behind if whole else 0.0
        if capture.method == "kernels":
            of, most = passes.get("forward", 0), view.cost("forward", "loss").share
            return found + (min(forward / of, 1.0) * most if of else 0.0)
        rest = capture.model_ns - passes.get("backward", 0)
        part = min(forward / rest, 1.0) * (1 - behind) if rest > 0 else 0.0
        return found + min(part, view.cost("forward", "loss", "other").share)

    def of(self, rows: Sequence[Operator]) -> float:
        """The same of operators."""
        return self.share(sum(one.forward for one in rows), sum(one.backward for one in rows))


def seen(view: View) -> Seen | None:
    """None without a capture of modules, or where the model takes no noticeable time."""
    capture = view.snapshot.kernels
    if capture is None or not capture.passes or not capture.operations or not view.model.clear:
        return None
    return Seen(view, capture)


def sequential_loop(view: View) -> Finding | None:
    """A loop of the user's code over steps that each compute little."""
    found = seen(view)
    loop = None if found is None else _sequential(view, found)
    if found is None or loop is None:
        return None
    file, line, function, steps, runs, forward, backward, operations, middle, calls, _, module, owner = loop
    ns, turns = forward + backward, max(steps * runs, 1)
    share = found.share(forward, backward)
    where = place(file, line, function)
    title = (
        f"a loop of {number(steps)} steps, one after another, takes {percent(share)} of each step: {where}"
    )
    draft = FindingDraft("sequential-loop", title, view.part(share))
    draft.saw(
        f"an iteration takes {span(ns / turns)} of forward and backward: "
        f"{counted(round(operations / turns), 'operator')} of forward, with a median of {span(middle)}", CAPTURE,
    )  # fmt: skip
    inside = module_text(module, owner)
    if calls and not module.startswith("("):
        draft.saw(
            f"most of it is in {inside}, {counted(round(calls / runs), 'call')} of modules in all", CAPTURE
        )
    draft.saw(f"{counted(runs, 'such loop')} in a step of the capture", CAPTURE)
    layer = _FUSED.get(owner)
    text = f"if a step needs only the state of the one before, use {layer}, which is one call for all steps; "
    draft.change(
        f"{text if layer else ''}compute what does not depend on the state for all steps at once, before or after the "
        "loop, and steps that do not depend on each other as one batch", where=where,
    )  # fmt: skip
    draft.add(_one_thread(view))
    return draft.done()


def _one_thread(view: View) -> Change | None:
    """One thread for short operators on the CPU, where no run before training has measured it."""
    threads = view.threads or 1
    if view.gpu or threads < 2 or view.thread_ns(1) is not None:
        return None
    return Change(
        f"compare {threads} threads with one: short operators gain little from more", ("run.threads=1",)
    )


def _sequential(view: View, found: Seen) -> Sequence[Any] | None:
    """The row of the loop that takes most, of those over steps."""
    rows = []
    for row in found.capture.loops:
        steps, forward, backward, middle, calls, different = row[3], row[5], row[6], row[8], row[9], row[10]
        share = found.share(finite(forward) or 0.0, finite(backward) or 0.0)
        short = (finite(middle) or 0.0) <= (SHORT_GPU_NS if view.gpu else SHORT_NS)
        layers = calls and different > LAYERS * calls / max(row[4], 1)
        if steps >= LEAST_STEPS and short and not layers and share >= 2 * FLOOR:
            rows.append((share, row))
    return max(rows, key=lambda one: one[0])[1] if rows else None


def large_vocabulary(view: View) -> Finding | None:
    """A projection or softmax over many outputs."""
    found = seen(view)
    if found is None:
        return None
    many = max((_outputs(one) for one in found.operators), default=0)
    rows = [one for one in found.operators if many and many in _last(one)]
    share = found.of(rows)
    if not rows or share < LEAST_VOCABULARY:
        return None
    first = max(rows, key=lambda one: (one.ns if _outputs(one) == many else 0.0, one.ns))
    what = "projection onto" if first.name in _PROJECTS else "softmax over"
    where = first.where
    at = f", {where}" if where else ""
    title = f"the {what} {number(many)} outputs takes {percent(share)} of each step: {first.subject}{at}"
    draft = FindingDraft("large-vocabulary", title, view.part(share))
    for one in sorted(rows, key=lambda row: -row.ns)[:3]:
        shapes = ", ".join("x".join(map(str, shape)) for shape in one.shapes)
        draft.saw(f"{printable(one.name)}({shapes}): {span(one.ns)} of forward and backward", CAPTURE)
    count = max((_rows(one, many) for one in rows), default=0)
    if count:
        draft.saw(
            f"{number(count)} rows of {number(many)} outputs are {size(count * many * first.item_bytes)}, which each "
            "of these operators reads or writes", CAPTURE,
        )  # fmt: skip
    draft.change(
        "leave out rows without a target before it; compute it and the loss in chunks of rows, with "
        "torch.utils.checkpoint, or by a fused kernel of both; or use nn.AdaptiveLogSoftmaxWithLoss or a sampled loss, "
        "which change the training", where=where,
    )  # fmt: skip
    return draft.done()


def _outputs(one: Operator) -> int:
    """How many outputs an operator projects onto or normalises over, if they are many; 0 for others."""
    shapes, found = one.shapes, 0
    if one.name == "linear" and len(shapes) > 1 and len(shapes[1]) == 2:
        found = shapes[1][0]
    elif one.name in _PROJECTS and len(shapes) > 1:
        # Of a product with more positions than outputs, the last one is the input or the weight.
        found = shapes[-1][-1] if len(shapes[-1]) == 2 else 0
    elif one.name in _SOFTMAX and shapes:
        found = shapes[0][-1]
    elif one.name in _LOSSES and shapes and len(shapes[0]) > 1:
        found = shapes[0][1]
    return found if found >= VOCABULARY else 0


def _last(one: Operator) -> set[int]:
    """Last dimensions of what an operator is given, and what it projects onto."""
    return (
        {shape[-1] for shape in one.shapes if len(shape) > 1} | {_outputs(one)}
        if one.name != "embedding"
        else set()
    )


def _rows(one: Operator, many: int) -> int:
    shape = one.shapes[0] if one.shapes else ()
    return prod(shape[:-1]) if shape and (shape[-1] == many or one.name in _PROJECTS) else 0


def small_operations(view: View) -> Finding | None:
    """Many operators that take hardly more than their launch."""
    found = seen(view)
    if found is None or view.gpu:
        return None  # on a GPU, `launch_bound` measures the idle time
    capture = found.capture
    count = capture.small
    part = min(capture.small_ns / found.whole_ns, 1.0)
    share = part * view.model.share
    loop = _sequential(view, found)
    if count < MANY or part < MOSTLY or share < 2 * FLOOR or loop is not None:
        return None
    lines = sorted(capture.lines, key=lambda row: -row[5])
    file, line, function, *_, of_line = lines[0] if lines else ("", 0, "", 0, 0, 0)
    where = place(file, line, function) if line else None
    at = f", most of them at {where}" if where else ""
    title = f"{number(count)} small operators take {percent(share)} of each step{at}"
    draft = FindingDraft("small-operations", title, view.part(share))
    draft.saw(
        f"half of the operators of forward and backward take less than {span(capture.median_ns)}; small ones and what "
        f"is between the operators take {percent(part)} of forward and backward", CAPTURE,
    )  # fmt: skip
    if where:
        draft.saw(f"{where} launches {number(of_line)} of them in each forward pass", CAPTURE)
    compiled = view.get("speed.compile") not in (None, "off")
    draft.change(
        "compile the model, which fuses them", *(() if compiled else ("speed.compile=default",)), where=where
    )
    draft.change(
        "or do the same with fewer operators on larger tensors, for example by stacking them", where=where
    )
    draft.add(_one_thread(view))
    return draft.done()


def unfused_attention(view: View) -> Finding | None:
    """Attention that is written out, or for which torch has no fused kernel."""
    found = seen(view)
    if found is None:
        return None
    rows = {}
    for one in found.operators:
        if one.name == "scaled_dot_product_attention" and one.detail.startswith("math"):
            rows[one] = [one]
        elif one.name in _SOFTMAX and _scores(one):
            parts = [other for other in found.operators if _is_part(other, one)]
            if sum(other.name in _ATTENDS - _SOFTMAX for other in parts) >= 1:
                rows[one] = parts
    if not rows:
        return None
    first = max(rows, key=lambda one: sum(part.ns for part in rows[one]))
    ns = sum(part.ns for part in rows[first])
    share = found.of(rows[first])
    if share < 2 * FLOOR:
        return None
    where = first.where
    title = f"attention without a fused kernel takes {percent(share)} of each step: {first.subject}"
    draft = FindingDraft("unfused-attention", f"{title}, {where}" if where else title, view.part(share))
    shapes = ", ".join("x".join(map(str, shape)) for shape in first.shapes)
    draft.saw(
        f"{printable(first.name)}({shapes}): {span(ns)} of forward and backward, with its products",
        CAPTURE,
    )
    draft.saw(_why(first), CAPTURE)
    draft.change(_fused(first), where=where)
    return draft.done()


def _scores(one: Operator) -> bool:
    """Whether a softmax is over the positions of attention."""
    shape = one.shapes[0] if one.shapes else ()
    return len(shape) in (3, 4) and shape[-1] >= LEAST_LENGTH and shape[-2] > 1


def _is_part(one: Operator, softmax: Operator) -> bool:
    """Whether an operator handles the scores of the same attention."""
    same = (one.file, one.function, one.module) == (softmax.file, softmax.function, softmax.module)
    length = softmax.shapes[0][-1]
    return (
        same and one.name in _ATTENDS and any(length in shape[-2:] for shape in one.shapes if len(shape) > 2)
    )


def _why(one: Operator) -> str:
    if one.owner == _HEADS and one.name in _SOFTMAX:
        return (
            "nn.MultiheadAttention returns its weights here (need_weights=True), which no fused kernel does"
        )
    if one.name in _SOFTMAX:
        return "it is written out: a product, a softmax over the positions, and a product"
    reasons = [
        word for word, text in (("dropout_p above 0", "dropout"), ("a mask", "mask")) if text in one.detail
    ]
    return "torch has chosen the composite backend (math)" + (
        f": it is given {' and '.join(reasons)}" if reasons else ""
    )


def _fused(one: Operator) -> str:
    if one.owner == _HEADS and one.name in _SOFTMAX:
        return "call it with need_weights=False where the weights are not used"
    if one.name in _SOFTMAX:
        return "use torch.nn.functional.scaled_dot_product_attention for the three operators"
    if "dropout" in one.detail:
        return "set dropout_p to 0 there, for which there is a fused kernel, and use dropout elsewhere"
    return "give it tensors of one type, contiguous in their last dimension, and is_causal instead of a mask"


def computed_twice(view: View) -> Finding | None:
    """A module that is called again with the same input."""
    found = seen(view)
    if found is None or not found.capture.repeats:
        return None
    row = max(found.capture.repeats, key=lambda one: (finite(one[6]) or 0.0) + (finite(one[7]) or 0.0))
    name, kind, file, line, function, times, forward, backward = row
    spent = finite(forward) or 0.0, finite(backward) or 0.0
    share = found.share(*spent)
    if share < FLOOR:
        return None
    where = place(file, line, function) if line else None
    title = f"{module_text(name, kind)} is computed again with the same input: {percent(share)} of each step"
    draft = FindingDraft("computed-twice", f"{title}, {where}" if where else title, view.part(share))
    count = counted(times, "time")
    draft.saw(f"called again {count} in a step with the same tensors, without random numbers in it", CAPTURE)
    draft.saw(f"the further calls take {span(sum(spent))} of forward and backward", CAPTURE)
    draft.change("call it once, and keep what it returns", where=where)
    return draft.done()


def unused_gradients(view: View) -> Finding | None:
    """Gradients of layers that no optimizer updates."""
    found = seen(view)
    if found is None or not found.capture.unused:
        return None
    rows = sorted(found.capture.unused, key=lambda row: -(finite(row[2]) or 0.0))
    ns = sum(finite(row[2]) or 0.0 for row in rows)
    share = found.share(0.0, ns)
    if share < FLOOR:
        return None
    names = [printable(row[0]) for row in rows]
    above = _above(names)
    title = (
        f"gradients of {above} are computed, and no optimizer uses them: up to {percent(share)} of each step"
    )
    draft = FindingDraft("unused-gradients", title, view.part(share))
    draft.saw(
        f"backward of {', '.join(names[:4])}{' and more' * (len(names) > 4)} takes {span(ns)}",
        CAPTURE,
    )
    draft.saw(
        "their parameters have gradients, are in no optimizer that has stepped, and do not change", CAPTURE
    )
    where = next((one.where for one in found.operators if one.module in names and one.where), None)
    draft.change(
        "freeze them: requires_grad_(False); and call them under torch.no_grad() where nothing before them is trained",
        where=where,
    )
    return draft.done()


def _above(names: Sequence[str]) -> str:
    """The module that has all of these in it, or the first one of them."""
    parts = [name.split(".") for name in names]
    common = []
    for same in zip(*parts, strict=False):
        if len({*same}) > 1:
            break
        common.append(same[0])
    return ".".join(common).removesuffix(".*") or names[0]


def channels_last(view: View) -> Change | None:
    """An idea where convolutions of images take much of the model, in the other memory format."""
    found = seen(view)
    if found is None:
        return None
    rows = [one for one in found.operators if one.name in _CONVOLUTIONS and one.detail == "channels first"]
    share = found.of(rows)
    if not rows or share < CONVOLVES:
        return None
    first = max(rows, key=lambda one: one.ns)
    text = (
        f"try the channels-last memory format: convolutions take {percent(share)} of each step, "
        f"the longest one is {first.subject}"
    )
    return Change(text, ("speed.channels_last=true",), first.where)


def line_of(view: View, module: str) -> str | None:
    """The line that calls a module, by the end of its name; None if no capture knows it."""
    capture = view.snapshot.kernels
    rows = [] if capture is None else operators(capture)
    known = (
        one.where
        for one in rows
        if not one.module.startswith("(") and f".{module}".endswith(f".{one.module}")
    )
    return next((where for where in known if where), None)


RULES = (
    sequential_loop, large_vocabulary, unfused_attention, computed_twice, unused_gradients, small_operations,
)  # fmt: skip
