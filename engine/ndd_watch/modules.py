"""The calls of modules: outermost ones are forward passes, or parts of an evaluation.

All modules share `nn.Module.__call__`, so one probe sees them all. Calls within another module only change a depth.
"""

from __future__ import annotations

import weakref
from array import array
from functools import partial
from threading import get_ident
from typing import Any, Callable

from .apart import module_of
from .clock import (
    BASE,
    CURRENT,
    DONE,
    EVALUATE,
    FORWARD,
    LAST,
    LOSS,
    OPTIMIZER,
    OTHER,
    TIMED,
    TRAINER,
    WAITING,
    S,
    enter,
    evaluation,
    mark,
    marks,
    now,
    row,
)
from .looks import Looks, attribute, key_of
from .mapped import INPUT
from .probes import Probes, VariableHook
from .slowing import Sizes, Tables
from .steps import Steps

# Calls of modules within another one, up to which hearing them costs less than taking the probes out and putting them
# back.
FEW_CALLS = 16
# Calls in a row on stored data, from which on they are an evaluation, and tensors that are remembered as such data.
FEW_STORED, MOST_STORED = 3, 256
# Steps that are timed by phase to look for such an evaluation, until one is found.
MOST_TRIES = 8
_RECURRENT = "torch.nn.modules.rnn"
# The name of a class, without code of its metaclass.
_NAME = type.__dict__["__name__"]


class StoredData:
    """Recognises an evaluation without `eval()` and without a loader: calls in a row that go through stored data.

    Such calls have no gradients, and no backward pass is among them. Their inputs, or the tensors that these are slices
    of, were there before an earlier step and have not changed since. Each input is another part, or has more items than
    a batch of the training. In a rollout, what a model receives depends on what it has answered: it is new.

    count: such calls in a row. It is set to 0 by a call with gradients.
    """

    def __init__(self, steps: Steps, looks: Looks) -> None:
        self._steps, self._looks = steps, looks
        self.count = 0
        # By key: the tensor, how often it had been changed in place, and the steps before it was seen first.
        self._known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        # Of the first call in a row: the steps and backward passes before it, and the times of the step.
        self._at = (0, 0)
        self._times = array("q", row)
        # Of the last call: the key of its tensor, and where its part of that begins.
        self._last = (0, 0)

    def knows(self, tensor: Any) -> bool:
        """Whether an input was there before the present step; it is remembered."""
        found = self._looks.stored(tensor)
        if found is None:
            return False
        whole, changes = found
        key = key_of(whole)
        known = self._known.get(key)
        if known is not None and known[0]() is whole and known[1] == changes:
            return bool(known[2] < S[DONE])
        self._known.pop(key, None)
        if len(self._known) >= MOST_STORED:
            del self._known[next(iter(self._known))]
        # No Python in it: an exception that another thread raises there would be lost.
        gone = partial(self._known.pop, key)
        self._known[key] = weakref.ref(whole, gone), changes, S[DONE]
        return False

    def evaluates(self, given: Any) -> bool:
        """A model that trains is called without gradients; whether this turns out to be an evaluation.

        Its calls so far are part of that then.
        """
        tensor = self._looks.first_tensor(given) if self._looks.allowed() else None
        if tensor is None or not self.knows(tensor):
            self.count = 0
            return False
        shape = self._looks.shape(tensor)
        part = key_of(self._looks.stored(tensor)[0]), self._looks.offset(tensor)  # type: ignore[index]
        large = bool(shape) and shape[0] > S[INPUT] > 0  # type: ignore[index]
        at = S[DONE], self._steps.backwards
        if not self.count or at != self._at or (part == self._last and not large):
            self.count, self._at = 0, at
            enter(S[CURRENT])
            self._times[:] = array("q", row)
        self._last = part
        self.count += 1
        if self.count != FEW_STORED:
            return False
        enter(S[CURRENT])
        spent = sum(row) - sum(self._times)
        row[:] = self._times
        row[EVALUATE] += spent
        return True


