"""Results of benchmarks and evaluation harnesses."""
