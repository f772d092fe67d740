"""The character models: one transformer, for next-character prediction and for absorbing-state diffusion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

CONDITIONING = 64  # width of the noise-level embedding
FREQUENCIES = 256  # sines and cosines of the noise level
EXPANSION = 4  # feed-forward width over model width


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
        self.expand = nn.Linear(width, EXPANSION * width, bias=False)
        self.project = nn.Linear(EXPANSION * width, width, bias=False)

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


class Trunk(nn.Module):
    """Embeddings, blocks and a final norm: (B, T) int64 -> (B, T, width); T at most `context`.

    If `conditioned`, the index `vocabulary` is the absorbing state (see ScoreModel), and attention is not causal.
    """

    def __init__(self, size: Size, conditioned: bool) -> None:
        super().__init__()
        self.absorbing = conditioned
        self.characters = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(size, conditioned) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)

    def parts(self) -> dict[str, nn.Module | Sequence[nn.Module]]:
        blocks = [block for block in self.blocks if isinstance(block, TransformerBlock)]
        return {
            "attention": [block.attention for block in blocks],
            "feed_forward": [block.feed for block in blocks],
        }

    def forward(self, indices: Tensor, condition: Tensor | None = None) -> Tensor:
        table = self.characters.weight
        if self.absorbing:
            table = F.pad(table, (0, 0, 0, 1))  # the absorbing state: a row of zeros after the characters
        x = F.embedding(indices, table) + self.positions.weight[: indices.shape[1]]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, condition)
        result: Tensor = self.norm(x)
        return result


class CharacterModel(nn.Module):
    """A trunk and a head."""

    trunk: Trunk
    head: nn.Linear

    def parts(self) -> dict[str, nn.Module | Sequence[nn.Module]]:
        return {**self.trunk.parts(), "head": self.head}


class NextCharacterModel(CharacterModel):
    """Autoregressive: (B, T) int64 -> logits of the next character (B, T, vocabulary). No biases anywhere.

    Parameters: (vocabulary + context) x width + layers x (12 width^2 + 2 width) + width, and vocabulary x width for the
    output layer unless it shares the embedding (`tie_weights`).
    """

    def __init__(self, size: Size, tie_weights: bool = False) -> None:
        super().__init__()
        self.trunk = Trunk(size, conditioned=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if tie_weights:
            self.head.weight = self.trunk.characters.weight
        initialise(self, size.layers)

    def forward(self, indices: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(indices))
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
        super().__init__()
        self.log_vocabulary = math.log(size.vocabulary)
        self.trunk = Trunk(size, conditioned=True)
        self.noise = NoiseEmbedding()
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.modulation = nn.Linear(CONDITIONING, 2 * size.width)
        self.head = nn.Linear(size.width, size.vocabulary)
        initialise(self, size.layers)
        # adaLN-zero: every block starts as the identity, and the head with equal scores.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and (name.endswith("modulation") or name == "head"):
                nn.init.zeros_(module.weight)

    def forward(self, indices: Tensor, noise: Tensor) -> Tensor:
        condition = self.noise(noise)
        x = self.trunk(indices, condition)
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        logits: Tensor = self.head(torch.addcmul(shift, self.norm(x), 1 + scale))
        return logits.float() - self.log_vocabulary


def initialise(model: nn.Module, layers: int) -> None:
    """As in GPT-2: normal with std 0.02, divided by sqrt(2 layers) for projections into the residual stream."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * layers) if name.endswith(".project") else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
