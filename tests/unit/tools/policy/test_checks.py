"""``vllm-kvevict policy``: every policy here passes, and each broken scorer fails its check."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins import documented, importable, write_package
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.tools.policy.__main__ import main
from vllm_kvevict.tools.policy.checks import CHECKS, problem

BY_NAME = {check.__name__: check for check in CHECKS}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_here_keeps_the_contract(name: str) -> None:
    scorer = build_policy(EvictionConfig(policy=name)).scorer
    assert [(check.__name__, problem(check, scorer)) for check in CHECKS] == [
        (check.__name__, None) for check in CHECKS
    ]


class Norms(Scorer):
    """Right: minus the norms of the keys."""

    requirements = Requirements(window="none")

    def raw(self, candidates: Candidates) -> torch.Tensor:
        return -candidates.keys[:, : candidates.num_candidates].float().norm(dim=-1)

    def scores(self, candidates: Candidates) -> torch.Tensor:
        valid = candidates.valid[:, : candidates.num_candidates]
        return self.raw(candidates).masked_fill(~valid, float("-inf"))


class Transposed(Norms):
    def scores(self, candidates: Candidates) -> torch.Tensor:
        return super().scores(candidates).T


class Half(Norms):
    def scores(self, candidates: Candidates) -> torch.Tensor:
        return super().scores(candidates).bfloat16()


class PaddingWins(Norms):
    def scores(self, candidates: Candidates) -> torch.Tensor:
        return self.raw(candidates)


class MeanOfColumns(Norms):
    """Its mean divides by the number of columns."""

    def raw(self, candidates: Candidates) -> torch.Tensor:
        return super().raw(candidates) - super().raw(candidates).mean(-1, keepdim=True)


class DividesByNothing(Norms):
    def raw(self, candidates: Candidates) -> torch.Tensor:
        norms = super().raw(candidates)
        return norms / norms.abs().amax(-1, keepdim=True)


class Draws(Norms):
    def raw(self, candidates: Candidates) -> torch.Tensor:
        return torch.rand_like(super().raw(candidates))


class InPlace(Norms):
    def raw(self, candidates: Candidates) -> torch.Tensor:
        candidates.keys.mul_(2)
        return super().raw(candidates)


class OtherHeads(Norms):
    """Subtracts the mean over the heads that it happens to get."""

    def raw(self, candidates: Candidates) -> torch.Tensor:
        return super().raw(candidates) - super().raw(candidates).mean(0, keepdim=True)


class OtherHeadsAlone(OtherHeads):
    requirements = Requirements(window="none", heads_alone=True)


class Crosses(Norms):
    def raw(self, candidates: Candidates) -> torch.Tensor:
        mean = candidates.mean_of_ranks(super().raw(candidates).mean(0, keepdim=True))
        return super().raw(candidates) - mean


class Mixes(Norms):
    """Its state is by layer alone."""

    requirements = Requirements(window="none", keeps_state=True)

    def __init__(self) -> None:
        self.seen = 0.0

    def raw(self, candidates: Candidates) -> torch.Tensor:
        self.seen += float(candidates.keys.sum())
        return super().raw(candidates) + self.seen

    def clear_rows(self, rows: Any) -> None:
        pass


class ReadsMore(Norms):
    def raw(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.queries is not None, "no queries"
        return super().raw(candidates)


@pytest.mark.parametrize(
    "scorer, check, says",
    [
        (Transposed(), "shapes", "the shape is (32, 4), not (4, 32)"),
        (Half(), "shapes", "the type is torch.bfloat16"),
        (ReadsMore(), "shapes", "no queries"),
        (PaddingWins(), "padding", "other than -inf"),
        (MeanOfColumns(), "padding", "divide a mean by valid.sum(-1)"),
        (DividesByNothing(), "ties", "not finite"),
        (Draws(), "determinism", "two calls give different scores"),
        (InPlace(), "determinism", ""),
        (Mixes(), "state", "depend on another request"),
        (OtherHeadsAlone(), "heads_apart", "but requirements say heads_alone"),
        (OtherHeads(), "ranks", "two ranks with half of the heads"),
        (Crosses(), "ranks", "requires no crosses_ranks"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Scorer) else "",
)
def test_a_broken_scorer_fails_its_check(scorer: Scorer, check: str, says: str) -> None:
    assert all(problem(one, Norms()) is None for one in CHECKS)
    found = problem(BY_NAME[check], scorer)
    assert found is not None and says in found


def test_the_command_checks_a_policy_of_a_package(tmp_path: Path, capsys: Any) -> None:
    modules = {"key_diff": documented("key_diff.py"), "broken_one": BROKEN}
    entries = ["key-diff = key_diff:build", "broken = broken_one:build"]
    write_package(tmp_path, "mine", modules, entries)
    from benchmarks.serving.options import Options

    with importable(tmp_path):
        assert Options.from_args(["--policies", "key-diff"]).policies == ("key-diff",)
        assert main(["key-diff"]) == 0
        assert capsys.readouterr().out.count("ok ") == len(CHECKS)
        assert main(["broken"]) == 1
        printed = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("failed  padding: ") for line in printed) == 1
    assert main(["no-such"]) == 1
    assert "unknown policy 'no-such'" in capsys.readouterr().err


BROKEN = """
from vllm_kvevict.policies.base import Requirements, Scorer

class Broken(Scorer):
    requirements = Requirements(window="none")

    def scores(self, candidates):
        return candidates.keys[:, : candidates.num_candidates].float().norm(dim=-1)

def build(config):
    return Broken()
"""
