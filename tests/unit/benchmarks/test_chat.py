"""The benchmark of chats: what is asked, and its arithmetic. No vLLM runs."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chat.conversation import Answer, Conversation
from benchmarks.chat.dialogue import (
    Dialogue,
    Question,
    for_base_model,
    make,
    make_growing,
)
from benchmarks.chat.measure import missing, of_turn, phases
from benchmarks.chat.report import markdown
from benchmarks.chat.servers import PLAIN, ROWS, STOCK, Setting
from benchmarks.provenance import provenance, used
from benchmarks.quality.local_chat import LocalChat
from vllm_kvevict.config.requests import KEYS, message_index

SHAPE: dict[str, int] = dict(characters=3000, summary_tokens=48)


def setting(folder: Path, **changes: Any) -> Setting:
    config = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    given = dict(
        model=folder, tokens=70, memory=4, sequences=16, policy="auto",
        budget="25%", profile="auto", store_memory="4G", every=96,
        dtype="bfloat16", work=folder,
    )  # fmt: skip
    return Setting(**{**given, **changes})


def all_messages(dialogue: Dialogue) -> list[list[dict[str, str]]]:
    """The messages of every turn."""
    answers = [f"answer {turn}" for turn in range(len(dialogue.questions))]
    return [dialogue.messages(answers[:turn]) for turn in range(len(answers))]


@pytest.mark.parametrize("sessions, turns", [(1, 2), (1, 4), (3, 3)])
def test_every_number_that_is_asked_for_stands_once_in_its_document(
    sessions: int, turns: int
) -> None:
    made = make(6, turns, sessions, **SHAPE)
    asked = [question for one in made for question in one.questions if question.number]
    assert len({question.number for question in asked}) == len(asked) == 6 * (turns - 1)
    for dialogue in made:
        assert [question.number is None for question in dialogue.questions].index(False) == 1
        for question in dialogue.questions[1:]:
            assert question.number is not None
            key = re.search(r"number for (\S+) mentioned", question.text)
            assert key is not None and question.number not in question.text
            assert dialogue.document.count(question.number) == 1
            assert f"magic numbers for {key[1]} is: {question.number}." in dialogue.document


def test_sessions_share_a_document_and_nothing_else_begins_alike() -> None:
    made = make(7, 2, 3, **SHAPE)
    documents = [one.document for one in made]
    assert documents[:3] == documents[3:6] and documents[6] == documents[0]
    firsts = sorted(set(documents))
    assert len(firsts) == 3
    for one, other in pairwise(firsts):
        assert one[:16] != other[:16]
    # Sessions about one document differ from their first question on.
    assert len({made[index].questions[0].text for index in (0, 3, 6)}) == 3
    assert made == make(7, 2, 3, **SHAPE) != make(7, 2, 3, seed=1, **SHAPE)
    assert all(2500 < len(document) < 3600 for document in documents)
    with pytest.raises(ValueError, match="2 turns"):
        make(1, 1, 1, **SHAPE)


def test_a_growing_chat_asks_for_numbers_of_earlier_turns() -> None:
    shape = dict(turns=5, characters=3000, passage=800, summary_tokens=48)
    made = make_growing(6, **shape)
    earlier = Counter[int]()
    for dialogue in made:
        said = [dialogue.document, *(question.text for question in dialogue.questions[1:])]
        assert 2500 < len(said[0]) < 3600 and all(700 < len(text) < 1400 for text in said[1:])
        assert dialogue.questions[0].number is None
        for turn, question in enumerate(dialogue.questions[1:], start=1):
            assert question.number is not None
            (found,) = [part for part, text in enumerate(said) if question.number in text]
            assert found < turn
            earlier[turn - found] += 1
            key = re.search(r"number for (\S+) mentioned", question.text)
            assert key is not None
            assert f"magic numbers for {key[1]} is: {question.number}." in said[found]
    assert len(earlier) > 2
    assert made == make_growing(6, **shape) != make_growing(6, seed=1, **shape)
    with pytest.raises(ValueError, match="passages of 1 character"):
        make_growing(1, **shape | dict(passage=0))


def test_turns_build_on_one_another_as_text(tiny_model: Path) -> None:
    template = LocalChat(tiny_model)._tokenizer.apply_chat_template
    (dialogue,) = make(1, 3, 1, **SHAPE)
    turns = all_messages(dialogue)
    assert [len(messages) for messages in turns] == [2, 4, 6]
    texts = [template(one, tokenize=False, add_generation_prompt=True) for one in turns]
    for number, (one, other) in enumerate(pairwise(texts)):
        assert other.startswith(one + f"answer {number}")
    assert all(text.count(dialogue.document) == 1 for text in texts)


def test_the_point_is_the_end_of_the_document_in_every_turn(tmp_path: Path) -> None:
    (dialogue,) = make(1, 3, 1, **SHAPE)
    for name in ("at", "tiers", "tiers-files", "restart"):
        xargs = setting(tmp_path).xargs(ROWS[name])
        assert set(xargs) <= set(KEYS)
        for messages in all_messages(dialogue):
            point = message_index(xargs["kv_eviction_at"]["message"], len(messages))
            assert messages[point]["content"] == dialogue.document
            assert messages[point + 1]["content"] == dialogue.questions[0].text
    assert not any(setting(tmp_path).xargs(ROWS[name]) for name in (STOCK, "always", "pressure"))


def test_a_base_models_chat_is_one_text_that_grows(tiny_model: Path) -> None:
    """Answers begin in the question's line, and the text of a turn begins with all of the last."""
    grown = make_growing(1, turns=4, passage=800, **SHAPE)
    for dialogue in map(for_base_model, [*grown, *make(1, 3, 1, **SHAPE)]):
        texts = [
            LocalChat(tiny_model)._tokenizer.apply_chat_template(
                messages, chat_template=PLAIN, tokenize=False
            )
            for messages in all_messages(dialogue)
        ]
        for number, (one, other) in enumerate(pairwise(texts)):
            assert other.startswith(f"{one}answer {number}\n")
        for text, question in zip(texts[1:], dialogue.questions[1:], strict=True):
            key = re.findall(r"special magic number for (\S+) mentioned", text)[-1]
            begun = f"\nThe special magic number for {key} mentioned in the provided text is"
            assert text.endswith(begun) and question.text.endswith(f"text?{begun}")
            assert f"magic numbers for {key} is: {question.number}." in text
        assert texts[0].removeprefix("<s>").startswith(f"{dialogue.document}\n")
        assert texts[0].endswith(f"\n{dialogue.questions[0].text}")


