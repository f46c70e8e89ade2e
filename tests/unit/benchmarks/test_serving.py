"""The serving sweep without a server: its trace and its grid."""

import json

from benchmarks.serving.datasets import CHUNK, Trace
from benchmarks.serving.options import DATASETS, Options
from benchmarks.serving.sweep import datasets, kv_bytes, server_args, settings


def test_trace_is_what_vllm_replays(tmp_path, tiny_model):
    """vLLM's own reader makes prompts of the lengths that the trace names, shared where it says."""
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets.datasets import TimedTrace

    trace = Trace(512, 64, 40, 5.0, tmp_path / "trace.jsonl")
    trace.write()
    text = trace.path.read_text()
    trace.write()
    assert trace.path.read_text() == text
    lines = [json.loads(line) for line in text.splitlines()]
    assert 3 < lines[-1]["timestamp"] < 25, "40 requests at 5 a second"
    assert [x["timestamp"] for x in lines] == sorted(x["timestamp"] for x in lines)

    given = dict(zip(trace.args()[::2], trace.args()[1::2], strict=True))
    reader = TimedTrace(
        dataset_path=given["--dataset-path"],
        random_seed=0,
        timed_trace_chunk_hash_size=given["--timed-trace-chunk-hash-size"],
        timed_trace_label_timestamp="timestamp",
        timed_trace_label_input_length="input_length",
        timed_trace_label_output_length="output_length",
        timed_trace_label_hash_ids="hash_ids",
    )
    requests = reader.sample(AutoTokenizer.from_pretrained(tiny_model), 40)
    assert [r.prompt_len for r in requests] == [line["input_length"] for line in lines]
    assert all(128 <= r.prompt_len <= 512 and 16 <= r.expected_output_len <= 64 for r in requests)
    first = [tuple(r.prompt[:CHUNK]) for r in requests]
    assert 3 <= len(first) - len(set(first)) <= 30, "some share a beginning, most do not"


def test_grid(tmp_path, monkeypatch, tiny_model_kv4):
    monkeypatch.chdir(tmp_path)
    options = Options.from_args(
        ["--model", str(tiny_model_kv4), "--policies", "snapkv,tova", "--budgets", "64",
         "--memory", "3"]
    )  # fmt: skip
    assert [s.label for s in settings(options)] == ["stock vLLM", "snapkv 64", "tova 64"]
    assert settings(options)[0].args() == []
    assert [d.name for d in datasets(options)] == list(DATASETS)
    assert all(d.longest <= 1024 + 96 for d in datasets(options))
    blocks = 3 * 35 + 1
    block = 4 * 4 * 32 * 2 * 32 * 4  # layers, KV heads, tokens, K and V, head size, bytes
    assert kv_bytes(options, 3) == blocks * block
    assert str(blocks * block) in server_args(options, 3)
