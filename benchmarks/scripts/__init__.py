"""The scripts that benchmarks run under `paceline run`."""
