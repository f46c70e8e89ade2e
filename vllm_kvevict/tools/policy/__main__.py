"""``vllm-kvevict policy NAME``: does a scorer keep the contract? See docs/own-policy.md."""

import argparse
import sys

from vllm_kvevict.processes import guard


def main(argv: list[str]) -> int:
    """Check and print. Returns the exit status: 1 if a check failed."""
    from pydantic import ValidationError

    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.plugins import policy_names, unknown
    from vllm_kvevict.policies.registry import build_policy
    from vllm_kvevict.tools.policy.checks import CHECKS, problem

    parser = argparse.ArgumentParser(
        prog="vllm-kvevict policy",
        description="Check the scorer of a policy, built in or of an installed package, on random "
        "inputs: shapes, padding, ties, determinism, state, and tensor-parallel ranks.",
    )
    parser.add_argument("name", metavar="NAME", help="The policy.")
    name = parser.parse_args(argv).name
    if name not in policy_names():
        print(f"error: {unknown(name, policy_names())}", file=sys.stderr)
        return 1
    try:
        scorer = build_policy(EvictionConfig(policy=name)).scorer
    except (ValueError, ValidationError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = False
    for check in CHECKS:
        found = problem(check, scorer)
        name = check.__name__.replace("_", " ")
        print(f"ok      {name}" if found is None else f"failed  {name}: {found}")
        failed |= found is not None
    return int(failed)


if __name__ == "__main__":
    guard()
    sys.exit(main(sys.argv[1:]))
