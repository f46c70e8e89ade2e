"""These tests run in a process of their own, started by tests/unit/ops/test_triton.py."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
