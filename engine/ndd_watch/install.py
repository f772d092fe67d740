"""Starts the observation of a process that has imported torch. It is watched from its first backward pass on."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from . import FOLDER, clock, outside, trying, workers
from .apart import (
    Dropped,
    WithoutCompiler,
    open_file,
    os,
    ours,
    skip_ours,
    threading,
    time,
    without_our_frames,
)
from .blocking import Copies
from .captures import Captures
from .clock import CURRENT, DATA_WAIT, DONE, PHASES, TIMED, TRAINER, WAITING, DeviceValues, S, memory
from .collecting import Collecting
from .emit import FOLDER_AT_START, Emitter, RequestHandler, reason_of
from .finite import Origin
from .frameworks import Frameworks, Wishes, numbers
from .holders import Allocations, Holders
from .hooks import Hooks
from .looks import Looks, groups_of, key_of, own
from .loops import Ends
from .mapped import ELSEWHERE, NATIVE, in_use
from .modules import Modules
from .probes import Learning, make_way
from .profiler import Allowance, Asides, StepProfiler
from .receiving import Receiving
from .slowing import Sizes, Tables
from .steps import PROFILE_NS, Steps
from .waits import place

thread_ns = time.thread_time_ns
# Hooks of one module, or whatever else is counted, from which on it is asked where they are added.
MANY = 8
# Steps that may be observed to learn where batches come from.
MOST_LEARNED = 4
# From one look at the memory of a GPU to the next.
MEMORY_NS = 5 * 10**8
# From the first profiled step, in which caches may be cold, to the second one.
SECOND_NS = 3 * 10**9
# A GPU has taken the place of another one if so many losses in a row are on it, each of another window.
MOVED = 3
# Without a step of the thread that trains for so long, another thread that trains takes its place.
SILENT_NS = 2 * 10**9


class Observer:
    """Everything that observes this process."""

    def __init__(self, torch: Any, frameworks: bool = True) -> None:
        """frameworks: whether to hear Hugging Face's Trainer and Lightning."""
        self._torch = torch
        self.steps = Steps()
        self.looks = Looks(torch)
        self.profiler = StepProfiler(own)
        self.modules = Modules(self.steps, self.looks, torch.is_grad_enabled)
        self.outside = outside.begin()
        self.origin = Origin(torch, self.looks)
        self.hooks = Hooks(
            self.steps,
            self.modules,
            self.looks,
            self._arm,
            own,
            self.outside.writes,
            self._elsewhere,
            self.origin,
        )
        self.allocations = Allocations(torch)
        self.copies = Copies(torch, self.looks, self.steps.missed, self._unseen)
        self.receiving = Receiving(lambda: S[TIMED] == get_ident() and S[CURRENT] == DATA_WAIT)
        self.emitter = self._emitter()
        self.captures = Captures(torch, self.steps, self.modules, self.looks, self._mark)
        self.holders = Holders(self.looks, own)
        self.learning = Learning(self.looks)
        self.wishes = Wishes()
        self.frameworks = (
            Frameworks(self.note, self.known, self.wishes, self.hooks.probes) if frameworks else None
        )
        # Where the steps of threads end that do not train at present.
        self._others: dict[int, Ends] = {}
        self._learned = 0
        # Of all that counts: processor time of this thread when the last one began.
        self.allowance, self._spent = Allowance(PROFILE_NS), 0
        # In a process of a trial.
        self._tried: trying.ScriptTrainer | None = None
        self.loader: dict[str, Any] = {}
        self._memory_due = 0
        # Losses in a row on another GPU than the one that is timed.
        self._moved = 0
        # Entries of the state of an optimizer in the first profiled step.
        self._first_state = 0
        # The steps before what is recorded now, where that is not the present one.
        self._done: int | None = None
        # What the current step is observed for: "", "learn", "profile", "retained", "capture" or "origin"; the steps
        # before one of "learn"; when the next one of "profile" is.
        self._study, self._heard_at, self._profile_due = "", 0, 0
        self._armed = self._stopped = self._arming = self._told_functions = self._attended = False
        # Steps of other threads while the first one is armed.
        self._uncounted = 0
        self._asides = Asides(self._begin_aside, self._end_aside, self._put_aside)
        self._wire()

    def _emitter(self) -> Emitter:
        hooks = self.hooks
        return Emitter(
            self.steps, self.looks, hooks.places, hooks.passes, self.receiving, lambda: hooks.waits.replicated
        )

    def _mark(self, kind: str, text: str, **data: Any) -> None:
        self.emitter.mark(kind, text, **data)

    def _wire(self) -> None:
        steps = self.steps
        steps.study, steps.give_up, steps.window = self.study, self.give_up, self._window
        steps.lost = self.lost
        steps.asides = self._asides if PROFILE_NS else None
        self._asides.collecting = Collecting(
            lambda: Holders(self.looks, own),
            lambda: in_use(steps.device),
            self._put_collected,
            clock.leave_out,
        )
        steps.finite.suspicious = self._suspicious
        steps.looked = self.profiler.leave_out
        self.requests = RequestHandler(steps, self._capture, self._look, self.wishes)
        self.hooks.loader_read = self._loader_read
        self.hooks.device_found = self._device_found
        if self.frameworks is not None:
            self.hooks.optimizer_made = self.frameworks.look

    def start(self) -> None:
        """Hook torch."""
        self._stopped = False
        self.hooks.install(self._torch)
        self.allocations.begin(self.hooks.probes)
        self.captures.install(self.hooks.probes)
        from torch.utils.data._utils.worker import _worker_loop

        workers.watched(self.hooks.probes, _worker_loop, _folder)
        self.receiving.install(self.hooks.probes)
        self.receiving.rest()
        skip_ours()

    def lost(self, error: BaseException) -> None:
        """An error of ours costs a figure."""
        if self.emitter.opened:
            text = f"a figure of step {self.emitter.step:,} is lost: {type(error).__name__}: {error}"
            self.emitter.mark("warning", text, observed="less")

    def give_up(self, error: BaseException) -> None:
        """End the observation after an error of ours. Never raises one."""
        try:
            self.stop()
            reason = f"{type(error).__name__}: {error}"
            emitter = self.emitter
            if emitter.opened:
                text = f"the observation ended at step {emitter.step:,}: {reason}"
                emitter.mark("warning", text, observed="no more")
            else:
                _tell_failure(reason)
        except Exception as another:
            if not ours(another):
                raise

    def stop(self) -> None:
        """Take everything out. The record stays open for its end."""
        S[TIMED] = S[TRAINER] = 0
        self._stopped = True
        study, self._study = self._study, ""
        self.steps.studying, self.steps.skip = False, 0
        self.hooks.remove()
        self._armed = False
        clock.gpu.forget()
        self.copies.remove()
        with Dropped():
            self.captures.close()
        self.origin.end()
        self.steps.retained.end()
        if study == "learn":
            self.learning.deaf()
        elif study == "profile":
            self.modules.end_counting()
            with Dropped():
                self.profiler.end()
        self.emitter.pause()

    def _arm(self) -> bool:
        """This process trains on this thread. Returns False if it cannot be observed."""
        if self._stopped or self._arming:
            return False
        self._arming = True
        try:
            with WithoutCompiler():
                return self._begin()
        finally:
            self._arming = False

    def _begin(self) -> bool:
        here = place(self._torch)
        if not self._armed:
            self._armed = True
            self.looks.prepare()
            if here["exchanges"]:
                self.hooks.install_waits(self._torch)
            skip_ours()
        if not self.emitter.opened:
            self.steps.ranks = here["exchanges"]
            try:
                self.emitter.open(here)
            except OSError as error:
                if not ours(error):
                    raise
                self.stop()
                _tell_failure(str(error))
                return False
            if self.hooks.missing:
                self._unseen(self.hooks.missing, "the source of this torch is not there")
        self.emitter.resume()
        self._try()
        clock.begin(get_ident())
        self.steps.time(get_ident())
        self._count_elsewhere(0)
        return True

    def _try(self) -> None:
        """In a process of a trial: train in runs, on command. An error ends the process: it is one of the trial."""
        if self.steps.gate is None:
            try:
                if (tried := trying.begin(self)) is not None:
                    self._tried, self.steps.gate = tried
            except Exception as error:  # noqa: BLE001
                trying.give_up(error)

    def _elsewhere(self, optimizer: Any) -> None:
        """Another thread than the one that trains steps an optimizer."""
        me = get_ident()
        if not S[TRAINER]:
            if self._arming:  # that thread begins at this moment
                self._count_elsewhere(sum(self._others.setdefault(me, Ends()).stepped(key_of(optimizer))))
            return
        silent = clock.now() - S[clock.LAST] > SILENT_NS
        if not (self.steps.optimizer_steps or S[DONE] or S[ELSEWHERE]) or silent:
            # The first backward pass was somebody else's, or that thread does not train any more.
            mine = self._others.pop(me) if me in self._others else Ends()
            self._others[S[TRAINER]], self.steps.ends = self.steps.ends, mine
            S[ELSEWHERE] += sum(self.steps.ends.stepped(key_of(optimizer)))
            clock.begin(me)
            S[NATIVE] = threading.get_native_id()
            self.steps.skip = self.steps.stepping = 0
            self.steps.time(me)
            del self.steps.phases[:]
            return
        self._count_elsewhere(sum(self._others.setdefault(me, Ends()).stepped(key_of(optimizer))))

    def _count_elsewhere(self, steps: int) -> None:
        """Count steps of another thread. The memory begins empty when the first thread is armed."""
        self._uncounted += steps
        if S[TRAINER]:
            S[ELSEWHERE] += self._uncounted
            self._uncounted = 0

    def _device_found(self, device: Any) -> None:
        """A loss is on this device. On the CPU it may be that of a model on a GPU, or of another one before that."""
        steps = self.steps
        if device.type == "cpu":
            device = self._of_parameters() or device
        known = steps.device
        if device == known or (known is not None and device.type == "cpu"):
            self._moved = 0
            return
        if known is not None and known.type != "cpu":
            self._moved += 1  # losses of several models may be on GPUs of their own
            if self._moved < MOVED:
                return
        steps.device, self._moved = device, 0
        if device.type == "cuda":
            cuda: Any = self._torch.cuda
            clock.gpu.prepare(
                lambda: cuda.Event(enable_timing=True),
                lambda: cuda.current_stream(device),
                cuda.is_current_stream_capturing,
            )
            if steps.values is None:
                steps.values = DeviceValues(self._torch, self.looks)
                self.copies.put()

    def _of_parameters(self) -> Any:
        """The device of the first parameter that the newest optimizer steps; None if that is unknown."""
        for optimizer in self.steps.optimizers()[-1:]:
            for group in groups_of(optimizer):
                for parameter in group["params"]:
                    if self.looks.is_tensor(parameter):
                        return self.looks.device(parameter)
        return None

    def note(self, kind: str, /, **body: Any) -> None:
        """Record what a framework says at the current step, or hear that an evaluation of it is over."""
        if kind == "evaluated":
            if S[TRAINER] == get_ident() and S[clock.BASE] == clock.EVALUATE:
                self.modules.evaluation(False)
            return
        self.emitter.say(kind, S[DONE] if self._done is None else self._done, **body)

    def known(self, found: dict[str, Any], then: Callable[[dict[str, float]], None]) -> None:
        """Call back with the numbers among these values; later, where some are on a GPU."""
        late = {str(name): value for name, value in found.items() if self.looks.number_on_gpu(value)}
        at_hand = numbers({name: value for name, value in found.items() if str(name) not in late})
        values, done = self.steps.values, S[DONE]
        if not late or values is None:
            then(at_hand)
            return

        def arrived(read: list[float]) -> None:
            self._done = done
            try:
                then({**at_hand, **numbers(dict(zip(late, read)))})
            finally:
                self._done = None

        values.send(list(late.values()), arrived)

    def _unseen(self, functions: list[str], why: str) -> None:
        """Functions whose time is not measured."""
        self._mark("note", f"not timed, since {why}: {', '.join(functions)}", observed="in part")

    def overdue(self) -> None:
        """Something was heard: end to look closely at a step that does not end."""
        self.profiler.overdue()
        self.captures.overdue()
        if S[TRAINER] == get_ident():
            self._asides.overdue()

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        """Python tells an audit hook what it does."""
        try:
            self.overdue()
            if event == "sys.setprofile":
                make_way()
                self.profiler.make_way()
                self.captures.make_way()
            elif event == "sys.excepthook":
                without_our_frames(given[2])
                self.allocations.failed(given[2])
                if S[TRAINER] == get_ident():
                    self.emitter.fail(reason_of(given[2]))
                    if self._tried is not None:
                        self._tried.failed(given[2], reason_of(given[2]))
            elif event == "exec":
                if "_dynamo" in given[0].co_filename:
                    self.hooks.probes.known_to_compilers()
            elif event == "os.exec" and self.emitter.opened:  # nothing of this process remains
                self._tell_outside()
        except Exception as error:
            if not ours(error):
                raise

    def ended(self) -> None:
        """The interpreter exits."""
        try:
            if self.emitter.opened:
                self.captures.overdue()
                self.captures.finish()
                if S[TRAINER] == get_ident():
                    self._asides.finish()
                self._tell_outside()
                self.emitter.close()
        except Exception as error:
            if not ours(error):
                raise

    def _window(self) -> None:
        """A window ends."""
        if not self.emitter.opened:
            return
        if found := self.hooks.passes.news():
            self.emitter.script(**found)
        self.emitter.window()
        self.steps.device_due = True
        self.requests.look()
        self._tell_outside()
        if S[clock.LAST] >= self._memory_due:
            self._memory_due = S[clock.LAST] + MEMORY_NS
            self.emitter.memory()

    def _tell_outside(self) -> None:
        """Record what the script does outside its folder, if there is more."""
        outside = self.outside
        if outside.seen > outside.recorded:
            outside.recorded = outside.seen
            self.emitter.script(outside=outside.to_dict())

    def _capture(self) -> None:
        """The console has asked for a profiler capture."""
        self.captures.wanted = True
        if not self._study:
            self.steps.next_study = 0

    def _suspicious(self, looks: int) -> None:
        """A loss or gradients are not finite, or may be. looks: at most so many are worth it."""
        if self.steps.gate is None and self.origin.ask(S[clock.LAST], looks) and not self._study:
            self.steps.next_study = 0

    def _look(self) -> None:
        """The console has asked what the process keeps."""
        begin = thread_ns()
        with Dropped():
            if (found := self.holders.look(self.emitter.step, sys._getframe())) is not None:
                self.emitter.put("holders", **found)
        self.allowance.add(thread_ns() - begin)

    def _loader_read(self, settings: dict[str, Any], place: Any) -> None:
        """The training begins to read a loader: record its settings if they are new."""
        found = {**settings, "place": place}
        if found["items"] is None and found["place"] == self.loader.get("place"):
            found["items"] = self.loader.get("items")
        if found != self.loader:
            self.loader = found
            self.emitter.loader(found)

    def study(self, t: int) -> None:
        """Between two steps: end to look closely at the last one, or begin with the next one."""
        spent, ended = thread_ns(), self._counts()
        if ended:  # beyond what such a step usually takes
            self.allowance.add(spent - self._spent - self.steps.usual_ns)
        self._study_step(t)
        self._spent = thread_ns()
        if ended or self._counts():
            self.allowance.add(self._spent - spent)
        steps = self.steps
        steps.earliest = self.allowance.due(t)
        if not (self._study or self.captures.wanted or self.origin.wanted):
            steps.next_study = max(steps.next_study, steps.earliest)

    def _counts(self) -> bool:
        """Whether the present look counts towards the allowance: nobody has asked for it."""
        return self._study in ("learn", "profile") or (self._study == "capture" and self.captures.by_itself)

    def _study_step(self, t: int) -> None:
        steps, learning, captures, before = self.steps, self.learning, self.captures, self._study
        due = not self._study and captures.is_due(t)
        if self._study == "capture" or ((captures.wanted or due) and not self._study):
            goes_on = captures.step(t) if self._study else captures.begin(t, due)
            self._study = "capture" if goes_on else ""
            steps.studying = goes_on
            if not goes_on:
                steps.next_study = self._next_study()
            return
        if t < self._profile_due and not (self._study or self.origin.wanted or steps.next_study == 0):
            steps.next_study = self._next_study()  # a capture was due, and is not possible
            return
        if self._study == "origin" or (self.origin.wanted and not self._study):
            goes_on = self.origin.step(t) if self._study else self.origin.begin(t, sum(steps.last_row))
            if self._study and not goes_on:
                self.emitter.put("not_finite", step=max(self.emitter.step - 1, 0), **self.origin.found)
            self._study = "origin" if goes_on else ""
            steps.studying = goes_on
            if not goes_on:
                steps.next_study = self._next_study()
            return
        reads = steps.last_row[DATA_WAIT] > 0
        # The first step may have another optimizer to come, and a batch may be made in the step before its own.
        whole = 0 if reads or learning.source is not None else 1
        if self._study == "learn" and S[DONE] <= self._heard_at + whole:
            return  # wait for a whole one
        if self._study == "learn":
            learning.deaf()
            self.modules.received = None
            self._study = ""
            source = learning.source
            # A loader's batches are timed already.
            if own(source) and not reads and source not in learning.reported:
                learning.reported.add(source)
                timed = self.hooks.promote(source, learning.names)
                learning.names = {}
                name, file, line = source.co_name, source.co_filename, source.co_firstlineno
                text = f"batches are made by {name} ({file}:{line})"
                if not timed:
                    text += "; it cannot be timed by itself, so its time is part of other"
                self._mark("note", text, file=file, line=line, function=name, timed=timed)
            learned = source is not None or reads or self._learned >= MOST_LEARNED
            # Where learning takes much time, one step is profiled before it is tried again.
            if PROFILE_NS and (learned or self.allowance.due(t) > t):
                self._profile()
        elif self._study == "profile":
            took = zip(PHASES, steps.last_row, steps.last_row[WAITING:])
            lengths = {name: own + wait for name, own, wait in took if own + wait}
            found = self.profiler.end(self.hooks.roots, lengths)
            if found["wall_ns"]:
                self.emitter.put("functions", step=self.emitter.step, **self._counted(), **found)
            self.modules.end_counting()
            steps.graphs.wanted = False
            self._study = "retained" if steps.retained.step_ended() else ""
        elif self._study == "retained":
            self._study = "retained" if steps.retained.step_ended() else ""
            if steps.retained.where is not None:
                self.emitter.script(retains=steps.retained.where)
        elif self._learned < MOST_LEARNED and learning.source is None and not reads:
            # It is not known where batches come from.
            self._learned += 1
            if learning.listen(steps.caller, sum(steps.last_row)):
                self._study, self._heard_at = "learn", S[DONE]
                self.modules.received = learning.received
        elif PROFILE_NS:
            self._profile()
        steps.studying = bool(self._study)
        if not self._study:
            learned = learning.source is not None or reads or self._learned >= MOST_LEARNED
            wait = PROFILE_NS if self._told_functions else min(SECOND_NS, PROFILE_NS)
            self._told_functions |= learned
            profiled = learned or before in ("profile", "retained")
            self._profile_due = (t + wait if PROFILE_NS else 1 << 62) if profiled else 0
            steps.next_study = self._next_study()

    def _next_study(self) -> int:
        """When to look closely at a step next, on our clock; 0 for at once."""
        if self.captures.wanted or self.origin.wanted:
            return 0
        return min(self._profile_due, self.captures.due_ns or 1 << 62)

    def _profile(self) -> None:
        if not self.profiler.begin(sum(self.steps.last_row)):
            self._study = "profile"
            self.steps.retained.begin()
            self.modules.count(Sizes(self.looks), Tables(self._torch, self.looks, attends=not self._attended))
            self.steps.graphs.wanted, self.steps.graphs.reached, self.steps.loss_due = True, 0, 0

    def _counted(self) -> dict[str, Any]:
        """What can grow, and embeddings with gradients for all of their rows, in the step that was profiled."""
        sizes, tables, graphs = self.modules.sizes, self.modules.tables, self.steps.graphs
        if sizes is None or tables is None:
            return {}
        if tables.devices > 1:
            self.emitter.script(data_parallel=tables.devices)
        if tables.attention is not None:
            self._attended = True
            if tables.attention:
                self.emitter.script(attention=tables.attention)
        sizes.optimizers(self.steps.optimizers())
        sizes.handlers()
        sizes.graph(graphs.reached)
        if self.steps.caller is not None:
            file = self.steps.caller.co_filename
            if graphs.reached:
                self.emitter.look_in("carries", file)
            for kind in ("hooks", "handlers", "parameters"):
                if sizes.most(kind) > MANY:
                    self.emitter.look_in(kind, file)
            state = sizes.most("state")
            self._first_state = self._first_state or state
            if state > 2 * self._first_state:
                self.emitter.look_in("state", file)
        found = tables.found(self.steps.optimizers())
        return {"sizes": sizes.counts(), "tables": found, "denormals": sizes.denormals}

    def _begin_aside(self) -> bool:
        """Profile an evaluation or a checkpoint from now on; the step in which it happens is not profiled."""
        if self._study == "profile":
            self.profiler.end()
        return self._study in ("", "profile") and self.steps.gate is None and not self.profiler.begin()

    def _end_aside(self, phase: str) -> dict[str, Any]:
        return self.profiler.end(self.hooks.roots, {}, phase)

    def _put_aside(self, found: dict[str, Any]) -> None:
        self.emitter.put("functions", step=self.emitter.step, **found)

    def _put_collected(self, found: dict[str, Any]) -> None:
        self.emitter.put("holders", **{**found, "step": self.emitter.step})

    def forked(self) -> None:
        """In a child process: most likely a worker of a loader. It is observed anew if it trains."""
        memory.detach()
        clock.gpu.forget()
        self.emitter.pause()
        self.profiler.drop()
        self.learning.deaf()
        self.receiving.rest()
        self.emitter, self._study, self._others = self._emitter(), "", {}
        self._arming, self._uncounted = False, 0
        self._asides = Asides(self._begin_aside, self._end_aside, self._put_aside)
        steps = self.steps
        del steps.phases[:]
        self.modules.reset()
        self.captures.forked()
        self.origin.end()
        self.modules.end_counting()
        # The hooks hold these two.
        kept = {"phases": steps.phases, "_made": steps._made, "compiled": steps.compiled}
        kept |= {"rest": steps.rest, "faking": steps.faking}
        vars(steps).update({**vars(Steps()), **kept})
        self._wire()


# Frequent events that tell nothing.
_UNHEARD = frozenset({
    "object.__getattr__", "object.__setattr__", "object.__delattr__", "builtins.id", "import", "compile",
    "code.__new__", "sys._getframe", "marshal.loads", "os.listdir", "os.scandir", "sys._current_frames",
})  # fmt: skip
observer: Observer | None = None


def install(frameworks: bool = True) -> Observer:
    """Observe this process from now on. frameworks: see Observer."""
    global observer
    observer = made = Observer(sys.modules["torch"], frameworks)
    trying.before_start(made)
    made.start()

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event not in _UNHEARD:
            made.audit(event, given)

    outside.listener = audit
    threading._register_atexit(made.ended)
    os.register_at_fork(after_in_child=made.forked)
    return made


def _folder() -> str:
    return str(os.environ.get(FOLDER) or FOLDER_AT_START)


def _tell_failure(reason: str) -> None:
    """Leave a word for the reader: nothing of ours appears in the output of the script."""
    with Dropped(OSError):
        path = os.path.join(_folder(), f"pid-{os.getpid()}.unobserved")
        with open_file(path, "w", encoding="utf-8") as file:
            file.write(reason)
