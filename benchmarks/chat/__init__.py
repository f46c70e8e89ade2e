"""Chats of several turns over a document each, against ``vllm serve``."""
