"""The hooks on torch: loaders, backward passes, optimizers, zeroed gradients, clipping, saving.

They are probes in torch's own functions, see `probes`. The global hooks of torch for optimizers would be traced with a
compiled step. Whatever fails in a hook ends the observation, never the script; exceptions of the script propagate.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .clock import (
    BACKWARD,
    BASE,
    CHECKPOINT,
    CLIP,
    CURRENT,
    DATA_WAIT,
    DONE,
    EVALUATE,
    FORWARD,
    LAST,
    NAMES,
    OPTIMIZER,
    OTHER,
    TIMED,
    TRAINER,
    WAITING,
    ZERO_GRAD,
    S,
    enter,
    mark,
    marks,
    now,
    row,
)
from .finite import Origin
from .looks import Looks, Places, attribute, function_of, key_of, own_frame
from .loops import Passes, subclasses, takes_closure, wraps_steps
from .mapped import LENGTHS_AT, MICRO, MOST_LENGTHS, OPEN
from .modules import Modules
from .probes import Probes, Rests, VariableHook, watch
from .steps import LOSS_NS, ByHand, Steps, gradient_norms
from .waits import Waits


class Hooks:
    """Puts the hooks in place and takes them out again.

    arm: called before the first backward pass or optimizer step; whether it is observed. own: whether a code object is
    the script's own. writes: called with a path that the script is about to write. elsewhere: called with an optimizer
    that another thread steps. origin: told of each loss and the end of its backward pass while it looks at steps.
    """

    def __init__(
        self,
        steps: Steps,
        modules: Modules,
        looks: Looks,
        arm: Callable[[], bool],
        own: Callable[[Any], bool],
        writes: Callable[[Any], None],
        elsewhere: Callable[[Any], None],
        origin: Origin,
    ) -> None:
        self._origin = origin
        self.steps, self.modules, self._looks = steps, modules, looks
        self._arm, self._own, self._writes, self._elsewhere = arm, own, writes, elsewhere
        self.probes = Probes()
        # How what is no probe is undone.
        self._undo: list[Callable[[], Any]] = []
        self.waits = Waits(steps, modules)
        steps.rest, steps.faking = self.probes.rest, looks.faking
        # The iterator that the training reads, and when it began to make a batch or to start.
        self._iterator = self._reading = self._ending = 0
        self.places, self.passes = Places(own), Passes(own, looks)
        # Code of functions -> the phase of what they call.
        self.roots: dict[Any, str] = {}
        # Set by `install`: called with the settings of a loader when the training begins to read it, and when an
        # optimizer is made.
        self.loader_read: Callable[[dict[str, Any], Any], None] = lambda settings, place: None
        self.optimizer_made: Callable[[], None] = lambda: None
        # Set by `install`: called once a window with the device of a loss.
        self.device_found: Callable[[Any], None] = lambda device: None
        # Functions that have no probe, since their source is not there.
        self.missing: list[str] = []

    # In and out.

    def install(self, torch: Any) -> None:
        """Hook torch. Most probes rest until this process trains."""
        from torch.optim import optimizer as optimizers
        from torch.utils.data import dataloader

        self._put(dataloader.DataLoader.__init__, self._seen(self._loader_made), None, False)
        self._put(optimizers.Optimizer.__init__, None, self._seen(self._optimizer_made), False)
        self._put(optimizers.Optimizer.__setstate__, self._seen(self._optimizer_copied), None, False)
        self._step_hooks = self._optimizer_hooks()
        for kind in subclasses(optimizers.Optimizer):
            self._hook_steps(kind)
        self._install_phases(torch, optimizers.Optimizer, dataloader)
        self.modules.install(torch, self.probes)
        self.roots[torch.nn.Module.__call__.__code__] = NAMES[FORWARD]
        self.probes.rest(True)
        # The first backward pass begins the training, and its end has to be heard.
        self._put(torch.autograd.backward, *self._backward_hooks(), True, phase=BACKWARD, rests="end")

    def _install_phases(self, torch: Any, optimizer: Any, dataloader: Any) -> None:
        """Hook functions whose time is a phase."""
        iterator = dataloader._BaseDataLoaderIter
        ends = self.passes.counting(self._leaves(TIMED, self._has_read), self.steps.missed)
        self._put(iterator.__next__, self._reads(), ends, True, phase=DATA_WAIT, rests="all")
        # The end of its workers belongs to an iterator, also of one that is thrown away after a batch.
        workers = dataloader._MultiProcessingDataLoaderIter
        pass_ends = self._turns_pass(), self._leaves(TIMED, self._pass_ended)
        self._put(workers._shutdown_workers, *pass_ends, True, phase=DATA_WAIT)
        begun = self._turns_pass(True), self._leaves(TIMED, self._pass_begun)
        self._put(dataloader.DataLoader.__iter__, *begun, True, phase=DATA_WAIT)
        self._put(
            torch.nn.Module.zero_grad, *self.timed(ZERO_GRAD, self.steps.zeroed), False, phase=ZERO_GRAD
        )
        zeroed = self.timed(ZERO_GRAD, self.steps.zeroed)
        self._put(optimizer.zero_grad, *zeroed, False, phase=ZERO_GRAD, rests="all")
        by_hand = ByHand(self.steps, self._looks, self._own, self._begins_training, self._look)
        self._put(torch.autograd.grad, *by_hand.hooks(), False)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._put(getattr(torch.nn.utils, name), *self.timed(CLIP), False, phase=CLIP)
        # Before torch 2.6 it is not there, and the norm is no argument of another function.
        scales = getattr(torch.nn.utils, "clip_grads_with_norm_", None)
        within = getattr(scales, "__wrapped__", None)
        self.probes.put(within, gradient_norms(self.steps, self._looks), None, False)
        scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
        self._put(scaler.unscale_, *self.timed(CLIP), True, phase=CLIP)
        self._put(scaler.scale, self._scales(), None, False)
        self._put(scaler.step, *self._scaler_hooks(), False)
        self._put(torch.save, self._seen(self._saves), self._leaves(TRAINER, self._saved), True)

    def install_waits(self, torch: Any) -> None:
        """Hook what waits for other ranks."""
        self._undo.append(self.waits.install(torch, self.probes))

    def remove(self) -> None:
        """Take all hooks out, except where somebody has put another one on top."""
        while self._undo:
            self._undo.pop()()
        self.probes.remove()
        self.modules.unwrap()

    def _put(
        self,
        function: Any,
        begins: Any,
        ends: Any,
        always: bool,
        phase: int | None = None,
        rests: Rests = "",
    ) -> None:
        if not self.probes.put(function, begins, ends, always, rests):
            self.missing.append(getattr(function, "__qualname__", repr(function)))
        elif phase is not None:
            self.roots[function.__code__] = NAMES[phase]

    # Probes of one phase.

    def timed(self, phase: int, after: Callable[[], Any] | None = None) -> tuple[Any, Any]:
        """Hooks of a function whose time counts towards a phase. after: called when it has returned."""
        return self._enters(phase), self._leaves(TIMED, after)

    def _enters(self, phase: int) -> Any:
        outer, traced = self._outer, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            if S[TIMED] == get_ident() and not traced():
                t = now()
                outer.append(S[CURRENT])
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = phase
                if marks:
                    mark(phase)
            return zero

        return begins

    def _enter(self, phase: int) -> None:
        """Switch to a phase; `ends` of `_leaves` switches back."""
        self._outer.append(S[CURRENT])
        enter(phase)

    @property
    def _outer(self) -> list[int]:
        return self.steps.phases

    def _leaves(self, who: int, after: Callable[[], Any] | None = None) -> Any:
        outer, traced, steps = self._outer, self._looks.traced, self.steps

        def ends(_probe: Any, zero: int) -> int:
            if S[who] == get_ident() and outer and not traced():
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                # In a closure, what is neither of these is the script's own code.
                try:
                    last = outer.pop()
                except IndexError:  # a signal handler of the script has ended a step meanwhile
                    last = OTHER
                S[CURRENT] = OTHER if last == OPTIMIZER and steps.closure else last
                if marks:
                    mark(S[CURRENT])
                if after is not None:
                    try:
                        after()
                    except Exception as error:  # noqa: BLE001
                        steps.missed(error)
            return zero

        return ends

    # The hooks.

    def _backward_hooks(self) -> tuple[VariableHook, Any]:
        steps, waits, outer = self.steps, self.waits, self._outer
        looks, origin = self._looks, self._origin
        traced = looks.traced

        def begins(_probe: Any, zero: int) -> int:
            if not S[TIMED] and S[BASE] == OTHER and S[TRAINER] == get_ident():
                steps.backwards += 1  # all that most of the short steps cost
                if steps.backwards > steps.usual_backwards:
                    S[OPEN] = steps.backwards
                    if not steps.nested:
                        steps.look_again()
                return 1 if steps.long and not steps.scaled and not traced() else zero
            if traced():
                return zero
            try:
                if S[TIMED] != get_ident():
                    if not self._begins_training():
                        return zero
                    if not self.probes.whole(sys._getframe(1).f_code):  # in a process that was forked
                        steps.backwards += 1
                        return zero
                current = S[CURRENT]
                if current % WAITING == BACKWARD:
                    steps.nested = True
                    outer.append(BACKWARD)
                    return zero
                if steps.closure and steps.backwards > steps.before_closure:
                    steps.nested = True  # another look at the same items
                else:
                    steps.backwards += 1
                    S[OPEN] = steps.backwards
                if steps.caller is None:
                    # The innermost function of the script: it contains the loop.
                    found = own_frame(sys._getframe(2), self._own)
                    steps.caller = found.f_code if found is not None else None
                if steps.ranks or origin.active or steps.wants_loss():
                    return 1
                t = now()
                outer.append(current)
                row[current] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = BACKWARD
                if marks:
                    mark(BACKWARD)
            except Exception as error:  # noqa: BLE001
                steps.failed(error)
            return zero

        def begun(_probe: Any, given: Any) -> int:
            try:
                if not S[TIMED]:
                    self._glance(given[:1])
                    return 0
                try:
                    self._look(*given)
                finally:
                    self._enter(BACKWARD)
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        def ends(_probe: Any, zero: int) -> int:
            if S[TIMED] != get_ident() or not outer or S[CURRENT] % WAITING != BACKWARD:
                return zero
            try:
                last = outer.pop()
            except IndexError:  # as above
                last = OTHER
            if last == BACKWARD:
                return zero
            t = now()
            row[S[CURRENT]] += t - S[LAST]
            S[LAST] = t
            # After the backward pass of a closure, the optimizer computes.
            S[CURRENT] = OPTIMIZER if steps.closure else last
            if marks:
                mark(S[CURRENT])
            try:
                if steps.ranks:
                    waits.after_backward()
                if origin.active and looks.allowed():
                    origin.gradients()
                if not steps.ends_known and not looks.faking():
                    steps.ended_backward()
            except Exception as error:  # noqa: BLE001
                steps.failed(error)
            return zero

        return VariableHook(begins, begun, ("tensors", "retain_graph", "create_graph")), ends

    def _glance(self, tensors: Any) -> None:
        """Read the loss in a step that is timed as a whole."""
        if self._looks.allowed() and (loss := self._looks.first_tensor(tensors, 2)) is not None:
            self._read(loss, due=False)

    def _look(self, tensors: Any, retains: Any, creates: Any) -> None:
        """Look at the loss, before its backward pass with these arguments."""
        steps, looks = self.steps, self._looks
        due, steps.loss_due = S[LAST] >= steps.loss_due, S[LAST] + LOSS_NS
        loss = looks.first_tensor((tensors,), 2) if looks.allowed() else None
        if loss is None:
            steps.retained.end()
            return
        if steps.device_due:
            steps.device_due = False
            self.device_found(looks.device(loss))
        begin, wanted, tables = now(), steps.graphs.wanted, self.modules.tables
        with looks.silent():
            if due:
                steps.graphs.mark(loss, S[DONE])
            if tables is not None:
                tables.loss(loss)
            if steps.retained.active:
                steps.loss_due = 0  # look at the next one, too
                frame = own_frame(sys._getframe(2), self._own)
                line = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
                steps.retained.hear(loss, retains is True and not creates, line)
        if wanted or tables is not None or not steps.loss_due:
            steps.leave_out(now() - begin)
        if self._origin.active:
            self._origin.loss(loss, sys._getframe(1))
        if not steps.scaled:
            self._read(loss)
        if steps.ranks:
            self.waits.before_backward(loss)

    def _read(self, loss: Any, due: bool = True) -> None:
        """Read a loss: at once on the CPU, and some steps later on a GPU, where it is due."""
        steps, done = self.steps, S[DONE]
        kept = steps.milestone_losses if done == steps.milestone else {}
        if (value := self._looks.on_host(loss)) is not None:
            if steps.finite.read(done, value):
                steps.loss, kept[done] = (done, value), value
            else:
                self._origin.at_once(loss, sys._getframe(2))
        elif due and steps.values is not None and self._looks.number_on_gpu(loss):

            def arrived(values: list[float]) -> None:
                if steps.finite.read(done, values[0]):
                    steps.late.append((done, values[0]))
                    kept[done] = values[0]

            steps.values.send([loss], arrived)

    def _scales(self) -> VariableHook:
        """Of a gradient scaler's `scale`: what it receives is the loss itself."""
        steps, looks, traced = self.steps, self._looks, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            # Also before the first backward pass, which would see the scaled loss.
            return zero if S[TRAINER] not in (0, get_ident()) or traced() else 1

        def begun(_probe: Any, given: Any) -> int:
            scaler, losses = given
            try:
                if attribute(scaler, "_enabled") is True and looks.allowed():
                    steps.scaled = True
                    steps.finite.remember(scaler)
                    loss = looks.first_tensor(losses, 2)
                    due = steps.wants_loss()
                    if loss is not None and (due or steps.long):
                        self._read(loss, due)
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        return VariableHook(begins, begun, ("self", "outputs"))

    def _begins_training(self) -> bool:
        """Whether a backward pass outside the timed thread is to be timed; counts one that ends an evaluation."""
        me = get_ident()
        if S[TRAINER] not in (0, me) or self._looks.faking():
            return False
        if not S[TRAINER]:
            return self._arm()
        if S[BASE] == EVALUATE:
            self.modules.evaluation(False)
        if not S[TIMED]:
            self.steps.backwards += 1
            return False
        return True

    def _reads(self) -> VariableHook:
        """A hook: the iterator of a loader begins to make a batch."""
        steps, outer, traced = self.steps, self._outer, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            me = get_ident()
            return zero if (S[TIMED] != me and (S[TRAINER] != me or S[BASE] != EVALUATE)) or traced() else 1

        def begun(_probe: Any, given: Any) -> int:
            try:
                (iterator,) = given
                if S[BASE] == EVALUATE:
                    if key_of(iterator) != self._iterator:
                        return 0
                    # The one of the training may be gone, and this another one in its place.
                    if attribute(iterator, "_num_yielded") == 0 and not attribute(
                        iterator, "_persistent_workers"
                    ):
                        self._iterator = 0
                        return 0
                    self.modules.evaluation(False)  # the training reads its own loader again
                    if S[TIMED] <= 0:
                        return 0
                else:
                    new = self._iterator != key_of(iterator)
                    if attribute(iterator, "_dataset") is None:  # made by the script
                        new = False
                    if new:
                        self._iterator = key_of(iterator)
                        settings, place = self.places.loader_of(iterator)
                        self.passes.reads_loader(settings)
                        if self.passes.uneven:
                            self.probes.stay(type(iterator).__next__)
                        self.loader_read(settings, place)
                    self.passes.ranks = steps.ranks
                    self.passes.reads(iterator, new)
                self._reading = t = now()
                outer.append(S[CURRENT])
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = DATA_WAIT
                if marks:
                    mark(DATA_WAIT)
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        return VariableHook(begins, begun, ("self",))

    def _turns_pass(self, starts: bool = False) -> Any:
        """A hook: a pass over the data of a loader ends or starts, and its workers. Its step is timed by phase."""
        steps, traced, grad_enabled = self.steps, self._looks.traced, self.modules.grad_enabled

        def begins(_probe: Any, zero: int) -> int:
            me = get_ident()
            if S[TRAINER] != me or S[TIMED] < 0 or S[BASE] == EVALUATE or traced():
                return zero
            try:
                # A model that trains may be evaluated without `eval()`; what trains reads its batches with gradients.
                if starts and S[DONE] and S[CURRENT] == OTHER and not grad_enabled():
                    self.modules.evaluation(True)
                    return zero
                if S[TIMED] != me:
                    steps.time_this()
                self._enter(DATA_WAIT)
                if starts:
                    self._reading = S[LAST]
                else:
                    self._ending = S[LAST]
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return zero

        return begins

    def _pass_begun(self) -> None:
        self.passes.began(sys._getframe(2))
        self.steps.first_ns += S[LAST] - self._reading

    def _pass_ended(self) -> None:
        self.steps.first_ns += S[LAST] - self._ending

    def _has_read(self) -> None:
        if self.steps.read() and self._origin.active:
            self._origin.left_out()
        if self.passes.gave(sys._getframe(3)):
            self.steps.first_ns += S[LAST] - self._reading

    def _seen(self, look: Callable[[Any], None]) -> Any:
        """A hook that only looks at the frame of its function."""
        steps, traced = self.steps, self._looks.traced

        def hook(_probe: Any, zero: int) -> int:
            try:
                if not traced():
                    look(sys._getframe(1))
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return zero

        return hook

    def _saves(self, frame: Any) -> None:
        """`torch.save` begins."""
        self._writes(frame.f_locals["f"])  # torch opens it without Python
        if S[TRAINER] == get_ident():
            self._enter(CHECKPOINT)
            if self.steps.asides is not None:
                self.steps.asides.begins(CHECKPOINT)

    def _saved(self) -> None:
        if self.steps.asides is not None:
            self.steps.asides.ends(CHECKPOINT)

    def _loader_made(self, frame: Any) -> None:
        self.places.remember(frame.f_locals["dataset"], frame.f_back)

    def _optimizer_made(self, frame: Any) -> None:
        optimizer = frame.f_locals["self"]
        self.steps.made(optimizer)
        self.places.remember(optimizer, frame.f_back)
        self._hook_steps(type(optimizer))
        self.optimizer_made()

    def _optimizer_copied(self, frame: Any) -> None:
        self.steps.made(frame.f_locals["self"])

    def _hook_steps(self, kind: type) -> None:
        """Hook `step` of a class of optimizers, which torch has wrapped when the first one was made."""
        for one in kind.__mro__:
            step = one.__dict__.get("step")
            if wraps_steps(step) and not self.probes.has(step):
                self.probes.put(step, *self._step_hooks, False)

    def _optimizer_hooks(self) -> tuple[VariableHook, VariableHook]:
        """Of the function that torch wraps around each `step` of an optimizer."""
        steps, faking, traced = self.steps, self._looks.faking, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            # In steps that are timed as a whole, the beginning is not noted.
            if steps.skip > 1 and not S[TIMED] and S[BASE] == OTHER:
                return zero
            if traced():
                steps.compiled = True
                return zero
            return 1

        def begun(_probe: Any, given: Any) -> int:
            args, kwargs = given
            try:
                if S[TRAINER] != get_ident() and (S[TRAINER] or faking() or not self._arm()):
                    return 0
                if not args:  # it raises an error
                    return 0
                optimizer = args[0]
                if S[BASE] == EVALUATE and not faking():
                    self.modules.evaluation(False)
                if steps.stepping:
                    # One optimizer may call another.
                    if steps.stepping != key_of(optimizer) and self._within_step(sys._getframe(2)):
                        return 0
                    if S[TIMED]:  # its last step failed, and the script continued
                        enter(steps.outer)
                if faking():
                    return 0
                steps.stepping = key_of(optimizer)
                if not S[TIMED]:
                    return 0
                t = now()
                steps.outer = current = S[CURRENT]
                row[current] += t - S[LAST]
                S[LAST] = t
                # A closure is the script's own code (LBFGS, Lightning), up to its backward pass.
                steps.closure = bool(len(args) > 1 or kwargs) and takes_closure(optimizer, args, kwargs)
                steps.before_closure = steps.backwards
                S[CURRENT] = OTHER if steps.closure else OPTIMIZER
                if marks:
                    mark(S[CURRENT])
            except Exception as error:  # noqa: BLE001
                steps.failed(error)
            return 0

        def ends(_probe: Any, zero: int) -> int:
            if steps.skip > 1 and steps.only == steps.sole and S[TRAINER] == get_ident() and plain():
                return zero
            return zero if traced() else 1

        def plain() -> bool:
            """End a step of the only optimizer that is timed as a whole: all that most of the short steps cost."""
            if steps.stepping or S[CURRENT] != OTHER or row[EVALUATE] or row[CHECKPOINT] or traced():
                return False
            t, done = now(), S[DONE]
            S[LENGTHS_AT + done % MOST_LENGTHS] = (row[OTHER] + t - S[LAST]) << 1
            row[OTHER] = 0
            S[LAST] = t
            S[MICRO] += steps.usual_backwards if steps.nested else steps.backwards
            S[steps.place] += 1
            steps.backwards = 0
            steps.skip -= 1
            S[DONE] = done + 1
            return True

        def ended(_probe: Any, given: Any) -> int:
            try:
                if not given[0]:
                    return 0
                optimizer = given[0][0]
                key = key_of(optimizer)
                if S[TRAINER] != get_ident():
                    if not faking():
                        self._elsewhere(optimizer)
                    return 0
                if steps.skip > 1 and steps.only == key and plain():
                    return 0
                if steps.stepping != key and (steps.stepping or S[TIMED] or faking()):
                    return 0
                steps.stepping = 0
                if S[BASE] == EVALUATE:
                    self.modules.evaluation(False)
                t = now()
                if S[TIMED]:
                    row[S[CURRENT]] += t - S[LAST]
                    S[LAST] = t
                    if steps.outer % WAITING == BACKWARD:
                        S[CURRENT] = steps.outer  # an optimizer that steps within the backward pass
                        if marks:
                            mark(S[CURRENT])
                    else:
                        # Calls that ended with an exception were not all heard.
                        S[CURRENT] = OTHER
                        if marks:
                            mark(OTHER)
                        del steps.phases[:]
                        self.modules.reset()
                steps.closure = False
                steps.optimizer_steps += 1
                steps.remember(optimizer)
                steps.stepped(key, t)
            except Exception as error:  # noqa: BLE001
                steps.failed(error)
            return 0

        return VariableHook(begins, begun, ("args", "kwargs")), VariableHook(ends, ended, ("args",))

    def _within_step(self, frame: Any) -> bool:
        """Whether a frame is called by a step of an optimizer, however indirectly."""
        while frame is not None:
            if frame.f_code.co_name == "wrapper" and id(frame.f_code) in self.probes.codes:
                return True
            frame = frame.f_back
        return False

    def _scaler_hooks(self) -> tuple[Any, Any]:
        """Of a scaler's `step`, which leaves the optimizer's out where gradients are not finite.

        A fused optimizer is called, and leaves the update out by itself.
        """
        steps, looks, before = self.steps, self._looks, [0]

        def begins(_probe: Any, zero: int) -> int:
            before[0] = steps.optimizer_steps + S[DONE]
            return zero

        def ended(frame: Any) -> None:
            if S[TRAINER] != get_ident() or not steps.scaled:
                return
            given = frame.f_locals
            if steps.optimizer_steps + S[DONE] == before[0]:
                steps.finite.updated(True, S[DONE])
                optimizer = given["optimizer"]
                steps.remember(optimizer)
                steps.stepped(key_of(optimizer), now())
                return
            done, found = S[DONE] - 1, given.get("found_inf")
            if not looks.number_on_gpu(found):
                steps.finite.updated(bool(looks.number(found)), done)
            elif steps.values is not None and S[LAST] >= steps.loss_due:
                steps.values.send([found], lambda values: steps.finite.updated(values[0] > 0, done))

        return begins, self._seen(ended)

    def promote(self, code: Any, names: dict[str, Any]) -> bool:
        """Count a function that makes batches as waiting for data; returns whether that is possible.

        names: its globals. From Python 3.12 on nothing is changed for that; before, its code, but not of a generator.
        """
        end = watch(code)
        if end is not None:
            self._undo.append(end)
            self.roots[code] = NAMES[DATA_WAIT]
            return True
        function = function_of(code, names)
        if function is not None and self.probes.put(function, *self.timed(DATA_WAIT), True):
            self.roots[function.__code__] = NAMES[DATA_WAIT]
            return True
        return False
