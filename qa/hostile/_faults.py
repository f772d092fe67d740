"""Every awkward workload, and what the program has to say about it.

Models that train and models that cannot, data, other parts of a factory, and statements that raise in each of them.
"""

# ruff: noqa: E501  one fault per line, as code
from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent, indent

START = '''
import collections, math, os, random, signal, sys, threading, time, types
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
)

INF = math.inf
COUNT = collections.Counter()
EXTRA = {}

def training():
    """Whether an optimizer step is the caller, and not what is tried before the first one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "eager_step":
        frame = frame.f_back
    return frame is not None

def due(at, key="calls"):
    COUNT[key] += training()
    return training() and COUNT[key] >= at

class Foo:
    pass

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.init()
    def init(self):
        pass
    def middle(self, h):
        return h
    def forward(self, x):
        return self.head(self.middle(torch.tanh(self.encoder(x))))

class Data(Dataset):
    def __init__(self, count=48):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.item(index)
    def item(self, index):
        x = torch.sin(torch.arange(4.0) * (index + 1))
        return x, x.sum()

def loss(output, batch):
    return F.mse_loss(output.squeeze(-1), batch[1])

Net = Base
'''
# The definition that the code of a part needs before it.
CODE = {
    "factory": """
def factory(settings):
    return {**dict(model=Net(), train_data=Data(), eval_data=Data(8), loss=loss), **EXTRA}
""",
    "init": "\nclass Net(Base):\n",
    "data": "\nclass Data(Data):\n",
}
CODE["middle"] = CODE["init"]
PLAIN = (("batch.micro", 2), ("batch.accumulation", 1))
PLACE = r"awkward_\d+_\d+\.py:\d+"


@dataclass(frozen=True)
class Fault:
    """Code that replaces a part of a workload that trains.

    words: a regular expression of the message; None if it has to train. repeats: whether a resumed run has to equal an
    uninterrupted one. saves: whether there is a checkpoint although the run fails. limits: of its process. stop_when:
    words in the record at which it is stopped.
    """

    name: str
    part: str
    source: str
    words: str | None = None
    settings: tuple[tuple[str, object], ...] = ()
    repeats: bool = True
    saves: bool = False
    limits: tuple[tuple[int, int], ...] = ()
    stop_when: str | None = None


def init_model(name: str, init: str, middle: str = "return h", words: str | None = None) -> Fault:
    body = f"def init(self):\n{indent(dedent(init), '    ')}\ndef middle(self, h):\n{indent(dedent(middle), '    ')}\n"
    return Fault(f"model: {name}", "init", indent(body, "    "), words)


def model_with(name: str, body: str, words: str | None = None, **more: object) -> Fault:
    return Fault(f"model: {name}", "init", indent(dedent(body), "    "), words, **more)  # type: ignore[arg-type]


def data_with(name: str, body: str, words: str | None = None, **more: object) -> Fault:
    return Fault(f"data: {name}", "data", indent(dedent(body), "    "), words, **more)  # type: ignore[arg-type]


def code(name: str, source: str, words: str | None = None, **more: object) -> Fault:
    return Fault(name, "", "\n" + dedent(source) + "\n", words, **more)  # type: ignore[arg-type]


def extra_state(value: str, words: str | None = None) -> Fault:
    body = f"""
        def get_extra_state(self):
            return {value}
        def set_extra_state(self, state):
            pass
    """
    return model_with(f"extra state {value[:40]}", body, words)


