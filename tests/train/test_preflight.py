"""What is checked of a configuration before torch is imported."""

from __future__ import annotations

import pytest

from ndd_engine.config import read
from ndd_engine.errors import ConfigError
from ndd_engine.hardware.detect import Nvml
from ndd_engine.train import request as module


@pytest.mark.parametrize("driver", [True, False])
def test_without_nvml_a_gpu_is_refused_only_if_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    """Virtual GPUs and WSL2 may have CUDA without NVML: only torch knows."""

    class Missing:
        @staticmethod
        def nvmlInit() -> None:  # noqa: N802
            raise OSError("NVML library not found")

    monkeypatch.setattr(module, "Nvml", lambda: Nvml(Missing))
    monkeypatch.setattr(module, "CUDA_DRIVER", None if driver else "libnothing.so")  # None: this process
    draft = read(sets=("run.device=cuda:63",))
    if driver:
        assert module.preflight(draft, use_torch=False).run.device == "cuda:63"
    with pytest.raises(ConfigError, match="cuda:63"):
        module.preflight(draft, use_torch=driver)