def test_a_model_without_a_chat_template_is_served_with_one(tmp_path: Path) -> None:
    for template in ("", "{{ messages }}"):
        command = setting(tmp_path, chat_template=template).start(STOCK, tmp_path).command
        given = command[command.index("--chat-template") + 1] if template else ""
        assert given == template and ("--chat-template" in command) == bool(template)


def test_servers_differ_in_the_flags_of_their_rows_alone(tmp_path: Path) -> None:
    common = setting(tmp_path)
    commands = {name: common.start(name, tmp_path / "stores").command for name in ROWS}
    for name, command in commands.items():
        # Three blocks of 32 tokens for each, and vLLM's null block; 2 bytes a number, K and V.
        memory = command[command.index("--kv-cache-memory-bytes") + 1]
        assert int(memory) == (4 * 3 + 1) * 32 * 2 * 3 * 16 * 2 * 2
        stock = name in (STOCK, "stock-offload")
        assert ("--kv-eviction" in command) == (not stock) == ("auto" in command)
        others = [one for one in command if "cpu_bytes_to_use" not in one]
        assert not any("{" in argument for argument in others)
    for name, flag, value in (
        ("pressure", "--kv-eviction-when", "pressure"),
        ("tiers", "--kv-eviction-store-memory", "4G"),
        ("restart", "--kv-eviction-store-path", str(tmp_path / "stores")),
        ("every-tiers", "--kv-eviction-every", "96"),
        ("every-restart", "--kv-eviction-store-path", str(tmp_path / "stores")),
        ("offload", "--kv-offloading-size", "4"),
    ):
        assert commands[name][commands[name].index(flag) + 1] == value
    offload = commands["stock-offload"]
    given = json.loads(offload[offload.index("--kv-transfer-config") + 1])
    assert given["kv_connector_extra_config"]["cpu_bytes_to_use"] == 4 << 30
    assert "--kv-eviction-profile" not in setting(tmp_path, profile="none").flags(
        ROWS["at"], tmp_path
    )


def test_only_servers_that_evict_store_tokens_in_few_bits(tmp_path: Path) -> None:
    few = setting(tmp_path, store_dtype="int4")
    for row in ROWS.values():
        flags = few.flags(row, tmp_path)
        given = [value for flag, value in pairwise(flags) if flag == "--kv-eviction-store-dtype"]
        assert given == (["int4"] if "--kv-eviction" in flags else [])
        assert "--kv-eviction-store-dtype" not in setting(tmp_path).flags(row, tmp_path)


def test_memory_for_one_chat_holds_the_longest_request(tmp_path: Path) -> None:
    command = setting(tmp_path, memory=1).start("at", tmp_path / "stores").command
    longest = int(command[command.index("--max-model-len") + 1])
    memory = int(command[command.index("--kv-cache-memory-bytes") + 1])
    assert memory // (2 * 3 * 16 * 2 * 2) >= longest + 32, "and the null block of 32 tokens"


