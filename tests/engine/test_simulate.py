"""The simulator of benchmarks/simulate: its loads, its clock, and a run of the real schedulers."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.provenance import provenance
from benchmarks.simulate.__main__ import simulate
from benchmarks.simulate.card import CARDS, Work, step_seconds
from benchmarks.simulate.job import Job
from benchmarks.simulate.load import Conversations, Lengths, Load, Trace
from benchmarks.simulate.model import Sizes
from benchmarks.simulate.options import Options
from benchmarks.simulate.report import markdown
from benchmarks.simulate.setting import Setting
from tests.models import cached_tiny_llama

SIZES = Sizes(layers=2, hidden=64, query_width=64, kv_token=256, weights=2000, itemsize=2, ranks=1)


def test_poisson_arrivals_have_the_rate() -> None:
    load = Load(Lengths(1, 9), Lengths(1, 1), rate=4.0, requests=4000)
    jobs = list(load.jobs())
    assert jobs == list(load.jobs()), "a seed repeats"
    assert {job.prompt for job in jobs} == set(range(1, 10))
    assert jobs[-1].arrival is not None
    assert 4000 / jobs[-1].arrival == pytest.approx(4.0, rel=0.1)


def test_a_load_swings_between_two_rates() -> None:
    load = Load(Lengths(1, 9), Lengths(1, 1), rate=2.0, requests=4000, burst=30.0, period=20.0)
    jobs = list(load.jobs())
    times = [job.arrival for job in jobs if job.arrival is not None]
    assert [job.phase for job in jobs] == ["burst" if t % 20 >= 10 else "quiet" for t in times]
    bursts = sum(job.phase == "burst" for job in jobs)
    assert bursts / (times[-1] / 2) == pytest.approx(30.0, rel=0.1)
    assert (4000 - bursts) / (times[-1] / 2) == pytest.approx(2.0, rel=0.3)
    assert {
        job.phase for job in Load(Lengths(1, 9), Lengths(1, 1), rate=2.0, requests=9).jobs()
    } == {""}


def test_a_mooncake_trace_gives_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"timestamp": 1500, "input_length": 900, "output_length": 0, "hash_ids": [5, 8]},
        {"timestamp": 2000, "input_length": 9000, "output_length": 9, "hash_ids": [5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = Trace(path, speed=2.0, longest=4096).jobs()
    assert (second.arrival, second.prompt, second.output) == (0.75, 900, 1)
    one, two = first.request(32).block_hashes, second.request(32).block_hashes
    assert (len(one), len(two)) == (34, 28)
    assert one[:16] == two[:16], "512 tokens are 16 blocks"
    assert not set(one[16:]) & set(two[16:])


def test_a_turn_of_a_conversation_begins_with_all_of_the_turns_before() -> None:
    load = Conversations(Lengths(90, 110), Lengths(20, 20), 3, 4)
    jobs = list(load.jobs())
    assert len(jobs) == 12 and jobs == list(load.jobs())
    for who in range(3):
        turns = jobs[who::3]
        for before, after in itertools.pairwise(turns):
            assert 90 <= after.prompt - before.prompt - 20 <= 110
            request = before.request(32)
            request.append_output_token_ids([7] * 20)
            known, found = request.block_hashes, after.request(32).block_hashes
            assert known == found[: len(known)], "answers included"
            assert len(known) == (before.prompt + 20) // 32 < len(found)
    first, other = jobs[0].request(32).block_hashes, jobs[1].request(32).block_hashes
    assert not set(first) & set(other)


@pytest.mark.parametrize("wrong", [
    "--conversations 3", "--turns 3", "--conversations 0 --turns 1",
    "--conversations 2 --turns 2 --rate 3", "--conversations 2 --turns 2 --shared 8 --point",
])  # fmt: skip
def test_what_conversations_exclude_is_named(wrong: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        Options.parse(wrong.split())
    assert "--conversations" in capsys.readouterr().err


def test_conversations_that_evict_compute_their_new_tokens_alone() -> None:
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --blocks 240 --max-num-seqs 8 --prompt 200 "
        "--output-len 30 --conversations 8 --turns 8 --clients 2 --steps 9000"
    ).split()
    settings = ["stock", "snapkv:12.5%,every=64"]
    options = Options.parse([*arguments, *(x for s in settings for x in ("--setting", s))])
    stock, evicting = (simulate(options, setting) for setting in options.settings)
    assert stock["finished"] == evicting["finished"] == 64
    assert evicting["counters"]["stores_reused"] == 7 * 8
    # A turn begins at the last state, which is at most an interval and a window old.
    new = 64 * (200 + 30)
    assert new - 64 <= evicting["computed_tokens"] <= new + 56 * (64 + 32 + 32)
    assert stock["computed_tokens"] > 2 * evicting["computed_tokens"]
    assert "2 clients" in markdown(options, {"stock": stock}, provenance())


class WithoutAnswers(Conversations):
    """Conversations in which a prompt does not repeat the tokens of earlier answers."""

    def jobs(self) -> Iterator[Job]:
        return (replace(job, continued=False) for job in super().jobs())


@pytest.mark.parametrize(("output", "load"), [(30, Conversations), (100, WithoutAnswers)])
def test_idle_conversations_keep_their_last_state_in_a_full_pool(output: int, load: type) -> None:
    """The pool has room for the latest state of each conversation, but not for earlier states."""
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --blocks 300 --max-num-seqs 8 --prompt 300 "
        f"--output-len {output} --conversations 8 --turns 10 --clients 2 --steps 30000 "
        "--setting snapkv:12.5%,every=64"
    ).split()
    options = Options.parse(arguments)
    options = replace(options, load=load(**vars(options.load)))
    (setting,) = options.settings
    found = simulate(options, setting)
    assert found["finished"] == 80 and found["counters"]["evictions_in_place"] > 0
    assert found["counters"]["stores_reused"] >= 0.9 * 72
    new = 80 * (300 + output) + (72 * output if load is WithoutAnswers else 0)
    assert found["computed_tokens"] < 1.5 * new


def test_branches_of_one_text_compute_it_twice_at_most_in_a_full_pool() -> None:
    """Each branch evicts several times after the common text, and would overwrite its state."""
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --blocks 150 --max-num-seqs 8 --shared 2000 "
        "--max-num-batched-tokens 256 --prompt 300 --output-len 10 --requests 24 --clients 1 "
        "--steps 30000 --setting snapkv:12.5%,every=64"
    ).split()
    options = Options.parse(arguments)
    (setting,) = options.settings
    found = simulate(options, setting)
    assert found["finished"] == 24 and found["counters"]["evictions_in_place"] > 0
    assert found["counters"]["stores_reused"] >= 22
    assert found["computed_tokens"] < 2 * 2000 + 24 * (300 + 10 + 2 * 64)


def test_a_step_takes_its_bytes_or_its_flops() -> None:
    card = CARDS["h100"]
    read = step_seconds(card, SIZES, Work(1, 10**6)) - step_seconds(card, SIZES, Work(1, 0))
    assert read == pytest.approx(10**6 * 256 / (0.8 * 3.35e12))
    computed = step_seconds(card, SIZES, Work(10**6, 0, 0)) - card.overhead
    wrote = 10**6 * 256 / (0.8 * 3.35e12)
    assert computed == pytest.approx(2 * 1000 * 10**6 / (0.6 * 989e12) + wrote)
    evicted = step_seconds(card, SIZES, Work(1, evicted=1000, kept=100))
    plain = step_seconds(card, SIZES, Work(1))
    assert evicted - plain == pytest.approx((500 + 200) * 256 / (0.8 * 3.35e12))


def test_settings_are_read() -> None:
    assert Setting.parse("stock") == Setting("stock")
    one = Setting.parse("snapkv:25%,interval=64,rings=7")
    assert one.eviction == {"policy": "snapkv", "budget": "25%", "interval": 64}
    assert one.rings == 7
    for wrong in ("snapkv", "stock,interval=3", "snapkv:10,interval"):
        with pytest.raises(ValueError, match=r"give|knows"):
            Setting.parse(wrong)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stock_and_eviction_run_side_by_side(asynchronous: bool) -> None:
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --blocks 200 --max-num-seqs 16 --prompt 300-400 "
        "--output-len 40-80 --shared 64 --aborts 0.2 --requests 40 --steps 4000"
    ).split() + ["--async"] * asynchronous
    options = Options.parse([*arguments, "--setting", "stock", "--setting", "snapkv:128"])
    stock, evicting = (simulate(options, setting) for setting in options.settings)
    jobs = list(itertools.islice(options.load.jobs(), 40))
    least = sum(min(job.abort_after or job.output, job.output) for job in jobs)
    for one in (stock, evicting):
        assert one["finished"] + one["aborted"] == 40
        assert one["sampled_tokens"] == least
        assert one["aborted"] > 0
    assert evicting["counters"]["evictions_prefill"] > 0
    assert evicting["running_mean"] > stock["running_mean"]
    table = markdown(options, {"stock": stock, "snapkv:128": evicting}, provenance())
    assert "| snapkv:128 |" in table and f"commit {provenance()['commit']}." in table


def test_requests_of_a_quiet_phase_are_never_evicted_under_pressure() -> None:
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --blocks 200 --max-num-seqs 16 --prompt 300-400 "
        "--output-len 40-80 --rate 50 --burst 1000 --period 0.4 --requests 150 --steps 4000"
    ).split()
    settings = ["snapkv:128,when=pressure", "snapkv:128"]
    options = Options.parse([*arguments, *(x for s in settings for x in ("--setting", s))])
    results = {setting.name: simulate(options, setting) for setting in options.settings}
    pressure, always = (one["by_phase"] for one in results.values())
    assert pressure["quiet"]["finished"] + pressure["burst"]["finished"] == 150
    assert 0 < pressure["quiet"]["never_evicted"] == pressure["quiet"]["finished"]
    assert pressure["burst"]["never_evicted"] < pressure["burst"]["finished"]
    assert always["quiet"]["never_evicted"] == always["burst"]["never_evicted"] == 0
    assert "| snapkv:128,when=pressure | quiet |" in markdown(options, results, provenance())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_questions_about_one_document_hold_one_store_and_their_tails(asynchronous) -> None:
    document, question, output, count = 2000, 40, 20, 32
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --blocks 400 --max-num-seqs {count} --point "
        f"--prompt {question} --output-len {output} --shared {document} --requests {count} "
        f"--clients {count} --steps 4000"
    ).split() + ["--async"] * asynchronous
    settings = ["stock", "ada-snapkv:25%", "ada-snapkv:25%,alone=true"]
    options = Options.parse([*arguments, *(x for s in settings for x in ("--setting", s))])
    stock, shared, alone = (simulate(options, setting) for setting in options.settings)
    assert shared["counters"]["stores_reused"] == count - 1 and "stores_reused" not in stock
    assert alone["counters"]["stores_reused"] == 0
    block, window = 32, 32
    store = (document // 4 - window) // block
    tail = (document - window) // block
    own = -(-(document + question + output) // block) - document // block
    # While the first one prefills it holds the document, and no other request anything.
    most = max(-(-document // block) + store, store + document // block - tail + count * own)
    assert shared["running_peak"] == count
    assert shared["blocks_used_peak"] <= most < alone["blocks_used_peak"]
    assert shared["computed_tokens"] < document + 1 + count * (question + output)
