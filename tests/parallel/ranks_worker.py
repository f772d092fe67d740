"""What the test programs of a rank share."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor


def ended_by(main: Callable[[], object]) -> NoReturn:
    """Run the program and end its process: the destructors of gloo's threads can wait for each other."""
    status = 1
    try:
        main()
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def whole(value: Any) -> Any:
    """The state without shards."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone() if isinstance(full, Tensor) else full


def error_of(work: Callable[[], Any]) -> str:
    """What it raises; "" if nothing."""
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""