def test_a_number_counts_where_it_stands_whole() -> None:
    question = Question("which?", 32, "1234567")
    for text in ("1234567", "It is 1234567.", "for owl: 1234567, for cat: 7654321"):
        assert question.right(text)
    for text in ("", "123456", "12345678", "91234567", "1,234,567"):
        assert not question.right(text)


def test_a_wrong_answer_that_names_another_hidden_number_is_mistaken() -> None:
    (one,) = make_growing(1, 3, passage=400, **SHAPE)
    assert len(one.numbers) == len({*one.numbers}) == 3
    right = one.questions[2].number
    assert right in one.numbers[:2]
    other = next(number for number in one.numbers if number != right)
    for answer in (f" {other}.", f"{other} or 1{right}"):
        assert one.is_mistaken(2, answer)
    for answer in (f" {right}", f"{other}, {right}", "no number", f"{other}0"):
        assert not one.is_mistaken(2, answer)
    assert not one.is_mistaken(0, other), "a summary is neither right nor wrong"


def answered(*turns: tuple[str, float, int, int]) -> Conversation:
    """A conversation of a summary and numbers, with (text, TTFT, prompt, cached) of each turn."""
    numbers = [Question("which?", 9, "42") for _ in turns[1:]]
    conversation = Conversation(Dialogue("text", (Question("what?", 9), *numbers)))
    for text, ttft, prompt, cached in turns:
        conversation.answers.append(Answer(text, ttft, ttft + 1, prompt, cached, 9))
    return conversation


def test_a_turn_comes_to_its_right_answers_and_computed_tokens() -> None:
    talks = [
        answered(("42", 5.0, 100, 0), ("is 42", 1.0, 130, 96)),
        answered(("so", 9.0, 110, 10), ("is 41", 4.0, 140, 0)),
        answered(("so", 6.0, 120, 0), ("42.", 2.0, 150, 128)),
    ]
    first, second = of_turn(talks, 0), of_turn(talks, 1)
    assert first["right"] is None and second["right"] == 2
    assert (first["ttft_s_median"], second["ttft_s_median"]) == (6.0, 2.0)
    assert (first["computed_tokens"], second["computed_tokens"]) == (320, 196)
    # Prompts of 130, 140 and 150 tokens after ones of 100, 110 and 120 and their answers of 9.
    assert (first["new_tokens"], second["new_tokens"]) == (330, 63)
    assert (first["turn"], second["turn"], second["answers"]) == (1, 2, 3)
    assert phases(3, rounds=False) == [3] and phases(3, rounds=True) == [1, 1, 1]


def test_a_row_that_did_not_evict_is_told() -> None:
    assert missing(STOCK, {}) == []
    assert missing("always", {"evictions": 3}) == []
    assert missing("always", {"evictions": 0}) == ["evictions"]
    assert missing("tiers", {"evictions": 3}) == ["stores_restored_memory"]
    assert all(row.counters for name, row in ROWS.items() if name != STOCK)


def test_the_table_has_all_turns_from_the_third_on_as_one() -> None:
    def one(name: str, *turns: tuple[int, int, list[float]]) -> dict[str, Any]:
        made = [
            dict(turn=number, answers=2, right=None if number == 1 else number % 3,
                 mistaken=number // 3, ttft_s=seconds,
                 ttft_s_median=sum(seconds) / 2, prompt_tokens=500, new_tokens=new,
                 computed_tokens=computed)
            for number, (new, computed, seconds) in enumerate(turns, 1)
        ]  # fmt: skip
        return dict(server=name, title=name, turns=made, seconds=9.0, output_tokens_per_s=5.0,
                    peak_running=3, counted={})  # fmt: skip

    first, second = (300, 300, [1.0, 3.0]), (100, 400, [9.0, 9.0])
    rows = [
        one(STOCK, first, second, (100, 500, [10.0, 20.0]), (100, 600, [20.0, 40.0])),
        one("every", first, second, (100, 110, [1.0, 2.0]), (200, 220, [2.0, 9.0])),
    ]
    table = markdown(dict(options={}, load="2 chats", rows=rows, failed=[]) | provenance() | used())
    later = [line.split(" | ") for line in table.splitlines() if "3 on" in line]
    # Medians of 10, 20, 20, 40 and of 1, 2, 2, 9 seconds; right answers are 0 and 1.
    assert later == [
        [f"| {STOCK}", "3 on", "1 of 4", "20.00", "1.00x", "1,000", "200", "1,100", "5.50x", "2 |"],
        ["| every", "3 on", "1 of 4", "2.00", "0.10x", "1,000", "300", "330", "1.10x", "2 |"],
    ]
    rows = [one(STOCK, first, second)]
    table = markdown(dict(options={}, load="2 chats", rows=rows, failed=[]) | provenance() | used())
    assert "3 on" not in table and "9.00" in table
