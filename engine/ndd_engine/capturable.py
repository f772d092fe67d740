"""Which configurations cannot be captured in a CUDA graph: for the step itself, its candidates and the diagnosis."""

from __future__ import annotations


def why_no_graph(gpu: bool, ranks: int, scales: bool, optimizer: str) -> str | None:
    """Why a step cannot be captured, or None.

    gpu: whether it trains on a CUDA GPU. scales: whether a scaler multiplies the loss. optimizer: its name.
    """
    if not gpu:
        return "there is no CUDA GPU"
    if ranks > 1:
        return "several ranks exchange gradients during backward"
    if scales:
        return 'fp16 loss scaling checks the gradients on the host: use precision.amp "bf16"'
    if optimizer == "sgd":
        return "torch's SGD reads the learning rate on the host"
    return None
