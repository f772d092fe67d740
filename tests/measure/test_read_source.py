"""Lines of a script that are found by reading it: what is kept, carried on, added, collected or drawn at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.measure.source import (
    adding_line,
    carrying_lines,
    collecting_line,
    drawing_line,
    growing_line,
    keeping_lines,
)

LOOP = """
def train(model, data, total, losses, meter, scaler):
    for x, y in data:
        loss = model(x, y)
        {backward}
        {keeps}
"""


def lines_of(keeps: str, backward: str = "loss.backward()") -> list[int]:
    return keeping_lines(LOOP.format(keeps=keeps, backward=backward))


@pytest.mark.parametrize(
    "keeps",
    [
        "total += loss", "total = total + loss", "losses.append(loss)", "meter.update(loss, len(x))",
        "total += loss * len(x)", "losses[0] += loss.cpu()", "losses.append((1, loss))", "total += loss if 1 else 0.0",
        "losses['a'] = loss", "self.total -= loss",
    ],
)  # fmt: skip
@pytest.mark.parametrize("backward", ["loss", "scaler.scale(loss)", "(loss / 4)"])
def test_a_line_that_keeps_the_graph_is_found(keeps: str, backward: str) -> None:
    assert lines_of(keeps, f"{backward}.backward()") == [6]
    assert lines_of(keeps, f"accelerator.backward({backward})") == [6]


@pytest.mark.parametrize(
    "keeps",
    [
        "total += loss.item()", "total += float(loss)", "losses.append(loss.detach().cpu())",
        "losses.append(loss.item())", "total += x", "print(loss)", "losses.append(f'{loss}')", "loss += 1",
        "loss = loss / 4", "total += (loss > 3)", "total += loss.item() if 1 else 0.0",
    ],
)  # fmt: skip
def test_a_line_that_keeps_a_number_is_not(keeps: str) -> None:
    assert lines_of(keeps) == []
    # Nor does a function without a backward pass.
    assert keeping_lines("def evaluate(total, loss):\n    total += loss\n    return total\n") == []


COLLECTS = """import gc
for step in range(9):
    train(step)
    gc.collect()


@decorated
def each(step):
    from gc import collect
    collect()


def never(step):
    return [step]
"""


@pytest.mark.parametrize(("function_line", "line"), [(1, 4), (7, 10), (13, 0)])
def test_the_line_of_a_collection_is_that_of_the_call(tmp_path: Path, function_line: int, line: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(COLLECTS)
    assert collecting_line(str(path), function_line) == line
    assert collecting_line(str(tmp_path / "gone.py"), function_line) == 0


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("out, state = rnn(x, state)", [4]),
        ("state = rnn(x, state)\n    state = state.detach()\n    other = net(x, other)", [4, 6]),
        ("x = x.to(device)\n    out = net(x)", []),
        ("state = zeros()\n    state = rnn(x, state)", []),
        ("state = [part.detach() for part in state]\n    out, state = rnn(x, state)", []),
        ("state = zeros()\n    for part in x:\n        state = rnn(part, state)", []),
        ("count = count + 1\n    loss = loss + net(x)", [5]),
        ("self.state = rnn(x, self.state)", [4]),
        ("out = net(x)\n    out.backward(retain_graph=True)", [5]),
    ],
)
def test_the_line_that_carries_a_graph_to_the_next_step(body: str, lines: list[int]) -> None:
    source = f"state = other = loss = None\ncount = 0\nfor x in data:\n    {body}\n    loss.backward()\n"
    assert carrying_lines(source) == lines
    # A model that keeps its state.
    model = (
        "class Net:\n    def forward(self, x):\n        x, self.h = self.rnn(x, self.h)\n        return x\n"
    )
    assert carrying_lines(model) == [3]


def test_the_line_that_adds_a_hook(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "model.register_forward_hook(once)\nfor step in range(9):\n    model.register_forward_hook(again)\n"
    )
    assert adding_line(str(path), "register_.*hook") == 3
    assert adding_line(str(path), "addHandler") == 0


ITEMS = """import random
import numpy as np
import torch


def noise(size):
    return {noise}


class Clips:
    def __getitem__(self, index):
        {before}
        return {item}
"""


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"item": "torch.randn(8)"}, 13),
        ({"item": "self.x[index] + random.random()"}, 13),
        ({"item": "np.random.uniform(size=3)"}, 13),
        ({"item": "self.x[index] + noise(8)", "noise": "torch.rand(size)"}, 7),
        ({"item": "self.x[index] + noise(8)", "noise": "torch.zeros(size)"}, 0),
        # Seeded by the item, or not random at all.
        ({"before": "g = torch.Generator().manual_seed(index)", "item": "torch.randn(8, generator=g)"}, 0),
        ({"before": "rng = np.random.default_rng(index)", "item": "rng.normal(size=8)"}, 0),
        ({"item": "self.x.sample(index)"}, 0),
    ],
)
def test_a_line_that_draws_random_numbers_for_an_item(
    tmp_path: Path, facts: dict[str, str], line: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(ITEMS.format(**{"noise": "0", "before": "x = self.x", "item": "x[index]", **facts}))
    assert drawing_line(str(path), 11) == line


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("history", "history.append(x)"), (".cache", "self.cache[i] = x"), (".state", 'optimizer.state[p]["old"] = x'),
        (".state", 'optimizer.state[p].setdefault("old", []).append(x)'), ("rows", "rows += [x]"),
        ("seen", "seen = torch.cat([seen, x])"), (".seen", "self.seen = self.seen + [x]"), ("parts", "parts.add(x)"),
        (".values", "Meter.values.extend(x)"), ("._forward_hooks", "model.register_forward_hook(hook)"),
        (".figs", "figure, axes = plt.subplots()"),
    ],
)  # fmt: skip
def test_the_line_where_a_container_grows_is_found(name: str, line: str, tmp_path: Path) -> None:
    """Another variable of the same name as an attribute is another thing."""
    plain, attribute = name.lstrip("."), name.startswith(".")
    other = f"{plain}.append(x)" if attribute else f"self.{plain}.append(x)"
    file = tmp_path / "train.py"
    file.write_text(f"{plain} = []\nfor x in {plain}:\n    {other}\n    {line}\n")
    assert growing_line(str(file), plain, attribute) == 4
    assert growing_line(str(file), "another", attribute) == 0
    # It is in the function that has the variable.
    file.write_text("def one(kept):\n    kept.append(1)\n\ndef two(kept):\n    kept.append(2)\n")
    assert growing_line(str(file), "kept", function_line=4) == 5
