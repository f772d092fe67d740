"""Numbers that are not finite: what a training tells of them, and which was the first one of a step.

A gradient scaler skips updates whose gradients are not finite, and halves its scale. At the start it does so until the
scale fits, and then about once in 2,000 steps. More than that is worth a closer look, see `Origin`.

Steps are looked at closely once a loss or gradients are known not to be finite. In such a step each function of Python
that returns is heard, in the order of the computation, and the tensors of modules, of torch.nn.functional and of the
user's own functions are reduced to their smallest and largest value. On a GPU this waits for the device. Nothing of
the script is kept.

Only NaN and +inf count, except in the loss: -inf alone is what masks of attention are filled with.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from .apart import Dropped, ours
from .clock import S, now
from .looks import Looks, attribute, key_of, modules_within, own, own_frame, variables
from .mapped import SKIPPED
from .probes import Listening

# Updates that may be skipped before the first one: with them the scale falls from 65,536 to below 1.
SETTLING = 20
# Skipped updates in a row, or within so many steps, that are more than usual.
IN_A_ROW, MANY, WITHIN = 3, 5, 1000


class Finite:
    """Of the thread that trains; steps are numbers of steps done before.

    suspicious: called with the most looks that this is worth, where more is skipped than usual, for each loss that is
    not finite, and where batches are left out. loss: while losses are
    not finite, (value in words, the first step with it, and of the finite ones before: the step of the last one, its
    value, and the lowest value; or None). since: the first of the skipped updates in a row, None without one. first:
    the first skipped update that counts since `take`.
    """

    def __init__(self) -> None:
        self.suspicious: Callable[[int], None] = lambda looks: None
        self.loss: tuple[str, int, int | None, float | None, float | None] | None = None
        self.since: int | None = None
        self.first: int | None = None
        self._last: tuple[int | None, float | None, float | None] = (None, None, None)
        self._settled, self._row = False, 0
        # Skipped updates and steps where they began to be counted as many; those that were told.
        self._many = (0, 0)
        self._told = int(S[SKIPPED])
        self._scaler: weakref.ref[Any] | None = None
        self._key = 0

    def updated(self, skipped: bool, done: int) -> None:
        """A gradient scaler has updated the parameters, or skipped that."""
        if not skipped:
            self._settled, self._row, self.since = True, 0, None
            return
        if not self._row:
            self.since = done
        self._row += 1
        if self._settled or self._row > SETTLING:
            S[SKIPPED] += 1
        elif self._row == SETTLING:
            S[SKIPPED] += SETTLING
        else:
            return
        if self.first is None:
            self.first = self.since
        count, begun = self._many
        if done - begun > WITHIN:
            self._many = count, begun = int(S[SKIPPED]) - 1, done
        if self._row >= IN_A_ROW or S[SKIPPED] - count >= MANY:
            self.suspicious(MOST_LOOKS)

    def read(self, done: int, value: float) -> bool:
        """Whether the loss of a step is finite."""
        if math.isfinite(value):
            lowest = self._last[2]
            self._last = done, value, value if lowest is None else min(lowest, value)
            self.loss = None
            return True
        first = done if self.loss is None else self.loss[1]
        self.loss = "NaN" if math.isnan(value) else "infinite", first, *self._last
        self.suspicious(MOST_LOOKS)
        return False

    def take(self, earlier: int = 0) -> dict[str, Any]:
        """Fields of a window that ends. earlier: steps of earlier processes, which steps of the record include."""

        def shown(step: int | None) -> int | None:
            return None if step is None else step + earlier

        skipped, self._told = S[SKIPPED] - self._told, int(S[SKIPPED])
        first, self.first = self.first, None
        bad = None
        if self.loss is not None:
            words, begin, before, *values = self.loss
            bad = words, shown(begin), shown(before), *values
        return {
            "skipped": skipped, "first_skipped": shown(first), "skipping_since": shown(self.since), "bad_loss": bad,
        }  # fmt: skip

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler was seen to multiply losses."""
        return self._scaler is not None

    def remember(self, scaler: Any) -> None:
        """This scaler multiplies the losses."""
        if self._key != key_of(scaler):
            self._key, self._scaler = key_of(scaler), weakref.ref(scaler)

    @property
    def scale(self) -> Any:
        """The tensor with the scale; None without one."""
        scaler = None if self._scaler is None else self._scaler()
        return None if scaler is None else attribute(scaler, "_scale")


