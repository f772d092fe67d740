"""What a step does without need: gradients of whole tables, graphs that stay, DataParallel, and denormal numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from ndd_engine.record.event import Table
from ndd_engine.text import counted, number, percent, printable, span, times
from ndd_watch.slowing import RETAINED_STEPS

from .finding import MOST_OF, Finding
from .view import (
    CLOCK,
    CONFIG,
    DEVICE,
    FLOOR,
    MODEL,
    PROFILER,
    Cost,
    FindingDraft,
    View,
    taken,
)
from .work_rules import line_of

LOOK = "graphs of the losses"
# What is no state of an optimizer.
IN_MODEL = ("parameters", "gradients")


# Backward usually takes up to so many times as long as forward and the loss.
BACKWARD = 2.0
# Optimizers that take sparse gradients as they are.
_TAKE_SPARSE = ("SGD", "Adagrad", "SparseAdam")


@dataclass(frozen=True, slots=True)
class Dense:
    """Dense gradients of tables. share: of the values that the optimizers update. cost: in all phases together.

    updating: of clipping, the optimizer and zero_grad. excess_ns: of backward, beyond what the rest of it may take.
    """

    tables: tuple[Table, ...]
    share: float
    updating: Cost
    excess_ns: float
    cost: Cost


def dense(view: View) -> Dense | None:
    """What dense gradients of tables cost, of which a step reads few rows; None without such a table."""
    functions = view.snapshot.functions
    if functions is None or not functions.tables or view.step_ns <= 0:
        return None
    share = min(sum(table[5] for table in functions.tables), 1.0)
    updating = view.cost("clip", "optimizer", "zero_grad")
    forward, backward = _host_or_device(view, "forward", "loss"), _host_or_device(view, "backward")
    excess = max(backward - BACKWARD * forward, 0.0) * share
    part = min((share * updating.ns + excess) / view.step_ns, 1.0)
    return Dense(tuple(functions.tables), share, updating, excess, view.part(part))


def _host_or_device(view: View, *phases: str) -> float:
    """Nanoseconds of these phases: by the clock of a GPU where there is one, and 0 on a GPU without."""
    if view.gpu:
        return sum(view.device_cost(phase).ns for phase in phases)
    return view.cost(*phases).ns


def dense_embedding(view: View) -> Finding | None:
    """An embedding has a gradient for each row of its table, and all phases that handle it handle all rows."""
    found = dense(view)
    if found is None or found.cost.share < 2 * FLOOR:
        return None
    name, _, rows, _, indices, _, optimizer = found.tables[0]
    where = printable(name)
    title = (
        f"the gradient of {where} has all {number(rows)} rows of its table, of which a step reads at most "
        f"{number(indices)}: up to {percent(found.cost.share)} of each step"
    )
    draft = FindingDraft("dense-embedding", title, found.cost)
    for table in found.tables[:3]:
        size = f"{number(table[2])} x {number(table[3])}"
        draft.saw(
            f"{printable(table[0])} ({printable(table[1])}, {size}) has sparse=False; a step reads at most "
            f"{counted(table[4], 'row')} of it",
            PROFILER,
        )
    several = "these tables have" if found.tables[1:] else "it has"
    draft.saw(f"{several} {percent(found.share)} of all values that are updated", PROFILER)
    phases = (
        "clipping, the optimizer and zero_grad" if view.cost("clip").ns else "the optimizer and zero_grad"
    )
    draft.add(taken(found.updating, f"{phases}, which handle all of these values, take"))
    if found.excess_ns:
        source = DEVICE if view.gpu else CLOCK
        text = f"backward takes {span(found.excess_ns)} more than twice the time of forward, as a dense gradient does"
        draft.saw(text, source)
    if optimizer in _TAKE_SPARSE:
        update = f"{optimizer} takes such gradients, without weight_decay and fused=True"
        changes = "Without momentum, the training stays the same"
    else:
        update = (
            f"update its weight by torch.optim.SparseAdam, and all others by {printable(optimizer)} as before"
        )
        changes = "This changes the training slightly: rows that a step does not read keep their averages"
    clips = "; clip_grad_norm_ does not take it" if view.cost("clip").ns else ""
    draft.change(f"make {where} with sparse=True; {update}{clips}. {changes}", where=line_of(view, str(name)))
    return draft.done()


def data_parallel(view: View) -> Finding | None:
    """A DataParallel with several GPUs: one process for all of them, and a copy of the model in each step."""
    devices = view.script.get("data_parallel")
    if not isinstance(devices, int) or devices < 2:
        return None
    cost = view.cost(*MODEL)
    draft = FindingDraft(
        "data-parallel", f"torch.nn.DataParallel trains on {devices} GPUs from one process", cost
    )
    draft.saw(f"a module of this class is called with {devices} device_ids", CONFIG)
    draft.saw(
        "it copies the model to each GPU in each step, and threads of one process share the interpreter",
        "PyTorch documentation",
    )
    draft.add(taken(cost, f"{view.model_takes}"))
    draft.unbounded()
    draft.change(
        "use torch.nn.parallel.DistributedDataParallel with one process for each GPU: "
        f"torchrun --nproc-per-node={devices}, and a DistributedSampler"
    )
    return draft.done()


def denormals(view: View) -> Finding | None:
    """Many numbers are denormal, and the processor is slow with them."""
    functions = view.snapshot.functions
    if functions is None or not functions.denormals or view.gpu or view.get("speed.flush_denormal") is True:
        return None
    costs = {name: _slowed(view, name, slow) for name, (_, slow) in functions.denormals.items()}
    name = max(costs, key=lambda one: costs[one].share)
    cost, (share, slow) = costs[name], functions.denormals[name]
    if cost.share < 2 * FLOOR:
        return None
    what = printable(name) + ("" if name in IN_MODEL else " of the optimizer")
    draft = FindingDraft(
        "denormals", f"{percent(share)} of the {what} are denormal numbers", cost, "possible"
    )
    draft.saw("they are too small for full precision, as far as a few values of each tensor tell", PROFILER)
    draft.saw(f"this processor takes {times(slow)} as long for them", "measured in the profiled process")
    phases = _phases(name)
    draft.add(taken(view.cost(*phases), f"{', '.join(phases)}: what computes with them takes"))
    draft.change("take denormal numbers as zero: torch.set_flush_denormal(True)", "speed.flush_denormal=true")
    return draft.done()


def _phases(name: str) -> tuple[str, ...]:
    return {"parameters": (*MODEL, "optimizer"), "gradients": ("clip", "optimizer")}.get(name, ("optimizer",))


def _slowed(view: View, name: str, slow: float) -> Cost:
    """What removing the slowness saves at most: if all that computes with such numbers is as slow as that."""
    return view.part(view.cost(*_phases(name)).share * (1 - 1 / slow))


def explains_optimizer(view: View) -> bool:
    """Whether one of these findings says why the optimizer takes long."""
    tables, functions = dense(view), view.snapshot.functions
    if tables is not None and tables.share >= MOST_OF:
        return True
    slow = functions is not None and "optimizer" in {
        one for name in functions.denormals for one in _phases(name)
    }
    return slow and denormals(view) is not None


def retain_graph(view: View) -> Finding | None:
    """Backward passes keep their graphs, and none goes through one again."""
    where, functions = view.script_place("retains"), view.snapshot.functions
    if where is None and functions is not None and functions.retains is not None:
        file, line = functions.retains
        where = printable(f"{PurePath(file).name}:{line}")
    if where is None:
        return None
    draft = FindingDraft(
        "retain-graph", "backward passes keep their graphs without need (retain_graph=True)", None
    )
    draft.saw(
        f"in {RETAINED_STEPS} steps in a row, each backward pass at {where} kept its graph, and none went through an "
        "earlier one again",
        LOOK,
    )
    draft.saw(
        "the activations of a step stay until its loss is replaced: the next forward pass needs memory for both",
        "PyTorch documentation",
    )
    draft.change("call backward() without retain_graph=True (same gradients)", where=where)
    return draft.done()


RULES = (dense_embedding, data_parallel, denormals, retain_graph)
