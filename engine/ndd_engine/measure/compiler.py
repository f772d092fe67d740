"""What torch.compile has done in this process."""

from __future__ import annotations


def compiled() -> tuple[int, int]:
    """(graphs compiled so far, graph breaks so far)."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
