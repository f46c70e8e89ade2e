"""Names of vLLM's KV connectors that load whole prompts."""

DUMMY = "DecodeBenchConnector"
"""vLLM's connector for load tests of decode servers, which fills prompts with dummy values."""

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors that move the blocks of a prompt from the server that computed it to the one that
answers."""

EXAMPLE = "ExampleConnector"
"""vLLM's connector that saves and loads prompts in files, by their tokens; for tests."""

LMCACHE = "LMCacheConnectorV1"
"""LMCache's connector, which saves and loads chunks of prompts, by their tokens."""

SAVING = (EXAMPLE, LMCACHE)
"""Connectors that save what requests compute, by their tokens."""

ONE_GROUP = (*NIXL, *SAVING)
"""Connectors that need one KV-cache group with all layers."""

LOADING = (DUMMY, *NIXL, *SAVING)
"""Connectors that load the KV of whole prompts."""
