"""Audits beside n-gram drafts, checked by the oracle."""

import json
import sys
from pathlib import Path

from tests.e2e.test_audit import (
    CASES,
    NEW_TOKENS,
    assert_told,
    expected,
    listen,
    serving,
    told_of,
)
from tests.models import random_prompt
from tests.oracles.masked import MaskedModel, check_tokens


def main(model: Path) -> None:
    """Rejected drafts are computed again, and what is kept of them is overwritten."""
    oracle, pattern = MaskedModel(model), random_prompt(25, seed=4)
    prompts = [(pattern * 20)[:500], (pattern * 12)[:300]]
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    settings = CASES["ada-snapkv"] | dict(audit="100%")
    with serving(model, settings, speculative_config=drafts) as run:
        told = listen(run)
        outputs = run.generate(prompts, NEW_TOKENS)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            lives = run.lives()[number]
            assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
            assert_told(told_of(told, number, 2), expected(oracle, [*prompt, *output], lives))
    print(json.dumps(dict(audits=len(told))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
