"""A pointer-generator: a BiLSTM encoder, an LSTM decoder with attention that copies words of the source.

Its two forms have the same parameter names, loss and gradients. "Stepwise" is the straightforward one: each decoder
step projects the encoder's states, the vocabulary and the copies. "Hoisted" keeps in the loop only what depends on the
previous step: the LSTM cells and the attention.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from ndd_engine.workloads import full_precision

from .summarise_data import PADDING, START, UNKNOWN

# Exceeds any gate's input and is exact in fp16: sigmoid(SHUT) is exactly 1, sigmoid(-SHUT) exactly 0.
SHUT = 1e4
# Keeps the logarithm of a zero probability finite, and its gradient too. Not zero in fp32.
EPS = 1e-12

# cuDNN prefers contiguous weights, but the encoder concatenates its weights again for every batch.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


class EncodedSources(NamedTuple):
    """A batch of encoded sources, as the decoder reads it.

    states: (B, S, 2 H). keys: (B, S, H), the projected states, or None if every step projects them. barred: (B, S)
    fp32, -inf at padding, else 0. extended: (B, S) int64, the source words; those not in the vocabulary are numbered
    from `vocabulary` on.
    """

    states: Tensor
    keys: Tensor | None
    barred: Tensor
    extended: Tensor

    def rows(self, indices: Tensor) -> EncodedSources:
        keys = None if self.keys is None else self.keys[indices]
        return EncodedSources(self.states[indices], keys, self.barred[indices], self.extended[indices])


class State(NamedTuple):
    """The decoder's state between steps. hidden, cell: (layers, B, H). context: (B, 2 H)."""

    hidden: Tensor
    cell: Tensor
    context: Tensor

    def rows(self, indices: Tensor) -> State:
        hidden, cell = (tensor.index_select(1, indices) for tensor in (self.hidden, self.cell))
        return State(hidden, cell, self.context.index_select(0, indices))


class DecoderSteps(NamedTuple):
    """The outputs of T decoder steps.

    hidden: (B, T, H), of the last layer. context: (B, T, 2 H). attention: (B, T, S), at least fp32, rows sum to 1.
    """

    hidden: Tensor
    context: Tensor
    attention: Tensor


def lstm_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Runs torch's LSTM in fp32 under fp16 autocast on the CPU, where oneDNN does not support fp16."""
    kind = x.device.type
    unsupported = (
        kind == "cpu" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    )
    return torch.autocast(kind, enabled=False) if unsupported else nullcontext()


