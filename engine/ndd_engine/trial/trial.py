"""A trial: candidate vs. baseline on this machine, from the paused runs to the stored result.

One process switches between both sides where the change allows it. Otherwise each side has a process of its own, and
pairs of them are started again and again. The candidate of the first pair is prepared first and alone, so that an
out-of-memory error is its own; the baseline's process only imports meanwhile. If both do not fit into memory at once,
only one process is open at a time.

The device stays free meanwhile: one trial at a time, and live runs paused and always resumed. A pause carries the id
of this process: the paused run watches it and resumes by itself if this process dies. The result is written to the
record of its run, through the run if it is live.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Self

from ndd_engine.child import StoppedError
from ndd_engine.config import Draft, read
from ndd_engine.errors import RunLockedError, UsageError
from ndd_engine.files import open_regular
from ndd_engine.hardware.detect import detect, equal_gpus
from ndd_engine.hardware.gpus import Gpu
from ndd_engine.hardware.load import LoadWatch
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.file import RunReader, truncate_torn_line, write_whole
from ndd_engine.record.rundir import RunDir, RunLock, all_runs, check_regular, flocked
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.channel import RECORD, send
from ndd_engine.text import duration, printable
from ndd_engine.train.request import preflight
from ndd_watch.changes import LOADER, switched_by

from .blocks import (
    FEWEST_ABBA,
    BlockPlan,
    BlocksDoNotFitError,
    SidePace,
    plan_blocks,
    plan_pairs,
    plan_switches,
)
from .estimates import ENOUGH, FLOOR, OneProcess, Replicates, Usual
from .outcome import MEASURING, Base, PairVariances, Progress, TrialRequest, differences, result
from .sides import ESTIMATE_S, SIDES, Budget, OwnSides, SideFailedError, Sides, Tell

# A run pauses after the current step or evaluation.
PATIENCE_S = 60.0
_POLL_S = 0.1
_LONGEST = 200  # characters of what is measured


def to_pause(base: Base, root: Path, others: bool, ranks: int | None = None) -> tuple[RunDir, ...]:
    """The live runs to pause while `base` is measured: its own, and those on the same device.

    others: whether runs other than its own may be paused; if not, raises a UsageError that names them. ranks: the most
    that are measured, each on a device of its own; None for those of `base`.
    """
    own = base.run
    config = read(base.config, base.sets, base.workload).resolve()
    device = detect(config.run.device, use_torch=False).device
    devices = _devices(device, ranks or config.parallel.ranks)
    found = [own] if own is not None and own.live_owner() is not None else []
    alongside = [run for run in all_runs(root) if not _same(run, own) and _trains_on(run, devices)]
    if alongside and not others:
        names = ", ".join(printable(run.name) for run in alongside)
        verb = "is" if len(alongside) == 1 else "are"
        raise UsageError(
            f"{names} {verb} training on {device} and would disturb the measurement: add --pause, or wait for the end"
        )
    return (*found, *alongside)


@contextmanager
def held(
    runs: Iterable[RunDir],
    tell: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[None]:
    """Pauses these runs inside the context, and resumes them afterwards; runs paused by a person stay paused.

    tell: receives messages for the user. stop: set it to stop waiting. Raises UsageError if a run does not pause.
    """
    asked: list[RunDir] = []
    try:
        for run in runs:
            try:
                send(run.control_socket, "pause", holder=os.getpid())
                asked.append(run)
            except UsageError as error:
                if run.live_owner() is not None:  # else it has just ended
                    raise UsageError(
                        f"run {printable(run.name)} cannot be paused and would disturb the measurement: {error}"
                    ) from None
        for run in asked:
            _wait(run, tell, stop, patience_s)
        yield
        for run in asked if tell is not None else ():
            snapshot = _snapshot(run)
            if tell is not None and not snapshot.final and snapshot.status != "paused":
                tell(
                    f"run {printable(run.name)} was resumed during the measurement and disturbed it: measure again"
                )
    finally:
        for run in asked:
            with suppress(UsageError):  # it has ended
                send(run.control_socket, "resume", holder=os.getpid())


@contextmanager
def alone(
    device: str,
    tell: Callable[[str], None],
    stop: threading.Event | None = None,
    folder: Path | None = None,
    ranks: int = 1,
    what: str = "",
) -> Iterator[None]:
    """Inside the context, no other trial of this user on this machine measures on the same device.

    Waits for the others, until `stop` is set. device: as in the configuration; its UUID names a GPU. tell: receives
    whom it waits for. folder: of the lock (default: the system's temporary folder). ranks: number of GPUs that are
    used. what: is measured, as those are told that wait. The kernel releases the lock of a process that is killed.
    Without a folder for the lock, does nothing.
    """
    machine = detect(device, use_torch=False)
    gpus = equal_gpus(machine)[:ranks] if ranks > 1 else []
    # In the order of the GPUs: two trials cannot wait for each other.
    names = [_named(gpu, f"cuda:{index}") for index, gpu in enumerate(gpus)]
    with ExitStack() as stack:
        for name in names or [_named(machine.chosen, machine.device)]:
            stack.enter_context(_alone_on(name, machine.device, what, tell, stop, folder))
        yield


def _named(gpu: Gpu | None, device: str) -> str:
    """The name of a device in that of its lock."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", gpu.uuid if gpu is not None and gpu.uuid is not None else device)


