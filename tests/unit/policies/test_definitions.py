"""What each policy keeps, against its definition in plain Python.

A definition gives, for one head, the evictable columns in the order in which they are kept. The
policy and the definition share no code but the draws of random numbers, which ``test_sample.py``
compares with their distribution. ``subgen-stream`` has a file of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.unit.ops.test_defensive import spelled_out
from tests.unit.policies.spelled_out import Case, attention, cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import TABLE, plain_name
from vllm_kvevict.ops.torch.sample import digest, gumbel
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Candidates, protect
from vllm_kvevict.policies.h2o import EXACT, H2O, RECENT, STEP
from vllm_kvevict.policies.nacl import NACL
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.scissorhands import Scissorhands
from vllm_kvevict.policies.streaming_llm import StreamingLLM
from vllm_kvevict.policies.tova import TOVA

SHARES = (0.0, 0.25, 0.5, 0.8, 1.0)


def snapkv(case: Case, head: int, options: dict) -> list[int]:
    """The mean over window and group, then the highest near a token. Tokens that stay are near."""
    rows = [row for rows in attention(case.candidates, head) for row in rows]
    end = case.candidates.valid.shape[1] - case.candidates.window
    columns = [c for c in range(end) if case.candidates.valid[head, c]]
    mean = {c: math.fsum(row[c] for row in rows) / len(rows) for c in columns}
    reach = options["pool_kernel"] // 2
    pooled = {}
    for column in case.columns(head):
        near = [mean.get(c, 0.0) for c in range(column - reach, column + reach + 1)]
        pooled[column] = max(near)
    return ranked(pooled)


def defensive(case: Case, head: int, options: dict) -> list[int]:
    peaks = spelled_out(case.candidates, 5, 2, 14)[head]
    shares = case.candidates.value_shares[head].tolist()
    return ranked({c: peaks[c] * shares[c] for c in case.columns(head)})


def probe(case: Case, head: int, options: dict) -> list[int]:
    """Both scores are joined if there is a window; otherwise those of keys alone count."""
    alone, joined = case.candidates.key_scores[head].unbind(-1)
    if case.candidates.queries is None or options["probe_window"] == "none":
        return ranked({c: float(alone[c]) for c in case.columns(head)})
    peaks = spelled_out(case.candidates, 5, 2, 14)[head]
    weight = float(case.candidates.window_weights[head])
    return ranked(
        {c: float(joined[c]) + weight * math.log(max(peaks[c], 1e-6)) for c in case.columns(head)}
    )


def recent_columns(case: Case, share: float) -> int:
    """Evictable columns among the last tokens that a share of the budget stands for."""
    stays = case.candidates.valid.shape[1] - case.candidates.num_candidates
    return max(0, round(share * (case.keep + case.candidates.window)) - stays)


def h2o(case: Case, head: int, options: dict) -> list[int]:
    """Recent tokens, the youngest first, and then the heaviest."""
    mine, sums = case.columns(head), case.candidates.accumulated[head].tolist()
    recent = mine[len(mine) - recent_columns(case, options["recent_share"]) :]
    return recent[::-1] + ranked({c: sums[c] for c in mine if c not in recent})


def streaming_llm(case: Case, head: int, options: dict) -> list[int]:
    mine = case.columns(head)
    return mine[: options["sinks"]] + mine[options["sinks"] :][::-1]


def scissorhands(case: Case, head: int, options: dict) -> list[int]:
    """The fewest low weights in the history window; then the most weight."""
    record = dict.fromkeys(case.columns(head), (0, 0.0))
    for query_head in attention(case.candidates, head):
        for weights in query_head:
            for column, (lows, less) in record.items():
                low = weights[column] < 1 / len(weights)
                record[column] = (lows + low, less - weights[column])
    counts = [lows for lows, _ in record.values()]
    event("counts tie" if len(set(counts)) < len(counts) else "counts differ")
    return sorted(record, key=lambda column: (*record[column], column))


def tova(case: Case, head: int, options: dict) -> list[int]:
    """The newest query of all heads of the layer."""
    heads = range(case.candidates.num_heads)
    rows = [rows[-1] for head in heads for rows in attention(case.candidates, head)]
    return ranked({c: math.fsum(row[c] for row in rows) / len(rows) for c in case.columns(head)})


def ada_tova(case: Case, head: int, options: dict) -> list[int]:
    """The newest query of the head's own group."""
    rows = [rows[-1] for rows in attention(case.candidates, head)]
    return ranked({c: math.fsum(row[c] for row in rows) / len(rows) for c in case.columns(head)})


