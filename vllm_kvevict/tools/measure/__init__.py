"""The command that asks a running server the operator's own questions at several budgets."""
