"""What all built-in workloads have: facts that are known without torch, names, a metric; and that they learn."""

from __future__ import annotations

import ast
import math
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import few
from torch.utils.data import default_collate
from workload_help import ANTISPOOF, SUMMARISE, configured, evaluate, made, told, train

from ndd_engine import run_training, workloads
from ndd_engine.config import read
from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.workloads.antispoof import SeResNet
from ndd_engine.workloads.base import parameter_count
from ndd_engine.workloads.chartext import NextCharacterModel, ScoreModel, Size
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts

TINY_TEXT: dict[str, Any] = {"name": "chartext", "layers": 2, "heads": 2, "width": 32, "dropout": 0.0}
SHORT_TEXT = {**TINY_TEXT, "max_characters": 20_000}


# Workload -> section, (item, token), metrics with the headline first.
BUILTIN: dict[str, tuple[dict[str, Any], tuple[str, str | None], list[str]]] = {
    "chartext": (SHORT_TEXT, ("segment", "character"), ["bits_per_char", "loss"]),
    "diffusion": ({**SHORT_TEXT, "objective": "diffusion"}, ("segment", "character"), ["bits_per_char", "loss"]),
    "eeg": ({"name": "eeg", "samples": 4000}, ("segment", "sample"), ["rmse", "auroc", "loss"]),
    "antispoof": ({**ANTISPOOF, "clips": 40}, ("clip", "frame"), ["eer_percent", "loss"]),
    "finetune": (
        {"name": "finetune", "layers": 1, "width": 16, "heads": 2, "document_chars": 600},
        ("example", "token"), ["perplexity", "loss", "bits_per_byte"],
    ),
    "summarise": ({**SUMMARISE, "pairs": 60, "summaries": 0}, ("pair", "token"), ["loss"]),
}  # fmt: skip


GUIDE_TEXT = Size(65, 256, 6, 6, 384, 0.2)
GUIDE_SPEECH = ([64, 128, 256, 512], 16, 0.5)  # channels, reduction, dropout


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (lambda: ScoreModel(GUIDE_TEXT), 11_739_585),
        # Without sharing, the output layer is a second (65, 384) table: 24,960 more, and still no biases.
        (lambda: NextCharacterModel(GUIDE_TEXT, tie_weights=True), 10_745_088),
        (lambda: NextCharacterModel(GUIDE_TEXT), 10_745_088 + 65 * 384),
        (lambda: SeResNet([2, 2, 2, 2], *GUIDE_SPEECH), 11_981_251),
        (lambda: SeResNet([3, 4, 6, 3], *GUIDE_SPEECH), 22_159_555),
    ],
)
def test_models_have_the_parameters_of_the_guide(
    model: Callable[[], torch.nn.Module], parameters: int
) -> None:
    with torch.device("meta"):
        assert parameter_count(model()) == parameters