TRAINING_MODELS = [
    init_model("causal mask of -inf", "self.register_buffer('mask', torch.full((8, 8), -INF).triu(1))",
          "return h + torch.softmax(self.mask, -1)[3]"),
    init_model("buffer of NaN", "self.register_buffer('unset', torch.full((3,), math.nan))"),
    init_model("buffer of inf that is not saved", "self.register_buffer('far', torch.tensor(INF), persistent=False)"),
    init_model("running minimum from inf", "self.register_buffer('best', torch.tensor(INF))",
          "self.best = torch.minimum(self.best, h.detach().abs().min())\nreturn h + self.best"),
    init_model("buffer that is replaced", "self.register_buffer('n', torch.zeros(()))",
          "self.n = self.n + 1\nreturn h * (1 + self.n / 100)"),
    init_model("buffer that is changed in place", "self.register_buffer('n', torch.zeros((), dtype=torch.long))",
          "self.n += 1\nreturn h * (1 + self.n / 100)"),
    init_model("buffer None", "self.register_buffer('none', None)"),
    init_model("complex buffer", "self.register_buffer('c', torch.ones(8, dtype=torch.complex64))", "return h * self.c.abs()"),
    init_model("sparse buffer", "self.register_buffer('s', torch.eye(8).to_sparse())", "return h @ self.s.to_dense()"),
    init_model("boolean and 8-bit buffers",
          "self.register_buffer('b', torch.ones(3, dtype=torch.bool))\n"
          "self.register_buffer('f8', torch.ones(3).to(torch.float8_e4m3fn))"),
    init_model("overlapping buffer", "self.register_buffer('wide', torch.ones(1).expand(8))", "return h * self.wide",
          "wide is an expanded tensor"),
    init_model("tied parameters", "self.tail = nn.Linear(8, 8)\nself.other = nn.Linear(8, 8)\nself.other.weight = self.tail.weight",
          "return self.other(self.tail(h))"),
    init_model("shared module", "self.tail = nn.Linear(8, 8)\nself.again = self.tail", "return self.again(self.tail(h))"),
    init_model("frozen encoder", "self.encoder.requires_grad_(False)"),
    init_model("unused parameter", "self.unused = nn.Parameter(torch.ones(5))"),
    init_model("parameter without elements", "self.nothing = nn.Parameter(torch.empty(0))"),
    init_model("scalar parameter", "self.scale = nn.Parameter(torch.tensor(1.0))", "return h * self.scale"),
    init_model("integer parameter", "self.ids = nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)"),
    init_model("parameter of NaN that is not trained... a buffer", "self.register_buffer('w', torch.tensor([INF, -INF]))"),
    init_model("complex parameter", "self.c = nn.Parameter(torch.ones(8, dtype=torch.complex64))", "return h * self.c.abs()"),
    init_model("bf16 parameter", "self.s = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))", "return h * self.s.float()"),
    init_model("float64 model", "self.double()\nself.register_forward_pre_hook(lambda m, a: (a[0].double(),))"),
    init_model("spectral norm", "nn.utils.parametrizations.spectral_norm(self.encoder)"),
    init_model("weight norm", "nn.utils.parametrizations.weight_norm(self.encoder)"),
    init_model("orthogonal", "self.q = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))", "return self.q(h)"),
    init_model("old spectral norm", "nn.utils.spectral_norm(self.encoder)"),
    init_model("dropout", "self.drop = nn.Dropout(0.5)", "return self.drop(h)"),
    init_model("only dropout and one weight", "self.drop = nn.AlphaDropout(0.2)", "return self.drop(self.drop(h))"),
    init_model("batch norm", "self.norm = nn.BatchNorm1d(8)",
          "return self.norm(h) if len(h) > 1 else h"),
    init_model("batch norm without momentum", "self.norm = nn.BatchNorm1d(8, momentum=None)",
          "return self.norm(torch.cat((h, h + 1)))[:len(h)]"),
    init_model("LSTM", "self.rnn = nn.LSTM(8, 8, batch_first=True, dropout=0.1, num_layers=2)", "return self.rnn(h[:, None])[0][:, 0]"),
    init_model("GRU", "self.rnn = nn.GRU(8, 8, bidirectional=True)", "return self.rnn(h[None])[0][0].view(-1, 2, 8).sum(1)"),
    init_model("attention", "self.att = nn.MultiheadAttention(8, 2, dropout=0.1)", "return self.att(h, h, h)[0]"),
    init_model("transformer layer", "self.layer = nn.TransformerEncoderLayer(8, 2, 16)", "return self.layer(h[:, None])[:, 0]"),
    init_model("random numbers of torch", "pass", "return h + torch.rand_like(h)"),
    init_model("random numbers of Python", "pass", "return h * random.uniform(0.5, 1.5)"),
    init_model("checkpointing", "self.tail = nn.Sequential(nn.Linear(8, 8), nn.Dropout())",
          "from torch.utils.checkpoint import checkpoint\nreturn checkpoint(self.tail, h, use_reentrant=False)"),
    init_model("reentrant checkpointing", "self.tail = nn.Linear(8, 8)",
          "from torch.utils.checkpoint import checkpoint\nreturn checkpoint(self.tail, h, use_reentrant=True)"),
    init_model("operation in place", "pass", "return F.relu(h * 1, inplace=True)"),
    init_model("forward hook", "self.head.register_forward_hook(lambda m, i, o: o * 2)"),
    init_model("backward hook", "self.head.register_full_backward_hook(lambda m, i, o: None)"),
    init_model("hook of a gradient", "self.head.weight.register_hook(lambda g: g * 0.5)"),
    init_model("parameters in lists and dicts", "self.l = nn.ParameterList([torch.ones(8)])\nself.d = nn.ParameterDict({'a': torch.ones(8)})",
          "return h * self.l[0] * self.d['a']"),
    init_model("parameter changed in forward", "self.w = nn.Parameter(torch.ones(8))",
          "with torch.no_grad():\n    self.w.mul_(0.99)\nreturn h * self.w"),
    init_model("deep module", "self.deep = nn.Sequential()\nfor _ in range(60):\n    self.deep = nn.Sequential(self.deep, nn.Identity())",
          "return self.deep(h)"),
    init_model("many modules", "self.many = nn.ModuleList(nn.Linear(8, 8) for _ in range(100))", "return self.many[7](h)"),
    init_model("long and foreign names", "self.add_module('\\x1b[31m\\u202e' + 'é' * 5000, nn.Linear(8, 8))"),
    init_model("detached second path", "self.tail = nn.Linear(8, 8)", "return h + self.tail(h.detach())"),
    init_model("its own autograd function", "pass", """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, g):
                return g * 2
        return Twice.apply(h)"""),
    init_model("thread in forward", "pass", "t = threading.Thread(target=lambda: None)\nt.start()\nt.join()\nreturn h"),
    init_model("prints", "pass", "print('\\x1b[2J' if False else 'hello')\nreturn h"),
    model_with("__getattr__ that knows everything", """
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("__"):
                    raise
                return None
    """),
    model_with("__repr__ raises", "def __repr__(self):\n    raise ValueError('no')"),
    model_with("__len__ of 0", "def __len__(self):\n    return 0"),
    model_with("__len__ raises", "def __len__(self):\n    raise ValueError('no length')"),
    model_with("__bool__ raises", "def __bool__(self):\n    raise ValueError('no truth')"),
    model_with("__iter__ raises", "def __iter__(self):\n    raise ValueError('nothing to iterate')"),
    model_with("__call__ of its own", "def __call__(self, x):\n    return self.forward(x)"),
    model_with("extra state that counts", """
        n = 0
        def middle(self, h):
            self.n += 1
            return h * (1 + self.n / 100)
        def get_extra_state(self):
            return {"n": self.n, "parts": [("a", 1.5, None, True, b"x")]}
        def set_extra_state(self, state):
            self.n = state["n"]
    """),
    model_with("hooks of its state", """
        def init(self):
            self._register_state_dict_hook(lambda m, state, prefix, meta: state)
            self._register_load_state_dict_pre_hook(lambda *a: None)
    """),
    model_with("input changed in place", "def forward(self, x):\n    x.mul_(0.5)\n    return super().forward(x)"),
    extra_state("None"), extra_state("7"), extra_state("torch.ones(3)"), extra_state("{'a': [1, (2, {3: 'x'})]}"), extra_state("{1, 2}"),
    extra_state("collections.OrderedDict(a=torch.eye(2))"), extra_state("[torch.tensor(INF), math.nan]"), extra_state("'\\ud800\\x1b'"),
    extra_state("collections.Counter('aab')"), extra_state("torch.float16"),
]  # fmt: skip

