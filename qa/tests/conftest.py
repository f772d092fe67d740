"""The examples of hypothesis, the private cache and the tiers are those of all tests."""

from tests.tiers import pytest_runtest_setup as pytest_runtest_setup
from tests.tiers import pytest_runtest_teardown as pytest_runtest_teardown

from tests.conftest import _private_cache as _private_cache
