"""flashinfer.jit.attention: variants for single_decode_with_kv_cache_with_jit_module and
single_prefill_with_kv_cache_with_jit_module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...validation import refuse, require
from ...variants import Param, Variant
from ..features import not_supported

# C++ types in jit_args, and their counterparts here.
_TENSORS = {
    "float": torch.float32,
    "int": torch.int32,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "uint8_t": torch.uint8,
    "int8_t": torch.int8,
    "int16_t": torch.int16,
    "uint16_t": torch.uint16,
    "uint32_t": torch.uint32,
    "bool": torch.bool,
    **dict.fromkeys(("half", "__half"), torch.float16),
    **dict.fromkeys(("nv_bfloat16", "__nv_bfloat16"), torch.bfloat16),
}
_SCALARS: dict[str, type[float] | type[int]] = {
    "double": float,
    "float": float,
    "int": int,
    "int32_t": int,
    "int64_t": int,
}
# Unsupported: transforms of Q and K in shared memory, custom reductions, tiles of CuTe.
_NO_COUNTERPART = ("REGISTER_QUERY_TRANSFORM", "REGISTER_KEY_TRANSFORM", "REGISTER_M_D_UPDATE", "make_tensor")
# query heads per KV head: a parameter added here, only for variants that read the KV head
_GROUP_SIZE = "group_size"
_BLOCK_COORD = (
    "q_tile_idx",
    "qo_head_idx",
    "kv_head_idx",
    "qo_indptr",
    "kv_indptr",
    "qo_len",
    "kv_len",
    "batch_idx",
)
_NOT_KNOWN = ("q_tile_idx", "qo_indptr", "kv_indptr")  # of these, unsupported

_BEFORE = """
#if !defined(__CUDACC__)
#define __device__
#define __host__
#define __forceinline__ inline
#endif
#define CUTLASS_DEVICE ATTN_HD
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch, q, kv, q_head, kv_head, ...)              \\
  template <class P, class T>                                                                      \\
  ATTN_HD T LogitsTransform(const P& params, T logits, uint32_t batch, uint32_t q, uint32_t kv,    \\
                            uint32_t q_head, uint32_t kv_head) { __VA_ARGS__ }
#define REGISTER_LOGITS_MASK(params, batch, q, kv, q_head, kv_head, ...)                           \\
  template <class P>                                                                               \\
  ATTN_HD bool LogitsMask(const P& params, uint32_t batch, uint32_t q, uint32_t kv,                \\
                          uint32_t q_head, uint32_t kv_head) { __VA_ARGS__ }
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch, q, q_head, m, d, scale, ...)              \\
  template <class P, class T, class M>                                                             \\
  ATTN_HD T OutputTransform(const P& params, T output, uint32_t batch, uint32_t q,                 \\
                            uint32_t q_head, M& m, float& d, float scale) { __VA_ARGS__ }

  using half = StoredFloat16;
  using __half = StoredFloat16;
  using nv_bfloat16 = StoredBFloat16;
  using __nv_bfloat16 = StoredBFloat16;
  ATTN_HD static float __half2float(half x) { return x; }
  ATTN_HD static float __bfloat162float(nv_bfloat16 x) { return x; }
  struct math {
    static constexpr float log2e = 1.44269504088896340736f;
    static constexpr float loge2 = 0.69314718055994530942f;
#if defined(__CUDACC_RTC__)
    static constexpr float inf = __builtin_bit_cast(float, 0x7f800000u);
#else
    static constexpr float inf = __builtin_huge_valf();
#endif
    ATTN_HD static float ptx_exp2(float x) { return ::attn::exp2(x); }
    ATTN_HD static float ptx_log2(float x) { return ::attn::log2(x); }
    ATTN_HD static float ptx_rcp(float x) { return 1.0f / x; }
    ATTN_HD static float rsqrt(float x) { return 1.0f / ::attn::sqrt(x); }
    ATTN_HD static float tanh(float x) { return ::attn::tanh(x); }
  };
  struct AttentionVariantBase {
    static constexpr bool use_softmax = true;
    template <class P>
    ATTN_HD static float get_v_scale(const P&, uint32_t = 0) { return 1.0f; }
  };
  template <int kRows>
  struct DefaultUpdater {};
  template <int kRows, bool kScales>
  struct OnlineSoftmax {
    ATTN_HD OnlineSoftmax(float) {}
  };
