"""Benchmarks, and what they share with the tests."""

import sys

from vllm_kvevict.processes import guard

# Python is about to run one of them as a command, and has imported none of its modules yet.
if sys.argv[:1] == ["-m"]:
    guard()
