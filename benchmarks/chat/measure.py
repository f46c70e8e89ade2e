"""One server's chats: right answers, seconds to first tokens, tokens, and what was counted."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chat.conversation import Conversation, converse
from benchmarks.chat.dialogue import Dialogue
from benchmarks.chat.servers import LOADED, ROWS, Setting
from benchmarks.server import Server, Watch

PREEMPTIONS = "preemptions"


def counts(server: Server) -> Counter[str]:
    """The server's totals by name; those of eviction are 0 on stock vLLM."""
    found = Counter(server.evictions())
    found[PREEMPTIONS] = int(server.metric("vllm:num_preemptions_total"))
    found[LOADED] = int(server.metric("vllm:external_prefix_cache_hits_total"))
    return found


def missing(name: str, counted: dict[str, int]) -> list[str]:
    """Counters of a row that should be above 0 and are not."""
    return [counter for counter in ROWS[name].counters if not counted.get(counter)]


def of_turn(conversations: Sequence[Conversation], turn: int) -> dict[str, Any]:
    """What one turn of all conversations came to; the first turn is 0.

    Returns:
        Number of the turn from 1, answers, right ones (None where no answer is right or wrong),
        wrong ones that name another number of the chat, seconds to the first token (all and their
        median), tokens of the prompts, those of them that no cache held, and those that were
        neither in the turn before nor its answer.

    """
    pairs = [(one.dialogue.questions[turn], one.answers[turn]) for one in conversations]
    scored = [question.right(answer.text) for question, answer in pairs if question.number]
    answers = [answer for _, answer in pairs]
    return {
        "turn": turn + 1,
        "answers": len(answers),
        "right": sum(scored) if scored else None,
        "mistaken": sum(
            one.dialogue.is_mistaken(turn, one.answers[turn].text) for one in conversations
        ),
        "ttft_s_median": median(answer.ttft_s for answer in answers),
        "ttft_s": [answer.ttft_s for answer in answers],
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "computed_tokens": sum(answer.computed_tokens for answer in answers),
        "new_tokens": sum(_new_tokens(one, turn) for one in conversations),
    }


def _new_tokens(conversation: Conversation, turn: int) -> int:
    tokens = conversation.answers[turn].prompt_tokens
    if turn:
        before = conversation.answers[turn - 1]
        tokens -= before.prompt_tokens + before.output_tokens
    return tokens


def phases(turns: int, rounds: bool) -> list[int]:
    """Turns of each phase; a phase begins when the phase before it has ended in all chats."""
    return [1] * turns if rounds else [turns]


def measure(
    name: str,
    setting: Setting,
    dialogues: Iterable[Dialogue],
    warm_up: Dialogue,
    at_once: int,
    think_s: float,
    rounds: bool = False,
    answered: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Start a row's server and have all dialogues with it.

    Args:
        name: Of :data:`ROWS`.
        setting: The servers' own.
        dialogues: In the order in which they begin.
        warm_up: Had alone and not counted, whenever a server starts: the first one pays for it.
        at_once: Dialogues at once.
        think_s: Seconds between the turns of one.
        rounds: A turn begins when all dialogues have had the turn before it; always so in a row
            that restarts its server.
        answered: Called after each answer.

    Returns:
        The row of the result file. Seconds are those with users: neither start-ups nor warm-ups,
        nor the time between rounds.

    """
    row = ROWS[name]
    conversations = [Conversation(dialogue) for dialogue in dialogues]
    turns, xargs = len(warm_up.questions), setting.xargs(row)
    planned = phases(turns, rounds or row.restarts)
    counted: Counter[str] = Counter()
    seconds, peak = 0.0, 0
    setting.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=setting.work, prefix="stores-") as folder:
        middle = len(planned) // 2
        for part in (planned[:middle], planned[middle:]) if row.restarts else (planned,):
            with setting.start(name, Path(folder)) as server:
                converse(server, [Conversation(warm_up)], turns, 1, 0, xargs)
                before = counts(server)
                with Watch(server) as watch:
                    for phase in part:
                        time.sleep(think_s if conversations[0].answers else 0)
                        seconds += converse(
                            server, conversations, phase, at_once, think_s, xargs, answered
                        )
                peak = max(peak, watch.peak_running)
                counted.update(counts(server))
                counted.subtract(before)
    output = sum(answer.output_tokens for one in conversations for answer in one.answers)
    return {
        "server": name,
        "title": row.title,
        "flags": setting.flags(row, Path("STORES")),
        "xargs": xargs,
        "turns": [of_turn(conversations, turn) for turn in range(turns)],
        "seconds": seconds,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "peak_running": peak,
        "counted": dict(counted),
        "answers": [one.as_dict() for one in conversations],
    }
