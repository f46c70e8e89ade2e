"""How soon further questions about one long document are answered, through ``vllm serve``.

    python -m benchmarks.shared_context

The first question prefills the document and evicts it at its end. Then another prompt, which does
not evict, takes the blocks that it gave back, so that its uncompressed prefix leaves the cache; a
request without a point shows that it has. The questions that follow take the store.
"""

import argparse
import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.quality.ruler.words import ADJECTIVES, NOUNS, VERBS
from benchmarks.server import Server
from benchmarks.smollm2 import real_model

RESULT = Path(__file__).parent / "results" / "shared_context.json"

PLACES = tuple(
    """above across against along among around behind below beneath beside beyond inside near
    opposite outside past through toward under within""".split()
)


def prose(rng: random.Random, sentences: int) -> str:
    """Sentences about animals and things."""

    def noun() -> str:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"

    return " ".join(
        f"{noun().capitalize()} {rng.choice(VERBS)} {noun()} {rng.choice(PLACES)} {noun()}."
        for _ in range(sentences)
    )


class Client:
    """Asks a server and times the first token."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def tokens(self, text: str) -> list[int]:
        body = dict(model="m", prompt=text, add_special_tokens=False)
        tokens: list[int] = self.server.post("/tokenize", body)["tokens"]
        return tokens

    def ask(self, prompt: list[int], **xargs: Any) -> dict[str, Any]:
        """Milliseconds to the first of 8 tokens, and tokens of the prompt that were cached."""
        body = dict(
            model="m", prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True, stream=True,
            stream_options=dict(include_usage=True), vllm_xargs=xargs,
        )  # fmt: skip
        request = urllib.request.Request(
            self.server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        start, first, usage = time.perf_counter(), None, {}
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk["choices"] and first is None:
                    first = time.perf_counter() - start
                usage = chunk.get("usage") or usage
        assert first is not None
        return dict(
            ttft_ms=round(first * 1000, 1),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )


def measure(client: Client, document_tokens: int, budget: str) -> dict[str, Any]:
    """All questions, in order."""
    rng = random.Random(0)
    document = client.tokens(prose(rng, document_tokens // 8))[:document_tokens]
    assert len(document) == document_tokens
    asked = dict(kv_eviction_at=document_tokens, kv_eviction_budget=budget)

    def question() -> list[int]:
        return client.tokens(f"\n\nQuestion: what does {prose(rng, 1)}\nAnswer:")

    client.ask(client.tokens(prose(rng, 40)), kv_eviction="none")
    first = client.ask(document + question(), **asked)
    other = client.tokens(prose(rng, document_tokens // 8))[: document_tokens + 500]
    client.ask(other, kv_eviction="none")
    others = [client.ask(document + question(), **asked) for _ in range(5)]
    gone = client.ask(document + question(), kv_eviction="none")
    taken = client.server.metric("vllm_kvevict:reused_stores_total")
    assert taken == len(others) and all(o["cached_tokens"] == document_tokens for o in others)
    assert gone["cached_tokens"] < document_tokens // 2, "the uncompressed document never left"
    return dict(
        document_tokens=document_tokens,
        budget=budget,
        first=first,
        others=others,
        without_a_point=gone,
        second_over_first=round(others[0]["ttft_ms"] / first["ttft_ms"], 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_context")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--memory", default="192M", help="--kv-cache-memory-bytes")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    arguments = [
        "--served-model-name", "m", "--enforce-eager", "--max-model-len", "8192",
        "--block-size", "32", "--kv-cache-memory-bytes", given.memory,
        "--max-num-batched-tokens", "2048", "--enable-prompt-tokens-details",
        "--kv-eviction", "ada-snapkv", "--kv-eviction-allow", "none",
    ]  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(real_model(), arguments, Path(folder) / "log") as server,
    ):
        result = measure(Client(server), given.tokens, given.budget)
    result = dict(server=arguments, **result, provenance=provenance())
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
