"""Marks of tests that need a compiler."""

from __future__ import annotations

import pytest

from attn_backend.jit import compilers

needs_nvcc = pytest.mark.skipif(compilers.nvcc() is None, reason="needs nvcc")


needs_nvrtc = pytest.mark.skipif(
    compilers.nvrtc() is None, reason="needs NVRTC (pip install nvidia-cuda-nvrtc)"
)


needs_cpp = pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler")