@pytest.mark.parametrize("name", BUILTIN)
def test_facts_names_and_metric(name: str) -> None:
    section, names, metrics = BUILTIN[name]
    workload = made(section, 4, 1600 if name == "antispoof" else 64)
    known = facts(configured(section, micro=4, sequence=1600 if name == "antispoof" else 64))
    data: Any = (workload.train_data, workload.eval_data)
    assert (known.train_items, known.eval_items) == tuple(map(len, data))
    assert (workload.item, workload.token) == names
    batch = (workload.collate or default_collate)([workload.train_data[index] for index in range(4)])
    output = workload.forward(workload.model, batch)
    loss = workload.loss(output, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.ndim == 0 and all(parameter.grad is not None for parameter in workload.model.parameters())
    found = evaluate(workload, micro=32)
    assert list(found) == metrics
    if name == "chartext":
        assert found["bits_per_char"] == pytest.approx(found["loss"] / math.log(2))


def test_what_is_offered_against_a_cause_is_a_setting_with_which_nothing_is_left_to_offer() -> None:
    section = {**SUMMARISE, "pairs": 60, "summaries": 4, "pad": "longest", "decoder": "stepwise"}
    offered = made(section, 8, 48).alternatives
    assert set(offered) == {"recompile", "stepwise", "evaluation"}
    for cause, (setting, _) in offered.items():
        key, _, value = setting.removeprefix("workload.").partition("=")
        changed = {**section, key: int(value) if value.isdigit() else value}
        assert set(made(changed, 8, 48).alternatives) == set(offered) - {cause}


@pytest.mark.parametrize(
    ("section", "sequence"),
    [
        ({**ANTISPOOF, "clips": 24}, 6000),
        ({**SUMMARISE, "pad": "longest"}, 48),
        ({**SUMMARISE, "pad": "full"}, 48),
    ],
)
def test_gathered_batches_are_the_collated_ones(section: dict[str, Any], sequence: int) -> None:
    workload = made(section, 8, sequence)
    data: Any = workload.train_data
    picked = [5, 0, len(data) - 1, 5]
    collated = (workload.collate or default_collate)([data[index] for index in picked])
    # Loader processes are sent a copy, and a GPU as well.
    sent = pickle.loads(pickle.dumps(data)).to(torch.device("cpu"))
    for each in (data, sent):
        assert all(map(torch.equal, each.batch(torch.tensor(picked)), collated))
    assert data.nbytes == sent.nbytes > 0
    with pytest.raises(IndexError):
        data[len(data)]
    if section.get("pad") == "full":
        assert [part.shape[1] for part in collated] == [48, 48, 24, 24]


@pytest.mark.parametrize("workload", ["chartext", "eeg", "antispoof", "finetune", "summarise"])
def test_data_that_is_not_there_is_named(tmp_path: Path, workload: str) -> None:
    for data in (tmp_path / "no" / "x.csv", "a\0b", "~nobody-of-this-name/x.csv", "x" * 5000):
        text = told(workload, data, sequence=2000)
        assert "workload.data" in text and "\0" not in text
    assert '"builtin"' in told(workload, "bultin", sequence=2000)


WITHOUT_TORCH = """
import sys
from ndd_engine.config import read
from ndd_engine.workloads.interface import facts
for name in ("chartext", "eeg", "finetune", "summarise", "antispoof"):
    few = ["workload.pairs=60"] if name == "summarise" else []
    assert facts(read(None, [f"workload.name={name}", *few]).resolve()).train_items
sys.exit("torch" in sys.modules)
"""


@pytest.mark.long
def test_facts_are_known_without_torch() -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=False).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("size", few(["guide", "tiny", "small", "narrow", "middle"], 1))
def test_the_library_feeds_every_size_of_the_summariser(size: str) -> None:
    """Whole, and as the little of it that a size is tried with where none was named."""
    draft = read(None, [f"workload.size={size}"], "summarise")
    config = draft.resolve()
    for each in (config, draft.resolve(few=True)):
        found = facts(each)
        assert found.train_items >= 16 and found.eval_items > 0
        assert found.tokens_per_item > each.batch.sequence * 0.95
    assert config.batch.items == (8 if size == "tiny" else 16)