def subgen(case: Case, head: int, options: dict) -> list[int]:
    """Farthest first, from the oldest token on."""
    keys, columns = case.candidates.keys[head].double().tolist(), case.columns(head)
    centers = columns[:1]
    while len(centers) < case.keep:
        nearest = {
            column: min(math.dist(keys[column], keys[center]) for center in centers)
            for column in columns
            if column not in centers
        }
        centers.append(max(nearest, key=lambda column: (nearest[column], -column)))
    return centers


def nacl(case: Case, head: int, options: dict) -> list[int]:
    """Algorithm 1: u_score by F_score, then u_random by Gumbel top-k."""
    group = attention(case.candidates, head)
    f_score = {
        c: math.fsum(row[c] for rows in group for row in rows) / len(group)
        for c in case.columns(head)
    }
    candidates = case.candidates
    num_random = round(options["random_share"] * case.keep)
    u_score = ranked(f_score)[: case.keep - num_random]
    where = (candidates.layer, candidates.first_head + head)
    seed = digest((options["seed"], *candidates.seed, *where))
    drawn = dict(zip(f_score, gumbel(seed, len(f_score)).tolist(), strict=True))
    return u_score + ranked({c: f_score[c] + drawn[c] for c in f_score if c not in u_score})


def ranked(scores: dict[int, float]) -> list[int]:
    """Columns from the highest score to the lowest, ties to the lower column."""
    return sorted(scores, key=lambda column: (-scores[column], column))


@dataclass(frozen=True)
class Definition:
    """A policy's order of columns, and the options to try it with.

    Args:
        order: Columns of a head of a case in the order in which they are kept.
        options: Values of each option.
        ragged: False if all heads keep the same tokens.

    """

    order: Callable[[Case, int, dict], list[int]]
    options: dict[str, st.SearchStrategy] | None = None
    ragged: bool = True


DEFINITIONS = {
    "snapkv": Definition(snapkv, dict(pool_kernel=st.sampled_from([1, 3, 7]), pool=st.just("max"))),
    "defensive": Definition(defensive),
    "probe": Definition(
        probe, dict(probe_window=st.sampled_from(["auto", "none"]), probe_recent=st.just(8))
    ),
    "h2o": Definition(h2o, dict(recent_share=st.sampled_from(SHARES))),
    "streaming-llm": Definition(streaming_llm, dict(sinks=st.integers(0, 9))),
    "scissorhands": Definition(scissorhands),
    "tova": Definition(tova, ragged=False),
    "ada-tova": Definition(ada_tova),
    "subgen": Definition(subgen),
    "nacl": Definition(nacl, dict(random_share=st.floats(0, 1), seed=st.integers(0, 2**63 - 1))),
}


def test_every_policy_has_a_definition():
    elsewhere = {"pyramidkv": "snapkv", "subgen-stream": ""}
    assert set(TABLE) <= set(DEFINITIONS) | set(elsewhere)
    assert TABLE["pyramidkv"].module == TABLE["snapkv"].module
    for name, definition in DEFINITIONS.items():
        assert set(TABLE[plain_name(name)].options) == set(definition.options or {})


