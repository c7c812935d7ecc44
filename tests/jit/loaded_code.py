"""A cubin loaded through libcuda, for tests that read its variables and launch its kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


class Driver:
    """The libcuda functions that the test needs."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # makes the context
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        assert getattr(self._library, name)(*arguments) == 0, name

    def load(self, cubin: Path) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuModuleLoad", ctypes.byref(module), str(cubin).encode())
        return module

    def read(self, module: ctypes.c_void_p, variable: str) -> tuple[int, int]:
        """Address and size."""
        place, size, words = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_uint64 * 2)()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(place), ctypes.byref(size), module, variable.encode())
        self.call("cuMemcpyDtoH_v2", words, place, size)
        return words[0], words[1]

    def launch(self, module: ctypes.c_void_p, kernel: str, *arguments: object) -> None:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        places = [ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments]  # type: ignore[arg-type]
        pointers = (ctypes.c_void_p * len(places))(*places)
        self.call("cuLaunchKernel", function, *(1, 1, 1), *(32, 1, 1), 0, None, pointers, None)
        torch.cuda.synchronize()
