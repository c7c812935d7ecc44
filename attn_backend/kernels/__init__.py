"""Finds or builds kernels, and wraps the plan, run and append functions of csrc/ in Python."""
