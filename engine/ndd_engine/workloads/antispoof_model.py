"""SE-ResNet on log-mel spectrograms: (B, mels, frames) float32 -> logits (B, 2) of spoof and real speech.

The 11,981,251 parameters (blocks [2, 2, 2, 2], channels 64-512, reduction 16):

    stem          7x7 convolution of one input channel, 3,136, and its BN, 128                         3,264
    stages        per block two 3x3 convolutions, two BN and the two C x C/16 matrices of SE, all without
                  bias; from the second stage on a 1x1 convolution with BN on the first
                  skip: 148,992 + 529,664 + 2,116,096 + 8,459,264                                 11,254,016
    pooling       Conv1d 512 -> 128, 65,664, and 128 -> 1, 129                                        65,793
    head          Linear 1024 -> 512 with BN, 525,824, 512 -> 256 with BN, 131,840, 256 -> 2, 514    658,178

Blocks [3, 4, 6, 3] add one, two, four and one blocks without a new skip: 22,159,555 parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

ATTENTION = 128  # width of the attention in the pooling layer
EPS = 1e-6  # added to the pooled variance: the gradient of its root is infinite at zero


class SqueezeExcite(nn.Module):
    """Scales each channel of (B, C, F, T) by a factor in 0..1 computed from the means of all channels."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // reduction, bias=False)
        self.excite = nn.Linear(channels // reduction, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=(2, 3))))))
        return x * scale[:, :, None, None]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and squeeze-and-excitation with a skip connection; stride 2 halves the map."""

    def __init__(self, inputs: int, channels: int, stride: int, reduction: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.se = SqueezeExcite(channels, reduction)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.se(self.norm2(self.conv2(y)))
        return F.relu(y + self.skip(x))


class AttentivePooling(nn.Module):
    """(B, C, F, T) -> (B, 2C): the mean over frequency, then its mean and standard deviation over time.

    Frames are weighted by attention (Okabe et al. 2018). The statistics are in float32: the variance of half-precision
    numbers would be mostly rounding error.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.Conv1d(channels, ATTENTION, 1), nn.Tanh(), nn.Conv1d(ATTENTION, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        frames = x.mean(dim=2)
        weights = torch.softmax(self.attention(frames).float(), dim=-1)
        frames = frames.float()
        mean = (weights * frames).sum(dim=-1)
        variance = (weights * (frames - mean.unsqueeze(-1)).square()).sum(dim=-1)
        return torch.cat((mean, (variance + EPS).sqrt()), dim=1)


class SeResNet(nn.Module):
    """The classifier; weights from torch's global generator.

    blocks, channels: per stage. reduction: of squeeze-and-excitation. dropout: of the two hidden layers of the head.
    """

    def __init__(
        self, blocks: Sequence[int], channels: Sequence[int], reduction: int, dropout: float
    ) -> None:
        super().__init__()
        first, last = channels[0], channels[-1]
        self.stem = nn.Sequential(
            nn.Conv2d(1, first, 7, 2, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.ModuleList()
        width = first
        for position, (count, size) in enumerate(zip(blocks, channels, strict=True)):
            layers = []
            for block in range(count):
                stride = 2 if position and not block else 1
                layers.append(ResidualBlock(width, size, stride, reduction))
                width = size
            self.stages.append(nn.Sequential(*layers))
        self.pooling = AttentivePooling(last)
        hidden, narrow = last, last // 2
        self.head = nn.Sequential(
            nn.Linear(2 * last, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, narrow), nn.BatchNorm1d(narrow), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(narrow, 2),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.stem(spectrogram.unsqueeze(1))
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(self.pooling(x))
        return logits

    def parts(self) -> Mapping[str, nn.Module]:
        stages = {f"stage{number}": stage for number, stage in enumerate(self.stages, 1)}
        return {"stem": self.stem, **stages, "pooling": self.pooling, "head": self.head}