"""
_AFTER = """
#undef REGISTER_LOGITS_TRANSFORM
#undef REGISTER_LOGITS_MASK
#undef REGISTER_OUTPUT_TRANSFORM
#undef CUTLASS_DEVICE
#if !defined(__CUDACC__)
#undef __device__
#undef __host__
#undef __forceinline__
#endif
"""


@dataclass(frozen=True)
class JitVariant:
    """A variant, and the order of its run arguments: tensors, then scalars."""

    variant: Variant
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    reads_kv_head: bool

    def args(
        self, given: Sequence[Any], of_plan: Mapping[str, Tensor | None], group_size: int
    ) -> dict[str, Tensor | float | int]:
        """The variant's arguments. of_plan: tensors that FlashInfer fills in itself, if the variant names
        them. group_size: query heads per KV head.

        Raises:
            ValueError: a wrong number of arguments.
        """
        names = [name for name in (*self.tensors, *self.scalars) if name not in of_plan]
        if len(given) != len(names):
            refuse("len(args)", len(given), f"{len(names)}: {', '.join(names) or 'none'}")
        values = dict(zip(names, given, strict=True))
        for name in self.tensors:
            value = values.get(name) if name not in of_plan else of_plan[name]
            if not isinstance(value, Tensor):
                refuse(name, value, "a tensor")
            values[name] = value.reshape(-1) if value.is_contiguous() else refuse(name, value, "contiguous")
        args = {_param(name): values[name] for name in (*self.tensors, *self.scalars)}
        return args | {_GROUP_SIZE: group_size} if self.reads_kv_head else args


def has_sinks(jit_args: Sequence[Any] | None) -> bool:
    """Whether jit_args are FlashInfer's for attention sinks, which every kernel of this package supports."""
    return jit_args is not None and len(jit_args) > 11 and jit_args[11] == "AttentionSink"


def jit_variant(jit_args: Sequence[Any] | None) -> JitVariant | None:
    """The variant that jit_args of the batch wrappers describe. None without jit_args, and for attention
    sinks.

    jit_args: uri, dtypes of Q, KV, O and indices, two head sizes, names and C++ types of tensors, names and
    C++ types of scalars, the struct's name, the struct's text.

    Raises:
        ValueError: the arguments are not such a list.
        NotImplementedError: a part of the struct has no
            counterpart.
    """
    if jit_args is None or has_sinks(jit_args):
        return None
    require(
        len(jit_args) >= 13,
        "len(jit_args)",
        len(jit_args),
        "13: uri, 4 dtypes, 2 head sizes, names and types of tensors and scalars, the variant's name, "
        "its C++",
    )
    return variant_of(*map(tuple, jit_args[7:11]), *jit_args[11:13])


@lru_cache(maxsize=64)
def variant_of(
    tensor_names: tuple[str, ...],
    tensor_types: tuple[str, ...],
    scalar_names: tuple[str, ...],
    scalar_types: tuple[str, ...],
    name: str,
    declaration: str,
) -> JitVariant:
    for part in _NO_COUNTERPART:
        if part in declaration:
            not_supported(f"jit_args of the variant {name!r}, which has {part}")
    bindings = _bindings(name, declaration)
    reads_kv_head = _reads_kv_head(declaration, bindings)
    params = []
    for names, types, known, what in (
        (tensor_names, tensor_types, _TENSORS, "tensor"),
        (scalar_names, scalar_types, _SCALARS, "scalar"),
    ):
        for param, kind in zip(names, types, strict=True):
            if kind not in known:
                not_supported(f"jit_args with a {what} of type {kind!r}")
            params.append(Param(_param(param), known[kind]))
    if reads_kv_head:
        params.append(Param(_GROUP_SIZE, int))
    source = _BEFORE + _struct_of_params(tensor_names, tensor_types, scalar_names, scalar_types) + declaration
    source += _hooks(name, declaration, f"row.qo_head / {_GROUP_SIZE}" if reads_kv_head else "0") + _AFTER
    return JitVariant(
        Variant.from_source(source, params, name=f"jit_{name}"), tensor_names, scalar_names, reads_kv_head
    )


