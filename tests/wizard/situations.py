"""A situation without a probe process, and a proposal."""

from __future__ import annotations

from ndd_engine.config import read
from ndd_engine.hardware.gpus import Host
from ndd_engine.hardware.named_gpus import gpu_named
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.estimate import ItemCounts
from ndd_engine.predict.probe_process import Opened
from ndd_engine.wizard.planner import Situation
from ndd_engine.wizard.proposals import Batch, Model, Proposal

BASE = Proposal(Model("tiny", 64, "off"), Batch(8, 2), "host", 0, 1000, 100, 500, 0.1, 1600, 64.0)
FREE = 1000 * MIB
KEPT_BYTES = 300 * MIB
MODEL = Model("tiny", 64, "off")
OPENED = Opened(
    device="cpu", device_name="Test CPU", chosen_threads=None, item="segment", token="character", tokens_per_item=64.0,
    train_items=1600, parameters=1000, model="a model", data="some text", size="tiny", memory_gb=None, sequence=64,
    process_bytes=0, context_bytes=0, free_bytes=None, items=ItemCounts(KEPT_BYTES, gathers=True), setup_s=3.0,
    lengths=[],
)  # fmt: skip
HOST = Host("h", "Test CPU", 2, 2, None, None)


def situation(*sets: str, opened: Opened = OPENED, gpu: str | None = "RTX 4080 SUPER") -> Situation:
    draft = read(None, ["workload.size=tiny", "run.device=cpu", *sets], "chartext")
    return Situation(
        draft.resolve(), opened, None if gpu is None else gpu_named(gpu), FREE, ("tiny",), (), ("off",),
    )  # fmt: skip
