"""Scores recorded answers over HTTP, with the full cache and over the evicted one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvevict.config.names import CONFIG_KEY, NONE
from vllm_kvevict.config.requests import (
    AT,
    BUDGET,
    INTERVAL,
    MESSAGE,
    POLICY,
    PREFILL_INTERVAL,
    TEXT,
    WHEN,
    message_index,
)
from vllm_kvevict.serving.context import before_text, common_prefix, last_place
from vllm_kvevict.tools.measure.api import Api, Refused
from vllm_kvevict.tools.measure.recorded import Recorded

FULL = {POLICY: NONE}
"""``vllm_xargs`` of a request that keeps its whole cache."""

SERVER = ""
"""The budget of a request that names none: the request's own, or the server's."""

UNKNOWN = "no-such-policy"
LORA = "vllm:lora_requests_info"
"""Metric of servers with ``--enable-lora``."""

BAD_REQUEST = 400
TEMPLATE_KEYS = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")
"""Keys of a chat that its template reads, and that ``/tokenize`` takes."""


@dataclass(frozen=True)
class Score:
    """One answer under the full cache and over an evicted one.

    Args:
        line: Line of the recorded request.
        kind: Its kind.
        prompt: Tokens of the prompt.
        tokens: Tokens of the answer that were scored.
        full: Sum of their log-probabilities with the full cache, in nats.
        evicted: The same over the evicted cache.
        first: Number of tokens that were the likeliest next token with the full cache.
        still_first: Number of these that were also the likeliest over the evicted cache.

    """

    line: int
    kind: str
    prompt: int
    tokens: int
    full: float
    evicted: float
    first: int
    still_first: int

    @property
    def loss(self) -> float:
        """Nats that the answer loses per token."""
        return (self.full - self.evicted) / self.tokens


Likelihoods = list[tuple[float, bool]]
"""Of each token of an answer: log-probability, and whether it was the likeliest."""


class Scorer:
    """A server that evicts, asked for the probabilities of given answers.

    The prompt and the answer are sent as one prompt (``prompt_logprobs``), which vLLM computes
    whole. The cache is evicted at the request's own eviction point, or where the prompt ends, as it
    was when the answer was generated. Requests of a server with ``--kv-eviction-every`` that name
    no point are evicted at the positions that depend on lengths alone.

    A server with LoRA generates the answer's tokens one by one instead, because vLLM's
    ``prompt_logprobs`` leave out adapters of the last layer, and end the engine on CPUs.

    Args:
        api: The server.
        model: Name of the model; None for that of each request.

    Raises:
        Refused: The server does not answer, does not evict, or allows no request the full cache.

    """

    def __init__(self, api: Api, model: str | None) -> None:
        self._api = api
        self._served = api.first_model()
        self._model = model
        self._check()
        metrics = self._metrics()
        self._every = _evicts_by_length(metrics)
        self._one_by_one = LORA in metrics or self._api.has_adapters()

    def model_of(self, one: Recorded) -> str:
        """Return the model of a request; a LoRA adapter has a name of its own."""
        return str(self._model or one.body.get("model") or self._served)

    def _check(self) -> None:
        body: dict[str, Any] = {
            "model": self._model or self._served,
            "prompt": [1],
            "max_tokens": 1,
        }
        try:
            self._api.call("/v1/completions", body | {"vllm_xargs": {POLICY: UNKNOWN}})
        except Refused as error:
            if error.status != BAD_REQUEST or POLICY not in str(error):
                raise
        else:
            raise Refused(
                f"{self._api.url} answers requests for an unknown policy: it runs without "
                "vllm-kvevict, without --kv-eviction, or with --kv-eviction none"
            )
        try:
            self._api.call("/v1/completions", body | {"vllm_xargs": FULL})
        except Refused as error:
            if error.status != BAD_REQUEST:
                raise
            raise Refused(
                f"{self._api.url} allows no request the full cache, with which answers are "
                "compared; start the server with --kv-eviction-allow none"
            ) from None

    def _metrics(self) -> str:
        try:
            return self._api.text("/metrics")
        except Refused:
            return ""

    def tokens(self, one: Recorded) -> tuple[list[int], list[int]]:
        """Return the token ids of a request's prompt and of its answer.

        Raises:
            Refused: The server cannot tokenize them.

        """
        prompt = list(one.prompt or self._prompt(one))
        answer = one.tokens or self._tokenize(
            {"prompt": one.text, "add_special_tokens": False}, one
        )
        return prompt, list(answer)

    def score(self, one: Recorded, budgets: Sequence[str]) -> list[Score]:
        """Return the scores of an answer at each budget.

        Args:
            one: The recorded request.
            budgets: Budgets; :data:`SERVER` for the request's own or the server's.

        Raises:
            Refused: In one sentence with the line, why the server cannot score it.

        """
        try:
            prompt, answer = self.tokens(one)
            point = self._point(one, prompt)
            full = self._likelihoods(one, prompt, answer, FULL)
            return [
                self._compared(
                    one,
                    len(prompt),
                    full,
                    self._likelihoods(one, prompt, answer, self.settings(one, point, budget)),
                )
                for budget in budgets
            ]
        except Refused as error:
            raise Refused(f"line {one.number}: {error}", error.status) from None
        except ValueError as error:
            raise Refused(f"line {one.number}: {error}", BAD_REQUEST) from None

    def settings(self, one: Recorded, point: int | None, budget: str) -> dict[str, Any]:
        """Return the ``vllm_xargs`` of the evicted request.

        Args:
            one: The recorded request, whose own settings are kept.
            point: Tokens before the eviction; None for the positions of
                ``--kv-eviction-every``.
            budget: Its budget, or :data:`SERVER`.

        """
        own = {key: value for key, value in _xargs(one).items() if key.startswith(CONFIG_KEY)}
        own.pop(AT, None)
        if own.get(POLICY) == NONE:
            return own
        if budget != SERVER:
            own[BUDGET] = budget
        own[WHEN] = "always"
        if point is not None:
            own[AT] = point
        return own

    def _point(self, one: Recorded, prompt: Sequence[int]) -> int | None:
        """Return the tokens of the prompt before its eviction; None for those by length alone."""
        own = _xargs(one)
        place = own.get(AT)
        if place is None:
            by_length = self._every and not {INTERVAL, PREFILL_INTERVAL} & own.keys()
            return None if by_length else len(prompt)
        if isinstance(place, Mapping):
            return self._named(one, place, prompt)
        point = int(place)
        return point + len(prompt) if point < 0 else point

    def _named(self, one: Recorded, place: Mapping[str, Any], prompt: Sequence[int]) -> int:
        """Return the tokens before a message or a text, counted as the server counts them."""
        ((kind, value),) = place.items()
        if not one.is_chat:
            text = str(one.body["prompt"])
            before = self._tokenize({"prompt": text[: max(0, last_place(text, str(value)))]}, one)
        else:
            messages = one.body["messages"]
            if kind == MESSAGE:
                messages = messages[: message_index(value, len(messages)) + 1]
            elif kind == TEXT:
                messages = before_text(messages, str(value))
            before = self._chat(one, messages, add_generation_prompt=False)
        return common_prefix(prompt, before)

    def _prompt(self, one: Recorded) -> list[int]:
        if one.is_chat:
            return self._chat(one, one.body["messages"])
        special = bool(one.body.get("add_special_tokens", True))
        return self._tokenize({"prompt": one.body["prompt"], "add_special_tokens": special}, one)

    def _chat(self, one: Recorded, messages: Sequence[Any], **changes: Any) -> list[int]:
        given = {key: one.body[key] for key in TEMPLATE_KEYS if key in one.body}
        return self._tokenize({"messages": list(messages)} | given | changes, one)

    def _tokenize(self, body: dict[str, Any], one: Recorded) -> list[int]:
        try:
            found = self._api.call("/tokenize", {"model": self.model_of(one)} | body)
        except Refused as error:
            if error.status in (404, 405):
                raise Refused(
                    f"{error}; give the address of a vLLM server, not of a router, or record with "
                    "return_token_ids"
                ) from None
            raise
        return [int(token) for token in found["tokens"]]

    def _likelihoods(
        self, one: Recorded, prompt: Sequence[int], answer: Sequence[int], xargs: dict[str, Any]
    ) -> Likelihoods:
        body = {
            "model": self.model_of(one), "max_tokens": 1, "temperature": 0, "vllm_xargs": xargs,
        }  # fmt: skip
        if self._one_by_one:
            whole = [*prompt, *answer]
            return [
                self._next(body | {"prompt": whole[:place]}, token)
                for place, token in enumerate(answer, len(prompt))
            ]
        body |= {"prompt": [*prompt, *answer], "prompt_logprobs": 0}
        found = self._api.call("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        if not isinstance(found, list) or len(found) != len(prompt) + len(answer):
            raise Refused(f"{self._api.url} answers without prompt_logprobs", BAD_REQUEST)
        places = zip(found[len(prompt) :], answer, strict=True)
        entries = [position[str(token)] for position, token in places]
        return [(float(entry["logprob"]), entry["rank"] == 1) for entry in entries]

    def _next(self, body: dict[str, Any], token: int) -> tuple[float, bool]:
        """Return the likelihood of a next token, which is the only one that may be generated."""
        forced = {"allowed_token_ids": [token], "logprobs": 1, "return_tokens_as_token_ids": True}
        found = self._api.call("/v1/completions", body | forced)["choices"][0]["logprobs"]
        (likelihood,), (top,) = found["token_logprobs"], found["top_logprobs"]
        return float(likelihood), likelihood == max(top.values())

    @staticmethod
    def _compared(one: Recorded, prompt: int, full: Likelihoods, evicted: Likelihoods) -> Score:
        pairs = list(zip(full, evicted, strict=True))
        return Score(
            line=one.number,
            kind=one.kind,
            prompt=prompt,
            tokens=len(pairs),
            full=sum(before for (before, _), _ in pairs),
            evicted=sum(after for _, (after, _) in pairs),
            first=sum(first for (_, first), _ in pairs),
            still_first=sum(first and still for (_, first), (_, still) in pairs),
        )


def _evicts_by_length(metrics: str) -> bool:
    """Return whether a server runs with ``--kv-eviction-every``, as its metrics say."""
    found = re.findall(r'^vllm_kvevict:config_info\{.*?\bevery="(\d+)"', metrics, re.MULTILINE)
    return any(int(number) for number in found)


def _xargs(one: Recorded) -> Mapping[str, Any]:
    found = one.body.get("vllm_xargs")
    return found if isinstance(found, Mapping) else {}
