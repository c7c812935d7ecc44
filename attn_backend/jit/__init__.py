"""Finds, compiles and keeps kernels."""
