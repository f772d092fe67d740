"""The character-level workload: windows of a text, two objectives, bits per character."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import ChartextSection

from .base import Batch, BuiltinWorkload, GatherItems, MeanLoss, sliding_windows
from .chartext_model import CharacterModel, NextCharacterModel, ScoreModel, Size
from .problems import Progress
from .text_data import TextData
from .windows import window_count

NOISE_EPS = 1e-3  # minimum time, and the share not absorbed at time 1 (SEDD's log-linear noise)


class TextWindows(GatherItems):
    """Windows of `sequence` characters over one int64 tensor (N,), their starts `stride` apart.

    An item is (input, target), both (sequence,) int64, the target one character later; without `shifted` it is the
    input only. Every window has room for the target, so both forms have the same items.
    """

    def __init__(self, codes: Tensor, sequence: int, stride: int, shifted: bool = True) -> None:
        self.codes, self.sequence, self.stride, self.shifted = codes, sequence, stride, shifted

    def __len__(self) -> int:
        return window_count(len(self.codes), self.sequence + 1, self.stride)

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        start = index * self.stride
        window = self.codes[start : start + self.sequence]
        if not self.shifted:
            return window
        return window, self.codes[start + 1 : start + self.sequence + 1]

    def batch(self, indices: Tensor) -> Any:
        """The items at `indices` (B,) int64 on the text's device, as a collated batch, by one gather."""
        windows = sliding_windows(self.codes, self.sequence)
        starts = indices * self.stride
        inputs = windows.index_select(0, starts)
        return inputs if not self.shifted else (inputs, windows.index_select(0, starts + 1))


class Diffused(NamedTuple):
    """The inputs of the diffusion loss. log_ratio: (B, T, vocabulary), see ScoreModel. weight: (B, T), zero for
    characters that are not absorbed."""

    log_ratio: Tensor
    weight: Tensor


@dataclass
class BitsPerCharacter(MeanLoss):
    """The loss in nats and in bits; upper bounds for the diffusion objective."""

    def result(self) -> dict[str, float]:
        loss = super().result()["loss"]
        return {"bits_per_char": loss / math.log(2), "loss": loss}


class Chartext(BuiltinWorkload):
    """A prepared character model; implements Workload. The index i stands for vocabulary[i]."""

    name = "chartext"
    item = "window"
    token: str | None = "character"

    def __init__(self, config: Config, section: ChartextSection, data: TextData, progress: Progress) -> None:
        self.vocabulary, layout = data.vocabulary, data.layout
        self.tokens_per_item = layout.sequence
        self.diffusion = section.objective == "diffusion"
        notes = list(data.notes)
        if self.diffusion:
            notes.append(
                "Bits per character of the diffusion objective are an upper bound, estimated with random noise."
            )
        super().__init__(data.line(), notes)
        self._section, self._seed = section, config.run.seed
        self._eval_noise: torch.Generator | None = None
        codes, shifted = encode(data.text, data.vocabulary), not self.diffusion
        train, evaluation = codes[: layout.parts.train], codes[layout.parts.train :]
        self.train_data = TextWindows(train, layout.sequence, layout.stride, shifted)
        self.eval_data = TextWindows(evaluation, layout.sequence, layout.eval_stride, shifted)
        self._build(lambda: build_model(section, len(data.vocabulary), layout.sequence), progress)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Logits (B, T, vocabulary), or Diffused, with noise from torch's global generator of the device.

        In evaluation, the noise comes from a generator that each `metric()` resets: every evaluation has the same
        noise, and does not affect the training that follows.
        """
        if not self.diffusion:
            return model(batch[0])
        clean: Tensor = batch
        if not self.model.training and self._eval_noise is None:
            self._eval_noise = torch.Generator(clean.device).manual_seed(self._seed)
        generator = None if self.model.training else self._eval_noise
        noisy, noise, weight = absorb(clean, len(self.vocabulary), generator)
        return Diffused(model(noisy, noise), weight)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        if self.diffusion:
            return score_entropy(output, batch)
        return F.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten())

    def metric(self) -> BitsPerCharacter:
        self._eval_noise = None
        return BitsPerCharacter()

    def describe_model(self) -> str:
        section = self._section
        kind = "absorbing-state diffusion" if self.diffusion else "next character"
        return (
            f"{section.layers} layers, {section.heads} heads, width {section.width}, context "
            f"{self.tokens_per_item}, {kind}"
        )


def build_model(section: ChartextSection, vocabulary: int, context: int) -> CharacterModel:
    """The model of the objective, with weights from torch's global generator."""
    size = Size(vocabulary, context, section.layers, section.heads, section.width, section.dropout)
    if section.objective == "diffusion":
        return ScoreModel(size)
    return NextCharacterModel(size, section.tie_weights)


def encode(text: str, vocabulary: str) -> Tensor:
    """The index of each character in the vocabulary, which must contain all of them: (len(text),) int64."""
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    table = torch.zeros(ord(max(vocabulary)) + 1, dtype=torch.int64)
    table[torch.tensor([ord(character) for character in vocabulary])] = torch.arange(len(vocabulary))
    return table[points]


def absorb(clean: Tensor, absorbing: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Characters (B, T) -> (noisy (B, T), total noise (B,), weight of each position in the loss (B, T)).

    With log-linear noise, a character is absorbed by time t with probability (1 - eps) t. The times of a batch are
    evenly spaced from a random start: each is uniformly distributed, and the variance of the loss is smaller.
    """
    batch, device = clean.shape[0], clean.device
    start = torch.rand(1, generator=generator, device=device)
    even = torch.arange(batch, device=device) / batch
    time = NOISE_EPS + (1 - NOISE_EPS) * ((start + even) % 1)
    chance = (1 - NOISE_EPS) * time
    absorbed = torch.rand(clean.shape, generator=generator, device=device) < chance.unsqueeze(1)
    noisy = torch.where(absorbed, absorbing, clean)
    return noisy, -torch.log1p(-chance), absorbed / time.unsqueeze(1)


def score_entropy(output: Diffused, clean: Tensor) -> Tensor:
    """Denoising score entropy of absorbed characters (Lou et al. 2024), a mean over characters in nats.

    With r = 1 / (exp(noise) - 1), the true ratio at the clean character, and score = r exp(l), the entropy
    sum(score) - r log(score[clean]) + r (log r - 1) is r (sum(exp l) - l[clean] - 1). For log-linear noise, r times the
    rate of the noise is 1 / t. So the weight is 1 / t, and nothing overflows.
    """
    log_ratio = output.log_ratio
    chosen = F.nll_loss(log_ratio.flatten(0, 1), clean.flatten(), reduction="none")  # -l[clean]
    entropy = log_ratio.exp().sum(-1) + chosen.view_as(clean) - 1
    return (output.weight * entropy).mean()