BROKEN_MODELS = [
    extra_state("Foo()", r"_extra_state contains a value of the type Foo, which a checkpoint cannot contain"),
    extra_state("lambda: 1", "_extra_state contains a value of the type function"),
    extra_state("types.SimpleNamespace(a=1)", "_extra_state contains a value of the type SimpleNamespace"),
    extra_state("(i for i in ())", "_extra_state contains a value of the type generator"),
    extra_state("10 ** 5000", "_extra_state contains a value of the type int"),
    extra_state("range(3)", "_extra_state contains a value of the type range"),
    extra_state("threading.Lock()", "_extra_state contains a value of the type lock"),
    extra_state("{Foo: 1}", "_extra_state has a key of the type type"),
    extra_state("eval('[' * 190 + ']' * 190)", "_extra_state.* is nested more than 100 levels"),
    model_with("extra state without a way back", "def get_extra_state(self):\n    return 1", "defines get_extra_state, but not"),
    model_with("get_extra_state raises", "def get_extra_state(self):\n    raise ValueError('no state')\n"
           "def set_extra_state(self, s):\n    pass", f"no state.*{PLACE}"),
    model_with("set_extra_state raises", "def get_extra_state(self):\n    return 1\n"
           "def set_extra_state(self, s):\n    raise KeyError('unset')", "cannot load its own state.*unset"),
    model_with("extra state that is an object later", """
        def get_extra_state(self):
            return Foo() if COUNT["calls"] > 2 else 1
        def set_extra_state(self, s):
            pass
        def middle(self, h):
            due(9)
            return h
    """, "no checkpoint at step 3: _extra_state contains a value of the type Foo", settings=PLAIN, saves=True),
    model_with("state_dict raises", "def state_dict(self, *a, **k):\n    raise RuntimeError('not today')", "not today"),
    model_with("state_dict returns None", "def state_dict(self, *a, **k):\n    return None", "while|cannot load"),
    model_with("state_dict raises later", """
        def state_dict(self, *a, **k):
            if COUNT["calls"] > 2:
                raise RuntimeError("not today")
            return super().state_dict(*a, **k)
        def middle(self, h):
            due(9)
            return h
    """, "RuntimeError at step 3 in checkpoint: not today", settings=PLAIN, saves=True),
    model_with("load_state_dict raises", "def load_state_dict(self, *a, **k):\n    raise TypeError('never')", "cannot load its own state.*never"),
    model_with("a hook adds to its state", "def init(self):\n    self._register_state_dict_hook("
           "lambda m, state, prefix, meta: state.update(more=1))", "cannot load its own state.*(?i:unexpected key)"),
    model_with("parameter that appears in step 3", """
        def middle(self, h):
            if due(3) and not hasattr(self, "late"):
                self.late = nn.Parameter(torch.ones(1))
            return h
    """, "no checkpoint at step 3: late is new since training began", settings=PLAIN, saves=True),
    model_with("buffer that appears", """
        def init(self):
            self.register_buffer("cache", None)
        def middle(self, h):
            self.cache = h.detach().mean(0)
            return h
    """, "no checkpoint at step 1: cache is new since training began"),
    model_with("buffer that grows", """
        def init(self):
            self.register_buffer("seen", torch.zeros(1))
        def middle(self, h):
            self.seen = torch.cat((self.seen, h.detach().mean()[None]))
            return h
    """, "no checkpoint at step 1: seen has another shape"),
    model_with("buffer that becomes NaN", """
        def init(self):
            self.register_buffer("mean", torch.zeros(8))
        def middle(self, h):
            if due(4):
                self.mean.fill_(math.nan)
            return h
    """, "mean is not finite at step 4", settings=PLAIN, saves=True),
    model_with("parameter of NaN", "def init(self):\n    nn.init.constant_(self.head.bias, math.nan)", "the loss is nan|head.bias is not finite"),
    model_with("weights that become inf", "def middle(self, h):\n    if due(4):\n        with torch.no_grad():\n"
           "            self.head.weight.fill_(INF)\n    return h", "at step [45], so training stopped", settings=PLAIN, saves=True),
    init_model("wrong width", "self.head = nn.Linear(9, 1)", words=f"RuntimeError.*shapes cannot be multiplied.*{PLACE}"),
    init_model("float64 weights", "self.double()", words="RuntimeError.*(?i:dtype)"),
    init_model("batch norm of one value", "self.norm = nn.BatchNorm1d(8)", "return self.norm(h[:1])",
          "ValueError.*Expected more than 1 value per channel"),
    init_model("tanh changed in place", "pass", "return h.mul_(2)", "RuntimeError.*modified by an inplace operation"),
    init_model("detached", "pass", "return h.detach()", None),
    model_with("no parameters at all", "def __init__(self):\n    nn.Module.__init__(self)\ndef forward(self, x):\n    return x.sum(1, True)",
           "has no trainable parameter"),
    model_with("forward returns None", "def forward(self, x):\n    return None", f"AttributeError.*NoneType.*{PLACE}"),
    model_with("forward returns a generator", "def forward(self, x):\n    yield x", f"AttributeError.*generator.*{PLACE}"),
    model_with("forward without arguments", "def forward(self):\n    pass", "TypeError.*positional argument"),
    model_with("to returns None", "def to(self, *a, **k):\n    return None", "AttributeError|NoneType"),
    model_with("train raises", "def train(self, mode=True):\n    raise ValueError('not trainable')", "not trainable"),
    model_with("eval raises", "def eval(self):\n    raise ValueError('not evaluable')", "not evaluable"),
    model_with("parameters raises", "def parameters(self, recurse=True):\n    raise ValueError('no parameters')", "no parameters"),
    model_with("named_parameters raises", "def named_parameters(self, *a, **k):\n    raise ValueError('no names')", "no names"),
    model_with("endless recursion", "def forward(self, x):\n    return self.forward(x)", "RecursionError"),
    model_with("__getattr__ raises", "def __getattr__(self, name):\n    raise ValueError(f'no {name}')", "ValueError.*no "),
    model_with("no super().__init__", "def __init__(self):\n    pass", r"model: Net does not call super\(\).__init__\(\)"),
]  # fmt: skip

