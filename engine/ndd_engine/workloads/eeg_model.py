"""The forecasters: (B, sequence, channels) float32 -> the next sample of every channel (B, 1, channels)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ndd_engine.config.workload_sections import EegSection


class Forecaster(nn.Module):
    """A model of hidden layers and a linear head."""

    hidden: nn.Module
    head: nn.Linear

    def parts(self) -> dict[str, nn.Module]:
        return {"hidden": self.hidden, "head": self.head}


class Mlp(Forecaster):
    """Flatten, then Linear, BatchNorm, ReLU and Dropout per hidden size, then Linear to the channels."""

    def __init__(self, channels: int, sequence: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = channels * sequence
        for size in hidden:
            layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(width, channels)

    def forward(self, window: Tensor) -> Tensor:
        prediction: Tensor = self.head(self.hidden(window))
        return prediction.unsqueeze(1)


class Recurrent(Forecaster):
    """One layer of LSTM or GRU, then Linear from its last state to the channels."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], channels: int, hidden: int) -> None:
        super().__init__()
        self.hidden = kind(channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, channels)

    def forward(self, window: Tensor) -> Tensor:
        states, _ = self.hidden(window)
        prediction: Tensor = self.head(states[:, -1:])
        return prediction


def build_model(section: EegSection, channels: int, sequence: int) -> Forecaster:
    """The configured forecaster, with weights from torch's global generator."""
    if section.model == "mlp":
        return Mlp(channels, sequence, section.hidden, section.dropout)
    return Recurrent(nn.LSTM if section.model == "lstm" else nn.GRU, channels, section.hidden[0])
