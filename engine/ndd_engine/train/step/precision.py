"""Mixed precision as configured; "auto" chooses by device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ndd_engine.config.schema import Config


@dataclass
class Precision:
    """Precision of the forward pass. autocast: None for fp32. scaler: None without loss scaling."""

    name: str
    autocast: torch.autocast | None
    scaler: torch.amp.GradScaler | None


def set_tf32(on: bool) -> None:
    """Turn TF32 on or off in cuBLAS and cuDNN, through the older of torch's two APIs.

    It sets the newer switches (`fp32_precision`, torch 2.9) as well. The other way round, torch raises an error where
    anything reads the older ones: `torch.backends.cudnn.flags`, torch.compile (pytorch issue 166387), the workload.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def make_precision(config: Config, device: torch.device) -> Precision:
    """Mixed precision for the device; also sets torch's TF32 switches on a GPU."""
    amp, tf32 = config.precision.amp, config.precision.tf32
    gpu = device.type == "cuda"
    recent = gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    if amp == "auto":
        # bf16 is emulated below compute capability 8.0; fp16 with loss scaling is faster there.
        amp = "bf16" if recent else "fp16" if gpu else "off"
    if gpu:
        set_tf32(tf32)
    if amp == "off":
        return Precision("tf32" if tf32 and recent else "fp32", None, None)
    dtype = torch.bfloat16 if amp == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
    return Precision(amp, torch.autocast(device.type, dtype=dtype), scaler)