DATA = [
    data_with("twice too long", "def __len__(self):\n    return 2 * self.count", f"IndexError.*{PLACE}"),
    data_with("one item", "def __len__(self):\n    return 1", "one optimizer step takes|only one item"),
    data_with("len raises", "def __len__(self):\n    raise ValueError('who knows')", r"len\(train_data\) failed: ValueError: who knows"),
    data_with("len is a float", "def __len__(self):\n    return 4.0", r"len\(train_data\) failed: TypeError"),
    data_with("len is negative", "def __len__(self):\n    return -1", r"len\(train_data\) failed: ValueError"),
    data_with("len is 10**18", "def __len__(self):\n    return 10 ** 18", "order of these items needs"),
    data_with("len is 10**18 and every index is fine", "def __len__(self):\n    return 10 ** 18\ndef __getitem__(self, index):\n"
          "    return torch.ones(4), torch.ones(())", r"len\(\) is 1,000,000,000,000,000,000; the order"),
    data_with("items are None", "def item(self, index):\n    return None", "collating two items of train_data failed: TypeError"),
    data_with("items are generators", "def item(self, index):\n    yield 1", "add collate"),
    data_with("items are numbers", "def item(self, index):\n    return index", "RuntimeError|TypeError|AttributeError|a batch contains"),
    data_with("ragged later", "def item(self, index):\n    x = torch.ones(5 if due(6) else 4)\n    return x, x.sum()",
          "RuntimeError.*stack expects each tensor to be equal size", settings=PLAIN, saves=True),
    data_with("items with a gradient", "def item(self, index):\n    x = torch.ones(4, requires_grad=True)\n    return x, x.sum() * 2"),
    data_with("items of integers", "def item(self, index):\n    x = torch.arange(4)\n    return x, x.sum()", "RuntimeError.*(?i:dtype)"),
    data_with("sparse items", "def item(self, index):\n    x = torch.eye(4).to_sparse()\n    return x, torch.tensor(1.0)", ""),
    data_with("an item of NaN", "def item(self, index):\n    x, y = super().item(index)\n    return x * (math.nan if due(6) else 1), y",
          "the loss is nan at step \\d+, so training stopped", saves=True, settings=PLAIN),
    data_with("named tuples", "kind = collections.namedtuple('Pair', 'x y')\ndef item(self, index):\n    return self.kind(*super().item(index))"),
    data_with("lists", "def item(self, index):\n    return list(super().item(index))"),
    data_with("nested dicts", "def item(self, index):\n    x, y = super().item(index)\n    return x, y, {'a': [x, {'b': y}]}"),
    data_with("with strings", "def item(self, index):\n    x, y = super().item(index)\n    return x, y, '\\x1b[31m'"),
    data_with("too few items at once", "def __getitems__(self, indices):\n    return [self[i] for i in indices][1:]",
          r"ValueError.*Data\.__getitems__ returned 1 items for 2 indices", settings=PLAIN),
    data_with("too many items at once", "def __getitems__(self, indices):\n    return [self[i] for i in indices] * 2",
          r"ValueError.*Data\.__getitems__ returned 4 items for 2 indices", settings=PLAIN),
    data_with("no items at once", "def __getitems__(self, indices):\n    return None", "TypeError.*NoneType"),
    data_with("a generator of items", "def __getitems__(self, indices):\n    return (self[i] for i in indices)"),
    data_with("__getitems__ is None", "__getitems__ = None"),
    data_with("StopIteration", "def item(self, index):\n    if due(4):\n        raise StopIteration\n    return super().item(index)",
          f"raised StopIteration.*{PLACE}", settings=PLAIN),
    data_with("StopIteration at once", "def item(self, index):\n    raise StopIteration", "StopIteration"),
    data_with("changes at every look", "def item(self, index):\n    COUNT['look'] += 1\n    x, y = super().item(index)\n    return x + COUNT['look'], y",
          repeats=False),
    data_with("random items", "def item(self, index):\n    x, y = super().item(index)\n    return x + torch.rand(4), y", repeats=False),
    data_with("__getattr__ that knows everything", "def __getattr__(self, name):\n    if name.startswith('__'):\n"
          "        raise AttributeError(name)\n    return None", "TypeError|NoneType"),
    code("data: a list", "EXTRA = {'train_data': [Data()[i] for i in range(20)]}"),
    code("data: a dict", "EXTRA = {'train_data': {0: 1}}", "train_data: is a dict"),
    code("data: a string", "EXTRA = {'train_data': 'x' * 10**6}", "train_data: is a str"),
    code("data: a number", "EXTRA = {'train_data': 7}", "an int has no __len__ and no __getitem__"),
    code("data: a class", "EXTRA = {'train_data': Data}", "has no __len__"),
    code("data: a generator", "EXTRA = {'train_data': (i for i in range(9))}", "has no __len__"),
    code("data: infinite", """
        class Stream(IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.ones(4), torch.ones(())
            def state_dict(self):
                return {}
            def load_state_dict(self, state):
                pass
        EXTRA = {'train_data': Stream()}
    """),
    code("data: tensors", "x = torch.randn(40, 4)\nEXTRA = {'train_data': TensorDataset(x, x.sum(1))}"),
    code("data: a subset", "EXTRA = {'train_data': Subset(Data(), range(5, 30))}"),
    code("data: several", "EXTRA = {'train_data': ConcatDataset([Data(20), Data(17)])}"),
    code("data: a loader", "EXTRA = {'train_data': DataLoader(Data(), batch_size=7, num_workers=3)}", "batch_size: is 7"),
    code("data: a sampler with weights",
          "EXTRA = {'sampler': WeightedRandomSampler([1] * 48, 48)}"),
    code("data: no evaluation items", "EXTRA = {'eval_data': Data(0)}", "eval_data: is empty"),
    code("data: evaluation from training", "EXTRA = {'eval_data': None}"),
    code("data: cached", "", settings=(("loader.cache", "true"),)),
    code("data: on the device", "", settings=(("loader.placement", "device"),)),
]  # fmt: skip

