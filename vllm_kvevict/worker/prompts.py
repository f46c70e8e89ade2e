"""Seeds of the requests' random draws: digests of their prompts.

Request ids would not do, because they change from run to run.
"""

import hashlib

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput


class PromptDigests:
    """The digest of the prompt of every request that the worker holds."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler. A preempted request keeps its digest."""
        for request_id in scheduler_output.finished_req_ids:
            self._digests.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            prompt = request.prompt_token_ids
            tokens = np.asarray([] if prompt is None else prompt, dtype="<i8")
            content = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
            self._digests[request.req_id] = int.from_bytes(content, "little", signed=True)

    def digest(self, request_id: str) -> int:
        """Return the digest in [-2**63, 2**63). All prompts given as embeddings share one."""
        return self._digests[request_id]
