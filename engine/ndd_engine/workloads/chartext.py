"""The characters of a text: a small transformer predicts the next one, or those that noise has absorbed.

A factory like your own; docs/own-model.md describes what it may return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from ndd_engine.workloads import (
    GatherItems,
    MeanLoss,
    Settings,
    build_checked,
    overlapping_segments,
    segment_count,
)

from .chartext_data import read

CONDITIONING = 64  # width of the noise-level embedding
FREQUENCIES = 256  # sines and cosines of the noise level
NOISE_EPS = 1e-3  # minimum time, and the share not absorbed at time 1 (SEDD's log-linear noise)


def factory(settings: Settings) -> dict[str, Any]:
    """Segments of a text and a model of it. The index i stands for vocabulary[i]."""
    data, options = read(settings), settings.options
    vocabulary, layout, notes = data.vocabulary, data.layout, data.notes
    diffusion = options["objective"] == "diffusion"
    size = Size(
        len(vocabulary), layout.sequence, *(options[key] for key in ("layers", "heads", "width", "dropout"))
    )
    settings.progress("building the model")
    model: CharacterModel
    parts: dict[str, Any]
    if diffusion:
        notes.append(
            "Bits per character of the diffusion objective are an upper bound, estimated with random noise."
        )
        model = build_checked(lambda: ScoreModel(size))
        objective = Diffusion(model, settings.seed)
        parts = {"forward": objective.forward, "loss": score_entropy, "metric": objective.metric}
    else:
        model = build_checked(lambda: NextCharacterModel(size, options["tie_weights"]))
        parts = {"loss": cross_entropy, "metric": BitsPerCharacter}
    codes = encode(data.text, vocabulary)
    train, evaluation = codes[: layout.train], codes[layout.train :]
    return {
        "model": model,
        "train_data": TextSegments(train, layout.sequence, layout.stride, not diffusion),
        "eval_data": TextSegments(evaluation, layout.sequence, layout.eval_stride, not diffusion),
        **parts,
        "item": "segment",
        "token": "character",
        "tokens_per_item": layout.sequence,
        "parts": model.parts(),
        "describe_model": f"{size.layers} layers, {size.heads} heads, width {size.width}, context {size.context}, "
        f"{'absorbing-state diffusion' if diffusion else 'next character'}",
        "describe_data": data.facts.text,
        "notes": notes,
    }


class TextSegments(GatherItems):
    """Segments of `sequence` characters over one int64 tensor (N,), their starts `stride` apart.

    An item is (input, target), both (sequence,) int64, the target one character later; without `shifted` it is the
    input only. Every segment has room for the target, so both forms have the same items.
    """

    def __init__(self, codes: Tensor, sequence: int, stride: int, shifted: bool = True) -> None:
        self.codes, self.sequence, self.stride, self.shifted = codes, sequence, stride, shifted

    def __len__(self) -> int:
        return segment_count(len(self.codes), self.sequence + 1, self.stride)

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        start = index * self.stride
        segment = self.codes[start : start + self.sequence]
        if not self.shifted:
            return segment
        return segment, self.codes[start + 1 : start + self.sequence + 1]

    def batch(self, indices: Tensor) -> Any:
        """The items at `indices` (B,) int64 on the text's device, as a collated batch, by one gather."""
        segments = overlapping_segments(self.codes, self.sequence)
        starts = indices * self.stride
        inputs = segments.index_select(0, starts)
        return inputs if not self.shifted else (inputs, segments.index_select(0, starts + 1))


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


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """Mean over characters, in nats. output: logits (B, T, vocabulary)."""
    return F.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten())


