"""The policies of the papers on the tasks of ``benchmarks.quality``."""
