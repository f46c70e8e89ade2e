"""Thousands of random requests at once; many are cut off, aborted or wrong on purpose."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.server import Server
from tests.models import random_prompt

POLICIES = ("ada-snapkv", "snapkv", "streaming-llm", "tova", "nacl", "none")
"""What the server must allow; budgets below lie above its window of 32 tokens."""

KINDS = dict(whole=5, stream=3, leaves=4, cancels=3, aborts=3, half=1, refused=1, too_long=1)
"""Weights: answered whole; streamed to its end; stream left after some tokens; cancelled before
any answer; aborted by id; half a body; bad settings; a prompt longer than the model takes."""

GROWN = 320
"""Tokens of a request that grows, its prompt included."""

SHARED = [random_prompt(400, seed=7000 + n) for n in range(6)]


def request(rng: random.Random, longest: int) -> dict[str, Any]:
    """A random completion request; its prompt may share blocks with earlier ones."""
    length = int(longest ** rng.uniform(0.2, 1.0))
    prefix = rng.choice(SHARED)[: rng.randrange(0, 400)] if rng.random() < 0.5 else []
    prompt = (prefix + random_prompt(length, rng.randrange(10**6)))[:length] or [9]
    body: dict[str, Any] = dict(
        model="tiny", prompt=prompt, max_tokens=int(100 ** rng.uniform(0, 1)), ignore_eos=True,
        **(dict(n=2, temperature=1) if rng.random() < 0.05 else dict(n=1, temperature=0)),
    )  # fmt: skip
    asked: dict[str, Any] = {}
    if rng.random() < 0.6:
        asked["kv_eviction"] = rng.choice(POLICIES)
    if rng.random() < 0.4:
        asked["kv_eviction_budget"] = rng.choice([64, 96, 160, "20%", "60%"])
    if rng.random() < 0.3:
        asked["kv_eviction_interval"] = rng.choice([0, 16, 64])
    if rng.random() < 0.3:
        asked["kv_eviction_at"] = rng.randint(1, len(prompt))
    if rng.random() < 0.2:
        asked["kv_eviction_protect_first"] = rng.randint(1, 32)
    return body | (dict(vllm_xargs=asked) if asked else {})


class Storm:
    """The clients of one storm.

    Args:
        server: Serves the model as "tiny" with policies of :data:`POLICIES` allowed.
        longest: Tokens of the longest prompt.
        limit: ``max_model_len`` of the server.
        seed: Same seed, same requests.
        growing: So many requests come first that start small, are never evicted and grow to
            ``GROWN`` tokens: more of them begin than a small pool can hold to their ends.

    """

    def __init__(
        self, server: Server, longest: int, limit: int, seed: int, growing: int = 0
    ) -> None:
        self._server, self._longest, self._limit, self._seed = server, longest, limit, seed
        self._growing = growing
        self._url = server.url + "/v1/completions"
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, count: int, concurrency: int) -> None:
        """Send ``count`` requests, ``concurrency`` at once, and wait for all of them."""
        asyncio.run(self._run(count, concurrency))

    async def _run(self, count: int, concurrency: int) -> None:
        numbers = iter(range(count))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=600)
        with tqdm(total=count, desc="requests") as bar:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

                async def client() -> None:
                    for number in numbers:
                        await self._one(session, number)
                        bar.update()

                await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        body = request(rng, self._longest)
        if number < self._growing:
            kind, few = "whole", random_prompt(40, rng.randrange(10**6))
            body |= dict(prompt=few, max_tokens=GROWN - len(few), n=1, temperature=0)
            body |= dict(vllm_xargs=dict(kv_eviction="none"))
        try:
            await getattr(self, f"_{kind}")(session, rng, body)
            self.done[kind] += 1
        except Exception as error:
            self.wrong.append(f"{self._seed} {number} {kind}: {error!r} {body}"[:400])

    async def _post(
        self, session: aiohttp.ClientSession, body: dict[str, Any], status: int, **headers: str
    ) -> dict[str, Any]:
        async with session.post(self._url, json=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == status, f"{answer.status} {text[:200]}"
            return json.loads(text)

    async def _whole(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        answer = await self._post(session, body, 200)
        assert answer["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}

    async def _stream(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        async with session.post(self._url, json=body | dict(stream=True)) as answer:
            assert answer.status == 200
            lines = [line async for line in answer.content if line.startswith(b"data: {")]
        ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines]
        assert ends.count("length") == body["n"], ends

    async def _leaves(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        stay = rng.randrange(body["max_tokens"])
        async with session.post(self._url, json=body | dict(stream=True)) as answer:
            assert answer.status == 200
            lines = [await answer.content.readline() for _ in range(stay)]
            # Tokens that nobody fetched in time come as one: it may be over by now, but whole.
            assert all(lines) or b"data: [DONE]\n" in lines, lines
            answer.close()

    async def _cancels(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        body = body | dict(max_tokens=rng.randint(50, 120), stream=rng.random() < 0.5)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._post(session, body, 200), rng.uniform(0, 0.4))

    async def _aborts(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        """The id that the client chose names the request, ``-0`` its only prompt."""
        name = f"storm-{rng.getrandbits(64):x}"
        body = body | dict(n=1, max_tokens=rng.randint(50, 120))
        headers = {"X-Request-Id": name}
        answer = asyncio.ensure_future(self._post(session, body, 200, **headers))
        ids = dict(request_ids=[f"cmpl-{name}-0"])
        url = self._server.url + "/inference/v1/abort_requests"
        while not answer.done():
            # An abort that comes before its request is for nobody, so it is said again.
            await asyncio.wait([answer], timeout=rng.uniform(0, 0.3))
            async with session.post(url, json=ids) as aborted:
                assert aborted.status == 200
        (choice,) = (await answer)["choices"]
        assert choice["finish_reason"] in ("abort", "length")
        self.done[f"finished by {choice['finish_reason']}"] += 1

    async def _half(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(head.encode() + data[: rng.randrange(len(data))])
        await writer.drain()
        writer.close()

    async def _refused(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        key, value = rng.choice(
            [("", "nothing"), ("_budget", 32), ("_interval", -1), ("_at", 10**6), ("_x", 1)]
        )
        asked = body.get("vllm_xargs", {}) | {f"kv_eviction{key}": value}
        answer = await self._post(session, body | dict(vllm_xargs=asked), 400)
        assert "KV eviction" in answer["error"]["message"]

    async def _too_long(self, session: Any, rng: random.Random, body: dict[str, Any]) -> None:
        await self._post(session, body | dict(prompt=[9] * (self._limit + 1)), 400)
