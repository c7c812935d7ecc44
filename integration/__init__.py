"""Real engines with this package's backend: serving, end-to-end benchmarks, token comparison.

Run its modules from the repository root.
"""
