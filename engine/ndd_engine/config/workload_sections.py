"""The `[workload]` table of each built-in workload, and of a user's own.

A knob is in here when it belongs to one workload; what all of them have (batch, sequence, optimizer) is in `schema`.
"""

from __future__ import annotations

import math
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from ndd_engine.text import printable


class Section(BaseModel):
    """A table of the configuration; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


class ChartextSection(Section):
    """Character-level transformer (guide: char-text)."""

    name: Literal["chartext"]
    data: str = Field(
        "builtin",
        description='"builtin" (the Python manual\'s topics), "stdlib" (its source), or a path to a text file',
    )
    size: str | None = Field(
        None,
        description='model size: a name from the workload\'s profile, "auto" to measure which fits this machine',
    )
    objective: Literal["autoregressive", "diffusion"] = Field(
        "autoregressive",
        description="predict the next character, or absorbing-state diffusion (score entropy)",
    )
    layers: int = Field(6, ge=1, le=96, description="transformer blocks")
    heads: int = Field(6, ge=1, le=96, description="attention heads; must divide the width")
    width: int = Field(384, ge=8, le=16384, description="model width")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout probability")
    tie_weights: bool = Field(
        False, description="share the token embedding with the output layer (autoregressive only)"
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="characters between window starts; default: the sequence length (windows do not overlap)",
    )
    max_characters: int | None = Field(
        None, ge=64, description="use at most this many characters of the text"
    )
    eval_fraction: float = Field(
        0.05, gt=0, lt=0.5, description="share of the text kept for evaluation (its end)"
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ChartextSection:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.tie_weights and self.objective == "diffusion":
            raise ValueError("tie_weights needs objective autoregressive")
        return self


class NddSection(Section):
    """Multichannel EEG forecasters (guide: eeg-forecasters)."""

    name: Literal["ndd"]
    data: str = Field(
        "builtin",
        description='"builtin" (seeded synthetic EEG with a planted seizure), or a path to a .arff or .csv file',
    )
    size: str | None = Field(None, description="model size: a name from the workload's profile")
    model: Literal["mlp", "lstm", "gru"] = Field("mlp", description="forecaster")
    hidden: list[Annotated[int, Field(ge=1)]] = Field(
        default=[128, 64], min_length=1, description="hidden sizes (mlp), or one size (lstm, gru)"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout probability of the mlp")
    channels: int = Field(8, ge=1, le=1024, description="channels of the builtin data")
    samples: int = Field(50_000, ge=64, description="samples of the builtin data")
    sample_rate: float = Field(256.0, gt=0, description="samples a second (Hz) of the builtin data")
    eval_fraction: float = Field(
        0.1, gt=0, lt=0.5, description="share of the recording kept for evaluation (its end)"
    )

    @model_validator(mode="after")
    def _one_hidden_size_for_recurrent(self) -> NddSection:
        if self.model != "mlp" and len(self.hidden) != 1:
            raise ValueError(f"model {self.model} takes exactly one hidden size, found {self.hidden}")
        return self


class AntispoofSection(Section):
    """SE-ResNet that tells spoofed from real speech (guide: antispoofing)."""

    name: Literal["antispoof"]
    data: str = Field(
        "builtin",
        description='"builtin" (synthesised voices and their Griffin-Lim copies), or a path to a folder of WAV files: '
        "real ones, of which copies are made, or subfolders bonafide and spoof",
    )
    size: str | None = Field(None, description="model size: a name from the workload's profile")
    blocks: list[Annotated[int, Field(ge=1, le=64)]] = Field(
        default=[2, 2, 2, 2], min_length=4, max_length=4, description="residual blocks of the four stages"
    )
    channels: list[Annotated[int, Field(ge=4, le=4096)]] = Field(
        default=[64, 128, 256, 512], min_length=4, max_length=4, description="channels of the four stages"
    )
    reduction: int = Field(16, ge=1, le=64, description="squeeze-and-excitation reduction")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout probability of the classifier")
    augment: bool = Field(
        False,
        description="change each training clip anew every epoch (noise, gain, filter) before its spectrogram",
    )
    class_weights: list[Annotated[float, Field(gt=0)]] = Field(
        default=[0.1, 0.9], min_length=2, max_length=2, description="loss weights of spoof and real speech"
    )
    clips: int = Field(
        400, ge=8, le=100_000, multiple_of=2, description="clips of the builtin data, half of them spoofed"
    )
    eval_fraction: float = Field(
        0.2,
        gt=0,
        lt=0.5,
        description="share kept for evaluation: of the speakers, or of the files where these name no speaker",
    )

    @model_validator(mode="after")
    def _reduction_divides(self) -> AntispoofSection:
        if any(width % self.reduction for width in self.channels):
            raise ValueError(f"reduction {self.reduction} does not divide channels {self.channels}")
        return self


class FinetuneSection(Section):
    """A small decoder-only language model on few long examples, tokenised on the fly (guide: finetune)."""

    name: Literal["finetune"]
    data: str = Field(
        "builtin",
        description='"builtin" (the longest topics of the Python manual), or a path: a .jsonl file ("text", or '
        '"prompt" and "completion"), a text file (examples between lines of "---", or cut into pieces), or a folder of '
        "texts",
    )
    size: str | None = Field(None, description="model size: a name from the workload's profile")
    layers: int = Field(4, ge=1, le=96, description="transformer blocks")
    heads: int = Field(4, ge=1, le=96, description="attention heads; must divide the width")
    width: int = Field(256, ge=8, le=16384, description="model width")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")
    vocabulary: int = Field(
        1024, ge=257, le=65536, description="tokens of the byte-pair encoder (256 bytes and the merges)"
    )
    examples: int = Field(25, ge=2, le=100_000, description="training examples: the longest ones of the data")
    document_chars: int = Field(
        0,
        ge=0,
        description="most characters of one example, 64 or more: a longer document is cut, and builtin ones are "
        "joined to reach it; 0: as they are",
    )
    pad: Literal["longest", "full"] = Field(
        "longest",
        description='pad a batch to its longest example, or always to batch.sequence ("full": one shape)',
    )
    eval_examples: int = Field(5, ge=1, le=100_000, description="examples kept for evaluation: the next ones")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> FinetuneSection:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if 0 < self.document_chars < 64:
            raise ValueError(f"document_chars {self.document_chars} is too short: take 64 or more, or 0")
        return self


class SummariseSection(Section):
    """BiLSTM pointer-generator summariser (guide: summariser). batch.sequence is the longest source."""

    name: Literal["summarise"]
    data: str = Field(
        "builtin",
        description='"builtin" (the standard library\'s functions and their docstrings), or a path to a .jsonl or .tsv '
        "file of source and summary",
    )
    size: str | None = Field(None, description="model size: a name from the workload's profile")
    embedding: int = Field(128, ge=4, le=4096, description="embedding width")
    hidden: int = Field(256, ge=4, le=4096, description="LSTM width of one direction")
    layers: int = Field(2, ge=1, le=8, description="LSTM layers of encoder and decoder")
    vocabulary: int = Field(16_000, ge=16, le=1_000_000, description="words of the vocabulary")
    target: int = Field(192, ge=2, le=4096, description="longest summary in tokens")
    decoder: Literal["hoisted", "stepwise"] = Field(
        "hoisted",
        description="project the encoder's states and the vocabulary once for all steps (hoisted), or inside each "
        "step (stepwise): the same loss and gradients",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")
    pad: Literal["longest", "full"] = Field(
        "longest", description='pad a batch to its longest pair, or always to the limits ("full": one shape)'
    )
    beam: int = Field(4, ge=1, le=32, description="beam of the summaries that evaluation writes")
    summaries: int = Field(
        4,
        ge=0,
        le=10_000,
        description="summaries written for ROUGE at an evaluation (greedy and beam); 0: none",
    )
    pairs: int | None = Field(
        None, ge=2, description="use at most this many pairs of the data, counted before functions are joined"
    )
    eval_fraction: float = Field(0.05, gt=0, lt=0.5, description="share of the pairs kept for evaluation")


class OwnSection(Section):
    """A user's own workload: `name` is "package.module:factory"."""

    name: str
    path: list[str] = Field(
        default_factory=list,
        description="folders to import the module from, before the current one; default: the configuration file's",
    )
    data: str = Field("builtin", description="handed to the factory as settings.data")
    size: str | None = Field(None, description="handed to the factory as settings.size")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="further knobs, which the factory asks for: settings.option(name, default)",
    )

    @field_validator("name")
    @classmethod
    def _module_and_factory(cls, name: str) -> str:
        module, _, factory = name.partition(":")
        if all(part.isidentifier() and not iskeyword(part) for part in (*module.split("."), factory)):
            return name
        dotted = module.strip("./").replace("/", ".").removesuffix(".py")
        meant = (
            f"; did you mean {printable(dotted)}:{printable(factory)}?"
            if dotted != module and factory
            else ""
        )
        raise ValueError(
            f'"{printable(name)}" is not "package.module:factory", as in my_workload:factory{meant}'
        )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: list[str]) -> list[str]:
        # A resumed run finds its module from any folder.
        try:
            return [str(Path(folder).expanduser().absolute()) for folder in path]
        except RuntimeError as error:
            raise ValueError(f"a folder cannot be found: {error}") from None  # "~nobody"

    @field_validator("options")
    @classmethod
    def _finite(cls, options: dict[str, Any]) -> dict[str, Any]:
        if (name := _not_finite(options)) is not None:
            raise ValueError(f"{printable(name)} is not a finite number")
        return options

    @model_validator(mode="after")
    def _no_size_to_find(self) -> OwnSection:
        if self.size == "auto":
            raise ValueError('size "auto" is for the built-in workloads; write a size that the factory knows')
        return self


