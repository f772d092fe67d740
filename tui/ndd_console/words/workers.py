"""The workers of a loader in words: what each does with its time, its slowest items, and the functions that take it."""

from __future__ import annotations

from collections.abc import Sequence

from ndd_engine.diagnose.loader_plan import batch_ns, enough
from ndd_engine.diagnose.view import View
from ndd_engine.diagnose.worker_facts import does, evidence, plan_of, predictions, received_ns
from ndd_engine.record.events import LoaderEvent
from ndd_engine.record.figures import death_text, setting
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.worker_events import WorkerFigures, WorkersEvent
from ndd_engine.text import MISSING, counted, number, percent, size, times

from .blocks import Bars, Block, NamedValues, Table, Text, ns, safe

_MOST_ITEMS = 8
_WORKER = "loader worker"  # the begin of the name of a process
LOADER = "Data loader"
NONE = "This run has no loader workers, or they have not made a few batches yet."
_TIMES = (
    "Times are of a batch. Idle is waiting until a batch is wanted. Another thread pickles and sends a batch, beside "
    "the next one."
)
_PREDICTED = (
    "The loader is played with the measured times. A trial decides: press t, or use `ndd-console try`."
)
_SHARES = "Share of the time of a batch, without other functions of the list. Whole batches were profiled."


def are_known(snapshot: Snapshot) -> bool:
    """Whether something is known of workers: what they told, or how they died."""
    return snapshot.workers is not None or bool(ends_table(snapshot))


def workers_blocks(snapshot: Snapshot) -> list[Block]:
    """All that is known from inside the workers."""
    found, ends = snapshot.workers, ends_table(snapshot)
    if found is None or not found.workers:
        return ends or [Text(NONE, "note")]
    view = View(snapshot)
    return [
        busy_bars(found.workers), facts(view), *ends, *predictions_table(view), times_table(found.workers),
        functions_table(snapshot, found), *transforms_table(found), items_table(found.workers),
        *process_tables(found.workers),
    ]  # fmt: skip


def busy_bars(workers: Sequence[WorkerFigures]) -> Bars:
    """One bar for each: the part of its time in which it makes batches; and the items that it makes."""
    rows = []
    for one in workers:
        rate = 1e9 * one.items / max(one.batches * (one.batch_ns + one.idle_ns), 1.0)
        text = f"{percent(1 - one.idle)} busy, {ns(one.batch_ns)} a batch, {number(rate)} items/s"
        rows.append((f"worker {one.number}", 1 - one.idle, text, "blue"))
    return Bars("Busy", tuple(rows))


def facts(view: View) -> NamedValues:
    """What stands out, and how many workers would be enough by the measured times."""
    seen = evidence(view)
    rows = [("seen" if not index else "", one.text) for index, one in enumerate(seen)]
    if (plan := plan_of(view)) is not None:
        now = f"at present, a batch is ready every {ns(batch_ns(plan))}"
        rows.append(("predicted", f"{counted(enough(plan), 'worker')} would be enough; {now}"))
    if batches := view.snapshot.totals.received.get("batches", 0):
        receive_ns, pin_ns = received_ns(view)
        behind = view.snapshot.totals.received.get("behind_ns", 0) / batches
        pins = f", pinning it in another thread {ns(pin_ns)}" if pin_ns else ""
        waits = f"it waits {ns(behind)} a batch while a later one is ready"
        rows.append(("training", f"receiving a batch takes {ns(receive_ns)}{pins}; {waits}"))
    return NamedValues(tuple(rows))


def ends_table(snapshot: Snapshot) -> list[Block]:
    """Workers that hang, with what they wait for, and those that died; none without any."""
    workers = () if snapshot.workers is None else snapshot.workers.workers
    rows = [(f"worker {one.number} (pid {one.pid})", f"makes {one.doing}") for one in workers if one.doing]
    if snapshot.stall is not None:
        lines = [line.partition(", ") for line in snapshot.stall.processes if line.startswith(_WORKER)]
        rows += [(safe(who), safe(does)) for who, _, does in lines]
    deaths = [one for one in snapshot.deaths if one.name.startswith(_WORKER)]
    rows += [(safe(f"{one.name} (pid {one.pid})"), death_text(one).partition(") ")[2]) for one in deaths]
    title = "Workers that hang or died"
    return [Table(title, ("worker", "what"), tuple(rows), frozenset(), wide=1)] if rows else []


def predictions_table(view: View) -> list[Block]:
    """What changes of the loader are predicted to bring; none without measured times."""
    plan = plan_of(view)
    if plan is None:
        return []
    now = batch_ns(plan)
    rows = tuple(
        (times(now / max(each, 1.0)), ns(each), ", ".join(change.sets)) for change, each in predictions(view)
    )
    title = f"Predicted: settings of the loader, with a batch every {ns(now)} at present"
    columns = "gain", "batch every", "setting"
    return [Table(title, columns, rows, frozenset({0, 1}), _PREDICTED, wide=2)] if rows else []


