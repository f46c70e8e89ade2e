"""Ask a server every sample under every policy, budget and scenario."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

from benchmarks.quality.budget import Kept, kept
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Completion, Endpoint
from benchmarks.quality.journal import Journal
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.prompt import AGNOSTIC, Prompt, make_prompt, message
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.tasks import characters_for, make

Item = TypeVar("Item")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Plan:
    """What is asked of each sample, and how the server evicts.

    ``labels`` maps a row of the table to the policy it asks for, and ``store_dtype`` is
    ``--kv-eviction-store-dtype`` of the server.
    """

    labels: dict[str, str]
    budgets: tuple[str, ...]
    scenarios: tuple[str, ...]
    max_tokens: int | None
    window: int
    block_size: int
    store_dtype: str = "auto"

    def kept(self, budget: str, point: int) -> Kept:
        """Return what an eviction at ``point`` keeps with this budget."""
        return kept(budget, point, self.window, self.block_size, self.store_dtype)

    def cells(self) -> list[Cell]:
        return [
            Cell(scenario, label, budget)
            for scenario in self.scenarios
            for label in self.labels
            for budget in self.budgets
        ]

    def limit(self, prompt: Prompt) -> int:
        """Most tokens of an answer."""
        return self.max_tokens or prompt.sample.max_tokens

    def xargs(self, cell: Cell, prompt: Prompt) -> dict[str, str | int]:
        """``vllm_xargs`` of a request: every key is given, so no server default enters.

        Only after prefill, because kvpress evicts there alone.
        """
        if cell == FULL_CELL:
            return {"kv_eviction": "none"}
        wanted: dict[str, str | int] = {
            "kv_eviction": self.labels[cell.label],
            "kv_eviction_budget": cell.budget,
            "kv_eviction_interval": 0,
            "kv_eviction_when": "always",
        }
        if cell.scenario == AGNOSTIC:
            wanted["kv_eviction_at"] = prompt.context
        return wanted

    def missing(self, prompt: Prompt, journal: Journal) -> list[Cell]:
        """Cells of a prompt that were not asked before."""
        limit = self.limit(prompt)
        return [
            cell
            for cell in (FULL_CELL, *self.cells())
            if journal.find(prompt.ids, limit, self.xargs(cell, prompt)) is None
        ]

    def expected(self, prompts: Sequence[Prompt], journal: Journal) -> dict[str, int]:
        """What the server must count: requests that evict, and tokens evicted per KV head."""
        expected = {"evictions": 0, "tokens_evicted": 0}
        for prompt in prompts:
            for cell in self.missing(prompt, journal):
                if cell == FULL_CELL:
                    continue
                point = prompt.point(cell.scenario)
                found = self.kept(cell.budget, point)
                expected["evictions"] += found.evicts
                expected["tokens_evicted"] += point - found.tokens
        return expected


def score(prompts: Sequence[Prompt], answers: Iterable[Completion]) -> dict[str, list[float]]:
    """Scores by task, in the order of the prompts."""
    by_task: dict[str, list[float]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        by_task.setdefault(prompt.sample.task, []).append(prompt.sample.score(answer.text))
    return by_task


def samples_of(
    chat: Endpoint | LocalChat, tasks: Sequence[str], length: int, seeds: Sequence[int]
) -> list[RulerSample]:
    """Samples of prompts of about ``length`` tokens: all tasks of a seed, then those of the next.

    A run that is cut off has as many samples of each task.
    """

    def count(sample: RulerSample) -> int:
        return len(chat.tokenize(message(sample)))

    def of(task: str) -> list[RulerSample]:
        characters = characters_for(task, length, count)
        return [make(task, characters, seed) for seed in seeds]

    return [sample for together in zip(*map(of, tasks), strict=True) for sample in together]


def render(
    chat: Endpoint | LocalChat, samples: Sequence[RulerSample], concurrency: int
) -> list[Prompt]:
    """Prompts of the samples under the model's chat template."""
    with ThreadPoolExecutor(concurrency) as threads:
        made = threads.map(lambda sample: make_prompt(sample, chat.tokenize, chat.encode), samples)
        return list(tqdm(made, total=len(samples), desc="chat template", unit="sample"))


def measure(
    endpoint: Endpoint | None,
    plan: Plan,
    prompts: Sequence[Prompt],
    concurrency: int,
    journal: Journal,
) -> dict[Cell, list[Completion]]:
    """Ask everything that ``journal`` does not hold, ``concurrency`` samples at a time.

    A sample's requests follow one another, the full cache first: with prefix caching the others
    find its prompt computed and prefill only what the eviction must see. Where the journal holds
    everything, ``endpoint`` may be None.

    Returns:
        Answers by cell, each in the order of the prompts.

    Raises:
        EndpointError: The server refused a request.

    """
    cells = [FULL_CELL, *plan.cells()]

    def ask(prompt: Prompt, bar: tqdm) -> list[Completion]:
        row = []
        for cell in cells:
            wanted = prompt.ids, plan.limit(prompt), plan.xargs(cell, prompt)
            answer = journal.find(*wanted)
            if answer is None:
                assert endpoint is not None, "without a server every answer is known"
                answer = journal.enter(*wanted, endpoint.complete(*wanted))
            row.append(answer)
            bar.update()
        return row

    with tqdm(total=len(prompts) * len(cells), desc=", ".join(plan.labels), unit="req") as bar:
        rows = together(ask, prompts, concurrency, bar)
    return dict(zip(cells, map(list, zip(*rows, strict=True)), strict=True))


def together(
    ask: Callable[[Item, tqdm], Row], items: Sequence[Item], concurrency: int, bar: tqdm
) -> list[Row]:
    """Ask about ``concurrency`` items at a time. A failure cancels those that wait, and is raised.

    Args:
        ask: Asks everything about one item, and moves the bar.
        items: In the order in which they are asked.
        concurrency: Number of threads.
        bar: Progress over all requests.

    """
    with ThreadPoolExecutor(concurrency) as threads:
        futures = [threads.submit(ask, item, bar) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