def _bindings(name: str, declaration: str) -> list[list[str]]:
    """The names that a Hopper variant gives to the coordinates of its block.

    Raises:
        NotImplementedError: it reads an unsupported coordinate, or destructures something else.
    """
    bindings = [
        re.findall(r"\w+", names)
        for names in re.findall(r"\bauto\s*&?\s*\[([^\]]*)\]\s*=\s*block_coord\b", declaration)
    ]
    if len(bindings) != len(re.findall(r"\bauto\s*&?\s*\[", declaration)):
        not_supported(
            f"jit_args of the variant {name!r}, which has auto [...] of something else than block_coord"
        )
    for names in bindings:
        for given, meant in zip(names, _BLOCK_COORD, strict=False):
            if meant in _NOT_KNOWN and _count(given, declaration) > sum(
                other.count(given) for other in bindings
            ):
                not_supported(
                    f"jit_args of the variant {name!r}, which reads {meant} of block_coord, as {given}"
                )
    return bindings


def _reads_kv_head(declaration: str, bindings: list[list[str]]) -> bool:
    """Whether the name of the KV head, a hook's last one, occurs anywhere except in its declaration."""
    names = [
        hook.split(",")[-2].strip()
        for hook in re.findall(r"REGISTER_LOGITS_(?:TRANSFORM|MASK)\s*\(([^{]*)\{", declaration)
    ]
    names += [binding[2] for binding in bindings if len(binding) == len(_BLOCK_COORD)]
    return any(_count(name, declaration) > names.count(name) for name in set(names))


