"""Sizing before a server is started: blocks, sequences, and the bytes of every buffer."""
