"""What evictions lose, seen on the operator's own traffic."""
