"""append_qkv and rotate_qk compared with float64: norms, both layouts of rotary embeddings, every destination
of K and V, and refusals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from append_problems import check, expected, frequencies, large_positions, random_problem
from tiers import mostly_slow

from attn_backend import KVCache, Rotary, append_qkv, rotate_qk

CPU_DTYPES, GPU_DTYPES = [torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("seed", mostly_slow(range(60), fast=20))
def test_random_cases(device: torch.device, seed: int) -> None:
    dtypes = GPU_DTYPES if device.type == "cuda" else CPU_DTYPES
    problem = random_problem(seed, dtypes[seed % len(dtypes)], device)
    written = append_qkv(
        problem.q,
        problem.k,
        problem.v,
        problem.kv,
        problem.slots,
        **problem.options,
        out=problem.out,
    )
    assert written is problem.written_q
    problem.check()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotate_qk(device: torch.device, interleaved: bool, in_place: bool) -> None:
    for head_dim, qo_heads, heads in ((128, 8, 2), (64, 4, 4), (80, 2, 1)):
        q, k = (
            torch.randn(9, qo_heads, head_dim, device=device).half(),
            torch.randn(9, heads, head_dim, device=device).half(),
        )
        positions = torch.arange(9, device=device) * 1000
        rotary = Rotary(frequencies(head_dim).to(device), interleaved)
        weight = torch.randn(head_dim, device=device).half()
        wanted = [expected(x, positions, rotary, w, 1e-6, 0.0) for x, w in ((q, weight), (k, None))]
        outs = {} if in_place else {"q_out": torch.empty_like(q), "k_out": torch.empty_like(k)}
        got = rotate_qk(q, k, rotary, positions, q_norm=weight, **outs)
        for x, y in zip(got, wanted, strict=True):
            check(x, y)
        assert (got[0] is q) == in_place


@pytest.mark.parametrize("interleaved", [True, False])
def test_angles_of_large_positions(device: torch.device, interleaved: bool) -> None:
    """A product of position and frequency, rounded to float32, is off by 5e-3 at position 100,000, and by
    0.03 at 10^6.
    """
    positions = large_positions().to(device)
    for dtype in GPU_DTYPES if device.type == "cuda" else CPU_DTYPES:
        for theta in (10000.0, 500000.0):
            q, k = (torch.randn(len(positions), 1, 64, device=device).to(dtype) for _ in range(2))
            rotary = Rotary(frequencies(64, theta).to(device), interleaved)
            wanted = [expected(x, positions, rotary, None, 0.0, 0.0) for x in (q, k)]
            for got, exact in zip(rotate_qk(q, k, rotary, positions), wanted, strict=True):
                check(got, exact)


def problem(**changed: Any) -> tuple[list[Any], dict[str, Any]]:
    q, k, v = (
        torch.randn(4, 6, 64).bfloat16(),
        torch.randn(4, 2, 64).bfloat16(),
        torch.randn(4, 2, 64).bfloat16(),
    )
    kv = KVCache.from_pair(torch.zeros(3, 4, 2, 64).bfloat16(), torch.zeros(3, 4, 2, 64).bfloat16())
    arguments = {"q": q, "k": k, "v": v, "kv": kv, "slots": torch.arange(4)} | changed
    return [arguments.pop(name) for name in ("q", "k", "v", "kv", "slots")], arguments


FREQUENCIES = Rotary(frequencies(64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"q": torch.zeros(4, 6, 60).bfloat16()},
            r"k.shape is \[4, 2, 64\], must be \[tokens, num_kv_heads, head_dim = 60\]",
        ),
        ({"q": torch.zeros(3, 6, 64).bfloat16()}, r"q.shape\[0\] is 3, must be at least 4"),
        ({"q": torch.zeros(4, 6, 64).int()}, "q.dtype is int32, must be float32, float16 or bfloat16"),
        ({"v": torch.zeros(4, 2, 64).half()}, "v.dtype is float16, must be bfloat16"),
        ({"out": torch.zeros(4, 6, 64).half()}, "q_out.dtype is float16"),
        ({"positions": torch.arange(4)}, "positions is .*, must be None without a rotary embedding"),
        ({"rotary": FREQUENCIES}, r"positions is None, must be a tensor \[tokens\] with a rotary embedding"),
        (
            {"rotary": FREQUENCIES, "positions": torch.arange(3)},
            r"positions.shape\[0\] is 3, must be at least 4",
        ),
        (
            {"rotary": FREQUENCIES, "positions": torch.zeros(4)},
            "positions.dtype is float32, must be int32 or int64",
        ),
        (
            {"rotary": Rotary(torch.zeros(5)), "positions": torch.arange(4)},
            "rotary_dim is 10, must be a multiple of 8 up to head_dim = 64",
        ),
        (
            {"rotary": Rotary(torch.zeros(9, 72)), "positions": torch.arange(4)},
            "rotary_dim is 72, must be a multiple of 8 up to head_dim = 64",
        ),
        (
            {"rotary": Rotary(torch.zeros(9, 64).half()), "positions": torch.arange(4)},
            "rotary.table.dtype is float16, must be bfloat16",
        ),
        (
            {"rotary": Rotary(torch.zeros(0, 64)), "positions": torch.arange(4)},
            r"rotary.table.shape\[0\] \(positions\) is 0, must be at least 1",
        ),
        ({"rotary": torch.zeros(32), "positions": torch.arange(4)}, "rotary is .*, must be a Rotary or None"),
        ({"q_norm": torch.zeros(64)}, "q_norm.dtype is float32, must be bfloat16"),
        ({"k_norm": torch.zeros(63).bfloat16()}, r"k_norm.shape is \[63\], must be \[head_dim = 64\]"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0, must be 0 or above"),
        ({"norm_eps": "x"}, "norm_eps is 'x', must be a number"),
        ({"kv": torch.zeros(2)}, "kv is .*, must be a KVCache"),
        ({"slots": torch.zeros(4)}, "slots.dtype is float32, must be int32 or int64"),
        (
            {"q": torch.zeros(4, 6, 64).bfloat16().requires_grad_()},
            "q is a tensor that requires a gradient|q .*grad",
        ),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], message: str) -> None:
    arguments, options = problem(**changed)
    with pytest.raises(ValueError, match=message):
        append_qkv(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["q", "k", "v", "slots"])
def test_a_tensor_on_another_device_is_named(argument: str) -> None:
    (q, k, v, kv, slots), _ = problem()
    tensors = {"q": q, "k": k, "v": v, "slots": slots}
    on_gpu: dict[str, Any] = {name: tensor.cuda() for name, tensor in tensors.items()}
    on_gpu |= {"kv": KVCache.from_pair(kv.k.cuda(), kv.v.cuda()), argument: tensors[argument]}
    with pytest.raises(ValueError, match=rf"^{argument}.device is cpu, must be cuda:0"):
        append_qkv(**on_gpu)


def test_a_rotary_is_a_table() -> None:
    for wrong in (torch.zeros(()), torch.zeros(1, 2, 3), [1.0]):
        with pytest.raises(ValueError, match=r"table is .*, must be a tensor"):
            Rotary(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="interleaved is 1, must be True or False"):
        Rotary(torch.zeros(32), interleaved=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k_out is"):
        rotate_qk(
            torch.zeros(2, 1, 64).half(),
            torch.zeros(2, 1, 64).half(),
            FREQUENCIES,
            torch.arange(2),
            k_out=torch.zeros(1, 1, 64).half(),
        )
