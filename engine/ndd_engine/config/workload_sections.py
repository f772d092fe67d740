"""The `[workload]` table of each built-in workload and of the user's own.

Contains the keys of single workloads; keys that all workloads share (batch, optimizer, …) are in `schema`.
"""

from __future__ import annotations

import math
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from ndd_engine.text import printable

# Upper limit of counts; their products fit into 64 bits.
MANY = 10**9


def _short_enough(text: str) -> str:
    if len(text.encode()) > 4000 or any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError("is too long for a path")
    return text


PathText = Annotated[str, AfterValidator(_short_enough)]


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
        description='training data: "builtin" (topics of the Python manual), "stdlib" (source code of the standard '
        "library) or the path of a text file",
    )
    size: str | None = Field(
        None,
        description='model size: a size name of the workload, or "auto" to choose the largest that is fast enough',
    )
    objective: Literal["autoregressive", "diffusion"] = Field(
        "autoregressive",
        description="autoregressive: next-character prediction; diffusion: absorbing-state diffusion (score entropy)",
    )
    layers: int = Field(6, ge=1, le=96, description="number of transformer blocks")
    heads: int = Field(6, ge=1, le=96, description="number of attention heads; must divide width")
    width: int = Field(384, ge=8, le=16384, description="model width (embedding dimension)")
    dropout: float = Field(0.2, ge=0, lt=1, description="dropout probability")
    tie_weights: bool = Field(
        False, description="tie the output layer to the token embedding (autoregressive only)"
    )
    stride: int | None = Field(
        None,
        ge=1,
        le=MANY,
        description="characters between the starts of segments; default: batch.sequence (no overlap)",
    )
    max_characters: int | None = Field(
        None, ge=64, le=MANY, description="maximum number of characters of the text to use; default: all"
    )
    eval_fraction: float = Field(
        0.05, gt=0, lt=0.5, description="fraction of the text used for evaluation (its end)"
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ChartextSection:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.tie_weights and self.objective == "diffusion":
            raise ValueError("tie_weights requires objective autoregressive")
        return self


class EegSection(Section):
    """Multichannel EEG forecasters (guide: eeg-forecasters)."""

    name: Literal["eeg"]
    data: str = Field(
        "builtin",
        description='training data: "builtin" (synthetic EEG with a seizure) or the path of an .arff or .csv file',
    )
    size: str | None = Field(None, description="model size: a size name of the workload")
    model: Literal["mlp", "lstm", "gru"] = Field("mlp", description="type of the forecaster")
    hidden: list[Annotated[int, Field(ge=1, le=1_000_000)]] = Field(
        default=[128, 64],
        min_length=1,
        max_length=100,
        description="hidden layer sizes (mlp), or a single hidden size (lstm, gru)",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout probability of the mlp")
    channels: int = Field(8, ge=1, le=1024, description="number of channels of the built-in data")
    samples: int = Field(50_000, ge=64, le=MANY, description="number of samples of the built-in data")
    sample_rate: float = Field(256.0, gt=0, le=1e9, description="sampling rate of the built-in data in Hz")
    eval_fraction: float = Field(
        0.1, gt=0, lt=0.5, description="fraction of the recording used for evaluation (its end)"
    )

    @model_validator(mode="after")
    def _one_hidden_size_for_recurrent(self) -> EegSection:
        if self.model != "mlp" and len(self.hidden) != 1:
            raise ValueError(f"model {self.model} requires exactly one hidden size, found {self.hidden}")
        return self


class AntispoofSection(Section):
    """SE-ResNet that classifies speech as real or spoofed (guide: antispoofing)."""

    name: Literal["antispoof"]
    data: str = Field(
        "builtin",
        description='training data: "builtin" (synthesised voices and Griffin-Lim copies) or the path of a folder of '
        "WAV files: real speech (spoofed copies are generated), or subfolders bonafide and spoof",
    )
    size: str | None = Field(None, description="model size: a size name of the workload")
    blocks: list[Annotated[int, Field(ge=1, le=64)]] = Field(
        default=[2, 2, 2, 2],
        min_length=4,
        max_length=4,
        description="number of residual blocks of the four stages",
    )
    channels: list[Annotated[int, Field(ge=4, le=4096)]] = Field(
        default=[64, 128, 256, 512],
        min_length=4,
        max_length=4,
        description="number of channels of the four stages; multiples of reduction",
    )
    reduction: int = Field(
        16, ge=1, le=64, description="reduction ratio of the squeeze-and-excitation blocks"
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout probability of the classifier")
    augment: bool = Field(
        False,
        description="augment training clips differently in every epoch (noise, gain, filter)",
    )
    class_weights: list[Annotated[float, Field(gt=0)]] = Field(
        default=[0.1, 0.9], min_length=2, max_length=2, description="loss weights of spoofed and real speech"
    )
    clips: int = Field(
        400,
        ge=8,
        le=100_000,
        multiple_of=2,
        description="number of clips of the built-in data, half of them spoofed; even",
    )
    eval_fraction: float = Field(
        0.2,
        gt=0,
        lt=0.5,
        description="fraction used for evaluation: of the speakers, or of the files if they do not name speakers",
    )

    @model_validator(mode="after")
    def _reduction_divides(self) -> AntispoofSection:
        if any(width % self.reduction for width in self.channels):
            raise ValueError(f"channels {self.channels} are not divisible by reduction {self.reduction}")
        return self


class FinetuneSection(Section):
    """Small decoder-only language model on few long examples, tokenised on the fly (guide: finetune)."""

    name: Literal["finetune"]
    data: str = Field(
        "builtin",
        description='training data: "builtin" (the longest topics of the Python manual) or the path of a .jsonl file '
        '(keys "text", or "prompt" and "completion"), a text file (examples separated by "---" lines, or cut into '
        "pieces) or a folder of text files",
    )
    size: str | None = Field(None, description="model size: a size name of the workload")
    layers: int = Field(4, ge=1, le=96, description="number of transformer blocks")
    heads: int = Field(4, ge=1, le=96, description="number of attention heads; must divide width")
    width: int = Field(256, ge=8, le=16384, description="model width (embedding dimension)")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")
    vocabulary: int = Field(
        1024, ge=257, le=65536, description="vocabulary size of the byte-pair encoder (256 bytes plus merges)"
    )
    examples: int = Field(
        25, ge=2, le=100_000, description="number of training examples (the longest of the data)"
    )
    document_chars: int = Field(
        0,
        ge=0,
        le=MANY,
        description="maximum characters per example (64 or more): longer documents are cut, built-in ones joined "
        "to reach it; 0: no limit",
    )
    pad: Literal["longest", "full"] = Field(
        "longest",
        description="longest: pad each batch to its longest example; full: always pad to batch.sequence (fixed shape)",
    )
    eval_examples: int = Field(
        5, ge=1, le=100_000, description="number of evaluation examples (the next longest)"
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> FinetuneSection:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if 0 < self.document_chars < 64:
            raise ValueError(f"document_chars {self.document_chars} is too small: use 0, or 64 or more")
        return self


class SummariseSection(Section):
    """BiLSTM pointer-generator summariser (guide: summariser). batch.sequence limits the source length.

    The guide evaluates every 500 steps, with 100 summaries: evaluate.every_steps=500 and workload.summaries=100.
    """

    name: Literal["summarise"]
    data: str = Field(
        "builtin",
        description='training data: "builtin" (functions of the standard library and their docstrings) or the path of '
        "a .jsonl or .tsv file of sources and summaries",
    )
    size: str | None = Field(None, description="model size: a size name of the workload")
    embedding: int = Field(128, ge=4, le=4096, description="embedding dimension")
    hidden: int = Field(256, ge=4, le=4096, description="LSTM hidden size per direction")
    layers: int = Field(2, ge=1, le=8, description="number of LSTM layers of the encoder and of the decoder")
    vocabulary: int = Field(16_000, ge=16, le=1_000_000, description="vocabulary size in words")
    target: int = Field(192, ge=2, le=4096, description="maximum summary length in tokens")
    decoder: Literal["hoisted", "stepwise"] = Field(
        "hoisted",
        description="hoisted: compute the projections once for all decoder steps; stepwise: in every step (same loss "
        "and gradients)",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")
    pad: Literal["longest", "full"] = Field(
        "longest",
        description="longest: pad each batch to its longest pair; full: always pad to the limits (fixed shape)",
    )
    beam: int = Field(4, ge=1, le=32, description="beam width for the summaries of an evaluation")
    summaries: int = Field(
        4,
        ge=0,
        le=10_000,
        description="number of summaries generated for ROUGE at each evaluation (greedy and beam); 0: none",
    )
    pairs: int | None = Field(
        None,
        ge=2,
        le=MANY,
        description="maximum number of pairs to use, counted before functions are joined; default: all",
    )
    eval_fraction: float = Field(0.05, gt=0, lt=0.5, description="fraction of the pairs used for evaluation")


class OwnSection(Section):
    """The user's own workload: `name` is "package.module:factory"."""

    name: str
    path: list[PathText] = Field(
        default_factory=list,
        description="folders to import the module from; default: the folder of the configuration file and the current "
        "folder",
    )
    data: str = Field("builtin", description="training data, passed to the factory as settings.data")
    size: str | None = Field(None, description="model size, passed to the factory as settings.size")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="further settings, which the factory reads with settings.option(name, default)",
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
            f'"{printable(name)}" is not of the form "package.module:factory", such as my_workload:factory{meant}'
        )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: list[str]) -> list[str]:
        # Absolute, so that the run can resume from any folder.
        try:
            return [str(Path(folder).expanduser().absolute()) for folder in path]
        except RuntimeError as error:
            raise ValueError(f"cannot resolve a folder: {error}") from None  # "~nobody"

    @field_validator("options")
    @classmethod
    def _finite(cls, options: dict[str, Any]) -> dict[str, Any]:
        if (name := _not_finite(options)) is not None:
            raise ValueError(f"{printable(name)} is not a finite number")
        return options


class AutoSection(Section):
    """How size "auto" is resolved: the largest of the candidates, in ascending order, that is fast enough without a
    GPU; `gpu_size` with one. probe: keys of [workload] with which a candidate is measured, such as less data."""

    candidates: list[str] = Field(min_length=1)
    gpu_size: str
    min_steps_per_second: float = Field(gt=0)
    probe: dict[str, Any] = Field(default_factory=dict)


class TuningSection(Section):
    """What tune knows of the model and the data, and so need not try.

    model: "attention" (scaled_dot_product_attention), "convolutions", "in memory" (batches are gathered from tensors in
    memory), "unrolled" (a loop that the compiler unrolls for minutes).
    """

    model: list[Literal["attention", "convolutions", "in memory", "unrolled"]] = Field(
        default=["attention", "convolutions"]
    )


class SizeTables(Section):
    """The tables [sizes.NAME], [auto] and [tuning] of a configuration file for the user's own workload."""

    sizes: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    auto: AutoSection | None = None
    tuning: TuningSection = TuningSection()

    @model_validator(mode="after")
    def _candidates_are_sizes(self) -> SizeTables:
        if self.auto is not None:
            for name in (*self.auto.candidates, self.auto.gpu_size):
                if name not in self.sizes:
                    raise ValueError(
                        f"[auto] names {printable(name)}, but there is no [sizes.{printable(name)}]"
                    )
        return self


def _not_finite(value: Any, name: str = "") -> str | None:
    """The dotted name of the first infinite or NaN number in a table, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else name
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_not_finite(part, f"{name}.{key}".lstrip(".")) for key, part in parts)
    return next((bad for bad in found if bad is not None), None)


OWN = "own"
DEFAULT_WORKLOAD = "chartext"
SECTIONS: dict[str, type[Section]] = {
    "antispoof": AntispoofSection,
    "chartext": ChartextSection,
    "eeg": EegSection,
    "finetune": FinetuneSection,
    "summarise": SummariseSection,
    OWN: OwnSection,
}
# The built-in workloads; a name with a colon is the user's own workload.
WORKLOADS = tuple(name for name in SECTIONS if name != OWN)


def kind(value: Any) -> str | None:
    """The kind of a `[workload]` table: one of WORKLOADS, OWN, or None without a name."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return OWN if isinstance(name, str) and ":" in name else name


WorkloadSection = Annotated[
    Annotated[AntispoofSection, Tag("antispoof")]
    | Annotated[ChartextSection, Tag("chartext")]
    | Annotated[FinetuneSection, Tag("finetune")]
    | Annotated[EegSection, Tag("eeg")]
    | Annotated[SummariseSection, Tag("summarise")]
    | Annotated[OwnSection, Tag(OWN)],
    Discriminator(kind),
]
