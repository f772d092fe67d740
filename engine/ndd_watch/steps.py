"""Counts the steps of the thread that trains, with an optimizer or without, and decides which are timed by phase.

A step ends where the optimizer steps, see `Ends`. Without an optimizer, gradients that are zeroed after a backward
pass end it, and without that every backward pass does. A compiled optimizer is not heard, which is the same. Further
backward passes of the only optimizer are micro-steps.

Timing the phases of a step costs 0.06 to 0.3 ms, mostly because our code is no longer in the caches of the processor.
Of short steps only one of `every` is timed by phase, and all of them as a whole. Which ones depends on their number
only, and is irregular: where a loader has four workers, every fourth batch may be a slow one.

Ranks that exchange data are compared step by step. A rank that times fewer steps times some of those that the others
time, and windows end at multiples of powers of two, without a word between the ranks.

A training may also use gradients of `torch.autograd.grad`, and update by hand. Such a call is a backward pass of a
training if the tensors that it differentiates by have been changed in place since an earlier call. Those of an attack
or a saliency map are new each time, and beside a penalty there is an optimizer.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from threading import get_ident
from typing import Any, Callable

from . import clock
from .apart import WithoutCompiler, ours
from .clock import (
    BACKWARD,
    CHECKPOINT,
    CURRENT,
    DATA_WAIT,
    DONE,
    EVALUATE,
    FORWARD,
    LAST,
    OTHER,
    TIMED,
    TRAINER,
    ZEROS,
    DeviceValues,
    S,
    enter,
    gpu,
    mark,
    marks,
    now,
    rest,
    row,
)
from .finite import FEW_LOOKS, Finite
from .looks import Looks, key_of, own_frame
from .loops import Ends
from .mapped import (
    BEGUN,
    CORRECTION,
    FIRST_NS,
    LEFT,
    LENGTHS_AT,
    MICRO,
    MOST_LENGTHS,
    MOST_OPTIMIZERS,
    OPEN,
    PASSES,
    PENDING,
    STEPPED,
)
from .probes import VariableHook
from .profiler import Asides
from .slowing import Garbage, KeptGraphs, Retained, Slowing

WINDOW_NS = int(float(os.environ.get("NDD_WATCH_WINDOW_S", "1")) * 1e9)
# From one loss that is read to the next: reading one costs several microseconds.
LOSS_NS = WINDOW_NS // 10
# For each backward pass of so long a step, the loss is read where that does not wait for a GPU.
LONG_NS = 40_000_000
# From one profiled step to the next; 0: none.
PROFILE_NS = int(float(os.environ.get("NDD_WATCH_PROFILE_S", "30")) * 1e9)
# What timing the phases of a step costs, and how much more at most where the step itself has emptied the caches: 1/256
# of it. The share of a step that it may cost.
COST_NS, MOST_MORE_NS = 300_000, 600_000
SHARE = float(os.environ.get("NDD_WATCH_SHARE", "0.0025"))
MOST_SKIPPED = 64
# So much longer than usual are steps that may have an evaluation.
MUCH_LONGER = 4
# Backward passes, without a step of an optimizer, after which they end the steps, or zeroed gradients do.
FEW_BACKWARDS = 8
# The same where an optimizer exists, and no compiler has read its step: it is likely to be heard later.
SILENT_BACKWARDS = 100
# Of several optimizers, some of them compiled: zeroed gradients in a row without a step, after which they end steps.
FEW_ZEROED = 3
# Batches without a backward pass from which on a closer look tells whether their losses are not finite.
SOME_LEFT_OUT = 3
# Errors of ours in hooks that look, of which the last one ends the observation.
MOST_MISSES = 3
_GOLDEN = 0x9E3779B9


def timed_every(step_ns: int) -> int:
    """Of how many steps of this length one is timed by phase, so that timing takes at most SHARE of them."""
    cost_ns = COST_NS + min(step_ns >> 8, MOST_MORE_NS)
    return min(int(cost_ns / (SHARE * step_ns)) + 1, MOST_SKIPPED) if step_ns else 1


class Steps:
    """The steps of a process.

    backwards: backward passes in the current step. compiled: a compiler has read the step of one, which is not heard
    from then on. ends_known: something else than a backward pass ends the steps. loss: value of a recent backward
    pass; loss_due: when the next one is read, on the clock. That of a milestone is read in any case: runs can be
    compared at the same steps. model: the name of the class of what is trained; shape: of its first input. caller: code
    of the function that contains the training loop. every: one of so many steps is timed by phase; skip: number of
    further steps that are not. ranks: this process exchanges data with other ranks.
    """

    def __init__(self) -> None:
        self.backwards = 0
        # The model was called with gradients since a batch was read, in a step that is timed by phase.
        self.computed = False
        # Batches of such steps that were computed and have no backward pass: since the last window, and all of them.
        self.left_out = self.all_left_out = 0
        self.compiled = self.ends_known = False
        # The optimizers that were made, and the key of the only one that is left of them; 0 where there are others.
        self._made: list[weakref.ref[Any]] = []
        self.sole = 0
        # (the steps before it, its value).
        self.loss: tuple[int, float] | None = None
        # A gradient scaler multiplies the losses: their own values are seen before that.
        self.scaled = False
        # The device of the training, whether the next loss is to tell it, what reads values there if it is a GPU, and
        # what its clock has measured: (steps before, nanoseconds by phase).
        self.device: Any = None
        self.device_due = True
        self.values: DeviceValues | None = None
        # Losses of a GPU that have arrived.
        self.late: list[tuple[int, float]] = []
        self.loss_due = 0
        # Steps before the next milestone, and the losses at those since the last window, by the steps before them.
        self.milestone = 1
        self.milestone_losses: dict[int, float] = {}
        self.model = ""
        self.shape: tuple[int, ...] | None = None
        self.whole_numbers = False
        self.caller: Any = None
        self.graphs, self.retained = KeptGraphs(), Retained()
        self.finite = Finite()
        self.ends = Ends()
        self._places: dict[int, int] = {}  # of optimizers, in the memory
        # The key of the optimizer that steps at present, the phase around it, whether it got a closure, and the
        # backward passes before that.
        self.stepping = self.outer = self.before_closure = 0
        self.closure = False
        # Phases around the current one, and steps of optimizers that were heard.
        self.phases: list[int] = []
        self.optimizer_steps = 0
        # Without a step of an optimizer: backward passes; zeroed gradients, and in a row; whether these end the steps.
        self._passes = self._zeroed = self._in_a_row = 0
        self._zeroing = False
        # Steps of optimizers, and steps, when gradients were zeroed last.
        self._heard_zeroed = 0
        # Steps that were counted although no optimizer was heard, and those of them while there was none.
        self._assumed = self._alone = 0
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self.every, self.skip, self.usual_backwards = 1, 0, 1
        # Whether steps are so long that each loss on the CPU can be read.
        self.long = False
        # The key of the only optimizer, where steps are timed as a whole, and where its steps are counted.
        self.only, self.place = 0, STEPPED
        # Backward passes happen within others, as of checkpointed activations. Only steps that are timed by phase tell
        # them apart.
        self.nested = False
        self.ranks = False
        # Whether the model that is trained was evaluated in the current step, and the last step in which calls of any
        # module looked like an evaluation.
        self.own_evaluation = False
        self.evaluated = -2
        # Of the current step: nanoseconds that it waited for the first batch of a pass over the data. Of all:
        # nanoseconds of evaluations and checkpoints.
        self.first_ns = self.aside_ns = 0
        # Of the window: steps after which there was an evaluation, and those with a checkpoint.
        self._evaluations = self._checkpoints = 0
        # The norm of the gradients, as a call that clips them has told it last.
        self.grad_norm: float | None = None
        # Set by the hooks: takes those out that steps without phases do not need, or puts them back.
        self.rest: Callable[[bool], None] = lambda on: None
        # Set by `Modules`: called where steps are timed as a whole that are much longer than the others.
        self.some_long: Callable[[], None] = lambda: None
        # Set by `install`: ends a window; learns from a step; called at the end of each step by a trial; called with
        # our own errors, at the end and for a figure that is lost.
        self.window: Callable[[], None] = lambda: None
        self.study: Callable[[int], None] | None = None
        self.gate: Callable[[], None] | None = None
        # Profiles evaluations and checkpoints; set by `install`.
        self.asides: Asides | None = None
        self.give_up: Callable[[BaseException], None] = lambda error: None
        self.lost: Callable[[BaseException], None] = lambda error: None
        self._misses = 0
        # Set by `install`: called with time that a look within a step took.
        self.looked: Callable[[int], None] = lambda ns: None
        self.slowing = Slowing()
        # Set by the hooks: whether tensors have no values at present.
        self.faking: Callable[[], bool] = lambda: False
        # Whether the current step is observed more closely, and when the next one is; whether the window has a step
        # under torch's profiler.
        self.studying = self.profiled = False
        self.next_study = 0
        # Before that moment, another closer look would cost too much. The usual time of a step; 0 before it is known.
        self.earliest = self.usual_ns = 0
        # The last step by phase, where it is observed more closely.
        self.last_row: list[int] = [0] * len(ZEROS)
        self.garbage = Garbage()
        # Steps before the present window, and, of a rank, after which it ends; 0 before that is known.
        self._window_begin = self._window_end = 0

    @property
    def done(self) -> int:
        """Steps so far."""
        return int(S[DONE])

    def made(self, optimizer: Any) -> None:
        """An optimizer is made, or copied."""
        self._made.append(weakref.ref(optimizer))
        self._find_sole()

    def has_optimizer(self) -> bool:
        """Whether an optimizer exists."""
        return any(one() is not None for one in self._made)

    def _find_sole(self) -> None:
        self._made = [one for one in self._made if one() is not None]
        self.sole = key_of(self._made[0]()) if len(self._made) == 1 else 0

    def remember(self, optimizer: Any) -> None:
        """This optimizer has stepped."""
        known = self._optimizers.get(key_of(optimizer))
        if known is None or known() is not optimizer:
            self._optimizers[key_of(optimizer)] = weakref.ref(optimizer)

    def _exists(self, key: int) -> bool:
        known = self._optimizers.get(key)
        return known is not None and known() is not None

    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped and still exist."""
        found = [one for one in (known() for known in self._optimizers.values()) if one is not None]
        self._optimizers = {key_of(one): weakref.ref(one) for one in found}
        return found

    def known_optimizers(self) -> list[Any]:
        """Those, and the ones that were made and have not stepped yet."""
        made = [one for one in (known() for known in self._made) if one is not None]
        return list({key_of(one): one for one in [*made, *self.optimizers()]}.values())

    def missed(self, error: BaseException) -> None:
        """An exception in a hook that looks: it costs a figure if it is ours, and continues if it is the script's."""
        if self._is_defect(error):
            self._misses += 1
            if self._misses < MOST_MISSES:
                self.lost(error)
            else:
                self.give_up(error)

    def failed(self, error: BaseException) -> None:
        """The same in a hook that counts steps: it ends the observation, since no count would be right any more."""
        if self._is_defect(error):
            self.give_up(error)

    def _is_defect(self, error: BaseException) -> bool:
        """Whether it is a defect of ours. Raises it if it is the script's."""
        if not ours(error):
            raise error
        # Near a limit of the script, such an error is none.
        return not isinstance(error, (RecursionError, MemoryError))

    def ended_backward(self, earlier: int = 0) -> None:
        """A backward pass has ended, and nothing else is known to end the steps. earlier: those that were not heard."""
        self._passes += 1 + earlier
        likely = self.has_optimizer() and not self.compiled
        few = SILENT_BACKWARDS if likely and self._zeroed < FEW_BACKWARDS else FEW_BACKWARDS
        if self._passes <= few:
            S[PENDING] = 0 if likely else self._passes
            return
        S[PENDING] = 0
        if self._zeroed and likely:
            self._count_unheard(self._zeroed)
            self.ends_known = self._zeroing = True
            return
        if self._passes == few + 1:
            self._count_unheard(few)
            self.backwards = 1  # those before are counted
        self._end_unheard()

    def zeroed(self) -> None:
        """Gradients were zeroed: this ends a step where no optimizer is heard, as there is none or it is compiled."""
        if self.stepping or not self.backwards or self.faking():
            return
        heard = self.optimizer_steps + S[DONE]
        again, self._heard_zeroed = heard == self._heard_zeroed, heard
        self._in_a_row = self._in_a_row + 1 if again else 1
        if not self._zeroing and (not self.has_optimizer() or (self.compiled and not self.optimizer_steps)):
            self.ends_known = self._zeroing = True
            S[PENDING] = 0
        elif not self._zeroing and self.compiled and self._in_a_row == FEW_ZEROED:
            self._zeroing = True
            self._count_unheard(FEW_ZEROED - 1)
        if self._zeroing and (again or not self.optimizer_steps):
            self._end_unheard()
            self._heard_zeroed = self.optimizer_steps + S[DONE]
        elif again or not self.optimizer_steps:
            # These gradients are no part of a step that an optimizer ends.
            self._zeroed += not self.optimizer_steps
            S[PASSES] += self.backwards
            S[OPEN] = 0
            self.backwards, self.nested = 0, True

    def _end_unheard(self) -> None:
        self._count_unheard(ended=1)
        self.end(now())

    def _count_unheard(self, earlier: int = 0, ended: int = 0) -> None:
        """Count steps that no optimizer has ended. earlier: they were not counted when they ended.

        They are taken back when an optimizer steps: the gradients were used for something else. Not so many of them
        before there was any optimizer: the parameters were changed in another way.
        """
        S[CORRECTION] += earlier
        S[MICRO] += earlier  # each had a backward pass, whose items count
        if not self.compiled:
            self._assumed += earlier + ended
            self._alone += (earlier + ended) * (not self.has_optimizer())

    def stepped(self, key: int, t: int) -> None:
        """An optimizer has stepped, or skipped a step because of infinite gradients. t: when, on the clock."""
        if not self.ends_known:
            self.ends_known, S[PENDING] = True, 0
        if self._zeroing:
            self._zeroing, self._in_a_row = False, 0
        if self._assumed:
            taken_back = self._assumed - (self._alone if self._alone > SILENT_BACKWARDS else 0)
            S[CORRECTION] -= taken_back
            S[MICRO] = max(S[MICRO] - taken_back, 0)
            self._assumed = self._alone = 0
        if key not in self.ends.counts and not any(self._exists(one) for one in self.ends.counts):
            S[CORRECTION] += self.ends.renew(key)
            self._places = {}
        place = self._places.setdefault(key, len(self._places))
        if place < MOST_OPTIMIZERS:
            S[STEPPED + place] += 1
        single = len(self.ends.counts) == 1
        ended, missed = self.ends.stepped(key)
        if single and len(self.ends.counts) > 1 and S[DONE] <= FEW_BACKWARDS:
            S[MICRO] = S[DONE]  # several backward passes of those steps were on one batch
        if missed:
            S[CORRECTION] += missed
        if ended:
            self.end(t)

    def finish(self) -> None:
        """Training has ended: without an optimizer, nothing else ends the last step."""
        if self.backwards and self._zeroing:
            self.end(now())
        if len(self.ends.counts) > 1:
            S[MICRO] += self.ends.begun
        S[CORRECTION] += self.ends.finished()

    def end(self, t: int) -> None:
        """The step ends now, on the clock."""
        row[S[CURRENT]] += t - S[LAST]
        S[LAST] = t
        # The step after a first batch is timed by phase as well: its read tells whether the pass continues.
        first = self.first_ns
        if row[EVALUATE] or row[CHECKPOINT] or first:
            self._set_aside()
        if marks:
            mark(S[CURRENT])
            gpu.end()
        done = S[DONE]
        place = LENGTHS_AT + done % MOST_LENGTHS
        if self.studying or t > self.next_study:
            self.last_row = row.tolist()
        if self.studying:  # such a step is slower than the others
            S[place] = S[LEFT] = 0
            self.computed = False
            for phase, spent in enumerate(self.last_row):
                rest[phase] += spent
        elif self.skip:
            S[place] = sum(row) << 1
            self.skip -= 1
            if self.nested:
                self.backwards = self.usual_backwards
            if not self.skip:
                self.time_this()
        else:
            clock.add_row()
            S[LEFT], self.computed = 0, False
            S[place] = sum(row) << 1 | 1
            if done >= self.milestone:
                self.milestone = later_milestone(self.milestone, done)
            if self.every > 1 and self.ends.only and not first:
                skip = min(untimed(done + 1, self.every), self.milestone - done - 1)
                self.skip, self.usual_backwards = skip, self.backwards
                self.only, self.place = self.ends.only, STEPPED + self._places.get(self.ends.only, 0)
                if self.skip:
                    self.time(0)
        row[:] = ZEROS
        S[DONE] = done + 1
        # Of several optimizers, each has backward passes of its own on the same batch.
        S[MICRO] += self.ends.batches if len(self.ends.counts) > 1 else self.backwards
        self.backwards = S[PASSES] = S[OPEN] = 0
        if t > gpu.due and not self.skip:
            gpu.sample(t, S[CURRENT], done + 1)
        if self.studying or t > self.next_study or t - S[BEGUN] >= WINDOW_NS or self.gate is not None:
            with WithoutCompiler():
                self._sometimes(t)

    def _set_aside(self) -> None:
        """Evaluations, checkpoints and first batches do not belong to the step in which they happen.

        All steps with a first batch are timed by phase, and only some of the others. What looks like an evaluation of
        another model in each step is part of the step: a teacher, a target network.
        """
        if row[EVALUATE]:
            each = self.evaluated == S[DONE] - 1 and not self.own_evaluation
            self.evaluated, self.own_evaluation = S[DONE], False
            if each:
                row[FORWARD] += row[EVALUATE]
                row[EVALUATE] = 0
                gpu.rename(EVALUATE, FORWARD)
        else:
            each = False
        if self.asides is not None:
            self.asides.settle(each)
        gpu.set_aside()
        self._evaluations += row[EVALUATE] > 0
        self._checkpoints += row[CHECKPOINT] > 0
        for phase, spent in (
            (EVALUATE, row[EVALUATE]),
            (CHECKPOINT, row[CHECKPOINT]),
            (DATA_WAIT, min(self.first_ns, row[DATA_WAIT])),
        ):
            clock.set_aside(phase, spent)
            if phase == DATA_WAIT:
                S[FIRST_NS] += spent
            else:
                self.aside_ns += spent
        self.first_ns = 0

    def take(self) -> dict[str, Any]:
        """What happened since the last call, as a window tells it; the newest norm of gradients is told, too."""
        found = {
            "evaluations": self._evaluations, "checkpoints": self._checkpoints, "left_out": self.left_out,
        }  # fmt: skip
        self._evaluations = self._checkpoints = self.left_out = 0
        self.grad_norm = None
        return found

    def read(self) -> bool:
        """The next batch was read, in a step that is timed by phase. Returns whether the one before was left out."""
        left_out = self.computed and not self.backwards
        if left_out:
            S[LEFT] += 1
            self.left_out += not self.studying  # such steps have no row
            self.all_left_out += 1
            if self.all_left_out >= SOME_LEFT_OUT:
                self.finite.suspicious(FEW_LOOKS)
        self.computed = False
        return left_out

    def leave_out(self, ns: int) -> None:
        """A look within the step took this time, which is no part of it."""
        S[LAST] += ns
        self.looked(ns)

    def wants_loss(self) -> bool:
        """Whether the loss of this step is to be read."""
        return S[LAST] >= self.loss_due or S[DONE] == self.milestone or self.gate is not None

    def time_this(self) -> None:
        """Time the step that has begun by phase, from now on."""
        self.skip = 0
        self.time(S[TRAINER])

    def look_again(self) -> None:
        """The current step continues for longer than usual: perhaps it ends in another way from now on."""
        self.skip = 1
        self.rest(False)

    def time(self, thread: int) -> None:
        """Time the phases of a thread; of none for 0, and as an evaluation for -1."""
        S[TIMED] = thread
        self.rest(not thread)

    def _sometimes(self, t: int) -> None:
        """What happens after some steps only."""
        ends = self._window_ends(t)
        # Ranks profile the first step of a window, so that most of the time all of them profile the same one.
        due = t > self.next_study and (ends if self.ranks and self.next_study else not self.skip)
        if due and self.skip:
            self.time_this()
        if self.study is not None and (self.studying or due):
            self.study(t)
            # What we do to look closely is no part of the next step.
            t = now()
            rest[S[CURRENT]] += t - S[LAST]
            S[LAST] = t
        if ends:
            lengths = sorted(clock.lengths(self._window_begin))
            step_ns = lengths[len(lengths) // 2] if lengths else 0
            self.long = step_ns > LONG_NS * self.usual_backwards
            if PROFILE_NS and self.gate is None and self.slowing.worth_a_look(step_ns):
                self.next_study = min(self.next_study, self.earliest)
            self.usual_ns = step_ns
            self.every = timed_every(step_ns) if SHARE else 1
            if self.every > 1 and lengths and lengths[-1] > MUCH_LONGER * step_ns:
                self.some_long()
            self.end_window()
        self.garbage.after_step(S[DONE])
        if self.gate is not None:
            self.gate()

    def end_window(self) -> None:
        """End the window after the step that has ended, unless it is empty."""
        if S[DONE] == self._window_begin:
            return
        self._window_begin, self._window_end = S[DONE], 0
        self._find_sole()
        self.window()

    def _window_ends(self, t: int) -> bool:
        """Whether the window ends after this step; of a rank, at the next multiple of about as many steps as it has."""
        if t - S[BEGUN] < WINDOW_NS:
            return False
        if not self.ranks:
            return True
        if not self._window_end:
            size = _power(max(S[DONE] - self._window_begin, self.every))
            self._window_end = -(-S[DONE] // size) * size
        return bool(S[DONE] >= self._window_end)


def later_milestone(milestone: int, done: int) -> int:
    """The first milestone after so many steps: every process has the same ones, each about a tenth after the other."""
    while milestone <= done:
        milestone += milestone // 10 + 1
    return milestone


def untimed(number: int, every: int) -> int:
    """How many steps, from this number on, are not timed by phase.

    Multiples of the golden ratio spread evenly, never repeat, and those below 1/16 are among those below 1/8.
    """
    count, limit, place = 0, (1 << 32) // every, number * _GOLDEN & 0xFFFFFFFF
    while place >= limit:
        place, count = place + _GOLDEN & 0xFFFFFFFF, count + 1
    return count


def _power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (max(count, 1) - 1).bit_length()


def gradient_norms(steps: Steps, looks: Looks) -> VariableHook:
    """The hook of `clip_grads_with_norm_`, on the function within the one that turns gradients off.

    It reads the norm at once on the CPU; that on a GPU arrives some steps later.
    """
    due = 0

    def timed(_probe: Any, zero: int) -> int:
        return 1 if S[TIMED] == get_ident() and not looks.traced() else zero

    def look(_probe: Any, given: Any) -> int:
        nonlocal due
        norm = given[0]
        try:
            if not looks.number_on_gpu(norm):
                arrived([looks.number(norm)])
            elif steps.values is not None and S[LAST] >= due:
                due = S[LAST] + LOSS_NS
                steps.values.send([norm], arrived)
        except Exception as error:  # noqa: BLE001
            steps.missed(error)
        return 0

    def arrived(values: Any) -> None:
        if values[0] is not None and math.isfinite(values[0]):
            steps.grad_norm = values[0]

    return VariableHook(timed, look, ("total_norm",))


# Tensors that are remembered.
MOST_KNOWN = 64


class ByHand:
    """The hooks of `torch.autograd.grad`.

    own: whether a code object is the script's own. begins: begins the training on this thread; whether it is timed.
    loss: called with the outputs, whether their graph is retained, and whether one is made, of a call that is timed.
    """

    def __init__(
        self,
        steps: Steps,
        looks: Looks,
        own: Callable[[Any], bool],
        begins: Callable[[], bool],
        loss: Callable[[Any, Any, Any], None],
    ) -> None:
        self._steps, self._looks, self._own, self._begins, self._loss = steps, looks, own, begins, loss
        # First tensor of a call -> how often it had been changed in place; and the one whose calls end steps.
        self._changes: dict[int, int] = {}
        self._ender = 0
        self._timed = False

    def hooks(self) -> tuple[VariableHook, VariableHook]:
        """What begins and what ends."""
        steps, looks = self._steps, self._looks

        def due(_probe: Any, zero: int) -> int:
            if looks.traced():
                return zero
            if S[TIMED] == get_ident():
                steps.retained.end()
            return zero if steps.has_optimizer() else 1

        def begun(_probe: Any, given: Any) -> int:
            try:
                self._timed = S[TIMED] == get_ident() and S[CURRENT] == OTHER
                if self._timed:
                    self._loss(*given)
                    steps.phases.append(OTHER)
                    enter(BACKWARD)
            except Exception as error:  # noqa: BLE001
                steps.missed(error)
            return 0

        def ended(_probe: Any, given: Any) -> int:
            try:
                if self._timed:
                    self._timed = False
                    if steps.phases:
                        enter(steps.phases.pop())
                if looks.allowed():
                    self._ended(given[0])
            except Exception as error:  # noqa: BLE001
                steps.failed(error)
            return 0

        names = "outputs", "retain_graph", "create_graph"
        return VariableHook(due, begun, names), VariableHook(due, ended, ("inputs",))

    def _ended(self, inputs: Any) -> None:
        """The gradients by these tensors are there."""
        steps, first = self._steps, self._looks.first_tensor(inputs, 1)
        if first is None:
            return
        key, changes, before = key_of(first), self._looks.changes(first), self._changes.get(key_of(first))
        if len(self._changes) < MOST_KNOWN or before is not None:
            self._changes[key] = changes
        if before is None or changes <= before:
            return
        earlier = not self._ender
        if earlier:
            self._ender = key
        if S[TIMED] != get_ident() and not self._begins():
            return
        steps.backwards += 1
        S[OPEN] = steps.backwards
        if steps.caller is None:
            found = own_frame(sys._getframe(2), self._own)
            steps.caller = found.f_code if found is not None else None
        if key == self._ender and not steps.ends_known:
            steps.ended_backward(earlier)
