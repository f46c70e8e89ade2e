"""A vLLM server seen over HTTP, wherever it runs."""

import json
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

NO_TEMPLATE = "must provide a chat template"
"""Part of vLLM's answer to a chat with a model that has no chat template."""


class EndpointError(RuntimeError):
    """The server refused a request; the message carries its reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


@dataclass(frozen=True)
class Completion:
    """A greedy answer: its text without special tokens, and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Followed:
    """What the model thought of given tokens, one entry a token.

    ``logprobs`` are theirs, ``greedy`` are the ids that the model would have said.
    """

    logprobs: tuple[float, ...]
    greedy: tuple[int, ...]


class Endpoint:
    """OpenAI completions, vLLM's /tokenize and /metrics of one server.

    Args:
        base_url: With or without the trailing ``/v1``. An API key is read from OPENAI_API_KEY.
        model: Name that the server gives the model; asked for where None.
        timeout_s: Longest wait for one answer.

    """

    def __init__(self, base_url: str, model: str | None = None, timeout_s: float = 600) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self.model = model or self._get_json("/v1/models")["data"][0]["id"]

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat under the server's template, ready for an answer.

        Without a template they are those of ``LocalChat``: the messages' text.
        """
        try:
            return self._post("/tokenize", {"messages": messages})["tokens"]
        except EndpointError as error:
            if NO_TEMPLATE not in str(error):
                raise
        return self.encode("".join(f"{message['content']}\n" for message in messages), special=True)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text alone; ``special``: after the tokens with which a prompt begins."""
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": special})["tokens"]

    def complete(
        self,
        ids: tuple[int, ...],
        max_tokens: int,
        xargs: dict[str, str | int],
        ignore_eos: bool = False,
    ) -> Completion:
        """Continue token ids greedily; ``xargs`` are the request's ``vllm_xargs``."""
        body: dict[str, Any] = {
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if ignore_eos:
            body["ignore_eos"] = True
        if xargs:
            body["vllm_xargs"] = xargs
        choice = self._post("/v1/completions", body)["choices"][0]
        return Completion(choice["text"], tuple(choice["token_ids"]))

    def follow(
        self, ids: tuple[int, ...], tokens: tuple[int, ...], xargs: dict[str, Any]
    ) -> Followed:
        """Make the server say ``tokens`` after ``ids``; it must run ``forced.ForcedTokens``.

        Raises:
            RuntimeError: The server said other tokens.

        """
        body = {
            "prompt": list(ids), "max_tokens": len(tokens), "temperature": 0, "logprobs": 1,
            "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
            "vllm_xargs": {**xargs, "forced_tokens": list(tokens)},
        }  # fmt: skip
        choice = self._post("/v1/completions", body)["choices"][0]
        if tuple(choice["token_ids"]) != tokens:
            raise RuntimeError(f"{self.url} does not run benchmarks.quality.forced:ForcedTokens")
        found = choice["logprobs"]
        greedy = [max(top, key=top.__getitem__) for top in found["top_logprobs"]]
        return Followed(
            tuple(found["token_logprobs"]), tuple(int(name.partition(":")[2]) for name in greedy)
        )

    def score(
        self, ids: tuple[int, ...], tokens: tuple[int, ...], xargs: dict[str, str | int]
    ) -> tuple[float, ...]:
        """Log-probabilities of ``tokens`` after ``ids``, computed as a prompt in one prefill.

        vLLM reads no prefix cache for such a request, so that all of the prompt is computed.
        """
        body = {
            "prompt": [*ids, *tokens], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
            "vllm_xargs": xargs,
        }  # fmt: skip
        found = self._post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        of_tokens = found[len(ids) :]
        return tuple(
            position[str(token)]["logprob"]
            for position, token in zip(of_tokens, tokens, strict=True)
        )

    def check_eviction_per_request(self, ids: tuple[int, ...]) -> None:
        """Fail where the server would silently ignore what this benchmark asks of it.

        Raises:
            RuntimeError: A request for a policy that does not exist was answered.

        """
        try:
            self.complete(ids, 1, {"kv_eviction": "no-such-policy"})
        except EndpointError as error:
            if error.status == 400:
                return
            raise
        raise RuntimeError(
            f"{self.url} answered a request for an unknown eviction policy: it runs without "
            "vllm-kvevict, or without --kv-eviction"
        )

    def metrics(self, name: str) -> dict[str, float] | None:
        """Values of a metric by its labels as text; None where the server has no such metric."""
        text = self._open("/metrics").decode()
        pattern = re.compile(rf"^{re.escape(name)}(\{{.*?\}})? (\S+)$", re.MULTILINE)
        found = {labels: float(value) for labels, value in pattern.findall(text)}
        return found or None

    def block_size(self) -> int:
        """Tokens in a block of the server's KV cache.

        Raises:
            RuntimeError: The server does not publish it.

        """
        for labels in self.metrics("vllm:cache_config_info") or ():
            found = re.search(r'\bblock_size="(\d+)"', labels)
            if found:
                return int(found[1])
        raise RuntimeError(f"{self.url}/metrics does not tell the block size; give --block-size")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self._open(path, {"model": self.model, **body}))

    def _get_json(self, path: str) -> dict[str, Any]:
        return json.loads(self._open(path))

    def _open(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            raise EndpointError(error.code, f"{path}: {reason}") from None
