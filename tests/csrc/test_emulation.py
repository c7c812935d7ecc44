"""The emulation of CUDA for device code on a CPU (tests/csrc/emulated/). Small kernels
(tests/csrc/emulation_test.cpp) give right results. Each of their faults is detected, by a wrong result or by
name.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import emulation
import host_planner
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")

KERNELS = (
    "named_barrier",
    "registers",
    "copy_async",
    "load_box",
    "store_box",
    "copy_to_cta",
    "multiply",
    "multiply_registers",
    "multiply_rows",
)
KERNELS += ("multiply_float8", "multiply_float8_registers")
SEEDS = range(8)


@pytest.fixture(scope="module")
def library(emulated: Path) -> ctypes.CDLL:
    library = emulation.build(
        emulated, "emulation_test", emulation.TESTS / "emulation_test.cpp", options=["-O1"]
    )
    library.run_kernel.restype = ctypes.c_char_p
    return library


def run(library: ctypes.CDLL, kernel: str, fault: int, seed: int) -> tuple[Tensor, Tensor]:
    """The kernel's result, or the tensor that TMA stores to, and the expected value."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    tensor, out = torch.randn(56, 64, generator=generator).bfloat16(), torch.zeros(64, 64)
    expected = torch.zeros(64, 64)
    if "float8" in kernel:
        a, b = (torch.randn(64, 128, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    if kernel == "named_barrier":
        expected[0] = 1
    elif kernel == "registers":
        expected[:6] = 1
    elif kernel == "copy_async":
        expected = a.float()
    elif kernel == "load_box":
        expected[:48, :48] = tensor[8:, 8:56].float()
    elif kernel == "store_box":
        expected = tensor.clone().float()
        expected[8:, 8:56] = a[:48, :48].float()
    elif kernel == "copy_to_cta":
        expected[::2], expected[1::2] = b[::2].float(), a[1::2].float()
    else:
        expected = (
            a.double() @ (b.double().T if kernel == "multiply" or "float8" in kernel else b.double())
        ).float()
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out, tensor)]
    emulation.check(library.run_kernel(KERNELS.index(kernel), fault, *pointers, seed))
    return (tensor.float() if kernel == "store_box" else out), expected


def tolerance(kernel: str) -> dict[str, float]:
    """Sums of 8-bit products have 14 bits."""
    return {"rtol": 2e-3, "atol": 2e-2} if "float8" in kernel else {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.parametrize("kernel", KERNELS)
def test_results(library: ctypes.CDLL, kernel: str) -> None:
    for seed in SEEDS:
        torch.testing.assert_close(*run(library, kernel, 0, seed), **tolerance(kernel))


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        (
            "named_barrier",
            1,
            "all threads wait:\n  CTA 0, threads 0 to 31: at barrier 2, to which 32 of 64 threads have come",
        ),
        ("named_barrier", 2, "threads 32 to 63: at barrier 3, to which 32 of 64"),
        ("registers", 1, "for registers, of which 0 are free"),
        ("load_box", 2, "lacks 0 of 1 arrivals and -16 bytes"),
        ("load_box", 4, "TMA fills what no fence.proxy.async has followed"),
        ("store_box", 1, "no fence.proxy.async has followed"),
        ("store_box", 2, "before TMA has read what it stores"),
        ("copy_to_cta", 1, "no fence.proxy.async has followed"),
        ("copy_to_cta", 5, "a copy to what no fence.proxy.async has followed"),
        ("copy_to_cta", 3, "lacks 0 of 1 arrivals and -16 bytes"),
        ("multiply", 2, "wgmma without wgmma.fence"),
        ("multiply", 3, "a warp has ended before its wgmma"),
        ("multiply", 4, "a warp has ended before its wgmma"),
        ("multiply", 5, "a warp has ended before its wgmma"),
        ("multiply_float8", 2, "wgmma without wgmma.fence"),
        ("multiply", 8, "the warps of a warpgroup have issued different wgmma"),
    ],
)
def test_faults_that_are_named(library: ctypes.CDLL, kernel: str, fault: int, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(emulation.DeviceError) as raised:
            run(library, kernel, fault, seed)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("copy_async", 1),
        ("copy_async", 2),
        ("load_box", 1),
        ("load_box", 3),
        ("copy_to_cta", 2),
        ("copy_to_cta", 4),
        ("multiply", 1),
        ("multiply", 6),
        ("multiply_registers", 6),
        ("multiply_registers", 7),
        ("multiply_rows", 1),
        ("multiply_rows", 6),
        ("multiply_float8", 1),
        ("multiply_float8", 6),
        ("multiply_float8_registers", 1),
        ("multiply_float8_registers", 6),
        ("multiply_float8_registers", 7),
    ],
)
def test_faults_that_give_a_wrong_result(library: ctypes.CDLL, kernel: str, fault: int) -> None:
    """At least in half of the orders of threads and copies."""
    wrong = 0
    for seed in SEEDS:
        try:
            wrong += not torch.allclose(*run(library, kernel, fault, seed), **tolerance(kernel))
        except emulation.DeviceError:  # threads that wait for a phase that no thread begins
            wrong += 1
    assert wrong >= len(SEEDS) // 2
