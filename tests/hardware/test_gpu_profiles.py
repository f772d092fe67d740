"""NVML's names match the right profiles, and no other names match."""

from __future__ import annotations

import pytest

from ndd_engine.hardware.gpus import load, match

GIB = 1 << 30
# There are two with published figures, of 10 and of 12 GB.
TWO_SIZES = "NVIDIA GeForce RTX 3080"


# Profile, MiB and name of GPUs that NVML reported somewhere.
KNOWN = """
a10                   23028  NVIDIA A10
a100-40gb             40960  NVIDIA A100-SXM4-40GB
a100-40gb             40960  NVIDIA A100-PCIE-40GB
a100-40gb             40536  A100-SXM4-40GB
a100-40gb             40536  A100-PCIE-40GB
a100-40gb              4864  NVIDIA A100-SXM4-40GB MIG 1g.5gb
a100-40gb             20096  NVIDIA A100-SXM4-40GB MIG 3g.20gb
a100-40gb              4864  NVIDIA A100-PCIE-40GB MIG 1g.5gb
a100-40gb             40536  A100-SXM4-40GB MIG 4c.7g.40gb
a100-40gb              9856  NVIDIA A100-SXM4-40GB MIG 1g.10gb
a100-80gb-pcie        81920  NVIDIA A100 80GB PCIe
a100-80gb-pcie        81050  NVIDIA A100 80GB PCIe MIG 7g.80gb
a100-80gb-sxm         81920  NVIDIA A100-SXM4-80GB
a100-80gb-sxm         81251  A100-SXM-80GB
a100-80gb-sxm          9728  NVIDIA A100-SXM4-80GB MIG 1g.10gb
a10g                  23028  NVIDIA A10G
a40                   46068  NVIDIA A40
b200                 183359  NVIDIA B200
gh200                 97871  NVIDIA GH200 480GB
gh200                 97871  NVIDIA GH200 120GB
h100-nvl              95830  NVIDIA H100 NVL
h100-pcie             81559  NVIDIA H100 PCIe
h100-sxm              81559  NVIDIA H100 80GB HBM3
h100-sxm              40448  NVIDIA H100 80GB HBM3 MIG 3g.40gb
h100-sxm               9728  NVIDIA H100 80GB HBM3 MIG 1g.10gb
h100-sxm              20096  NVIDIA H100 80GB HBM3 MIG 1g.20gb
h200-nvl             143771  NVIDIA H200 NVL
h200-sxm             143771  NVIDIA H200
h200-sxm              16384  NVIDIA H200 MIG 1g.18gb
l4                    23034  NVIDIA L4
l40                   46068  NVIDIA L40
l40s                  46068  NVIDIA L40S
rtx-2080-ti           11019  GeForce RTX 2080 Ti
rtx-2080-ti           11264  NVIDIA GeForce RTX 2080 Ti
rtx-3080-10gb         10240  NVIDIA GeForce RTX 3080
rtx-3080-10gb         10018  GeForce RTX 3080
rtx-3080-12gb         12288  NVIDIA GeForce RTX 3080
rtx-3090              24576  NVIDIA GeForce RTX 3090
rtx-3090              24268  GeForce RTX 3090
rtx-4070              12282  NVIDIA GeForce RTX 4070
rtx-4070-laptop        8188  NVIDIA GeForce RTX 4070 Laptop GPU
rtx-4080              16376  NVIDIA GeForce RTX 4080
rtx-4080-super        16376  NVIDIA GeForce RTX 4080 SUPER
rtx-4090              24564  NVIDIA GeForce RTX 4090
rtx-5080              16303  NVIDIA GeForce RTX 5080
rtx-5090              32607  NVIDIA GeForce RTX 5090
rtx-6000-ada          49140  NVIDIA RTX 6000 Ada Generation
rtx-a6000             49140  NVIDIA RTX A6000
rtx-pro-6000          97887  NVIDIA RTX PRO 6000 Blackwell Workstation Edition
rtx-pro-6000-max-q    97887  NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition
t4                    15360  Tesla T4
t4                    15360  NVIDIA T4
v100-pcie-16gb        16384  Tesla V100-PCIE-16GB
v100-pcie-32gb        32768  Tesla V100-PCIE-32GB
v100-sxm2-16gb        16384  Tesla V100-SXM2-16GB
v100-sxm2-32gb        32768  Tesla V100-SXM2-32GB
"""
# Names that NVML reported of other products, of virtual GPUs, and of editions without published figures.
UNKNOWN = (
    "NVIDIA H100 80GB HBM2e", "NVIDIA H20", "NVIDIA H800", "NVIDIA H800 PCIe", "NVIDIA A800-SXM4-80GB",
    "NVIDIA A800 80GB PCIe", "NVIDIA B300 SXM6 AC", "NVIDIA GB200", "NVIDIA GB10", "NVIDIA L20", "NVIDIA A30",
    "NVIDIA A30 MIG 1g.6gb", "NVIDIA A2", "NVIDIA A16", "Tesla V100S-PCIE-32GB", "Tesla V100-FHHL-16GB",
    "Tesla V100-DGXS-32GB", "Tesla V100-SXM3-32GB", "Tesla P4", "Tesla P100-PCIE-16GB", "Tesla K80", "Tesla M4",
    "GRID A100-40C", "GRID A100-10C", "NVIDIA A40-48Q", "GRID K520", "GRID T4-16Q", "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 3080 Laptop GPU", "NVIDIA GeForce RTX 3080 Ti Laptop GPU", "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4070 SUPER",
    "NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4060 Laptop GPU", "NVIDIA GeForce RTX 5090D",
    "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 5080 Laptop GPU",
    "NVIDIA GeForce RTX 5060 Ti", "NVIDIA GeForce RTX 3050 Laptop GPU", "NVIDIA GeForce RTX 3070 Laptop GPU",
    "NVIDIA GeForce RTX 3060", "GeForce GTX 1070 Ti", "GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1660 Ti",
    "NVIDIA TITAN RTX", "NVIDIA TITAN V", "NVIDIA RTX A5000", "NVIDIA RTX A4000", "NVIDIA RTX A2000",
    "NVIDIA RTX 4000 SFF Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", "Quadro RTX 8000", "Quadro RTX 6000",
    "Quadro P2000", "NVIDIA T400", "NVIDIA A100-PG509-200", "NVIDIA A100-SXM-64GB", "NVIDIA GH200 144G HBM3e",
    "NVIDIA RTX 5000 Ada Generation",
    "NVIDIA A10-24Q", "AMD Instinct MI300X", "",
)  # fmt: skip


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_known_gpus_are_found(line: str) -> None:
    slug, mib, name = line.split(maxsplit=2)
    profile = match(name, int(mib) << 20)
    assert profile is not None and profile.slug == slug


def test_unknown_gpus_get_no_figures() -> None:
    assert not [name for name in UNKNOWN if match(name, 24 * GIB)]
    assert match(TWO_SIZES, 20 * GIB) is None


def test_memory_is_needed_where_it_tells_gpu_apart() -> None:
    assert match(TWO_SIZES, None) is None


def test_mig_instance_gets_its_whole_gpu_with_a_note() -> None:
    profile = match("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40 * GIB)
    whole = match("NVIDIA A100-SXM4-80GB", 80 * GIB)
    assert profile is not None and whole is not None and whole.note is None
    assert profile.slug == whole.slug and "3g.40gb" in (profile.note or "")


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
    assert len({profile.slug for profile in load()}) == len(load()) == 36
