"""Benchmarks: `python -m benchmarks --help`. Ratios within one run count; machines are noisy."""