def times_table(workers: Sequence[WorkerFigures]) -> Table:
    """Where the time of each worker goes."""
    columns = "worker", "batch", "item", "slowest 1 %", "collate", "pickle", "pipe", "idle"
    rows = tuple(
        (
            f"{one.number}", ns(one.batch_ns), ns(one.item_ns[0]), ns(one.item_ns[2]), ns(one.collate_ns),
            ns(one.pickle_ns), ns(one.send_ns + one.blocked_ns), ns(one.idle_ns),
        )
        for one in workers
    )  # fmt: skip
    return Table("Times", columns, rows, frozenset(range(1, len(columns))), _TIMES, wide=0)


def functions_table(snapshot: Snapshot, found: WorkersEvent) -> Table:
    """The functions that take the time of a batch; of a script, relative to its folder."""
    folder = f"{setting(snapshot.run, 'script', 'folder')}/"
    title = f"Functions in workers, from {counted(found.profiles, 'batch')} under Python's profiler"
    rows = tuple(
        (
            percent(row[4]), percent(row[5]), number(row[3]), does(row) or MISSING,
            f"{row[0].removeprefix(folder)}:{row[1]} in {row[2]}",
        )
        for row in found.functions
    )  # fmt: skip
    columns = ("share", "with calls", "calls", "what", "function") if rows else ()
    note = _SHARES if rows else "No batch was profiled yet."
    return Table(title, columns, rows, frozenset({0, 1, 2}), note, wide=4)


def transforms_table(found: WorkersEvent) -> list[Block]:
    """Each transform of a list of them; none without one."""
    rows = tuple((percent(share), name) for name, share in found.transforms)
    return [Table("Transforms", ("share", "transform"), rows, frozenset({0}), wide=1)] if rows else []


def items_table(workers: Sequence[WorkerFigures]) -> Table:
    """The slowest items by their index."""
    slow = sorted(((took, name, one.number) for one in workers for took, name in one.slow), reverse=True)
    rows = tuple((ns(took), name, f"{worker}") for took, name, worker in slow[:_MOST_ITEMS])
    together = rows and all(one.collate_ns is None for one in workers)
    note = "Items are read together: the mean time of those of a batch." if together else ""
    return Table("Slowest items", ("time", "index", "worker"), rows, frozenset({0}), note, wide=1)


def process_tables(workers: Sequence[WorkerFigures]) -> list[Block]:
    """The life of each process, and what Linux knows of it."""
    columns = "worker", "pid", "starts", "start", "first batch", "batches", "memory", "private"
    rows = tuple(
        (
            f"{one.number}", f"{one.pid}" if one.pid else MISSING, number(one.starts), ns(one.start_ns),
            ns(one.first_ns), number(one.batches), size(one.pss_bytes), size(one.private_bytes),
        )
        for one in workers
    )  # fmt: skip
    needs = "worker", "from storage a batch", "new pages a batch", "late", "descriptors"
    needed = tuple(
        (
            f"{one.number}", MISSING if one.read_bytes is None else size(round(one.read_bytes)),
            MISSING if one.faults is None else number(round(one.faults)), percent(one.late),
            MISSING if one.descriptors is None else number(one.descriptors),
        )
        for one in workers
    )  # fmt: skip
    shared = "Memory counts shared pages in proportion (PSS)."
    late = "Late: ready to run, without a processor."
    return [
        Table("Processes", columns, rows, frozenset(range(1, len(columns))), shared, wide=0),
        Table("Storage and processor", needs, needed, frozenset(range(1, len(needs))), late, wide=0),
    ]


def loader_facts(loader: LoaderEvent) -> NamedValues:
    """The data loader: what an item costs, and whether items can be cached or gathered."""
    cached = "none" if loader.encoded is None else number(loader.encoded)
    gather = ns(loader.gather_ns) + (" per micro-batch" if loader.gather_ns is not None else "")
    if not loader.in_memory:
        gather += ": the dataset cannot gather a whole batch at once"
    differ = "items come from a stream" if loader.stream else "items differ between epochs"
    each = f"{ns(loader.item_ns)}, of which {ns(loader.item_cpu_ns)} CPU time (mean of {loader.probed})"
    return NamedValues.of(
        ("items", f"{number(loader.items or None)}, {cached} cached"),
        ("", f"{differ} and cannot be cached" if loader.epochs_differ else ""),
        ("micro-batch", f"{counted(loader.micro, 'item')}, {size(loader.batch_bytes)}"),
        ("time per item", each if loader.item_ns is not None else MISSING),
        ("collate", f"{ns(loader.collate_ns)} per micro-batch"),
        ("gather", gather),
        title=LOADER,
    )