def _not_finite(value: Any, name: str = "") -> str | None:
    """The dotted name of the first number in a table that is infinite or not a number."""
    if isinstance(value, float):
        return None if math.isfinite(value) else name
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_not_finite(part, f"{name}.{key}".lstrip(".")) for key, part in parts)
    return next((bad for bad in found if bad is not None), None)


OWN = "own"
SECTIONS: dict[str, type[Section]] = {
    "antispoof": AntispoofSection,
    "chartext": ChartextSection,
    "finetune": FinetuneSection,
    "ndd": NddSection,
    "summarise": SummariseSection,
    OWN: OwnSection,
}
# The names of the built-in workloads; a name with a colon is a user's own.
WORKLOADS = tuple(name for name in SECTIONS if name != OWN)


def kind(value: Any) -> str | None:
    """Which section a `[workload]` table is: one of WORKLOADS, OWN, or None when it names nothing."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else name


WorkloadSection = Annotated[
    Annotated[AntispoofSection, Tag("antispoof")]
    | Annotated[ChartextSection, Tag("chartext")]
    | Annotated[FinetuneSection, Tag("finetune")]
    | Annotated[NddSection, Tag("ndd")]
    | Annotated[SummariseSection, Tag("summarise")]
    | Annotated[OwnSection, Tag(OWN)],
    Discriminator(kind),
]