def completed(draw: Callable, ragged: bool) -> Case:
    """A case with every input that a policy may read; whatever is in the padding."""
    case = draw(cases(ragged))
    candidates, seed = case.candidates, draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    sums = 50 * torch.rand(candidates.valid.shape, generator=generator) ** 4
    sums = sums.round() if draw(st.booleans()) else sums
    garbage = draw(st.sampled_from([math.nan, math.inf, 9.0]))
    shape = candidates.num_heads, candidates.num_candidates
    case.candidates = replace(
        candidates,
        accumulated=sums.masked_fill(~candidates.valid, garbage),
        key_scores=torch.randn(*shape, 2, generator=generator),
        window_weights=torch.rand(shape[0], generator=generator),
        layer=draw(st.integers(0, 99)),
        first_head=draw(st.integers(0, 9)),
    )
    return case


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_what_the_definition_keeps_is_kept(name, data):
    definition = DEFINITIONS[name]
    case = completed(data.draw, definition.ragged)
    options = {key: data.draw(values) for key, values in (definition.options or {}).items()}
    chosen = build_policy(EvictionConfig(policy=name, options=options))
    window = chosen.requirements.window
    if window == "none" or (window == "optional" and data.draw(st.booleans())):
        case.candidates = replace(case.candidates, queries=None)
    heads = range(case.candidates.num_heads)
    expected = [definition.order(case, head, options)[: case.keep] for head in heads]
    assert case.kept(chosen.scorer) == [sorted(columns) for columns in expected]
    if name in ("subgen", "h2o", "streaming-llm", "nacl"):
        # Under protected tokens, the last in this order lose their places.
        order = chosen.scorer.scores(case.candidates).argsort(dim=-1, descending=True, stable=True)
        assert order[:, : case.keep].tolist() == expected


@settings(deadline=None)
@given(st.data(), st.sampled_from(SHARES), st.integers(0, 9), st.sampled_from([0.0, 0.2, 1.0]))
def test_h2o_adaptive_heads_all_keep_recent_and_protected_tokens(data, share, first, floor):
    """What budget moves between heads are heavy hitters only."""
    case = completed(data.draw, ragged=True)
    candidates, bs = case.candidates, case.block_size
    recent = recent_columns(case, share)
    valid = candidates.valid[:, : candidates.num_candidates]
    assume(first + recent <= case.keep and int(valid.sum(-1).min()) >= first + recent)
    scores = protect(H2O(share).scores(candidates), candidates.valid, first)[None]
    caps = valid.sum(-1)[None] // bs
    pages = Adaptive(floor).pages(scores, caps, case.store_blocks, bs)
    columns = select_tokens(scores, pages, bs)[0].split((pages[0] * bs).tolist())
    for head, kept in enumerate(columns):
        mine = case.columns(head)
        assert set(mine[:first]) | set(mine[len(mine) - recent :]) <= set(kept.tolist())


