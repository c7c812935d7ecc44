"""packbits and segment_packbits, compared with numpy's."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from attn_backend import packbits, segment_packbits


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(device: torch.device, dtype: torch.dtype, bitorder: Any) -> None:
    for count in (0, 1, 7, 8, 9, 1000, 4099):
        x = (
            torch.randint(0, 2, (count,), dtype=dtype)
            if dtype == torch.bool
            else torch.randint(0, 3, (count,), dtype=dtype)
        )
        packed = packbits(x.to(device), bitorder)
        assert packed.device.type == device.type
        assert packed.tolist() == numpy.packbits(x.numpy() != 0, bitorder=bitorder).tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_segment_packbits(device: torch.device, dtype: torch.dtype, bitorder: Any) -> None:
    for lens in ([], [0], [3, 0, 8, 17, 0], [1] * 40, [1000, 3]):
        indptr = torch.tensor([0, *lens], dtype=dtype).cumsum(0, dtype=dtype)
        x = torch.randint(0, 2, (sum(lens) + 5,)).bool()  # elements after the last segment do not count
        packed, new_indptr = segment_packbits(x.to(device), indptr.to(device), bitorder)
        assert packed.device.type == new_indptr.device.type == device.type
        assert new_indptr.dtype == torch.int32
        assert new_indptr.tolist() == [0, *numpy.cumsum([-(-n // 8) for n in lens]).tolist()]
        expected = (
            [numpy.packbits(part.numpy(), bitorder=bitorder).tolist() for part in x[: sum(lens)].split(lens)]
            if lens
            else []
        )
        assert packed.tolist() == [byte for part in expected for byte in part]
        # an indptr on the host
        assert all(map(torch.equal, (packed, new_indptr), segment_packbits(x.to(device), indptr, bitorder)))


def test_true_is_what_is_not_zero(device: torch.device) -> None:
    """A mask of bytes 0 and 255, viewed as bool."""
    x = torch.tensor([0, 255, 1, 0, 0, 0, 2, 0, 255], dtype=torch.uint8, device=device).view(torch.bool)
    assert packbits(x, "little").tolist() == [0b1000110, 1]
    assert segment_packbits(x, torch.tensor([0, 3, 9], device=device), "little")[0].tolist() == [
        0b110,
        0b101000,
    ]


def test_segments_may_begin_later(device: torch.device) -> None:
    x = torch.randint(0, 2, (40,), device=device).bool()
    late, indptr = segment_packbits(x, torch.tensor([5, 8, 30], device=device))
    first, of_first = segment_packbits(x[5:], torch.tensor([0, 3, 25]))
    assert torch.equal(late, first)
    assert torch.equal(indptr, of_first)


def test_refusals() -> None:
    x, indptr = torch.zeros(4, dtype=torch.bool), torch.tensor([0, 4])
    for call, message in (
        (
            lambda: packbits(torch.zeros(4)),
            "x is a float32 tensor .*, must be a vector of booleans or integers",
        ),
        (lambda: packbits(x.view(2, 2)), "x is a bool tensor of shape"),
        (lambda: packbits(x, "middle"), "bitorder is .middle., must be 'big' or 'little'"),  # type: ignore[arg-type]
        (lambda: segment_packbits(x, indptr.float()), "indptr is a float32 tensor"),
        (
            lambda: segment_packbits(x, indptr[:0]),
            "indptr is an int64 tensor .*, must be of at least one element",
        ),
        (
            lambda: segment_packbits(x, torch.tensor([0, 3, 2])),
            r"indptr is \[0, 3, 2\], must be 0 or more first, and then never less than before",
        ),
        (lambda: segment_packbits(x, indptr - 1), r"indptr is \[-1, 3\], must be 0 or more first"),
        (lambda: segment_packbits(x[:3], indptr), r"indptr\[-1\] is 4, must be at most len\(x\) = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
