"""Mixed precision as configured, and what "auto" chooses on this device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ndd_engine.config.schema import Config


@dataclass
class Precision:
    """How the forward pass computes. autocast None: fp32 throughout. scaler None: no loss scaling."""

    name: str
    autocast: torch.autocast | None
    scaler: torch.amp.GradScaler | None


def make_precision(config: Config, device: torch.device) -> Precision:
    """Mixed precision for the device; sets the TF32 switches on a card."""
    amp = config.precision.amp
    if amp == "auto":
        amp = "off"
        if device.type == "cuda":
            # Before compute capability 8.0 bf16 is emulated: fp16 with scaling is the fast one there.
            amp = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.precision.tf32
    if amp == "off":
        tf32 = (
            config.precision.tf32
            and device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )
        return Precision("tf32" if tf32 else "fp32", None, None)
    dtype = torch.bfloat16 if amp == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
    return Precision(amp, torch.autocast(device.type, dtype=dtype), scaler)