class Modules:
    """looks: reads what belongs to the script. grad_enabled: torch.is_grad_enabled."""

    def __init__(self, steps: Steps, looks: Looks, grad_enabled: Callable[[], bool]) -> None:
        self._steps, self._looks, self.grad_enabled = steps, looks, grad_enabled
        # Keys of modules that were called outermost with gradients, and the classes of all that trained.
        self._trained: set[int] = set()
        self._kinds: set[int] = set()
        # Those that were called without gradients, such as a teacher.
        self._silent: set[int] = set()
        self.stored = StoredData(steps, looks)
        # Steps that were timed by phase to look for evaluations, see `_seek`, and what ends that.
        self._tries = 0
        self._end_seeking: Callable[[], None] = lambda: None
        # By key of such a class, whether its input is (time, batch, …).
        self._time_first: dict[int, bool] = {}
        # In the first call of a class that is looked at: its key, the shape of its input, and whether that is of whole
        # numbers.
        self._root: tuple[int, tuple[int, ...], bool] | None = None
        # Hear calls of modules, or do not.
        self._listen: Callable[[bool], None] = lambda on: None
        # Called with the first tensor that a model receives, and whether it does so with gradients.
        self.received: Callable[[Any, bool], None] | None = None
        # In a profiled step: count the hooks of the models that train, and the rows of embeddings that it reads.
        self.sizes: Sizes | None = None
        self.tables: Tables | None = None
        # Of a capture and of a profiled step: `enters` and `leaves` hear every call.
        self.watch: Any = None
        # DistributedDataParallel, if this process exchanges data, and its modules.
        self.replica: type | None = None
        self.replicas: list[weakref.ref[Any]] = []
        self._depth = [0]
        # Calls within outermost ones, and whether those within the present one are not heard.
        self._calls = [0]
        self._deaf = False
        # In a trial: what wraps the call of an outermost module, the innermost one first; and the changed classes.
        self.around: list[Callable[..., Any]] = []
        self._wrapped: dict[type, Any] = {}

    def install(self, torch: Any, probes: Probes) -> None:
        """Put the probes in place."""
        base = torch.nn.Module
        if probes.put(base.__call__, *self._call_hooks(), False, "all"):
            self._listen = probes.switch(base.__call__)
        probes.put(base.train, self._mode_hook(), None, False)
        self._steps.some_long = lambda: self._seek(torch, probes)

    def _seek(self, torch: Any, probes: Probes) -> None:
        """Some steps are much longer than the others: look for evaluations where gradients are turned off.

        In steps that are timed as a whole, calls of modules are not heard.
        """
        self._steps.some_long = lambda: None
        entries = [one.__enter__ for one in (torch.no_grad, torch.inference_mode)]
        switches = [
            probes.switch(entry) for entry in entries if probes.put(entry, self._no_gradients(), None, False)
        ]

        def end() -> None:
            for switch in switches:
                switch(False)

        self._end_seeking = end

    def _no_gradients(self) -> Any:
        """A hook: gradients are turned off, perhaps for an evaluation between two steps."""
        steps, traced = self._steps, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            if S[TIMED] or steps.backwards or S[TRAINER] != get_ident() or traced():
                return zero
            try:
                self._tries += 1
                if self._tries > MOST_TRIES:
                    self._end_seeking()
                else:
                    steps.time_this()
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return zero

        return begins

    def reset(self) -> None:
        """No module is being called: calls that ended with an exception were not heard."""
        if self._depth[0]:
            self._depth[0] = 0
            self._deaf = False
            self._listen(True)

    def count(self, sizes: Sizes, tables: Tables) -> None:
        """The next step is profiled."""
        self.sizes, self.tables, self.watch = sizes, tables, tables

    def end_counting(self) -> None:
        """It has ended, or is profiled no more. Safe to call twice."""
        if self.watch is self.tables:
            self.watch = None
        self.sizes = self.tables = None

    def _call_hooks(self) -> tuple[Any, Any]:
        steps, depth, calls, traced = self._steps, self._depth, self._calls, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            if S[TRAINER] != get_ident():
                return zero
            if depth[0]:
                depth[0] += 1
                calls[0] += 1
                return zero if (self._root is None and self.watch is None) or traced() else 1
            depth[0] = 1
            return zero if traced() else 1

        def begun(_probe: Any, given: Any) -> int:
            try:
                if depth[0] > 1:
                    if self._root is not None:
                        self._inner(*given)
                else:
                    self._outermost(*given)
                if self.watch is not None:
                    self.watch.enters(given[0], depth[0], given[1:])
                if depth[0] > 1:
                    return 0
                if calls[0] <= FEW_CALLS or self.watch is not None:
                    calls[0] = 0
                elif self._root is None:
                    self._deaf = True
                    self._listen(False)  # calls within this one
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        def ends(_probe: Any, zero: int) -> int:
            if S[TRAINER] != get_ident():
                return zero
            if self.watch is not None:
                try:
                    self.watch.leaves(depth[0])
                except Exception as error:  # noqa: BLE001
                    steps.missed(error)
            inside = depth[0] - 1
            if inside > 0:
                depth[0] = inside
                return zero
            depth[0] = 0
            if self._deaf and S[TIMED]:
                self._deaf = False
                self._listen(True)
            if FORWARD <= S[CURRENT] % WAITING <= LOSS and S[TIMED] > 0:
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = OTHER
                if marks:
                    mark(OTHER)
            if self._root is not None:
                (key, shape, whole), self._root = self._root, None
                try:
                    self._receives(shape, self._time_first.setdefault(key, False), whole)
                except Exception as error:  # noqa: BLE001
                    steps.missed(error)
            return zero

        return VariableHook(begins, begun, ("self", "args", "kwargs")), ends

    def _outermost(self, module: Any, args: Any, kwargs: Any) -> None:
        """A module is called from outside other modules."""
        # A module of TorchScript does not keep it here.
        training, grad = attribute(module, "training"), self.grad_enabled()
        if training is None:
            training = grad
        if S[BASE] == EVALUATE:
            if not (training and grad):
                enter(S[CURRENT])  # it makes progress
                if self._steps.asides is not None:
                    self._steps.asides.goes_on()
                self._own_evaluation(module)
                return
            self.evaluation(False)
        current, kind = S[CURRENT], type(module)
        # Within another phase: a transform in a dataset, a call that is recomputed within the backward pass.
        if current != OTHER and not (current == OPTIMIZER and self._steps.closure):
            return
        trains = training or grad
        # Others that only compute, such as a teacher or an encoder that is frozen, are part of the step.
        if not trains and key_of(kind) in self._kinds:
            self.evaluation(True)
            self._own_evaluation(module)
            return
        if grad:
            self.stored.count = 0
        elif key_of(module) in self._trained and self.stored.evaluates((args, kwargs)):
            self._tries = 0
            self.evaluation(True)
            return
        loss = "modules.loss" in module_of(kind)
        if trains and not loss:
            (self._trained if grad else self._silent).add(key_of(module))
            self._kinds.add(key_of(kind))
            if self.replica is not None and isinstance(module, self.replica):
                self._replicate(module)
            if self.received is not None or (self._steps.shape is None and grad):
                self._look(kind, (args, kwargs))
            if self.sizes is not None:
                begin = now()
                self.sizes.model(module)
                self._steps.leave_out(now() - begin)
            if self.around and kind not in self._wrapped:
                self._wrap(kind)
        if S[TIMED] <= 0:
            return
        if grad:
            self._steps.computed = True
        t = now()
        row[current] += t - S[LAST]
        S[LAST] = t
        S[CURRENT] = LOSS if loss else FORWARD
        if marks:
            mark(S[CURRENT])

    def _own_evaluation(self, module: Any) -> None:
        """A module is called in an evaluation. Stored data may also be gone through in each step, to choose from it."""
        if self.stored.count < FEW_STORED:
            self._steps.own_evaluation |= key_of(module) in self._trained or key_of(module) in self._silent

    def _replicate(self, module: Any) -> None:
        """Remember a DistributedDataParallel."""
        alive = [one for one in self.replicas if one() is not None]
        if all(one() is not module for one in alive):
            self.replicas = [*alive, weakref.ref(module)]

    def _look(self, kind: type, given: Any) -> None:
        """Look at a model and its input."""
        self._steps.model = self._steps.model or _NAME.__get__(kind)
        if not self._looks.allowed():
            return
        tensor = self._looks.first_tensor(given)
        if tensor is None:
            return
        if self.received is not None:
            self.received(tensor, self.grad_enabled())
        self.stored.knows(tensor)
        shape = self._looks.shape(tensor)
        if shape is None:
            return
        if len(shape) == 1 and self._looks.fractions(tensor):
            shape = ()  # the features of one item, such as the state of an environment
        whole, known = self._looks.whole_numbers(tensor), self._time_first.get(key_of(kind))
        if known is None:
            self._root = key_of(kind), shape, whole
        else:
            self._receives(shape, known, whole)

    def _receives(self, shape: tuple[int, ...], time_first: bool, whole: bool) -> None:
        """A model has received a tensor of this shape, of whole numbers or not."""
        if not self.grad_enabled():  # it acts, or labels, before it is trained
            return
        if time_first and len(shape) > 1:
            shape = (shape[1], shape[0], *shape[2:])
        items, before = shape[0] if shape else 0, self._steps.shape
        if before and items <= before[0]:  # another call of the step, as for a boundary of the same batch
            return
        self._steps.shape, self._steps.whole_numbers = shape, whole
        S[INPUT] = items

    def _inner(self, module: Any, args: Any, _kwargs: Any) -> None:
        """A module within one whose class is looked at for the first time: a recurrent one tells the order."""
        if module_of(type(module)) == _RECURRENT and attribute(module, "batch_first") is False:
            tensor = self._looks.first_tensor(args)
            shape = None if tensor is None else self._looks.shape(tensor)
            root, first, _ = self._root or (0, (), False)
            self._time_first[root] = bool(shape and first) and shape[0] == first[0]  # type: ignore[index]

    def _mode_hook(self) -> VariableHook:
        """Of `train`, which `eval` calls: all between `eval` of what trains and the next training is an evaluation."""
        steps, traced = self._steps, self._looks.traced

        def begins(_probe: Any, zero: int) -> int:
            return zero if S[TRAINER] != get_ident() or traced() else 1

        def begun(_probe: Any, given: Any) -> int:
            module, mode = given
            try:
                if key_of(type(module)) in self._kinds:
                    if mode is False and S[BASE] == OTHER == S[CURRENT] and not self._depth[0]:
                        self.evaluation(True)
                        self._own_evaluation(module)
                    elif mode is True and S[BASE] == EVALUATE:
                        self.evaluation(False)
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        return VariableHook(begins, begun, ("self", "mode"))

    def evaluation(self, on: bool) -> None:
        """The script begins or ends an evaluation; all of it belongs to one phase."""
        S[BASE] = EVALUATE if on else OTHER
        self._steps.time(-1 if on else S[TRAINER] * (not self._steps.skip))
        evaluation(on)
        if (asides := self._steps.asides) is not None:
            (asides.begins if on else asides.ends)(EVALUATE)

    # In a trial.

    def _wrap(self, kind: type) -> None:
        """Have the calls of modules of a class go through `around`, from the next one on."""
        inherited = next(one.__dict__["__call__"] for one in kind.__mro__ if "__call__" in one.__dict__)
        self._wrapped[kind] = kind.__dict__.get("__call__")
        compiling, depth = self._looks.compiling, self._depth

        def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            call: Any = inherited
            if not (compiling() or depth[0] or S[TRAINER] != get_ident()):
                for wrap in self.around:
                    call = wrap(call)
            return call(module, *args, **kwargs)

        kind.__call__ = __call__  # type: ignore[method-assign]

    def unwrap(self) -> None:
        """Restore the changed classes."""
        while self._wrapped:
            kind, before = self._wrapped.popitem()
            if before is None:
                del kind.__call__
            else:
                kind.__call__ = before  # type: ignore[method-assign]