def _count(name: str, declaration: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", declaration))


def _param(name: str) -> str:
    """A parameter name that cannot clash: FlashInfer's names may mean something else here."""
    return f"jit_{name}"


def _struct_of_params(
    tensor_names: Sequence[str],
    tensor_types: Sequence[str],
    scalar_names: Sequence[str],
    scalar_types: Sequence[str],
) -> str:
    values = [f"    {kind}* {name};\n" for name, kind in zip(tensor_names, tensor_types, strict=True)]
    values += [f"    {kind} {name};\n" for name, kind in zip(scalar_names, scalar_types, strict=True)]
    first = [
        f"const_cast<{kind}*>({_param(name)}.data)"
        for name, kind in zip(tensor_names, tensor_types, strict=True)
    ]
    first += [
        f"static_cast<{kind}>({_param(name)})" for name, kind in zip(scalar_names, scalar_types, strict=True)
    ]
    # The plan applies the window: kernels skip tokens outside of it.
    window = "    static constexpr int32_t window_left = -1;\n"
    return f"""
  struct JitValues {{
{"".join(values)}  }};
  struct JitParams : JitValues {{
    JitValues additional_params;  // no reference to this object, which compilers may copy when it is returned
    int32_t qo_len, kv_len;
{"" if "window_left" in scalar_names else window}
    ATTN_HD JitParams(const JitValues& values, const ScoreRow& row)
        : JitValues(values),
          additional_params(values),
          qo_len(row.kv_len - row.position + row.index),
          kv_len(row.kv_len) {{}}
    ATTN_HD uint32_t get_qo_len(uint32_t) const {{ return qo_len; }}
    ATTN_HD uint32_t get_kv_len(uint32_t) const {{ return kv_len; }}
    ATTN_HD bool has(const ScoreRow& row, int32_t kv_position) const {{
      return row.index >= 0 && row.index < qo_len && kv_position >= 0 && kv_position < kv_len;
    }}
  }};
  struct JitBlock {{
    int32_t q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx;
  }};
  ATTN_HD JitParams jit_params(const ScoreRow& row) const {{
    return JitParams(JitValues{{{", ".join(first)}}}, row);
  }}
"""


def _hooks(name: str, declaration: str, kv_head: str) -> str:
    """kv_head: an expression.

    Hooks are not called for rows and tokens that do not exist: FlashInfer's variants do not expect them.
    """
    on_hopper = "block_coord" in declaration
    uses_softmax = (
        "DefaultUpdater<" not in declaration
        if on_hopper
        else not re.search(r"\buse_softmax\s*=\s*false", declaration)
    )
    block = f"JitBlock{{0, row.qo_head, {kv_head}, 0, 0, params.qo_len, params.kv_len, row.request}}"
    made = (
        f"{name} made(params, {block});"
        if on_hopper
        else f"{name} made(params, row.request, static_cast<uint8_t*>(nullptr));"
    )
    coordinates = f"row.request, row.index, kv_position, row.qo_head, {kv_head}"
    text = "" if uses_softmax else "\n  static constexpr bool kUsesSoftmax = false;\n"
    transformed = (
        f"made.LogitsTransform(params, logit, {coordinates})"
        if "REGISTER_LOGITS_TRANSFORM" in declaration
        else "logit"
    )
    text += f"""
  float logits(float logit, const ScoreRow& row, int32_t kv_position) const {{
    const JitParams params = jit_params(row);
    if (!params.has(row, kv_position)) return logit;
    {made}
    return {transformed}{" * (made.sm_scale_log2 * math::loge2)" if uses_softmax else ""};
  }}
"""
    if "REGISTER_LOGITS_MASK" in declaration:
        text += f"""
  bool mask(const ScoreRow& row, int32_t kv_position) const {{
    const JitParams params = jit_params(row);
    if (!params.has(row, kv_position)) return false;
    {made}
    return made.LogitsMask(params, {coordinates});
  }}
"""
    if "REGISTER_OUTPUT_TRANSFORM" in declaration:  # its input is already divided by the sum
        text += f"""
  float output(float value, const ScoreRow& row, int32_t) const {{
    const JitParams params = jit_params(row);
    {made}
    float m = 0.0f, d = 1.0f;
    return made.OutputTransform(params, value, row.request, row.index, row.qo_head, m, d, 1.0f);
  }}
"""
    return text


__all__ = ["JitModule", "gen_customize_single_decode_module", "gen_customize_single_prefill_module"]


class JitModule:
    """A variant in the form that FlashInfer's functions pass around."""

    def __init__(self, variant: JitVariant) -> None:
        self.variant = variant

    def build_and_load(self, *_arguments: Any, **_options: Any) -> JitModule:
        """Returns itself: the first call that needs its kernels compiles them."""
        return self


def gen_customize_single_decode_module(
    uri: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str,
    **_options: Any,
) -> JitModule:
    """A variant from the struct variant_name in variant_decl, FlashInfer's C++.

    The dtypes and head sizes of the call apply, not these.

    Raises:
        NotImplementedError: the struct, or a type, has no counterpart.
    """
    names_and_types = (
        additional_tensor_names,
        additional_tensor_dtypes,
        additional_scalar_names,
        additional_scalar_dtypes,
    )
    return JitModule(variant_of(*map(tuple, names_and_types), variant_name, variant_decl))


def gen_customize_single_prefill_module(backend: str, *arguments: Any, **options: Any) -> JitModule:
    """Like gen_customize_single_decode_module; backend: "fa2" or "fa3", whose structs differ.

    Raises:
        NotImplementedError: the struct, or a type, has no counterpart.
    """
    return gen_customize_single_decode_module(*arguments, **options)