@contextmanager
def _alone_on(
    name: str, device: str, what: str, tell: Callable[[str], None], stop: threading.Event | None,
    folder: Path | None,
) -> Iterator[None]:  # fmt: skip
    path = (folder or Path(tempfile.gettempdir())) / f"ndd-console-{os.getuid()}-{name}.lock"
    try:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        while os.fstat(handle).st_uid == os.getuid() and (holder := _locked(handle, what)) is not None:
            tell(f"waiting for {holder} on {device}")
            if (stop or threading.Event()).wait(_POLL_S):
                break
        yield
    finally:
        os.close(handle)


def _locked(handle: int, what: str) -> str | None:
    """Take the lock. Returns who holds it and for how long; None if it was taken, or files cannot be locked."""
    with suppress(OSError):
        if not flocked(handle):
            return _holder(os.pread(handle, 4 * _LONGEST, 0).decode("utf-8", "replace"))
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {time.time():.0f} {what[:_LONGEST]}".encode(), 0)
    return None


def _holder(text: str) -> str:
    """What a lock says of its holder, in words: "the trial of … (process 7, for 12 s)"."""
    pid, _, rest = text.partition(" ")
    since, _, what = rest.partition(" ")
    known = f", for {duration(max(time.time() - float(since), 0))}" if since.isdecimal() else ""
    return f"{printable(what) or 'another measurement'} (process {printable(pid) or '?'}{known})"


def _snapshot(run: RunDir) -> Snapshot:
    reader = RunReader(run)
    reader.poll()
    return reader.snapshot()


def _wait(
    run: RunDir, tell: Callable[[str], None] | None, stop: threading.Event | None, patience_s: float
) -> None:
    reader = RunReader(run)
    deadline = time.monotonic() + patience_s
    announced = False
    while True:
        reader.poll()
        snapshot = reader.snapshot()
        if snapshot.final or snapshot.status == "paused" or (stop is not None and stop.is_set()):
            return
        if time.monotonic() > deadline:
            raise UsageError(
                f"run {printable(run.name)} did not pause within {duration(patience_s)}: it is {snapshot.status}"
            )
        if tell is not None and not announced:
            tell(f"waiting for run {printable(run.name)} to pause")
            announced = True
        time.sleep(_POLL_S)


def _same(run: RunDir, other: RunDir | None) -> bool:
    return other is not None and run.path.resolve() == other.path.resolve()


def _trains_on(run: RunDir, devices: set[str]) -> bool:
    """Whether it is live, not paused, and on one of these devices or not yet on a known one."""
    if run.live_owner() is None:
        return False
    snapshot = _snapshot(run)
    if snapshot.status == "paused" or snapshot.run is None:
        return snapshot.status != "paused"
    ranks = snapshot.ranks.newest.world if snapshot.ranks is not None else 1
    return not devices.isdisjoint(_devices(snapshot.run.device, ranks))


