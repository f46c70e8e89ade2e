"""What benchmarks and tests compare an engine with."""
