"""Asks a running server over its OpenAI API."""

from typing import Any

from vllm_kvevict.tools.measure.api import Api, Refused
from vllm_kvevict.tools.measure.questions import Question

SEPARATOR = "\n\n"
FULL = "full cache"
KNOWN, NOT_KNOWN = "known", "not known"

NO_TEMPLATE = "must provide a chat template"
"""Part of vLLM's answer to a chat with a model that has no chat template."""


class Server:
    """A server that evicts.

    Questions are chats. A base model without a chat template gets the context, the question and a
    line break as a completion.

    Args:
        url: Its address, with or without ``/v1``.
        model: Name of the model; None for the first that the server lists.
        key: API key, or None.
        policy: Policy of the requests; None for the server's.
        max_tokens: Tokens of an answer if the question sets none.

    Raises:
        Refused: Nothing answers at this address.

    """

    def __init__(
        self, url: str, model: str | None, key: str | None, policy: str | None, max_tokens: int
    ) -> None:
        self._api = Api(url, key)
        self._policy, self._max_tokens = policy, max_tokens
        self._has_template = True
        self.model = model or self._api.first_model()

    def answer(self, question: Question, budget: str, known: bool) -> str:
        """Return the answer to a question.

        Args:
            question: The question.
            budget: Budget of the request, or :data:`FULL`.
            known: True if the question is known at the eviction.

        Raises:
            Refused: The server answers with an error.

        """
        text = question.context.rstrip() + SEPARATOR + question.question
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": question.max_tokens or self._max_tokens,
            "vllm_xargs": self._settings(question, budget, known),
        }
        if self._has_template:
            try:
                return self._chat(body, text, question.prefix)
            except Refused as error:
                if NO_TEMPLATE not in str(error):
                    raise
                self._has_template = False
        found = self._api.call("/v1/completions", body | {"prompt": f"{text}\n{question.prefix}"})
        return str(found["choices"][0]["text"])

    def _chat(self, body: dict[str, Any], text: str, prefix: str) -> str:
        messages = [{"role": "user", "content": text}]
        if prefix:
            messages.append({"role": "assistant", "content": prefix})
            body = body | {"add_generation_prompt": False, "continue_final_message": True}
        found = self._api.call("/v1/chat/completions", body | {"messages": messages})
        return str(found["choices"][0]["message"].get("content") or "")

    def _settings(self, question: Question, budget: str, known: bool) -> dict[str, Any]:
        if budget == FULL:
            return {"kv_eviction": "none"}
        settings: dict[str, Any] = {
            "kv_eviction_budget": budget,
            "kv_eviction_interval": 0,
            "kv_eviction_when": "always",
        }
        if self._policy is not None:
            settings["kv_eviction"] = self._policy
        if not known:
            settings["kv_eviction_at"] = {"text": SEPARATOR + question.question}
        return settings
