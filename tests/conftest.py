"""What all tests share: hypothesis runs the same examples everywhere and keeps no database."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ndd",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ndd")
