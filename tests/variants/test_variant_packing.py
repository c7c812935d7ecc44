"""The bytes of a variant's parameters match its C++ struct, and wrong values are refused."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_variants import COMPILER, CSRC

from attn_backend.variants import Param, Variant, builtin

CPU = torch.device("cpu")
HOOK = "float logits(float logit, const ScoreRow&, int32_t) const { return logit; }"
PARAMS = [
    Param("first", int),
    Param("table", torch.float16, 3),
    Param("factor", float),
    Param("flag", torch.bool, 1),
    Param("single", torch.int64, 0),
    Param("last", float, value=2.5),
]
PRINTED = """
#include <cstdio>
template <class T, int kDims>
void print(const attn::ParamTensor<T, kDims>& tensor) {
  std::printf("%zu", reinterpret_cast<size_t>(tensor.data));
  for (int i = 0; i < kDims; ++i) std::printf(" %d %d", tensor.sizes[i], tensor.strides[i]);
  std::printf("\\n");
}
int main() {
  attn::VariantParams bytes;
  if (std::fread(bytes.bytes, 1, sizeof(bytes.bytes), stdin) != sizeof(attn::UserVariant::Params)) return 1;
  const auto& params = bytes.as<attn::UserVariant::Params>();
  %s
}
"""


def printed(variant: Variant, packed: bytes, fields: str, folder: Path) -> list[str]:
    path = folder / "print.cpp"
    path.write_text(variant.source + PRINTED.replace("%s", fields))
    subprocess.run(
        [
            COMPILER,
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{CSRC}",
            str(path),
            "-o",
            str(folder / "print"),
        ],
        check=True,
    )
    done = subprocess.run([str(folder / "print")], input=packed, capture_output=True, check=True)
    return done.stdout.decode().splitlines()


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_bytes_are_the_struct(tmp_path: Path) -> None:
    other = Variant.from_source(HOOK, {"slopes": torch.float32, "count": int}, name="other")
    variant = Variant.from_source(HOOK, PARAMS, name="mine") & builtin.causal() & other
    args: dict[str, Any] = {
        "first": -7,
        "table": torch.zeros(2, 3, 5, dtype=torch.float16).transpose(0, 2)[1:],
        "factor": 0.5,
        "flag": torch.zeros(4, dtype=torch.bool)[::2],
        "single": torch.tensor(3),
        "slopes": torch.zeros(1).expand(6),
        "count": 9,
    }
    packed = variant.pack(args, CPU)
    assert len(packed) == variant.params_bytes
    fields = "\n".join(
        [
            'std::printf("%d\\n", params.mine_part.first); print(params.mine_part.table); '
            'std::printf("%g\\n", params.mine_part.factor);',
            'print(params.mine_part.flag); print(params.mine_part.single); std::printf("%g\\n", '
            "params.mine_part.last);",
            'print(params.other_part.slopes); std::printf("%d\\n", params.other_part.count);',
        ]
    )
    expected = [
        "-7",
        f"{args['table'].data_ptr()} 4 1 3 5 2 15",
        "0.5",
        f"{args['flag'].data_ptr()} 2 2",
        f"{args['single'].data_ptr()} 1 1",
        "2.5",
        f"{args['slopes'].data_ptr()} 6 0",
        "9",
    ]
    assert printed(variant, packed, fields, tmp_path) == expected


def test_bound_tensors_stay_alive() -> None:
    def make() -> Variant:
        table = torch.arange(4.0)
        return Variant.from_functions(lambda score, b, h, q_idx, kv_idx: score + table[h])

    variant = make()
    address = int.from_bytes(variant.pack({}, CPU)[:8], "little")
    assert list((ctypes.c_float * 4).from_address(address)) == [0, 1, 2, 3]
    assert variant.pack({}, CPU) == variant.pack({}, CPU)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "variant_args['slopes'] of variant alibi is missing, must be a float32 tensor of 1 dimension"),
        ({"slope": torch.zeros(4)}, "variant_args: 'slope' is unknown; known of variant alibi are slopes"),
        (
            {"slopes": torch.zeros(4), "other": 1},
            "variant_args: 'other' is unknown; known of variant alibi are slopes",
        ),
        ({"slopes": 3.0}, "variant_args['slopes'] is 3.0, must be a float32 tensor of 1 dimension"),
        (
            {"slopes": torch.zeros(4, dtype=torch.float64)},
            "variant_args['slopes'] is a float64 tensor of shape [4]",
        ),
        ({"slopes": torch.zeros(4, 1)}, "variant_args['slopes'] is a float32 tensor of shape [4, 1]"),
        ({"slopes": torch.zeros(0)}, "must have at least one element"),
        (
            {"slopes": torch.zeros(4, device="meta")},
            "variant_args['slopes'] is a float32 tensor of shape [4] and strides [1] on meta, must be on cpu",
        ),
        ({"slopes": torch.zeros(4, requires_grad=True)}, "that requires a gradient, which is not computed"),
        ({"slopes": torch.zeros(4).to_sparse()}, "variant_args['slopes'] is a sparse_coo tensor"),
        ({"slopes": torch.zeros(1).expand(2**31)}, "must have sizes and strides below 2^31"),
    ],
)
def test_wrong_tensors(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        builtin.alibi().pack(args, CPU)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (float, "a"),
        (float, True),
        (float, 1e39),
        (float, torch.zeros(1)),
        (int, 0.5),
        (int, 2**31),
        (int, True),
        (int, None),
    ],
)
def test_wrong_numbers(dtype: Any, value: Any) -> None:
    variant = Variant.from_source(HOOK, {"number": dtype}, name="mine")
    must = "a number that a float32 holds" if dtype is float else "an int that an int32 holds"
    with pytest.raises(ValueError, match=rf"variant_args\['number'\] is .*, must be {must}"):
        variant.pack({"number": value}, CPU)


def test_numbers() -> None:
    variant = Variant.from_source(HOOK, {"number": float}, name="mine")
    assert variant.pack({"number": 1}, CPU) == variant.pack({"number": 1.0}, CPU)
    assert variant.pack({"number": float("inf")}, CPU)
    assert builtin.causal().pack({}, CPU) == b"\0"
