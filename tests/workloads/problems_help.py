"""The problems of a configuration's data, which building the workload must report with the same messages."""

from __future__ import annotations

import pytest

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import facts, problems


def refused(config: Config) -> str:
    """The problems as text; there must be some."""
    found = problems(config, "run.toml")
    assert found and all(problem.where == "run.toml" and problem.key for problem in found)
    for refuse in (facts, prepare):
        with pytest.raises(ConfigError) as caught:
            refuse(config)
        assert [problem.message for problem in caught.value.problems] == [
            problem.message for problem in found
        ]
    return "\n".join(map(str, found))
