"""A proxy for two servers: one computes prompts, the other answers them.

An example, not a proxy for production: it has no time limits, health checks, list of models or
metrics. It does what vLLM's example proxies do: each request goes to the prefill server for one
token, marked ``do_remote_decode``, and then as it is to the decode server, with the first answer's
``kv_transfer_params``. Where the prefill server is gone, the decode server does both.

A prefill server whose blocks are read evicts nothing, and stock vLLM refuses a mapping such as
``{"kv_eviction_at": {"message": 0}}``. The settings of KV eviction therefore go to the decode
server alone. A prefill server that writes stores to a folder needs them (``--stores``).
"""

import argparse
import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
LEFT_OUT = (
    "stream_options", "min_tokens", "max_completion_tokens", "n",
    "echo", "logprobs", "top_logprobs", "prompt_logprobs",
)  # fmt: skip
"""What one token needs no more, or cannot have."""

XARGS, PREFIX = "vllm_xargs", "kv_eviction"
"""Field of a request with settings of its own, and how those of KV eviction begin."""

log = logging.getLogger("prefill_decode")


def without_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without its settings of KV eviction."""
    left, given = dict(body), body.get(XARGS)
    if isinstance(given, Mapping):
        left[XARGS] = {key: value for key, value in given.items() if not key.startswith(PREFIX)}
        if not left[XARGS]:
            del left[XARGS]
    return left


class Proxy:
    """Sends requests on.

    Args:
        prefill: URL of the server that computes prompts.
        decode: URL of the server that answers.
        stores: Whether the prefill server writes stores to a folder that the other one reads.

    """

    def __init__(self, prefill: str, decode: str, stores: bool) -> None:
        self._prefill = prefill
        self._decode = decode
        self._stores = stores
        self._client: ClientSession

    async def run_client(self, app: web.Application) -> Any:
        """Hold one pool of connections as long as the proxy runs."""
        async with ClientSession(timeout=ClientTimeout(total=None)) as self._client:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {
            k: v for k, v in request.headers.items() if k in ("Authorization", "X-Request-Id")
        }
        # A server that pushes blocks finds their request by its id on the other server.
        headers.setdefault("X-Request-Id", uuid4().hex)
        refused, params = await self._compute_prompt(request.path, body, headers)
        if refused is not None:
            return refused
        if params:
            body["kv_transfer_params"] = params
        url = self._decode + request.path
        async with self._client.post(url, json=body, headers=headers) as answer:
            relayed = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await relayed.prepare(request)
            async for chunk in answer.content.iter_any():
                await relayed.write(chunk)
            await relayed.write_eof()
            return relayed

    async def _compute_prompt(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[web.Response | None, dict[str, Any] | None]:
        """A refusal for the client, or what the decode server is told of the prompt."""
        asked = {key: value for key, value in body.items() if key not in LEFT_OUT}
        if not self._stores:
            asked = without_settings(asked)
        asked |= dict(stream=False, max_tokens=1)
        asked["kv_transfer_params"] = dict(do_remote_decode=True, do_remote_prefill=False)
        try:
            async with self._client.post(self._prefill + path, json=asked, headers=headers) as done:
                if 400 <= done.status < 500:
                    return web.json_response(await done.json(), status=done.status), None
                params = (await done.json()).get("kv_transfer_params")
        except (ClientError, ValueError):
            return None, None
        if params and not self._stores and "remote_engine_id" not in params:
            # The decode server would wait for a store that other settings may have made.
            log.warning("The prefill server writes stores: start this proxy with --stores.")
            return None, None
        return None, params


def application(proxy: Proxy) -> web.Application:
    """Return the proxy as a web application."""
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(proxy.run_client)
    for path in PATHS:
        app.router.add_post(path, proxy.answer)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts")
    parser.add_argument("--decode", required=True, help="URL of the server that answers")
    parser.add_argument(
        "--stores",
        action="store_true",
        help="both servers have the plugin and one --kv-eviction-store-path; without it, "
        "settings of KV eviction go to the decode server alone",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    app = application(Proxy(args.prefill, args.decode, args.stores))
    web.run_app(app, host=args.host, port=args.port)


if __name__ == "__main__":
    main()