def test_h2o_half_the_budget_is_recent():
    """100 tokens, a budget of 40 with a window of 8: the last 20, and the 20 heaviest before."""
    sums = torch.rand(1, 100, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(1, 100, dtype=torch.bool)
    keys = torch.zeros(1, 100, 1)
    scores = H2O().scores(Candidates(keys, valid, None, 8, 92, 1.0, keep=32, accumulated=sums))
    kept = select_tokens(scores[None], torch.tensor([[32]]), 1)[0].tolist()
    heavy = sums[0, :80].topk(20).indices.tolist()
    assert kept + list(range(92, 100)) == sorted(heavy) + list(range(80, 100))


def test_h2o_scores_stay_exact_for_the_longest_prompts():
    """Every recent token has a score of its own, above a million queries' worth of attention."""
    ranks = torch.tensor([0, 1, 2**20, EXACT - 2, EXACT - 1], dtype=torch.float32)
    scores = RECENT + STEP * ranks
    assert len(set(scores.tolist())) == 5 and scores.min() > 1e9
    assert scores.double().tolist() == [RECENT + STEP * rank for rank in ranks.tolist()]


def test_scissorhands_equal_counts_keep_what_weighs_most_among_many():
    """Of 100 000 tokens nearly all are always low; float32 still tells their weights apart."""
    tokens = 100_000
    keys = torch.linspace(0.0, 1.0, tokens)[torch.randperm(tokens)][None, :, None]
    candidates = Candidates(
        keys=torch.cat([keys, torch.full((1, 4, 1), 12.0)], 1),
        valid=torch.ones(1, tokens + 4, dtype=torch.bool),
        queries=torch.ones(1, 8, 4, 1),
        window=4,
        num_candidates=tokens,
        scale=1.0,
    )
    scores = Scissorhands().scores(candidates)
    assert scores.max() < 1, "all are low, for every query"
    kept = select_tokens(scores[None], torch.tensor([[1]]), 1000)[0]
    heaviest = keys[0, :, 0].argsort(descending=True)[:1000].sort().values
    assert len(set(kept.tolist()) & set(heaviest.tolist())) >= 995


def test_streaming_llm_is_exact_for_a_million_tokens():
    scores = StreamingLLM(sinks=4).scores(bare(2**20))
    kept = select_tokens(scores[None], torch.tensor([[1]]), 1000)[0]
    assert kept.tolist() == [0, 1, 2, 3, *range(2**20 - 996, 2**20)]
    assert scores.unique().numel() == 2**20 - 3, "no two recent tokens score alike"


def test_streaming_llm_refuses_what_float32_cannot_tell_apart():
    with pytest.raises(ValueError, match="at most 16777216 tokens"):
        StreamingLLM().scores(bare(2**24 + 1))


def bare(columns: int) -> Candidates:
    """One head for a policy that reads neither keys nor queries."""
    valid = torch.ones(1, 1, dtype=torch.bool).expand(1, columns + 2)
    return Candidates(torch.empty(1, 0, 1), valid, None, 2, columns, 1.0)


@settings(deadline=None, max_examples=20)
@given(cases(ragged=False))
def test_tova_two_ranks_score_like_one(case):
    """Each rank holds some of the heads; what the ranks average is the same on both."""
    both = case.candidates
    parts = [
        replace(both, keys=k, valid=v, queries=q)
        for k, v, q in zip(
            both.keys.split(1), both.valid.split(1), both.queries.split(1), strict=True
        )
    ]
    sent = []
    for part in parts:
        TOVA().scores(replace(part, mean_of_ranks=lambda tensor: sent.append(tensor) or tensor))
    assert [tensor.shape[0] for tensor in sent] == [1] * both.num_heads
    average = torch.stack(sent).mean(0)
    for part in parts:
        scores = TOVA().scores(replace(part, mean_of_ranks=lambda tensor: average))
        torch.testing.assert_close(scores, TOVA().scores(both)[:1])


@pytest.mark.parametrize(
    "other", [dict(seed=(1, 8)), dict(seed=(2, 7)), dict(layer=1), dict(first_head=2)]
)
def test_nacl_draws_differ_by_request_length_layer_and_head(other):
    def kept(scorer: NACL, candidates: Candidates) -> list[list[int]]:
        return scorer.scores(candidates).topk(12).indices.sort(-1).values.tolist()

    candidates = replace(random_candidates((0, 0)), seed=(1, 7))
    assert kept(NACL(), candidates) == kept(NACL(), candidates)
    assert kept(NACL(), candidates) != kept(NACL(), replace(candidates, **other))
    assert kept(NACL(), candidates) != kept(NACL(seed=1), candidates)
    alike = replace(
        candidates,
        keys=candidates.keys[:1].expand(2, -1, -1),
        queries=candidates.queries[:1].expand(2, -1, -1, -1),
    )
    first, second = kept(NACL(), alike)
    assert first != second, "heads draw apart"
