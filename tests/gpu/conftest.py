"""Fixtures of the tests that need a GPU."""

from tests.ranks import one_rank  # noqa: F401
