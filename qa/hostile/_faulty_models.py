"""Awkward models: those that train, and those that cannot."""

# ruff: noqa: E501  one fault per line, as code
from __future__ import annotations

from qa.hostile._faulty_code import PLACE, PLAIN, extra_state, init_model, model_with

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
    init_model("everything frozen", "self.requires_grad_(False)", words="has no trainable parameter"),
    init_model("lazy layer", "self.lazy = nn.LazyLinear(3)", words="has no shape yet"),
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
