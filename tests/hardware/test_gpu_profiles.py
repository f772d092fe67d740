"""NVML's names match the right profiles, and no other names match."""

from __future__ import annotations

import pytest

from ndd_engine.hardware.profiles import load, match

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "mib", "slug"),
    [
        ("NVIDIA H200", 143771, "h200-sxm"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("A100-SXM4-40GB", 40536, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb-pcie"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb-sxm"),
        ("NVIDIA A40", 46068, "a40"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
        ("GeForce RTX 3090", 24268, "rtx-3090"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 8188, "rtx-4070-laptop"),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376, "rtx-4080-super"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
        ("Tesla T4", 15360, "t4"),
        ("A100-SXM-80GB", 81251, "a100-80gb-sxm"),
        ("NVIDIA H100 NVL", 95830, "h100-nvl"),
        ("NVIDIA H200 NVL", 143771, "h200-nvl"),
        ("NVIDIA GH200 480GB", 97871, "gh200"),
        ("NVIDIA GH200 120GB", 97871, "gh200"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA L40", 46068, "l40"),
        ("NVIDIA RTX A6000", 49140, "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx-pro-6000-max-q"),
        ("GeForce RTX 2080 Ti", 11019, "rtx-2080-ti"),
        ("NVIDIA GeForce RTX 4080", 16376, "rtx-4080"),
        ("NVIDIA GeForce RTX 5080", 16303, "rtx-5080"),
        ("Tesla V100-SXM2-16GB", 16384, "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", 32768, "v100-sxm2-32gb"),
        ("Tesla V100-PCIE-16GB", 16384, "v100-pcie-16gb"),
        ("Tesla V100-PCIE-32GB", 32768, "v100-pcie-32gb"),
    ],
)
def test_known_gpu_is_found(name: str, mib: int, slug: str) -> None:
    profile = match(name, mib << 20)
    assert profile is not None and profile.slug == slug


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16),
        ("NVIDIA GeForce RTX 4090 D", 24),
        ("NVIDIA GeForce RTX 4070", 12),
        ("NVIDIA GeForce RTX 3080 Ti", 12),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16),
        ("NVIDIA GeForce RTX 3080", 20),
        ("NVIDIA GeForce RTX 3090 Ti", 24),
        ("NVIDIA A100-SXM-64GB", 64),
        ("NVIDIA GH200 144G HBM3e", 144),
        ("NVIDIA GeForce RTX 5080 Laptop GPU", 16),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96),
        ("NVIDIA GB200", 185),
        ("NVIDIA RTX 5000 Ada Generation", 32),
        ("NVIDIA A10-24Q", 24),
        ("NVIDIA T400", 2),
        ("NVIDIA A40-48Q", 48),
        ("Tesla V100S-PCIE-32GB", 32),
        ("AMD Instinct MI300X", 192),
        ("", 0),
    ],
)
def test_unknown_gpu_gets_no_figures(name: str, gib: int) -> None:
    assert match(name, gib * GIB) is None


def test_memory_is_needed_where_it_tells_gpu_apart() -> None:
    assert match("NVIDIA GeForce RTX 3080", None) is None


def test_mig_instance_gets_its_whole_gpu_with_a_note() -> None:
    profile = match("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40 * GIB)
    assert profile is not None and profile.slug == "a100-80gb-sxm"
    assert profile.note is not None and "whole GPU" in profile.note and "3g.40gb" in profile.note
    assert match("NVIDIA A100-SXM4-80GB", 80 * GIB) != profile
    h200 = match("NVIDIA H200 MIG 1g.18gb", 16 * GIB)
    assert h200 is not None and h200.slug == "h200-sxm"


def test_figures_are_dense_and_hold_together() -> None:
    for profile in load():
        peaks = profile.dense_tflops
        assert set(peaks) <= {"bf16", "fp16", "tf32", "fp32"} and {"fp16", "fp32"} <= set(peaks)
        ampere = profile.compute_capability >= (8, 0)
        assert ("bf16" in peaks) == ampere and ("tf32" in peaks) == ampere
        if ampere:  # on every NVIDIA GPU since Ampere, dense tf32 runs at half the rate of dense bf16
            assert peaks["bf16"] == peaks["fp16"]
            assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.02)
        assert profile.source and profile.bandwidth_gb_s > 100
    assert len({profile.slug for profile in load()}) == len(load()) == 35
