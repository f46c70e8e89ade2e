"""Rows of kvpress's RULER evaluation in, predictions of a running server out.

    python -m benchmarks.quality.rows IN.jsonl OUT.jsonl --base-url http://127.0.0.1:8000 \\
        --policy ada-snapkv --budget 25%

IN has one JSON object a line with `context`, `question`, `answer_prefix`, `answer` (a list),
`max_new_tokens` and `task`, as kvpress's data sets have (pandas: `to_json(lines=True,
orient="records")`). OUT has the same rows with `predicted_answer`, which kvpress's own
`calculate_metrics` reads. As in kvpress the context is compressed before the question is seen
(`kv_eviction_at`); `--question-aware` compresses at the prompt's end.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from benchmarks.quality.endpoint import Endpoint
from benchmarks.quality.prompt import make_prompt
from benchmarks.quality.ruler.sample import RulerSample

COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens", "task")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file.

    Raises:
        ValueError: A row is not JSON or lacks a column; the message names line and column.

    """
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
        missing = [name for name in COLUMNS if name not in row]
        if missing:
            raise ValueError(f"{path}, line {number}: no column {', '.join(missing)}")
        yield row


def sample_of(row: dict[str, Any]) -> RulerSample:
    """A row as a sample; RULER wants one of the answers in its `qa` tasks, else all."""
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    return RulerSample(
        row["task"], row["context"], row["question"], row["answer_prefix"],
        tuple(map(str, answers)), int(row["max_new_tokens"]), any_answer="qa" in row["task"],
    )  # fmt: skip


def predict(endpoint: Endpoint, row: dict[str, Any], xargs: dict[str, Any], aware: bool) -> str:
    """The server's answer to a row, compressed before the question or, ``aware``, after it."""
    sample = sample_of(row)
    # kvpress puts nothing between context and question.
    prompt = make_prompt(sample, endpoint.tokenize, endpoint.encode, between="")
    if xargs["kv_eviction"] != "none" and not aware:
        xargs = {**xargs, "kv_eviction_at": prompt.context}
    return endpoint.complete(prompt.ids, sample.max_tokens, xargs).text


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Answer all rows; returns and prints RULER's score of each task."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.rows")
    parser.add_argument("rows", type=Path, help="JSON Lines with kvpress's columns")
    parser.add_argument("predictions", type=Path, help="the same with predicted_answer")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", help="name that the server gives the model")
    parser.add_argument("--policy", default="ada-snapkv", help="or none, for the full cache")
    parser.add_argument("--budget", default="25%", help="kept share of the context, or tokens")
    parser.add_argument("--question-aware", action="store_true")
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args(arguments)

    rows, endpoint = list(read(options.rows)), Endpoint(options.base_url, options.model)
    xargs: dict[str, Any] = {"kv_eviction": options.policy}
    if options.policy != "none":
        xargs |= {
            "kv_eviction_budget": options.budget, "kv_eviction_interval": 0,
            "kv_eviction_when": "always",
        }  # fmt: skip
    endpoint.check_eviction_per_request(tuple(endpoint.encode("Hello")))
    scores = defaultdict(list)
    with (
        ThreadPoolExecutor(options.concurrency) as threads,
        options.predictions.open("w") as out,
    ):
        answers = threads.map(
            lambda row: predict(endpoint, row, xargs, options.question_aware), rows
        )
        for row, answer in zip(rows, tqdm(answers, total=len(rows), unit="row"), strict=True):
            out.write(json.dumps({**row, "predicted_answer": answer}) + "\n")
            scores[row["task"]].append(sample_of(row).score(answer))
    found = {task: fmean(values) for task, values in scores.items()}
    for task, score in found.items():
        print(f"{task:<24}{100 * score:6.1f} of {len(scores[task])} rows")
    return found


if __name__ == "__main__":
    main()