class Encoder(nn.Module):
    """Bidirectional LSTM layers over padded sources.

    forward(embedded (B, S, E), real (B, S) bool) -> (states (B, S, 2 H), hidden and cell (layers, B, H) of the
    forward direction after each source's last word).

    Right padding would be the backward direction's first input, and would change the forward direction's final state.
    So the input has one more feature that marks padding, with fixed weights that close the input gates and open the
    forget gates: the cell state does not change at padding, exactly. Unlike packed sequences, this needs no lengths
    on the host and has one shape; unlike reversing by an index, both directions stay in one call.
    """

    shut: Tensor

    def __init__(self, embedding: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(2 * hidden if layer else embedding, hidden, batch_first=True, bidirectional=True)
            for layer in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        # Gates in torch's order: input, forget, cell, output.
        shut = torch.tensor([-SHUT, SHUT, 0.0, 0.0]).repeat_interleave(hidden).unsqueeze(1)
        self.register_buffer("shut", shut, persistent=False)

    def forward(self, embedded: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = embedded.shape[0]
        flag = (~real).unsqueeze(2).to(embedded.dtype)
        last = (real.sum(1) - 1).view(batch, 1, 1)
        x, hidden, cell = embedded, [], []
        for index, layer in enumerate(self.layers):
            lstm = cast(nn.LSTM, layer)
            if index:
                x = self.dropout(x)
            x = torch.cat((x.to(flag.dtype), flag), dim=2)
            start = x.new_zeros(2, batch, lstm.hidden_size)
            with lstm_precision(x):
                x, _, ends = torch.lstm(
                    x, (start, start), self._weights(lstm), True, 1, 0.0, self.training, True, True
                )
            one_way = x[..., : lstm.hidden_size]
            # The cell state is constant over padding, but the output is not, so it is gathered.
            hidden.append(one_way.gather(1, last.expand(-1, 1, lstm.hidden_size)).squeeze(1))
            cell.append(ends[0])
        return x, torch.stack(hidden), torch.stack(cell)

    def _weights(self, lstm: nn.LSTM) -> list[Tensor]:
        found = []
        for below, before, *biases in lstm.all_weights:  # forward, then backward direction
            found += [torch.cat((below, self.shut), dim=1), before, *biases]
        return found


class AdditiveAttention(nn.Module):
    """Additive attention (Bahdanau et al. 2015) without biases.

    forward(query (B, H), memory) -> (weights (B, S), at least fp32, context (B, 2 H)).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, memory: EncodedSources) -> tuple[Tensor, Tensor]:
        keys = self.keys(memory.states) if memory.keys is None else memory.keys
        scores = self.score(torch.tanh(keys + self.query(query).unsqueeze(1))).squeeze(2)
        weights = torch.softmax(full_precision(scores) + memory.barred, dim=1)
        states = memory.states
        context = torch.bmm(weights.to(states.dtype).unsqueeze(1), states).squeeze(1)
        return weights, context


class Decoder(nn.Module):
    """LSTM layers over [word, previous context], with attention after each step.

    forward(embedded (B, T, E), memory, state) -> (steps, final state), for any T.

    The words are known in advance (teacher forcing), so their part of the first layer's gates is one product for all
    steps; inside the loop, each layer's input and recurrent weights are one matrix.
    """

    def __init__(self, embedding: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = embedding
        self.lstm = nn.LSTM(
            embedding + 2 * hidden,
            hidden,
            layers,
            batch_first=True,
            dropout=dropout if layers > 1 else 0.0,  # torch warns otherwise
        )
        self.attention = AdditiveAttention(hidden)

    def forward(self, embedded: Tensor, memory: EncodedSources, state: State) -> tuple[DecoderSteps, State]:
        layers: list[tuple[Tensor, Tensor, Tensor]] = [
            (below, before, first + second) for below, before, first, second in self.lstm.all_weights
        ]
        below, before, bias = layers[0]
        own = F.linear(embedded, below[:, : self.embedding], bias)
        layers[0] = below[:, self.embedding :], before, bias
        # Cast once: autocast caches casts of parameters only, and would cast these in every step.
        weights = [torch.cat((below, before), dim=1).to(own.dtype).t() for below, before, _ in layers]
        biases = [bias.to(own.dtype) for *_, bias in layers]
        hidden = list(state.hidden.to(own.dtype).unbind(0))
        cell = list(state.cell.to(own.dtype).unbind(0))
        context = state.context.to(own.dtype)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for gates in own.unbind(1):
            below, bias = context, gates
            for layer, weight in enumerate(weights):
                if layer:
                    below = F.dropout(hidden[layer - 1], self.lstm.dropout, self.training)
                    bias = biases[layer]
                hidden[layer], cell[layer] = lstm_cell(
                    torch.addmm(bias, torch.cat((below, hidden[layer]), dim=1), weight), cell[layer]
                )
            attention, context = self.attention(hidden[-1], memory)
            context = context.to(own.dtype)
            found.append((hidden[-1], context, attention))
        steps = DecoderSteps(*(torch.stack(parts, dim=1) for parts in zip(*found, strict=True)))
        return steps, State(torch.stack(hidden), torch.stack(cell), context)


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Gate inputs (B, 4 H) in torch's order and the previous cell (B, H) -> hidden and cell (B, H)."""
    into, forget, new, out = gates.chunk(4, dim=1)
    cell = torch.addcmul(forget.sigmoid() * cell, into.sigmoid(), new.tanh())
    return out.sigmoid() * cell.tanh(), cell


class StepwiseDecoder(Decoder):
    """The same with one call of the LSTM per step."""

    def forward(self, embedded: Tensor, memory: EncodedSources, state: State) -> tuple[DecoderSteps, State]:
        hidden, cell, context = state
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for word in embedded.unbind(1):
            x = torch.cat((word, context), dim=1).unsqueeze(1)
            with lstm_precision(x):
                output, (hidden, cell) = self.lstm(x, (hidden.to(x.dtype), cell.to(x.dtype)))
            attention, context = self.attention(output.squeeze(1), memory)
            found.append((output.squeeze(1), context, attention))
        steps = DecoderSteps(*(torch.stack(parts, dim=1) for parts in zip(*found, strict=True)))
        return steps, State(hidden, cell, context)


class Pointer(nn.Module):
    """Probability of each target word: generated from the vocabulary, or copied from the source.

    forward(steps, embedded (B, T, E), memory, target (B, T)) -> (B, T), at least fp32. Only the target's
    probability is computed, from its logit and the attention at its positions in the source.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        features = hidden + 2 * hidden + embedding
        self.vocabulary = vocabulary
        self.words = nn.Linear(features, vocabulary)
        self.gate = nn.Linear(features, 1)

    def forward(
        self, steps: DecoderSteps, embedded: Tensor, memory: EncodedSources, target: Tensor
    ) -> Tensor:
        features = torch.cat((steps.hidden, steps.context, embedded), dim=2)
        logits, gate = full_precision(self.words(features)), full_precision(self.gate(features)).squeeze(2)
        known = target < self.vocabulary
        word = torch.where(known, target, UNKNOWN)
        surprise = F.cross_entropy(logits.flatten(0, 1), word.flatten(), reduction="none").view_as(gate)
        generated = torch.where(known, torch.exp(-surprise), 0.0)
        places = memory.extended.unsqueeze(1) == target.unsqueeze(2)
        copied = (steps.attention * places).sum(2)
        return gate.sigmoid() * generated + (-gate).sigmoid() * copied

    def distribution(self, steps: DecoderSteps, embedded: Tensor, memory: EncodedSources) -> Tensor:
        """Probabilities of the vocabulary and of the source words not in it: (B, T, vocabulary + S), at least fp32.

        A source of S words has at most S such words, so the shape does not depend on the words.
        """
        features = torch.cat((steps.hidden, steps.context, embedded), dim=2)
        generated = torch.softmax(full_precision(self.words(features)), dim=2)
        gate = full_precision(self.gate(features)).sigmoid()
        extended = memory.extended.unsqueeze(1).expand_as(steps.attention)
        both = F.pad(gate * generated, (0, extended.shape[2]))
        return both.scatter_add(2, extended, (1 - gate) * steps.attention)


class StepwisePointer(Pointer):
    """The same, computed from the whole distribution."""

    def forward(
        self, steps: DecoderSteps, embedded: Tensor, memory: EncodedSources, target: Tensor
    ) -> Tensor:
        return self.distribution(steps, embedded, memory).gather(2, target.unsqueeze(2)).squeeze(2)


class PointerGenerator(nn.Module):
    """The whole model.

    forward(source, extended (B, S), target_in, target_out (B, T), all int64) -> probability of each target word (B, T),
    at least fp32. Sources and targets are padded on the right with PADDING. `extended` and `target_out` number source
    words that are not in the vocabulary from `vocabulary` on. The decoder starts from the forward direction's final
    states, layer by layer.
    """

    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, dropout: float, hoisted: bool
    ) -> None:
        super().__init__()
        self.hoisted = hoisted
        self.source_words = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.target_words = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)
        self.encoder = Encoder(embedding, hidden, layers, dropout)
        decoder, pointer = (Decoder, Pointer) if hoisted else (StepwiseDecoder, StepwisePointer)
        self.decoder = decoder(embedding, hidden, layers, dropout)
        self.pointer = pointer(vocabulary, embedding, hidden)
        for table in (self.source_words, self.target_words):
            nn.init.normal_(table.weight, std=1 / math.sqrt(embedding))
            with torch.no_grad():
                table.weight[PADDING].zero_()

    def parts(self) -> dict[str, nn.Module | Sequence[nn.Module]]:
        """Sub-phases of forward. Attention runs in the decoder's loop; `keys` before it, or inside."""
        attention = self.decoder.attention
        return {
            "embedding": [self.source_words, self.target_words],
            "encoder": self.encoder,
            "decoder": self.decoder,
            "attention": [attention, attention.keys],
            "pointer": self.pointer,
        }

    def forward(self, source: Tensor, extended: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        memory, state = self.read(source, extended, self.hoisted)
        embedded: Tensor = self.dropout(self.target_words(target_in))
        if self.hoisted:
            steps, _ = self.decoder(embedded, memory, state)
            chosen: Tensor = self.pointer(steps, embedded, memory, target_out)
            return chosen
        each = []
        for place in range(target_in.shape[1]):
            here = slice(place, place + 1)
            steps, state = self.decoder(embedded[:, here], memory, state)
            each.append(self.pointer(steps, embedded[:, here], memory, target_out[:, here]))
        return torch.cat(each, dim=1)

    def read(self, source: Tensor, extended: Tensor, project: bool) -> tuple[EncodedSources, State]:
        """Encodes the sources (B, S). project: project the states once, for all steps."""
        real = source != PADDING
        states, hidden, cell = self.encoder(self.dropout(self.source_words(source)), real)
        barred = torch.zeros_like(source, dtype=torch.float32).masked_fill(~real, -torch.inf)
        keys = self.decoder.attention.keys(states) if project else None
        context = states.new_zeros(states.shape[0], states.shape[2])
        return EncodedSources(states, keys, barred, extended), State(hidden, cell, context)

    def step(self, words: Tensor, memory: EncodedSources, state: State) -> tuple[Tensor, State]:
        """A step of generation: extended words (B,) -> (log-probabilities of the next (B, vocabulary + S), state).

        -inf for UNKNOWN, START and PADDING.
        """
        known = torch.where(words < self.pointer.vocabulary, words, UNKNOWN)
        embedded = self.target_words(known).unsqueeze(1)
        steps, state = self.decoder(embedded, memory, state)
        likely = torch.log(self.pointer.distribution(steps, embedded, memory).squeeze(1) + EPS)
        for special in (UNKNOWN, START, PADDING):
            likely[:, special] = -torch.inf
        return likely, state


def negative_log_likelihood(chosen: Tensor, target_out: Tensor) -> Tensor:
    """Probability of each target word (B, T) -> mean over the words of a summary, then over summaries, in nats.

    Each summary has the same weight, so the gradient of a batch is the mean of its items' gradients.
    """
    real = target_out != PADDING
    surprise = torch.where(real, -torch.log(chosen + EPS), 0.0)
    return (surprise.sum(1) / real.sum(1)).mean()