class Diffusion:
    """Forward and metric of the diffusion objective, whose noise is another one in every step.

    In evaluation, the noise comes from a generator that each `metric()` resets: every evaluation has the same noise,
    and does not affect the training that follows.
    """

    def __init__(self, model: CharacterModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self.eval_noise: torch.Generator | None = None

    def forward(self, model: nn.Module, clean: Tensor) -> Diffused:
        training = self.model.training
        if not training and self.eval_noise is None:
            self.eval_noise = torch.Generator(clean.device).manual_seed(self.seed)
        absorbing = self.model.head.out_features
        noisy, noise, weight = absorb(clean, absorbing, None if training else self.eval_noise)
        return Diffused(model(noisy, noise), weight)

    def metric(self) -> BitsPerCharacter:
        self.eval_noise = None
        return BitsPerCharacter()


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


# The model.


class SelfAttention(nn.Module):
    """Multi-head self-attention without biases: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (B, T, 3, H, D) -> three of (B, H, T, D)
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        joined: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class FeedForward(nn.Module):
    """Linear, GELU, Linear, without biases: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.project(F.gelu(self.expand(x)))
        return result


class Size(NamedTuple):
    """The size of a model; `context` is the maximum length of its input."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward; with adaLN-zero (Peebles & Xie 2023) if `conditioned`, else causal.

    forward(x (B, T, width), condition (B, CONDITIONING) or None) -> (B, T, width).
    """

    def __init__(self, size: Size, conditioned: bool) -> None:
        super().__init__()
        width = size.width
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.attention = SelfAttention(width, size.heads, size.dropout, causal=not conditioned)
        self.norm_feed = nn.LayerNorm(width, bias=False)
        self.feed = FeedForward(width)
        self.drop = nn.Dropout(size.dropout)
        self.modulation = nn.Linear(CONDITIONING, 6 * width) if conditioned else None

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        result: Tensor
        if self.modulation is None or condition is None:
            x = x + self.drop(self.attention(self.norm_attention(x)))
            result = x + self.drop(self.feed(self.norm_feed(x)))
            return result
        parts = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts  # each (B, 1, width)
        # Attention runs once, on the modulated input.
        x = x + gate_a * self.drop(
            self.attention(torch.addcmul(shift_a, self.norm_attention(x), 1 + scale_a))
        )
        result = x + gate_f * self.drop(self.feed(torch.addcmul(shift_f, self.norm_feed(x), 1 + scale_f)))
        return result


class CharacterModel(nn.Module):
    """Embeddings, blocks and a final norm; derived classes add the head.

    If `conditioned`, the index `vocabulary` is the absorbing state (see ScoreModel), and attention is not causal.
    """

    head: nn.Linear

    def __init__(self, size: Size, conditioned: bool) -> None:
        super().__init__()
        self.absorbing = conditioned
        self.characters = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(size, conditioned) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """Sub-phases of forward."""
        blocks = [block for block in self.blocks if isinstance(block, TransformerBlock)]
        attention, feed = [block.attention for block in blocks], [block.feed for block in blocks]
        return {"attention": [*attention], "feed_forward": [*feed], "head": self.head}

    def hidden(self, indices: Tensor, condition: Tensor | None = None) -> Tensor:
        """(B, T) int64 -> (B, T, width); T at most `context`."""
        table = self.characters.weight
        if self.absorbing:
            table = F.pad(table, (0, 0, 0, 1))  # the absorbing state: a row of zeros after the characters
        x = self.drop(F.embedding(indices, table) + self.positions.weight[: indices.shape[1]])
        for block in self.blocks:
            x = block(x, condition)
        result: Tensor = self.norm(x)
        return result


class NextCharacterModel(CharacterModel):
    """Autoregressive: (B, T) int64 -> logits of the next character (B, T, vocabulary). No biases anywhere.

    Parameters: (vocabulary + context) x width + layers x (12 width^2 + 2 width) + width, and vocabulary x width for the
    output layer unless it shares the embedding (`tie_weights`).
    """

    def __init__(self, size: Size, tie_weights: bool = False) -> None:
        super().__init__(size, conditioned=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if tie_weights:
            self.head.weight = self.characters.weight
        initialise(self, size.layers)

    def forward(self, indices: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(indices))
        return logits


class NoiseEmbedding(nn.Module):
    """Total noise (B,) -> condition (B, CONDITIONING): sines and cosines, Linear, SiLU, Linear, SiLU."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        half = FREQUENCIES // 2
        frequencies = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.first = nn.Linear(FREQUENCIES, CONDITIONING)
        self.second = nn.Linear(CONDITIONING, CONDITIONING)

    def forward(self, noise: Tensor) -> Tensor:
        angles = noise.float().unsqueeze(1) * self.frequencies
        waves = torch.cat((angles.cos(), angles.sin()), dim=1)
        return F.silu(self.second(F.silu(self.first(waves))))


class ScoreModel(CharacterModel):
    """Diffusion over characters with an absorbing state (SEDD: Lou, Meng & Ermon, ICML 2024).

    forward(indices (B, T) int64, noise (B,)) -> (B, T, vocabulary) float: the logarithm of score x (exp(noise) - 1),
    where score estimates p(this character) / p(absorbed). The factor is the known scale of that ratio, so an untrained
    model gives all characters the same probability.

    The absorbing state is the index `vocabulary`, one past the last character. Its embedding is fixed at zero: a vector
    added to it could as well be added to all position embeddings and subtracted from all character embeddings. It is
    never predicted, so it has no output. Both tables therefore have `vocabulary` rows: 11,739,585 parameters for 65
    characters at the size "guide".
    """

    def __init__(self, size: Size) -> None:
        super().__init__(size, conditioned=True)
        self.log_vocabulary = math.log(size.vocabulary)
        self.noise = NoiseEmbedding()
        self.norm_head = nn.LayerNorm(size.width, bias=False)
        self.modulation = nn.Linear(CONDITIONING, 2 * size.width)
        self.head = nn.Linear(size.width, size.vocabulary)
        initialise(self, size.layers)
        # adaLN-zero: every block starts as the identity, and the head with equal scores.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and (name.endswith("modulation") or name == "head"):
                nn.init.zeros_(module.weight)

    def forward(self, indices: Tensor, noise: Tensor) -> Tensor:
        condition = self.noise(noise)
        x = self.hidden(indices, condition)
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        logits: Tensor = self.head(torch.addcmul(shift, self.norm_head(x), 1 + scale))
        return logits.float() - self.log_vocabulary


def initialise(model: nn.Module, layers: int) -> None:
    """As in GPT-2: normal with std 0.02, divided by sqrt(2 layers) for projections into the residual stream."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * layers) if name.endswith(".project") else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
