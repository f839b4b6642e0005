"""Benchmarks, and adapters of weightd for a harness that runs weight-sync patterns side by side (see README.md)."""