# Steps in a row that are looked at until one is not finite, looks at most, and nanoseconds between two.
MOST_STEPS, MOST_LOOKS, AGAIN_NS = 40, 5, 30 * 10**9
# The same of batches that a loop leaves out: their losses may be finite.
FEW_LOOKS = 3
# Listening ends where the steps take much longer than usual: so many times, and so many nanoseconds more.
LONGER, SPARE_NS = 20, 10**9
# Values of a container up to which it is looked into.
MOST_INSIDE = 64
# Positions of a dimension that are named, and the sizes from which on that is of use.
MOST_NAMED, LEAST_SIZE = 3, 4

Found = dict[str, Any]


class Origin:
    """wanted: the next step is to be looked at. active: the present one is. found: see NotFiniteEvent of the record."""

    def __init__(self, torch: Any, looks: Looks) -> None:
        self._torch, self._looks = torch, looks
        self.wanted = self.active = False
        self._looked, self._again, self._until = 0, 0, 0
        self._count = 0
        # What a step has shown that was not looked at closely.
        self._seen: Found = {}
        self._call = torch.nn.Module._call_impl.__code__
        self._functional = torch.nn.functional.__file__
        self._listening = Listening(self._returns)
        self._forget()

    def _forget(self) -> None:
        self.found: Found = {}
        # The function that made data that is not finite; parameters that are not; the model.
        self._made: Found = {}
        self._damaged: Found = {}
        self._root: weakref.ref[Any] | None = None

    def ask(self, t: int, most: int = MOST_LOOKS) -> bool:
        """Something is not finite, at t on our clock; whether a closer look is due. most: looks that this is worth."""
        if not (self.active or self.wanted) and self._looked < most and t >= self._again:
            self.wanted = True
        return self.wanted

    def begin(self, t: int, usual_ns: int) -> bool:
        """Look at the step that begins; whether that is possible. usual_ns: how long a step usually takes."""
        self.wanted = False
        self._looked, self._again, self._count = self._looked + 1, t + AGAIN_NS, 0
        self._until = t + MOST_STEPS * LONGER * usual_ns + SPARE_NS
        self._forget()
        self.active = self._looks.allowed() and self._listening.begin()
        return self.active

    def step(self, t: int) -> bool:
        """A step has ended; whether the next one is looked at, too."""
        self._count += 1
        goes_on = not (self.found or self._listening.ended) and self._count < MOST_STEPS
        if goes_on:  # with damaged weights, at least the data may show
            self._forget()
        else:
            self.found = self.found or self._damaged
            self.end()
        return goes_on

    def left_out(self) -> None:
        """A batch was left out: for another reason, where nothing was found in it, and then the look has its answer."""
        if not self.found:
            self._listening.end()

    def end(self) -> None:
        """End the look. Safe to call twice."""
        self._listening.end()
        if self._seen and self.found.get("what", "parameter") == "parameter":
            self.found = self._seen
        self.active = False
        if self.found:
            self._looked = MOST_LOOKS  # it is known

    def of(self, model: Any, batch: Any, compute: Callable[[], Any] | None) -> Found:
        """What is not finite first where the loss of a batch is computed once more; else in the batch or the model.

        compute: returns the loss; None where it cannot be called again.
        """
        self._forget()
        if compute is not None and self.begin(now(), SPARE_NS):
            try:
                self.loss(compute(), None)
            finally:
                self.end()
        if self.found.get("what", "loss") != "loss":
            return self.found
        for place, one in enumerate(self._looks.tensors(batch)):
            if self._is_bad(one):
                return {"what": "input", "name": f"batch[{place}]", **self._part(one)}
        if not self.found:
            self._parameters(model)
        return self.found or self._damaged

    # What is heard.

    def _returns(self, frame: Any, value: Any) -> None:
        """A function returns this value."""
        try:
            if now() > self._until:
                self.end()
                return
            code = frame.f_code
            if value is None or self.found or code.co_name == "<module>":
                return
            is_module = code is self._call
            if not is_module and code.co_filename != self._functional and not own(code):
                return
            if not self._looks.allowed():
                return
            outer = self._outermost(frame)
            if outer is not None and self._root is None:
                root = outer.f_locals["self"]
                self._root = weakref.ref(root)
                self._parameters(root)
            if (bad := self._first_bad(value)) is None:
                return
            if outer is not None and (wrong := self._first_bad(_given(outer))) is not None:
                if not self._computed(wrong):
                    self.found = self._input(wrong, outer)
            elif self._damaged:
                pass
            elif is_module:
                self._module(frame, outer, bad)
            else:
                self._function(frame, outer, bad)
        except Exception as error:
            with Dropped():
                self.end()
            if not ours(error):
                raise

    def _module(self, frame: Any, outer: Any, bad: Any) -> None:
        """A module returns what is not finite, in the call of the outermost one."""
        module, given = frame.f_locals["self"], _given(frame)
        name = next((path for path, one in modules_within(outer.f_locals["self"]) if one is module), "")
        between = self._first_bad(given)
        code: Any = getattr(getattr(type(module), "forward", None), "__code__", None)
        place = _place(own_frame(frame.f_back, own))
        if between is None and own(code):
            place = {"file": code.co_filename, "line": code.co_firstlineno, "function": code.co_name}
        self.found = {
            "what": "output" if between is None else "before", "name": name, "kind": type(module).__name__,
            "largest": self._largest([given, attribute(module, "_parameters")]),
            **self._part(bad if between is None else between), **place,
        }  # fmt: skip

    def _function(self, frame: Any, outer: Any, bad: Any) -> None:
        """A function of torch or of the user returns what is not finite."""
        code, given = frame.f_code, _given(frame)
        if frame.f_back is not None and frame.f_back.f_code is self._call:
            return  # `forward`: its module is heard next
        if (wrong := self._first_bad(given)) is not None:
            if outer is None and self._root is not None and not self._computed(wrong):
                self.found = self._input(wrong, frame)
            return
        name = str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]
        here = {
            "what": "function", "name": name, "largest": self._largest(given), **self._part(bad),
            **_place(frame if own(code) else own_frame(frame.f_back, own)),
        }  # fmt: skip
        if outer is None and self._root is None:  # the data, before the model is called
            self._made = self._made or here
        else:
            self.found = here

    def loss(self, loss: Any, frame: Any) -> None:
        """A backward pass begins. frame: of torch's function."""
        if self.found or not self._is_bad(loss, is_loss=True):
            return
        self.found = self.known(loss, frame)
        if not (self.found or self._damaged):
            here = {"what": "loss", **self._part(loss), **_place(own_frame(frame, own))}
            self.found = self._made if self._root is None and self._made else here

    def known(self, loss: Any, frame: Any) -> Found:
        """Data that is not finite among the variables of the function that computes a loss; {} without any."""
        caller = own_frame(frame, own)
        for name, one in _variables(caller, self._looks) if caller is not None else ():
            if one is not loss and not self._computed(one) and self._is_bad(one):
                return {"what": "input", "name": name, **self._part(one), **_place(caller), **self._made_by()}
        return {}

    def at_once(self, loss: Any, frame: Any) -> None:
        """A loss is not finite, in a step that is not looked at closely: see at least the data of this one."""
        if not self.active and self._looked < MOST_LOOKS and not self._seen:
            self._seen = self.known(loss, frame)

    def gradients(self) -> None:
        """A backward pass has ended: everything before it was finite."""
        root = None if self._root is None else self._root()
        if self.found or self._damaged or root is None:
            return
        named = [(name, item.grad) for name, item in _parameters_of(root, self._looks)]
        plain = [(name, grad) for name, grad in named if self._looks.is_tensor(grad)]
        bad = [(name, grad) for name, grad in plain if self._is_bad(grad)]
        if bad:  # the backward pass begins with the last ones
            name, grad = bad[-1]
            self.found = {
                "what": "gradient", "name": name, **self._part(grad), "count": len(bad), "of": len(plain),
            }  # fmt: skip

    def _parameters(self, root: Any) -> None:
        """Look at the parameters of a model."""
        named = _parameters_of(root, self._looks)
        bad = [(name, item) for name, item in named if self._is_bad(item)]
        if bad:
            name, item = bad[0]
            self._damaged = {
                "what": "parameter", "name": name, **self._part(item), "count": len(bad),
                "of": len(named),
            }  # fmt: skip

    # Inside.

    def _outermost(self, frame: Any) -> Any:
        """The frame of the outermost call of a module around this one; None outside of modules."""
        found = None
        while frame is not None:
            if frame.f_code is self._call:
                found = frame
            frame = frame.f_back
        return found

    def _computed(self, tensor: Any) -> bool:
        """Whether a tensor depends on parameters: it is no data."""
        with self._looks.silent():
            return bool(tensor.requires_grad)

    def _input(self, tensor: Any, frame: Any) -> Found:
        """What a model or a function has received. frame: of its call."""
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name in ("_wrapped_call_impl", "__call__"):
            caller = caller.f_back
        name = ""
        if caller is not None and own(caller.f_code):
            name = next((name for name, one in _variables(caller, self._looks) if one is tensor), "")
        if not name:
            name = next((key for key, one in _given(frame).items() if one is tensor), "")
        place = _place(own_frame(frame.f_back, own))
        return {"what": "input", "name": name, **self._part(tensor), **place, **self._made_by()}

    def _made_by(self) -> Found:
        """The function of the user that has made data that is not finite."""
        made = self._made
        return {"made": [made["file"], made["line"], made["name"]]} if "file" in made else {}

    def _first_bad(self, value: Any) -> Any:
        return next((one for one in self._looks.tensors(value) if self._is_bad(one)), None)

    def _is_bad(self, tensor: Any, is_loss: bool = False) -> bool:
        """Whether a tensor has NaN or +inf; of one value that is a loss also -inf."""
        torch = self._torch
        with self._looks.silent():
            plain = tensor.is_floating_point() and not tensor.is_nested and tensor.layout is torch.strided
            if (
                not plain
                or tensor.device.type == "meta"
                or tensor.itemsize == 1
                or not self._looks.elements(tensor)
            ):
                return False
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return False
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            highest = float(tensor.detach().amax().item())
            if is_loss and self._looks.elements(tensor) == 1:
                highest = abs(highest)
        return not highest < math.inf

    def _largest(self, values: Any) -> float:
        """The largest magnitude in tensors that are finite."""
        found = 0.0
        for tensor in self._looks.tensors(values):
            with self._looks.silent():
                plain = tensor.is_floating_point() and tensor.layout is self._torch.strided
                if plain and tensor.itemsize > 1 and self._looks.elements(tensor):
                    found = max(found, float(tensor.detach().abs().amax().item()))
        return found if math.isfinite(found) else 0.0

    def _part(self, tensor: Any) -> Found:
        """Which part of a tensor is not finite: its values, their share, and the positions of a dimension."""
        torch = self._torch
        with self._looks.silent():
            tensor = tensor.detach()
            wrong = ~torch.isfinite(tensor)
            nan = bool(torch.isnan(tensor).any().item())
            infinite = bool(torch.isinf(tensor).any().item())
            share = float(wrong.float().mean().item())
            found: Found = {"nan": nan, "infinite": infinite, "share": share, "axis": "", "at": [], "size": 0}
            # Images have their channels first.
            dimension = 1 if wrong.ndim == 4 else wrong.ndim - 1
            for axis, name in ((dimension, "channel" if wrong.ndim == 4 else "column"), (0, "item")):
                if wrong.ndim < 2 or wrong.shape[axis] < LEAST_SIZE:
                    continue
                others = [one for one in range(wrong.ndim) if one != axis]
                places = wrong.sum(dim=others).nonzero().flatten().tolist()
                if len(places) <= MOST_NAMED or (name == "item" and len(places) < wrong.shape[axis]):
                    at, size = places[:MOST_NAMED], int(wrong.shape[axis])
                    found |= {"axis": name, "at": at, "places": len(places), "size": size}
                    break
        return found