def unigram_entropy(text: str) -> float:
    """Bits a character takes when only the frequency of characters is known."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def test_next_character_beats_the_unigram_entropy(text_file: Path, sentences: str) -> None:
    workload = made({**TINY_TEXT, "data": str(text_file)}, 16, 32)
    before = evaluate(workload)["bits_per_char"]
    train(workload, 100, 1e-2, 16)
    assert evaluate(workload)["bits_per_char"] < unigram_entropy(sentences) - 1.5 < before


@pytest.mark.long
def test_diffusion_beats_the_unigram_entropy(tmp_path: Path) -> None:
    """On lines of one repeated letter, where every neighbour tells.

    On sentences a model of this size stays at the unigram entropy for the first thousand steps, until it
    finds out which neighbours matter.
    """
    draw = random.Random(7)
    text = "".join(draw.choices("abcdefghijklmnop")[0] * 15 + "\n" for _ in range(2400))
    path = tmp_path / "lines.txt"
    path.write_text(text)
    workload = made({**TINY_TEXT, "data": str(path), "objective": "diffusion"}, 16, 16)
    before = evaluate(workload)["bits_per_char"]
    train(workload, 120, 3e-3, 16)
    after = evaluate(workload)["bits_per_char"]
    # A line's letter takes 4 bits, so its 16 characters take 0.25 each: no honest bound is much below that.
    assert 0.2 < after < unigram_entropy(text) - 2.5 < before


def test_forecast_beats_the_last_sample_and_the_mean() -> None:
    """On the builtin data, whose rhythms can be extrapolated and whose noise averages out over a window."""
    workload = made({"name": "eeg", "samples": 20_000, "channels": 4}, 256, 64)
    last = evaluate(workload, lambda batch: batch[0][:, -1:])
    mean = evaluate(workload, lambda batch: torch.zeros_like(batch[1]))
    train(workload, 150, 0.01, 256)
    learned = evaluate(workload)
    assert learned["rmse"] < 0.95 * last["rmse"] < mean["rmse"]
    assert learned["auroc"] > max(last["auroc"], mean["auroc"])


@pytest.mark.slow
def test_antispoof_tells_copies_of_voices_it_never_heard(tmp_path: Path) -> None:
    workload = made(ANTISPOOF, 16, 9_600)
    assert evaluate(workload)["eer_percent"] > 40
    # Nothing as simple as loudness above 4 kHz tells a copy: what is learned is the harm to the harmonics.
    signs = torch.tensor([-1.0, 1.0])
    loudness = evaluate(workload, lambda batch: batch[0][:, 97:].mean((1, 2))[:, None] * signs)
    assert 40 < loudness["eer_percent"] < 60
    found = run_training(
        {
            "run": {"epochs": 16, "max_steps": 160, "threads": 1, "device": "cpu"},
            "workload": ANTISPOOF,
            "batch": {"micro": 16, "sequence": 9_600},
            "optimizer": {"name": "adam", "lr": 3e-3, "weight_decay": 1e-4},
            "schedule": {"kind": "cosine", "min_lr": 1e-5},
            "clip": {"max_norm": 5.0},
            "evaluate": {"every_epochs": 0, "at_end": True},
        },
        runs=tmp_path,
    )
    assert found.snapshot.evaluations[-1].metrics["eer_percent"] < 30


@pytest.mark.long
def test_finetune_beats_the_frequency_of_its_tokens() -> None:
    sets = ("size=small", "vocabulary=512", "document_chars=1500")
    config = read(
        None, ["workload.name=finetune", "batch.sequence=128", *(f"workload.{one}" for one in sets)]
    )
    torch.manual_seed(1)
    workload: Any = prepare(config.resolve())
    counts = torch.ones(len(workload.train_data.encoder))  # so that no token is impossible
    items = [workload.train_data[index] for index in range(len(workload.train_data))]
    for item in items:
        counts += torch.bincount(item, minlength=len(counts))
    likely = (counts / counts.sum()).log()
    unigram = evaluate(workload, lambda batch: likely.expand(*batch[0].shape, -1), micro=4)
    before = evaluate(workload, micro=4)
    workload.train_data = items  # encoded once
    train(workload, 60, 1e-3, 4)
    after = evaluate(workload, micro=4)
    assert after["perplexity"] < 0.7 * unigram["perplexity"] < 0.7 * before["perplexity"]
    assert after["bits_per_byte"] < unigram["bits_per_byte"] - 0.2


@pytest.mark.long
def test_summarise_beats_the_frequency_of_its_words() -> None:
    """On functions of the standard library, with most summary words outside of so small a vocabulary."""
    workload = made({**SUMMARISE, "summaries": 4, "beam": 2}, 8, 48)
    summaries = [torch.where(item[3] < 500, item[3], 0) for item in workload.train_data]  # type: ignore[attr-defined]
    counts = torch.ones(500) + torch.bincount(torch.cat(summaries), minlength=500)
    likely = (counts / counts.sum()).log()
    held_out = [torch.where(item[3] < 500, item[3], 0) for item in workload.eval_data]  # type: ignore[attr-defined]
    # Words outside of the vocabulary count as one word, which flatters this.
    baseline = -sum(float(likely[words].mean()) for words in held_out) / len(held_out)
    before = evaluate(workload, micro=8)
    train(workload, 120, 5e-3, 8, clip=1.0)
    after = evaluate(workload, micro=8)
    assert after["loss"] < baseline - 0.3 < baseline < before["loss"]
    assert after["rouge_1"] > before["rouge_1"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "section", "metric", "bound"),
    [
        # Real EEG drifts slowly, and repeating the last sample beats a short training: only the mean is beaten.
        ("eeg/eye-state.arff", {"name": "eeg"}, "rmse", 0.8),
        (
            "text/tinyshakespeare.txt",
            {**TINY_TEXT, "width": 64, "max_characters": 200_000},
            "bits_per_char",
            0.83,
        ),
    ],
)
def test_real_data_is_learned(
    real_data: Path, file: str, section: dict[str, Any], metric: str, bound: float
) -> None:
    workload = made({**section, "data": str(real_data / file)}, 64, 32)
    if metric == "rmse":
        baseline = evaluate(workload, lambda batch: torch.zeros_like(batch[1]))["rmse"]
    else:
        baseline = unigram_entropy((real_data / file).read_text("utf-8")[:200_000])
    train(workload, 150, 3e-3, 64)
    assert evaluate(workload)[metric] < bound * baseline


def test_the_built_in_workloads_use_the_public_interface_only() -> None:
    """And every name of it is documented."""
    folder = Path(workloads.__file__).parent
    theirs = {
        *WORKLOADS,
        *(f"{name}_data" for name in WORKLOADS),
        "builtin_texts",
        "speech_signals",
        "pointer_generator",
    }
    for name in theirs:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or "ndd" in str(node.module)):
                names = {alias.name for alias in node.names}
                public = node.module == "ndd_engine.workloads" and names <= set(workloads.__all__)
                assert public or (node.level == 1 and node.module in theirs), (name, node.module, names)
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("ndd") for alias in node.names), name
    text = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text()
    assert not [name for name in workloads.__all__ if f"`{name}`" not in text]
    assert all(hasattr(workloads, name) for name in workloads.__all__)