def _devices(first: str, ranks: int) -> set[str]:
    """The devices of so many ranks, of which rank 0 has this one."""
    kind, _, index = first.partition(":")
    return {f"{kind}:{int(index) + rank}" for rank in range(ranks)} if index.isdecimal() else {first}


def record_trial(run: RunDir, event: TrialEvent) -> None:
    """Add the trial to the run's record. Raises UsageError if it cannot be written."""
    line = event.to_json(time.time())
    if run.live_owner() is not None:
        try:
            send(run.control_socket, RECORD, event=json.loads(line))
            return
        except UsageError:
            if run.live_owner() is not None:
                raise
    lock = RunLock(run)
    try:
        lock.acquire()
        check_regular(run.events)
        truncate_torn_line(run.events)
        handle = os.open(run.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            write_whole(handle, line.encode() + b"\n")  # or nothing
            os.fsync(handle)
        finally:
            os.close(handle)
    except RunLockedError:
        raise
    except OSError as error:
        raise UsageError(
            f"the trial cannot be recorded: {printable(str(run.events))}: {error.strerror}"
        ) from None
    finally:
        lock.release()


# Estimate of the seconds in which a small model is prepared, with the import of torch, and measured.
LEAST_BUDGET_S = 30.0
# Share of a compilation that further processes save by reading the caches; an estimate, for planning only.
CACHED = 0.6
# The largest budget that an inconclusive result recommends, as a multiple of its own.
MOST_TIMES = 20
# Ratios up to this count as similar sides, from which the usual difference between processes is learned.
SIMILAR = 1.25
# Sides in the order of the runs of a block, alternating between pairs.
ORDERS = ((0, 1, 1, 0), (1, 0, 0, 1))


def enough(budget_s: float) -> str:
    """The advice where a setup took more than so many seconds, and how much longer it would have taken is unknown."""
    return f"raise --budget to about {math.ceil(max(2 * budget_s, LEAST_BUDGET_S))}"


class NotMeasurableError(Exception):
    """Nothing can be measured; the message says why."""


def drafts(request: TrialRequest) -> tuple[Draft, Draft]:
    """(baseline, candidate). Raises UsageError if the request cannot be tried, ConfigError for mistakes in either."""
    if not request.sets:
        raise UsageError(
            "no settings to try: add --set KEY=VALUE (the length of the run applies to both sides of a trial)"
        )
    if not request.budget_s > 0:
        raise UsageError(f"--budget {request.budget_s:g}: allowed: more than 0 seconds")
    of = request.base
    base = read(of.config, of.sets, of.workload)
    change = read(of.config, (*of.sets, *request.sets), of.workload)
    configs = [preflight(draft, use_torch=False) for draft in (base, change)]
    if base.size == change.size and configs[0] == configs[1]:
        raise UsageError(f"{', '.join(request.sets)}: already set in {of.name}; there is nothing to compare")
    return base, change


def check(request: TrialRequest) -> dict[str, tuple[object, object]]:
    """The keys that differ, with both values. Raises UsageError if the request cannot be tried."""
    base, change = drafts(request)
    return differences(base.resolve(), change.resolve())


def run_trial(request: TrialRequest, tell: Tell, stop: threading.Event | None = None) -> TrialEvent:
    """Measure candidate vs. baseline. Failures of either are results; mistakes in the request raise UsageError.

    tell: called on this thread, a few times per second. stop: set it to end early with what is known. Waits while
    another trial measures on the same device; this does not count towards the budget. Does not pause or record
    anything, see `alone` and `record_trial`. Leaves no process and no file behind.
    """
    base, change = drafts(request)

    def waiting(text: str) -> None:
        tell(Progress(text, 0.0, request.budget_s))

    configs = base.resolve(), change.resolve()
    device, ranks = configs[0].run.device, max(config.parallel.ranks for config in configs)
    with alone(device, waiting, stop, ranks=ranks, what=request.title):
        sides = OwnSides(request, (base, change), Budget(request.budget_s, tell, stop))
        with Trial(request, sides) as trial:
            return trial.run()


class Trial:
    """A trial in progress. sides: what is compared; they know the budget."""

    def __init__(self, request: TrialRequest, sides: Sides) -> None:
        self.request = request
        self._sides, self._budget = sides, sides.budget
        self._exclusive = False
        self._history = PairVariances()
        self._load = LoadWatch()
        # Seconds to start a pair of processes, and of a block.
        self._start_s = self._abba_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sides.clean_up()

    def run(self) -> TrialEvent:
        """Measure and return the result."""
        try:
            verdict, reason = self._measure()
        except StoppedError:
            measured = self._replicates.estimate() is not None
            verdict = "stopped"
            reason = "before the end of the measurement" if measured else "stopped before there was a result"
        except NotMeasurableError as error:
            verdict, reason = "inconclusive", str(error)
        except (BlocksDoNotFitError, SideFailedError) as error:
            verdict, reason = self._interrupted(error)
        if rates := self._replicates.rates():
            self._sides.speeds(rates)
        facts = self._sides.facts
        found = self._replicates.estimate()
        return result(
            self.request, verdict, reason, found, (facts[0], facts[1]), self._sides.changed, self._budget.elapsed_s,
            self._sides.note, self._sides.doubt, self._load.taken(),
        )  # fmt: skip

    def _measure(self) -> tuple[str, str]:
        self._budget.tick(self._budget.stage)(
            None
        )  # no process is started after a stop while it waited for others
        self._sides.choose()
        if not self._sides.switches or self.request.restarts:
            return self._in_pairs()
        try:
            return self._in_one_process()
        except SideFailedError as error:
            if error.kind in ("late", "refused") or (error.kind == "ended" and self._replicates.blocks):
                raise
            first = error
        # Processes of their own show which side fails, and may have enough memory.
        self._sides.close()
        self._sides.forget()
        try:
            return self._in_pairs()
        except (SideFailedError, BlocksDoNotFitError) as error:
            if isinstance(error, SideFailedError) and error.kind != "late":
                raise
            raise first from None  # the rest of the budget was too short to find out

    def _in_one_process(self) -> tuple[str, str]:
        """Blocks of one process that switches between both sides."""
        sides = self._sides
        base_s, change_s = sides.open_one()
        plan = self._plan_switches(base_s, change_s)
        self._budget.replicates = OneProcess()
        fresh = True
        for order in cycle(ORDERS):
            try:
                self._blocks(order, plan, 1)
            except SideFailedError as error:
                if error.kind != "ended" or (fresh and not self._replicates.blocks):
                    raise
                if fresh:
                    break
                sides.close()
                sides.open_one()
                fresh = True
                continue
            fresh = False
            if self._budget.left_s < self._abba_s or self._clear():
                break
        sides.learn()
        return self._verdict()

    def _in_pairs(self) -> tuple[str, str]:
        """Blocks of several pairs of processes."""
        plan, blocks = self._first_pair()
        for number in count(1):
            self._replicates.begin()
            try:
                self._pair(number, plan, blocks)
            except SideFailedError as error:
                # Where a script ends, the blocks before that count, and another pair follows.
                if error.kind != "ended" or not self._replicates.current:
                    self._replicates.abandon()
                    if error.kind == "oom" and self._sides.count > 1 and not self._exclusive:
                        self._separate()
                        continue
                    if self._replicates.blocks and error.kind in ("late", "ended"):
                        break  # what was measured so far counts
                    if error.kind != "ended" or (shorter := self._shorter(plan)) is None:
                        raise
                    plan = shorter
                    continue
            if self._clear():
                break
            # A smaller pair is better than none.
            blocks = min(blocks, round((self._budget.left_s - self._start_s) / self._abba_s))
            if blocks < FEWEST_ABBA:
                self._use_rest(number, plan)
                break
        if (blocks := self._replicates.blocks) < FEWEST_ABBA:
            text = f"the budget is enough for {blocks} of at least {FEWEST_ABBA} ABBA blocks"
            raise BlocksDoNotFitError(text, self._start_s + FEWEST_ABBA * plan.abba_s)
        found, between = self._replicates.estimate(), self._replicates.between()
        # A large effect also scales the differences between processes.
        if between is not None and found is not None and max(found.ratio, 1 / found.ratio) < SIMILAR:
            self._history.add(self._sides.machine, between)
        return self._verdict()

    def _shorter(self, plan: BlockPlan) -> BlockPlan | None:
        """Shorter runs for a script that ended before a block; None if there are none, or no time."""
        if self._sides.by_epochs or self._budget.left_s < self._start_s:
            return None
        periods = [self._sides.period(index, step_s) for index, step_s in enumerate(plan.step_s)]
        return plan.shorter((periods[0], periods[1]))

    def _clear(self) -> bool:
        """Whether the result is clear before the budget is spent. Call it at the end of a pair."""
        replicates, within = self._replicates, self.request.within
        if within is None:
            return replicates.early() is not None
        found = replicates.estimate()
        return (
            found is not None and len(replicates.pairs) >= ENOUGH and found.high <= found.ratio * (1 + within)
        )

    def _verdict(self) -> tuple[str, str]:
        """(verdict, reason) of what was measured."""
        verdict, found = self._replicates.last(), self._replicates.estimate()
        if verdict != "inconclusive":
            return verdict, ""
        noisy = f"too noisy to resolve a difference of {FLOOR * 100:.0f} %"
        if found is not None and not found.low <= 1 <= found.high:
            noisy = "too few processes to call this difference real"
        times = self._replicates.needed()
        if times is None:
            return verdict, f"{noisy}; raise --budget"
        # Setup of the first pair included, which further time does not repeat.
        needed_s = self._budget.elapsed_s * times
        return verdict, f"{noisy}; {self._more(max(needed_s, self.request.budget_s * 1.2))}"

    def _more(self, needed_s: float) -> str:
        """The advice to raise the budget to so many seconds."""
        most_s = MOST_TIMES * self.request.budget_s
        if needed_s > most_s:
            return f"raise --budget above {most_s:g}"
        seconds = needed_s * 1.1
        return (
            f"raise --budget to about {math.ceil(seconds / 10) * 10 if seconds > 20 else math.ceil(seconds)}"
        )

    def _interrupted(self, error: BlocksDoNotFitError | SideFailedError) -> tuple[str, str]:
        """Where a process had no time left to start, or its script ended, the blocks before that count."""
        harmless = isinstance(error, BlocksDoNotFitError) or error.kind in ("late", "ended")
        if harmless and (found := self._verdict())[0] != "inconclusive":
            return found
        if isinstance(error, SideFailedError):
            return self._failed(error)
        return "inconclusive", f"{error}; {self._more((self._budget.elapsed_s + error.needed_s) * 1.2)}"

    def _failed(self, error: SideFailedError) -> tuple[str, str]:
        if error.kind == "late":
            setup = self._sides.facts[error.index].prepare_s is None
            took = f"setup took more than {self._budget.elapsed_s:.0f} s"
            # It has trained before: the script ended, or pairs of processes are compared.
            why = took if setup else f"after a new start, {error}"
            return "inconclusive", f"{why}; {enough(self.request.budget_s)}"
        if error.kind == "ended":
            return "inconclusive", f"{error} before enough was measured; let it train for longer"
        if error.index == 0 and error.kind != "refused":
            return "failed", f"the baseline itself fails: {error}"
        return ("out of memory" if error.kind == "oom" else "failed"), str(error)

    @property
    def _replicates(self) -> Replicates:
        """What was measured so far."""
        return self._budget.replicates

    # Planning.

    def _plan_switches(self, base_s: float, change_s: float) -> BlockPlan:
        """The runs of one process that switches between both sides. base_s, change_s: seconds of a step."""
        by_epochs, budget = self._sides.by_epochs, self._budget
        loads = bool(switched_by(LOADER) & set(self._sides.changed))
        gpu = self._sides.facts[0].device.startswith("cuda")
        base, change = self._paces(base_s, change_s)
        plan = plan_switches(base, change, budget.left_s, by_epochs, loads, gpu)
        if plan.within or by_epochs:
            return plan
        paces, _ = self._timed(plan, base, change)
        return plan_switches(*paces, budget.left_s, by_epochs, loads, gpu)

    def _plan_pairs(self, base_s: float, change_s: float, usual: Usual) -> BlockPlan:
        """The runs of pairs of processes. usual: see `plan_pairs`."""
        base, change = self._paces(base_s, change_s)
        by_epochs, budget = self._sides.by_epochs, self._budget
        plan = plan_blocks(base, change, budget.left_s, by_epochs, True, self._start_s, usual)
        if plan.within or self._exclusive or by_epochs:
            return plan
        try:
            paces, whole = self._timed(plan, base, change)
        except SideFailedError as error:
            if error.kind != "ended":
                raise
            self._sides.close()  # the first pair starts again
            paces, whole = (base, change), False
        return plan_blocks(*paces, budget.left_s, by_epochs, whole, self._start_s, usual)

    def _paces(self, base_s: float, change_s: float) -> tuple[SidePace, SidePace]:
        if missing := self._sides.never_happens():
            raise NotMeasurableError(missing)
        if unlike := self._sides.compare_items():
            raise NotMeasurableError(unlike)
        if self._budget.left_s < self._budget.budget_s / 10:
            enough_s = FEWEST_ABBA * 4 * max(base_s, change_s, ESTIMATE_S)
            took = duration(self._budget.elapsed_s)
            text = f"starting both sides, warming up and timing their first steps took {took}"
            raise BlocksDoNotFitError(text, enough_s)
        base, change = self._pace(0, base_s), self._pace(1, change_s)
        if self._sides.by_epochs:
            # The first estimate does not show the cost of the start of an epoch.
            return self._over_epoch(0, base), self._over_epoch(1, change)
        return base, change

    def _pace(self, index: int, step_s: float) -> SidePace:
        facts = self._sides.facts[index]
        return SidePace(
            facts.items_per_step, facts.steps_per_epoch, step_s, self._sides.period(index, step_s)
        )

    def _over_epoch(self, index: int, pace: SidePace) -> SidePace:
        """The pace over a whole epoch, its start included; unchanged if an epoch takes too long."""
        limit_s = self._budget.left_s / (FEWEST_ABBA * 2)
        seconds, steps = self._sides.train(index, pace.per_epoch, "timing a whole epoch", until_s=limit_s)
        return replace(pace, step_s=seconds / steps) if steps == pace.per_epoch else pace

    def _timed(
        self, plan: BlockPlan, base: SidePace, change: SidePace
    ) -> tuple[tuple[SidePace, SidePace], bool]:
        """The paces over a whole run each, which show the cost of periodic events, and whether the runs fit."""
        paces, whole = [], True
        for index, pace in enumerate((base, change)):
            limit_s = self._budget.left_s / (FEWEST_ABBA * 4)
            seconds, steps = self._sides.train(
                index, plan.steps[index], "timing a whole run", plan, until_s=limit_s
            )
            all_of = steps == plan.steps[index]
            whole = whole and all_of
            paces.append(replace(pace, step_s=max(seconds / steps, 0 if all_of else pace.step_s)))
        return (paces[0], paces[1]), whole

    # Pairs.

    def _first_pair(self) -> tuple[BlockPlan, int]:
        """Start the first pair, and plan: (the runs of a block, blocks per pair)."""
        begin = self._budget.elapsed_s
        sides = self._sides
        sides.open(1, 0)
        change_s = sides.prepare(1)
        try:
            base_s = sides.prepare(0)
        except SideFailedError as error:
            if error.kind != "oom" or sides.count < 2:
                raise
            self._separate()
            sides.open(0)
            base_s = sides.prepare(0)
        cached_s = CACHED * sum(side.compile_s or 0.0 for side in sides.facts)
        self._start_s = max(self._budget.elapsed_s - begin - cached_s, 0.0)
        usual = self._history.usual(self._sides.machine)
        plan = self._plan_pairs(base_s, change_s, usual)
        pairs, blocks = plan_pairs(self._budget.left_s, self._start_s, plan.abba_s, usual)
        self._budget.replicates = Replicates(usual, pairs < ENOUGH)
        self._abba_s = plan.abba_s
        return plan, max(blocks, FEWEST_ABBA)

    def _separate(self) -> None:
        """Both do not fit at once: from here on only one process is open at a time."""
        self._exclusive = True
        self._budget.replicates = Replicates(self._replicates.usual, self._replicates.few_pairs)
        self._sides.forget()
        self._sides.close()

    def _pair(self, number: int, plan: BlockPlan, blocks: int) -> None:
        """Measure the blocks of a pair of processes. number: from 1."""
        order = ORDERS[(number - 1) % 2]
        if self._exclusive:
            self._in_turn(order[:2], plan, blocks)
            return
        sides, begin = self._sides, self._budget.elapsed_s
        if number > 1 or not sides.is_open(0):
            sides.close()
            # In the first pair, the candidate is prepared first.
            first = 1 if number % 2 else 0
            sides.open(first, 1 - first)
            for index in (first, 1 - first):
                sides.prepare(index)
            self._start_s = self._budget.elapsed_s - begin
        self._blocks(order, plan, blocks)
        sides.learn()

    def _use_rest(self, number: int, plan: BlockPlan) -> None:
        """With few pairs, measure further blocks of the last one where no other pair fits."""
        few = len(self._replicates.pairs) < ENOUGH
        if few and not self._exclusive and self._sides.count == len(SIDES):
            try:
                self._blocks(ORDERS[(number - 1) % 2], plan, int(self._budget.left_s / self._abba_s))
            except SideFailedError as error:
                if error.kind != "ended":
                    raise

    def _blocks(self, order: tuple[int, ...], plan: BlockPlan, blocks: int) -> None:
        """Measure ABBA blocks of the current pair, fewer if the budget ends or the result is clear."""
        sides, replicates, begin = self._sides, self._replicates, self._budget.elapsed_s
        for done in range(1, blocks + 1):
            rates: tuple[list[float], list[float]] = ([], [])
            for index in order:
                rates[index].append(sides.segment(index, plan))
            (a1, a2), (b1, b2) = rates
            replicates.add_abba(a1, b1, b2, a2)
            self._abba_s = (self._budget.elapsed_s - begin) / done
            self._budget.progress(MEASURING)
            over = self._budget.left_s < 0 and done >= FEWEST_ABBA
            if over or (replicates.few_pairs and self._clear()):
                break

    def _in_turn(self, order: tuple[int, ...], plan: BlockPlan, blocks: int) -> None:
        """A pair with one process at a time; drifts cancel between pairs, whose order alternates."""
        sides, begin, measured_s = self._sides, self._budget.elapsed_s, 0.0
        known_s = self._start_s if sides.count else 0.0  # one of them has started before
        rates: dict[int, list[float]] = {}
        for index in order:
            if not sides.is_open(index):
                sides.close()
                sides.open(index)
                sides.prepare(index)
            ready = self._budget.elapsed_s
            rates[index] = [sides.segment(index, plan) for _ in range(2 * blocks)]
            sides.learn()
            measured_s += self._budget.elapsed_s - ready
            sides.close(index)
        self._start_s = max(self._budget.elapsed_s - begin - measured_s, known_s)
        for a1, b1, b2, a2 in zip(rates[0][::2], rates[1][::2], rates[1][1::2], rates[0][1::2], strict=True):
            self._replicates.add_abba(a1, b1, b2, a2)
        self._budget.progress(MEASURING)