def _place(frame: Any) -> Found:
    """The line that a frame is at; the first one of its function where that is known better."""
    if frame is None:
        return {}
    code = frame.f_code
    return {"file": code.co_filename, "line": frame.f_lineno or code.co_firstlineno, "function": code.co_name}


def _variables(frame: Any, looks: Looks) -> Iterator[tuple[str, Any]]:
    """Tensors that variables of a frame are or have, the newest first: "x", "batch['x']", "batch[0]"."""
    for name, value in reversed(variables(frame).items()):
        kind = type(value)
        if looks.is_tensor(value):
            yield name, value
        elif (kind is dict or kind is list or kind is tuple) and len(value) <= MOST_INSIDE:
            for key, one in value.items() if kind is dict else enumerate(value):
                if looks.is_tensor(one) and type(key) in (str, int):
                    yield f"{name}[{key!r}]", one


def _given(frame: Any) -> dict[str, Any]:
    """The arguments of a function by their names; those of `forward` for the call of a module."""
    known, code = variables(frame), frame.f_code
    if code.co_name != "_call_impl" or not known:
        return {
            name: known.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        }
    kinds = type(known["self"]).__mro__
    forward: Any = next((one.__dict__["forward"] for one in kinds if "forward" in one.__dict__), None)
    names = getattr(getattr(forward, "__code__", None), "co_varnames", ())[1:]
    places = [names[place] if place < len(names) else str(place) for place in range(len(known["args"]))]
    return {**dict(zip(places, known["args"])), **known["kwargs"]}


def _parameters_of(root: Any, looks: Looks) -> list[tuple[str, Any]]:
    """(name, parameter) of a model, in the order of its modules."""
    return [
        (f"{path}.{key}" if path else str(key), item)
        for path, module in modules_within(root)
        for key, item in (attribute(module, "_parameters") or {}).items()
        if looks.is_tensor(item)
    ]
