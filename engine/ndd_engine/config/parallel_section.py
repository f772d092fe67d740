"""The section [parallel]: several ranks that train one model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .workload_sections import Section


class ParallelSection(Section):
    ranks: int = Field(
        1,
        ge=1,
        le=65_536,
        description="number of processes (ranks) that train one model; 1: a single process",
    )
    strategy: Literal["ddp", "fsdp2"] = Field(
        "ddp",
        description="ddp: every rank holds the whole model; fsdp2: parameters, gradients and optimizer state are "
        "sharded over the ranks",
    )
    bucket_mb: float = Field(25.0, gt=0, le=10_000, description="ddp: size of a gradient bucket in MB")
    compress: Literal["off", "fp16", "bf16"] = Field(
        "off", description="ddp: exchange gradients in half precision"
    )
    find_unused: bool = Field(
        False, description="ddp: search every step for parameters that the loss does not use (slower)"
    )
    reshard: bool = Field(
        True,
        description="fsdp2: free the gathered parameters after forward and gather them again in backward",
    )
    param_dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="fsdp2: dtype in which parameters are gathered and layers compute"
    )
    reduce_dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="fsdp2: dtype in which gradients are reduced"
    )
    restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="restart all ranks from the last checkpoint at most N times after one fails",
    )
    hang_s: float = Field(
        60.0,
        ge=1,
        le=86_400,
        description="a rank that finishes no step for so long is reported as hanging (seconds)",
    )
