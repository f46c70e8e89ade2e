"""The command that shows what evictions lose on the operator's own traffic."""
