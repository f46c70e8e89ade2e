"""Runs ``vllm-kvevict measure --recorded FILE``: what recorded requests lose."""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from vllm_kvevict.tools.measure.api import Api, Refused
from vllm_kvevict.tools.measure.loss import by_group, lines, sentence
from vllm_kvevict.tools.measure.push import give
from vllm_kvevict.tools.measure.recorded import Recorded, read
from vllm_kvevict.tools.measure.score import SERVER, Score, Scorer

OWN = "the server's budget"
"""How a budget that no request names is shown."""


def run(options: argparse.Namespace, budgets: list[str]) -> int:
    """Score, print and push.

    Args:
        options: Of the command.
        budgets: Budgets; none for the server's.

    Returns:
        The exit status.

    Raises:
        Refused: The server cannot be asked, or refuses every request.
        ValueError: A line of the file is wrong.
        OSError: A file cannot be read or written, or the Pushgateway does not answer.

    """
    records = read(options.recorded)
    scorer = Scorer(Api(options.base_url, os.environ.get("OPENAI_API_KEY")), options.model)
    asked = budgets or [SERVER]
    print(f"scoring {len(records)} answers", file=sys.stderr)
    scores = _score(scorer, records, asked, options.concurrency)
    losses = [
        (budget or OWN, by_group([one[index] for one in scores]))
        for index, budget in enumerate(asked)
    ]
    if options.output is not None:
        rows = [
            asdict(score) | {"budget": budget}
            for of_one in scores
            for budget, score in zip(asked, of_one, strict=True)
        ]
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join(lines(losses)))
    for budget, groups in losses:
        print(sentence(budget, groups[0]))
    give(scorer.model_of(records[0]), losses, options.push, options.textfile)
    return 0


def _score(
    scorer: Scorer, records: list[Recorded], budgets: list[str], at_once: int
) -> list[list[Score]]:
    """Return the scores of each request by budget; requests that the server refuses are left out.

    Raises:
        Refused: The server refuses all of them, or no longer answers.

    """
    found, refused = [], []
    threads = ThreadPoolExecutor(at_once)
    try:
        futures = [threads.submit(scorer.score, one, budgets) for one in records]
        for future in futures:
            try:
                found.append(future.result())
            except Refused as error:
                if error.status is None:
                    raise
                refused.append(str(error))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    if not found:
        raise Refused(f"no request could be scored; {refused[0]}")
    if refused:
        print(
            f"{len(refused)} of {len(records)} requests were left out; {refused[0]}",
            file=sys.stderr,
        )
    return found
