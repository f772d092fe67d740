"""How the test programs of a rank end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


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