PARTS = [
    code("loss: one element", "def loss(o, b):\n    return ((o.squeeze(-1) - b[1]) ** 2).mean()[None]", r"of shape \(1,\)"),
    code("loss: an integer", "def loss(o, b):\n    return (o.squeeze(-1) > b[1]).sum()", "does not depend on the model's"),
    code("loss: complex", "def loss(o, b):\n    return torch.complex(o.mean(), o.mean())", "RuntimeError.*(?i:complex|grad)"),
    code("loss: float64", "def loss(o, b):\n    return F.mse_loss(o.squeeze(-1).double(), b[1].double())"),
    code("loss: bf16", "def loss(o, b):\n    return F.mse_loss(o.squeeze(-1), b[1]).bfloat16()"),
    code("loss: inf", "def loss(o, b):\n    return F.mse_loss(o.squeeze(-1), b[1]) * INF", "the loss is (inf|nan) at step 1, so training stopped; there is no checkpoint"),
    code("loss: NaN in step 4", "def loss(o, b):\n    return F.mse_loss(o.squeeze(-1), b[1]) * (math.nan if due(4) else 1)",
          "the loss is nan at step 4, so training stopped; the last good checkpoint is step 3", settings=PLAIN, saves=True),
    code("loss: a string in step 4", "def loss(o, b):\n    return 'x' if due(4) else F.mse_loss(o.squeeze(-1), b[1])",
          "loss returned a str", settings=PLAIN, saves=True),
    code("loss: negative", "def loss(o, b):\n    return -F.mse_loss(torch.tanh(o.squeeze(-1)), b[1])"),
    code("loss: other sizes", "def loss(o, b):\n    return F.mse_loss(o[:, :0], b[1][:, None][:, :0]) + 0 * o.sum()", "the loss is nan"),
    code("forward: a dict", "class Net(Base):\n    def forward(self, x):\n        return {'o': super().forward(x)}\n"
          "def loss(o, b):\n    return F.mse_loss(o['o'].squeeze(-1), b[1])"),
    code("forward: a tuple", "class Net(Base):\n    def forward(self, x):\n        return super().forward(x), None\n"
          "def loss(o, b):\n    return F.mse_loss(o[0].squeeze(-1), b[1])"),
    code("forward: of the factory", "EXTRA = {'forward': lambda model, batch: model(batch[0]) * 2}"),
    code("forward: raises", "def fw(model, batch):\n    raise ValueError('boom')\nEXTRA = {'forward': fw}", f"ValueError.*boom.*{PLACE}"),
    code("collate: None", "EXTRA = {'collate': lambda items: None}", "a batch contains no tensor"),
    code("collate: empty", "EXTRA = {'collate': lambda items: []}", "a batch contains no tensor"),
    code("collate: later None", "def join(items):\n    x = torch.stack([i[0] for i in items])\n"
          "    return None if due(4) else (x, x.sum(1))\nEXTRA = {'collate': join}",
          "TypeError at step 5 in data_wait: the collate function returned None", settings=PLAIN, saves=True),
    code("metric: None", "class M:\n    def update(self, *a): pass\n    def result(self): return None\nEXTRA = {'metric': M}",
          r"result\(\) returned a NoneType"),
    code("metric: empty", "class M:\n    def update(self, *a): pass\n    def result(self): return {}\nEXTRA = {'metric': M}"),
    code("metric: NaN", "class M:\n    def update(self, *a): pass\n    def result(self): return {'m': math.nan}\nEXTRA = {'metric': M}"),
    code("metric: many and foreign", "class M:\n    def update(self, *a): pass\n"
          "    def result(self): return {'\\x1b[31m' + 'n' * i: i for i in range(0, 90, 9)}\nEXTRA = {'metric': M}"),
    code("item: long", "EXTRA = {'item': 'x' * 10**6}", "item: has 1,000,000 characters; allowed: at most 40"),
    code("item: foreign", "EXTRA = {'item': '\\x1b[31m\\u202e\\ud800', 'describe_model': '\\x9b2J' * 500, 'notes': ['\\x07' * 3000]}"),
    code("token: alone", "EXTRA = {'token': 'word'}", "tokens_per_item: is missing, but token is set"),
    code("token: of inf", "EXTRA = {'token': 'word', 'tokens_per_item': INF}", "a number above 0"),
    code("parts: foreign names", "def factory(s):\n    m = Net()\n    return dict(model=m, train_data=Data(), loss=loss, parts={'\\x1b[31m': m.head})",
          "this is no name for a phase"),
    code("parts: used", "def factory(s):\n    m = Net()\n    return dict(model=m, train_data=Data(), loss=loss, parts={'head': m.head, 'all': [m.encoder]})"),
    code("notes: many", "EXTRA = {'notes': ['note'] * 30}"),
    code("describe: raises", "def d():\n    raise ValueError('boom')\nEXTRA = {'describe_data': d}", r"describe_data\(\) failed: ValueError: boom"),
    code("factory: a generator", "def factory(s):\n    yield 1", "is missing from the generator that the factory returned"),
    code("factory: parts missing", "def factory(s):\n    return types.SimpleNamespace()", "is missing from the SimpleNamespace that the factory returned"),
    code("factory: two arguments", "def factory(a, b):\n    return 1", "the factory failed: TypeError"),
    code("factory: a name that is long", "def factory(s):\n    return type('N' * 10**6, (), {})()", "is missing from the N+"),
    code("factory: properties that raise", "class R:\n    @property\n    def model(self):\n        raise OSError('gone')\ndef factory(s):\n    return R()",
          "reading model failed: OSError: gone"),
    code("factory: a mapping", "def factory(s):\n    return types.MappingProxyType(dict(model=Net(), train_data=Data(), loss=loss))"),
    code("factory: an option of another type", "def factory(s):\n    s.option('width', 3)\n    return dict(model=Net(), train_data=Data(), loss=loss)",
          settings=(),),
    code("module: raises", "raise ValueError('import\\x1b[31m')", r"importing awkward_\d+_\d+ failed: ValueError: import\\x1b\[31m"),
    code("module: exits", "sys.exit(3)", "exited the program"),
    code("module: not Python", "def factory(s)\n    return 1", "is not valid Python"),
    code("module: null bytes", "\0", "is not valid Python"),
    code("module: deep", "x = " + "(" * 150 + "1" + ")" * 150 + "\ny = " + "-" * 100000 + "1", "is not valid Python|RecursionError|MemoryError|too complex"),
]  # fmt: skip

