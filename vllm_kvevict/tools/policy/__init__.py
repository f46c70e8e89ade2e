"""The command that checks a scorer against the contract of policies."""
