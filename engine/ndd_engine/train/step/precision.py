"""Mixed precision as configured; "auto" chooses by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ndd_engine.config.schema import Config


@dataclass
class Precision:
    """Precision of the forward pass. autocast: None for fp32. scaler: None without loss scaling."""

    name: str
    autocast: torch.autocast | None
    scaler: torch.amp.GradScaler | None


def set_tf32(on: bool, compiles: bool) -> None:
    """Turn TF32 on or off in cuBLAS and cuDNN, through one of torch's two APIs.

    `fp32_precision` where torch has it (2.9), otherwise the older switches. torch raises an error when the older
    ones are read after only the newer ones were set, and torch.compile reads them (pytorch issue 166387). Runs that
    compile therefore set the older switches, which set the newer ones as well.
    """
    backends: Any = torch.backends
    if compiles or not hasattr(backends.cuda.matmul, "fp32_precision"):
        torch.set_float32_matmul_precision("high" if on else "highest")
        backends.cudnn.allow_tf32 = on
        return
    for operation in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operation.fp32_precision = "tf32" if on else "ieee"


def make_precision(config: Config, device: torch.device) -> Precision:
    """Mixed precision for the device; also sets torch's TF32 switches on a GPU."""
    amp, tf32 = config.precision.amp, config.precision.tf32
    gpu = device.type == "cuda"
    recent = gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    if amp == "auto":
        # bf16 is emulated below compute capability 8.0; fp16 with loss scaling is faster there.
        amp = "bf16" if recent else "fp16" if gpu else "off"
    if gpu:
        set_tf32(tf32, compiles=config.speed.compile != "off")
    if amp == "off":
        return Precision("tf32" if tf32 and recent else "fp32", None, None)
    dtype = torch.bfloat16 if amp == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
    return Precision(amp, torch.autocast(device.type, dtype=dtype), scaler)
