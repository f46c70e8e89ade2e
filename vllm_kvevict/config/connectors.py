"""Names of vLLM's KV connectors that load whole prompts."""

DUMMY = "DecodeBenchConnector"
"""vLLM's connector for load tests of decode servers, which fills prompts with dummy values."""

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors that move the blocks of a prompt from the server that computed it to the one that
answers."""

LOADING = (DUMMY, *NIXL)
