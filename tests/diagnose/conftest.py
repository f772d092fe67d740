"""The record's tests make random sequences of events, which the rules must handle as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "record"))
