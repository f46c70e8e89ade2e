"""Names of vLLM's KV connectors that load whole prompts."""

DUMMY = "DecodeBenchConnector"
"""vLLM's connector for load tests of decode servers, which fills prompts with dummy values."""

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors that move the blocks of a prompt from the server that computed it to the one that
answers."""

EXAMPLE = "ExampleConnector"
"""vLLM's connector that saves and loads prompts in files, by their tokens; for tests."""

ONE_GROUP = (*NIXL, EXAMPLE)
"""Connectors that need one KV-cache group with all layers."""

LOADING = (DUMMY, *NIXL, EXAMPLE)
"""Connectors that load the KV of whole prompts."""
