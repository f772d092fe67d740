"""The examples of hypothesis and the private cache are those of all tests."""

from tests.conftest import _private_cache as _private_cache
