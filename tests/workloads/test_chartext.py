"""The character workload: exact sizes, windows, the two objectives."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ndd_engine.config.schema import Config
from ndd_engine.workloads import chartext
from ndd_engine.workloads.base import parameter_count
from ndd_engine.workloads.chartext import (
    Diffused,
    NextCharacterModel,
    ScoreModel,
    Size,
    TextWindows,
    absorb,
    score_entropy,
)
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts

GUIDE = Size(65, 256, 6, 6, 384, 0.2)


def test_diffusion_has_the_parameters_of_the_guide() -> None:
    with torch.device("meta"):
        assert parameter_count(ScoreModel(GUIDE)) == 11_739_585


def test_autoregressive_parameters_are_the_trunk_without_conditioning() -> None:
    vocabulary, context, layers, _, width, _ = GUIDE
    block = (
        3 * width**2 + width**2 + 4 * width**2 + 4 * width**2 + 2 * width
    )  # qkv, project, feed-forward, norms
    trunk = vocabulary * width + context * width + layers * block + width
    with torch.device("meta"):
        tied = NextCharacterModel(GUIDE, tie_weights=True)
        untied = NextCharacterModel(GUIDE)
    assert parameter_count(tied) == trunk == 10_745_088
    # Without sharing, the output layer is a second (65, 384) table: 24,960 more, and still no biases.
    assert parameter_count(untied) == trunk + vocabulary * width == 10_770_048
    assert not any(name.endswith("bias") for name, _ in untied.named_parameters())


def test_next_character_model_sees_only_the_past_and_diffusion_sees_all() -> None:
    torch.manual_seed(0)
    indices = torch.randint(0, 11, (1, 16))
    changed = indices.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 11
    causal = NextCharacterModel(Size(11, 16, 2, 2, 32, 0.0))
    difference = (causal(indices) - causal(changed)).abs().sum(-1)[0]
    assert not difference[:10].any() and difference[10:].all()
    score = ScoreModel(Size(11, 16, 2, 2, 32, 0.0))
    for parameter in score.parameters():  # away from the start, where every block is the identity
        torch.nn.init.normal_(parameter, std=0.1)
    noise = torch.tensor([1.0])
    assert (score(indices, noise) - score(changed, noise)).abs().sum(-1)[0].all()


def test_score_entropy_is_the_published_formula() -> None:
    """Compared with SEDD's absorbing score entropy, written as in the paper with its log-linear noise."""
    generator = torch.Generator().manual_seed(3)
    clean = torch.randint(0, 5, (8, 12), generator=generator)
    noisy, noise, weight = absorb(clean, 5, generator)
    log_ratio = torch.randn(8, 12, 5, generator=generator)
    esigm1 = torch.expm1(noise.double())
    log_score = log_ratio.double() - esigm1.log()[:, None, None]
    ratio = (1 / esigm1)[:, None]
    own = log_score.gather(-1, clean.unsqueeze(-1)).squeeze(-1)
    entropy = log_score.exp().sum(-1) - ratio * own + ratio * (ratio.log() - 1)
    chance = -torch.expm1(-noise.double())
    rate = (1 - chartext.NOISE_EPS) / (1 - chance)  # time derivative of the total noise
    expected = (torch.where(noisy == 5, entropy, 0.0) * rate[:, None]).mean()
    assert float(score_entropy(Diffused(log_ratio, weight), clean)) == pytest.approx(
        float(expected), rel=1e-4
    )


def test_windows_shift_by_one_and_have_room_for_the_target() -> None:
    codes = torch.arange(20)
    windows = TextWindows(codes, 4, 4)
    assert len(windows) == 4  # the fifth would have no target for its last character
    given, target = windows[3]
    assert given.tolist() == [12, 13, 14, 15] and target.tolist() == [13, 14, 15, 16]
    assert len(TextWindows(codes, 4, 1)) == 16
    assert [list(item) for item in TextWindows(codes, 4, 8, shifted=False)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    with pytest.raises(IndexError):
        windows[4]
    copy = pickle.loads(pickle.dumps(windows))
    assert torch.equal(copy[1][1], windows[1][1])


@pytest.mark.parametrize("objective", ["autoregressive", "diffusion"])
def test_prepared_workload(make_config: Callable[..., Config], text_file: Path, objective: str) -> None:
    section = {
        "name": "chartext",
        "data": str(text_file),
        "objective": objective,
        "layers": 1,
        "heads": 2,
        "width": 16,
    }
    config = make_config(section, micro=4, sequence=32)
    workload = prepare(config)
    assert (workload.item, workload.token, workload.tokens_per_item) == ("window", "character", 32)
    known = facts(config)
    assert (known.train_items, known.eval_items) == (len(workload.train_data), len(workload.eval_data))  # type: ignore[arg-type]
    batch = torch.utils.data.default_collate([workload.train_data[index] for index in range(4)])
    shapes = [tuple(part.shape) for part in ([batch] if isinstance(batch, Tensor) else batch)]
    assert shapes == ([(4, 32)] if objective == "diffusion" else [(4, 32), (4, 32)])
    output = workload.forward(workload.model, batch)
    loss = workload.loss(output, batch)
    loss.backward()
    assert loss.ndim == 0
    metric = workload.metric()
    metric.update(output, batch, loss)
    result = metric.result()
    assert next(iter(result)) == "bits_per_char"
    assert result["bits_per_char"] == pytest.approx(result["loss"] / math.log(2))


def test_builtin_and_stdlib_texts(make_config: Callable[..., Config]) -> None:
    builtin = facts(make_config({"name": "chartext"}, micro=8, sequence=128))
    assert builtin.train_items > 2_000 and "characters" in builtin.text
    library = facts(make_config({"name": "chartext", "data": "stdlib"}, micro=8, sequence=128))
    assert library.train_items > 5 * builtin.train_items