# (name, statements that raise, words of the message)
RAISES = [
    ("ValueError", "raise ValueError('boom')", "ValueError.*boom"),
    ("a message of a megabyte", "raise ValueError('boom ' * 200_000)", "ValueError.*boom.*…"),
    ("many lines", "raise ValueError('boom\\n' * 1000)", "ValueError.*boom"),
    ("control characters", "raise ValueError('\\x1b]0;boom\\x07\\u202e\\ud800')", r"ValueError.*\\x1b\]0;boom"),
    ("no message", "raise ValueError", "ValueError.*no message"),
    ("__str__ raises", "E = type('E', (Exception,), {'__str__': lambda s: 1 / 0})\nraise E", "E.*its message cannot be shown: __str__ raises ZeroDivisionError"),
    ("__str__ returns a number", "E = type('E', (Exception,), {'__str__': lambda s: 7})\nraise E", "E.*its message cannot be shown"),
    ("a type with a long name", "raise type('E' * 10**6, (Exception,), {})('boom')", "EEEE.*boom"),
    ("a cycle of causes", "a, b = ValueError('boom'), KeyError('b')\na.__cause__, b.__cause__ = b, a\nraise a", "boom"),
    ("a group", "raise ExceptionGroup('boom', [ValueError(1)])", "boom"),
    ("KeyError", "raise KeyError('boom')", "KeyError.*boom"),
    ("SyntaxError", "raise SyntaxError('boom')", "SyntaxError.*boom"),
    ("UnicodeDecodeError", "b'\\xff'.decode()", "UnicodeDecodeError"),
    ("AssertionError", "assert False", "AssertionError.*no message"),
    ("RecursionError", "def f():\n    f()\nf()", "RecursionError"),
    ("MemoryError", "raise MemoryError", "out of memory|MemoryError"),
    ("BaseException", "raise type('Stop', (BaseException,), {})('boom')", "Stop.*boom"),
    ("SystemExit", "sys.exit(3)", "SystemExit"),
    ("KeyboardInterrupt", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("GeneratorExit", "raise GeneratorExit", "GeneratorExit"),
    ("OSError", "open('/none\\x1b/x')", r"/none\\x1b/x"),
    ("too many open files", "raise OSError(24, 'Too many open files')", r"too many open files.*ulimit -n"),
    ("no more threads", "raise RuntimeError(\"can't start new thread\")", "cannot start another thread or process.*ulimit -u"),
    ("no fork", "raise BlockingIOError(11, 'Resource temporarily unavailable')", "cannot start another thread or process"),
    ("a file-size limit", "raise OSError(27, 'File too large')", "file too large.*ulimit -f"),
    ("ancillary data", "raise RuntimeError('received 0 items of ancdata')", "too many open files"),
    ("StopIteration", "raise StopIteration('boom')", "StopIteration"),
    ("a warning", "raise UserWarning('boom')", "UserWarning.*boom"),
]  # fmt: skip

# (name, code around the statements, whether a checkpoint exists by then)
PLACES = [
    ("the factory", "def factory(s):\n{0}", False),
    ("forward", "class Net(Base):\n    def middle(self, h):\n        if due(4):\n{2}\n        return h", True),
    ("the first forward", "class Net(Base):\n    def middle(self, h):\n{1}", False),
    ("the loss", "def loss(o, b):\n    if due(4):\n{1}\n    return F.mse_loss(o.squeeze(-1), b[1])", True),
    ("an item", "class Data(Data):\n    def item(self, index):\n        if due(7):\n{2}\n        return super().item(index)", True),
    ("the first item", "class Data(Data):\n    def item(self, index):\n{1}", False),
    ("collate", "def join(items):\n    if due(4):\n{1}\n    x = torch.stack([i[0] for i in items])\n    return x, x.sum(1)\nEXTRA = {{'collate': join}}", True),
    ("a gradient's hook", "class Net(Base):\n    def init(self):\n        self.head.weight.register_hook(self.hook)\n"
     "    def hook(self, g):\n        COUNT['h'] += training()\n        if COUNT['h'] >= 4:\n{2}", True),
    ("the metric", "class M:\n    def update(self, *a):\n        if COUNT['calls'] > 3:\n{2}\n    def result(self):\n        return {{'m': 1}}\n"
     "class Net(Base):\n    def middle(self, h):\n        due(99)\n        return h\nEXTRA = {{'metric': M}}", True),
]  # fmt: skip


def _raising() -> Iterator[Fault]:
    """Every exception in two places, so that every place sees many."""
    for number, (name, statements, words) in enumerate(RAISES):
        for turn in range(2):
            place, around, saves = PLACES[(number + turn * 4) % len(PLACES)]
            if name in ("GeneratorExit", "StopIteration") and "item" in place:
                continue  # ends the generator that fetches the items; tested by name
            blocks = [indent(statements, " " * 4 * depth) for depth in (1, 2, 3)]
            settings = (*PLAIN, ("evaluate.every_steps", 4)) if place == "the metric" else PLAIN
            yield Fault(
                f"{place}: {name}", "", "\n" + around.format(*blocks) + "\n", words, settings, saves=saves
            )


FAULTS = [*TRAINING_MODELS, *BROKEN_MODELS, *DATA, *PARTS, *_raising()]

WORKERS = (*PLAIN, ("loader.workers", 1), ("loader.fetch", "item"))


def _worker(name: str, statements: str, words: str | None, **more: object) -> Fault:
    body = f"def item(self, index):\n    if torch.utils.data.get_worker_info() is not None and index % 5 == 0:\n{indent(statements, ' ' * 8)}\n    return super().item(index)"
    return data_with(f"in a worker: {name}", body, words, settings=WORKERS, **more)


IN_PROCESSES = [
    _worker("os._exit", "os._exit(3)", r"loader worker \d+ exited with status 3 \(os\._exit"),
    _worker("sys.exit", "sys.exit(5)", r"loader worker \d+ exited with status 5|SystemExit"),
    _worker("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)", r"loader worker \d+ was killed by SIGKILL"),
    _worker("SIGSEGV", "os.kill(os.getpid(), signal.SIGSEGV)", r"loader worker \d+ was killed by SIGSEGV"),
    _worker("StopIteration", "raise StopIteration", rf"raised StopIteration.*{PLACE}"),
    _worker("an error", "raise ValueError('boom')", rf"ValueError.*boom.*{PLACE}"),
    _worker("a message of a megabyte", "raise ValueError('boom ' * 200_000)", "ValueError.*boom"),
    _worker("a local class", "raise type('Local', (Exception,), {})('boom')", "Local: boom"),
    _worker("__str__ raises", "raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})", "its message cannot be shown"),
    _worker("an object as item", "return Foo(), 1", "TypeError.*Foo"),
    _worker("a thread", "threading.Thread(target=time.sleep, args=(0.01,)).start()\nreturn super().item(index)", None),
    data_with("workers", "pass", settings=WORKERS),
    code("limits: open files", "", "too many open files", settings=WORKERS, limits=((resource.RLIMIT_NOFILE, 20),)),
    code("limits: fewer open files", "", "too many open files", settings=WORKERS, limits=((resource.RLIMIT_NOFILE, 16),)),
    code("limits: file size", "class Net(Base):\n    def init(self):\n        self.big = nn.Linear(300, 300)", "file too large.*of this process is 64 KiB.*ulimit -f",
          settings=PLAIN, limits=((resource.RLIMIT_FSIZE, 65536),)),
    code("stopped at once while workers start", "", "immediately|interrupted", settings=WORKERS, stop_when="running a test step"),
]  # fmt: skip
