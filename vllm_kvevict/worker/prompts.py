"""What tells a request's draws from another's: its prompt. Request ids change from run to run."""

import hashlib

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput


class PromptDigests:
    """A number for the prompt of every request that the worker holds."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler. A preempted request keeps its number."""
        for request_id in scheduler_output.finished_req_ids:
            self._digests.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            prompt = request.prompt_token_ids
            tokens = np.asarray([] if prompt is None else prompt, dtype="<i8")
            content = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
            self._digests[request.req_id] = int.from_bytes(content, "little", signed=True)

    def of(self, request_id: str) -> int:
        """In [-2**63, 2**63); requests with embeddings in place of tokens share one number."""
        return self._digests[request_id]
