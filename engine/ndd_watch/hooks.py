"""The hooks on torch: loaders, backward passes, optimizers, zeroed gradients, clipping, saving, train and eval.

Every hook calls the original exactly once and lets its errors through. Our own errors end the observation, never the
script.
"""

from __future__ import annotations

import sys
from functools import wraps
from threading import get_ident
from typing import Any, Callable

from . import monitor
from .clock import (
    BACKWARD,
    BASE,
    CHECKPOINT,
    CLIP,
    CURRENT,
    DATA_WAIT,
    EVALUATE,
    LAST,
    NAMES,
    OPTIMIZER,
    OTHER,
    TIMED,
    TO_DEVICE,
    TRAINER,
    WAITING,
    ZERO_GRAD,
    S,
    closure_of,
    enter,
    now,
    row,
    wholes,
)  # fmt: skip
from .modules import Modules
from .own import own_frame
from .places import Places
from .steps import Steps
from .waits import Waits

Function = Callable[..., Any]


class Hooks:
    """Puts the hooks in place and takes them out again.

    steps, modules: of this process. arm: called before the first backward pass, whether to observe. own: whether
    a code object is the script's own. writes: called with a path that the script is about to write.
    """

    def __init__(
        self,
        steps: Steps,
        modules: Modules,
        compiling: Callable[[], bool],
        arm: Callable[[], bool],
        own: Callable[[Any], bool],
        writes: Callable[[Any], None],
    ) -> None:
        self.steps, self.modules = steps, modules
        self._compiling, self._arm, self._own, self.writes = compiling, arm, own, writes
        # How each hook is undone, in the order in which they were made.
        self._undo: list[Callable[[], Any]] = []
        self.waits = Waits(compiling, steps)
        # The iterator that the training reads.
        self._iterator = 0
        self.places = Places(own)
        # Set by `install`: called with the settings of a loader when the training begins to read it.
        self.loader_read: Callable[[dict[str, Any], Any], None] = lambda settings, place: None

    # In and out.

    def install(self, torch: Any) -> None:
        """Hook torch."""
        from torch.optim import optimizer as optimizers
        from torch.utils.data import dataloader

        self.patch(torch.autograd, "backward", self._backward)
        self.patch(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self.patch(dataloader.DataLoader, "__iter__", self.timed, DATA_WAIT)
        self.patch(dataloader.DataLoader, "__init__", self.places.loader_made)
        self.patch(torch.nn.Module, "train", self._train)
        self.patch(torch.nn.Module, "zero_grad", self.timed, ZERO_GRAD, self.steps.zeroed)
        self.patch(optimizers.Optimizer, "zero_grad", self.timed, ZERO_GRAD)
        self.patch(optimizers.Optimizer, "__init__", self.places.optimizer_made, self.steps)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self.patch(torch.nn.utils, name, self.timed, CLIP)
        scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
        self.patch(scaler, "unscale_", self.timed, CLIP)
        self.patch(scaler, "step", self._scaler_step)
        self.patch(torch, "save", self._save)
        if torch.version.cuda or torch.version.hip:
            # Never ask whether there is a GPU: that would keep a later fork from using it.
            for name in ("to", "cuda"):
                self.patch(torch.Tensor, name, self.timed, TO_DEVICE)
        self._undo.append(optimizers.register_optimizer_step_pre_hook(self._optimizer_begins).remove)
        self._undo.append(optimizers.register_optimizer_step_post_hook(self._optimizer_ended).remove)

    def remove(self) -> None:
        """Take all hooks out, except where somebody has put another one on top."""
        while self._undo:
            self._undo.pop()()
        self.modules.unhook_all()

    def patch(self, owner: Any, name: str, make: Function, *more: Any) -> None:
        """Replace an attribute by make(it, *more), if there is one."""
        original = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
        if original is None:
            return
        ours = make(original, *more)
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

        self._undo.append(undo)

    def timed(
        self, original: Function, phase: int, after: Callable[[], Any] | None = None, who: int = TIMED
    ) -> Function:
        """The function, whose time counts towards a phase. after: called when it has returned.

        who: TRAINER counts it also during evaluations and in steps that are not timed by phase.
        """
        compiling, steps = self._compiling, self.steps

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling() or S[who] != get_ident():
                return original(*args, **kwargs)
            t = now()
            outer = S[CURRENT]
            row[outer] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = phase
            try:
                return original(*args, **kwargs)
            finally:
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = outer
                if after is not None:
                    try:
                        after()
                    except Exception as error:  # noqa: BLE001
                        steps.give_up(error)

        return call

    # The hooks.

    def _backward(self, original: Function) -> Function:
        compiling, steps, waits = self._compiling, self.steps, self.waits

        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            me = get_ident()
            if S[TIMED] != me:
                if S[TRAINER] == me and S[TIMED] == 0 and S[BASE] != EVALUATE:
                    steps.backwards += 1  # of a step that is timed as a whole
                    return original(*args, **kwargs)
                try:
                    if not self._begins_training():
                        return original(*args, **kwargs)
                except Exception as error:  # noqa: BLE001
                    steps.give_up(error)
                    return original(*args, **kwargs)
            outer = S[CURRENT]
            if outer % WAITING == BACKWARD:
                steps.nested = True
                return original(*args, **kwargs)
            try:
                steps.backwards += 1
                if steps.caller is None:
                    # The innermost function of the script: it contains the loop.
                    frame = own_frame(sys._getframe(1), self._own)
                    steps.caller = frame.f_code if frame is not None else None
                if steps.ranks or steps.gate is not None or S[LAST] >= steps.loss_due:
                    loss: Any = args[0] if args else kwargs.get("tensors")
                    steps.keep(loss)
                    if steps.ranks:
                        waits.before_backward(loss)
            except Exception as error:  # noqa: BLE001
                steps.give_up(error)
                return original(*args, **kwargs)
            t = now()
            row[outer] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = BACKWARD
            try:
                return original(*args, **kwargs)
            finally:
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = outer
                try:
                    if steps.ranks:
                        waits.after_backward()
                    if not steps.ends_known:
                        steps.ended_backward()
                except Exception as error:  # noqa: BLE001
                    steps.give_up(error)

        self.modules.calls(backward, BACKWARD)
        return backward

    def _begins_training(self) -> bool:
        """Whether a backward pass outside the timed thread is to be timed; counts one that ends an evaluation."""
        me = get_ident()
        if S[TRAINER] not in (0, me):
            return False
        if not S[TRAINER]:
            return self._arm()
        if S[BASE] == EVALUATE:
            self.modules.evaluation(False)
        if not S[TIMED]:
            self.steps.backwards += 1
            return False
        return True

    def _next(self, original: Function) -> Function:
        @wraps(original)
        def __next__(iterator: Any) -> Any:
            if S[TIMED] != get_ident():
                if S[BASE] != EVALUATE or S[TRAINER] != get_ident() or id(iterator) != self._iterator:
                    return original(iterator)
                self.modules.evaluation(False)  # the training reads its own loader again
                if not S[TIMED]:
                    return original(iterator)
            if self._iterator != id(iterator):
                self._iterator = id(iterator)
                try:
                    self.loader_read(*self.places.loader_of(iterator))
                except Exception as error:  # noqa: BLE001
                    self.steps.give_up(error)
                    return original(iterator)
            t = now()
            outer = S[CURRENT]
            row[outer] += t - S[LAST]
            S[LAST] = t
            S[CURRENT] = DATA_WAIT
            try:
                return original(iterator)
            finally:
                t = now()
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = outer

        self.modules.calls(__next__, DATA_WAIT)
        return __next__

    def _save(self, original: Function) -> Function:
        timed, writes = self.timed(original, CHECKPOINT, None, TRAINER), self.writes

        @wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(f, "write"):
                writes(f)  # torch opens it without Python
            return timed(obj, f, *args, **kwargs)

        return save

    def _train(self, original: Function) -> Function:
        modules = self.modules

        @wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            if S[TRAINER] == get_ident() and type(module) in modules.hooked:
                if not mode and S[BASE] == OTHER == S[CURRENT]:
                    modules.evaluation(True)
                elif mode and S[BASE] == EVALUATE:
                    modules.evaluation(False)
            return original(module, mode)

        return train

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """A global hook of torch before each optimizer step."""
        if S[TRAINER] != get_ident():
            return None
        if S[BASE] == EVALUATE:
            self.modules.evaluation(False)
        steps = self.steps
        stepping = steps.stepping
        if stepping is not None:
            if stepping is not optimizer:  # one optimizer may call another
                return None
            if S[TIMED]:  # its last step failed, and the script went on
                enter(steps.outer)
        steps.stepping = optimizer
        if not S[TIMED]:
            return None
        t = now()
        steps.outer = outer = S[CURRENT]
        row[outer] += t - S[LAST]
        S[LAST] = t
        S[CURRENT] = OPTIMIZER
        # A closure is the script's own code (LBFGS, Lightning); so is its time that no other hook takes.
        if len(args) > 1 and callable(args[1]):
            return (args[0], closure_of(args[1]), *args[2:]), kwargs
        if kwargs and callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": closure_of(kwargs["closure"])}
        return None

    def _optimizer_ended(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """A global hook of torch after each optimizer step."""
        if S[TRAINER] != get_ident():
            return
        steps = self.steps
        # None if the first backward pass of the process was in the closure of this step.
        if steps.stepping is not None and steps.stepping is not optimizer:
            return
        steps.stepping = None
        try:
            if steps.skip > 1 and S[CURRENT] == OTHER and not (row[EVALUATE] or row[CHECKPOINT]):
                # All that most of the short steps cost.
                t = now()
                wholes.append(row[OTHER] + t - S[LAST])
                row[OTHER] = 0
                S[LAST] = t
                steps.done += 1
                steps.micro += steps.usual_backwards if steps.nested else steps.backwards
                steps.backwards = 0
                steps.skip -= 1
                return
            if S[BASE] == EVALUATE:
                self.modules.evaluation(False)
            t = now()
            if S[TIMED]:
                row[S[CURRENT]] += t - S[LAST]
                S[LAST] = t
                S[CURRENT] = steps.outer
            steps.stepped(optimizer, t)
        except Exception as error:  # noqa: BLE001
            steps.give_up(error)

    def _scaler_step(self, original: Function) -> Function:
        steps = self.steps

        @wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = steps.count_of(optimizer), steps.done
            result = original(scaler, optimizer, *args, **kwargs)
            try:
                if S[TRAINER] == get_ident() and (steps.count_of(optimizer), steps.done) == before:
                    steps.skipped_updates += 1  # infinite gradients
                    steps.stepped(optimizer, now())
            except Exception as error:  # noqa: BLE001
                steps.give_up(error)
            return result

        return step

    def promote(self, code: Any, names: dict[str, Any]) -> bool:
        """Count a function that makes batches as waiting for data; returns whether that is possible.

        A function that is looked up by its global name at each call is replaced; any other one, such as a generator
        that exists, can be timed from Python 3.12 on.
        """
        found: Any = names.get(code.co_name)
        if id(getattr(found, "__code__", None)) != id(code) or code.co_flags & 0x20:
            end = monitor.watch(code)
            if end is not None:
                self._undo.append(end)
                self.modules.roots[code] = NAMES[DATA_WAIT]
            return end is not None
        ours = self.timed(found, DATA_WAIT)
        names[code.co_name] = ours
        self.modules.roots[code] = NAMES[DATA_WAIT]

        def undo() -> None:
            if names.get(code.co_name) is ours:
                names[code.co_name] = found

        self._undo.append(undo)
        return True
