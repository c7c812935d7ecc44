"""Cases over 8-bit caches: the cases of case_tensors.py with K and V rounded to 8 bits, and scales, which
change the represented values. Unused slots are NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import attention_kernels
import case_tensors
import cases
import numpy
import oracle
import torch
from torch import Tensor

from attn_backend import Attention, BlockScales, BSRView, KVCache, PageTable, Variant

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
INT4 = "int4"
TOKEN_DTYPES = (torch.float8_e4m3fn, torch.int8, INT4)  # of caches with a scale for each token and head
NVFP4, MXFP4 = FP4_DTYPES = ("nvfp4", "fp4_mx_block16")  # of caches with BlockScales
FOUR_BITS = (INT4, *FP4_DTYPES)
PAIR = "int8_k_nvfp4_v"
SIDES: dict[torch.dtype | str, tuple[torch.dtype | str, torch.dtype | str]] = {PAIR: (torch.int8, NVFP4)}


def sides(dtype: torch.dtype | str) -> tuple[torch.dtype | str, torch.dtype | str]:
    """The formats of K and of V."""
    return SIDES.get(dtype, (dtype, dtype))


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of codes 0 to 7
SCALES = ("number", "tensor", "head", "request", "request and head")
Q_SCALES = ("number", "tensor", "head")
TOLERANCE = 4e-3  # ||o - ref|| / ||ref||
ROUNDED_TOLERANCE = 8e-3  # an eps of bfloat16: rows are multiplied by their own scales and rounded
# If Q, K, V and probabilities are multiplied in e4m3: these have three bits after the first, and sums of
# products have 14 in all.
MULTIPLIED_TOLERANCE = 3.5e-2
MULTIPLIED_LSE_TOLERANCE = 5e-3


def random_scale(
    rng: numpy.random.Generator, form: str, batch: int, num_kv_heads: int, device: torch.device
) -> Tensor | float:
    shape = {
        "number": (),
        "tensor": (1,),
        "head": (num_kv_heads,),
        "request": (max(batch, 1), 1),
        "request and head": (max(batch, 1), num_kv_heads),
    }[form]
    values = torch.from_numpy(rng.uniform(0.2, 1.5, shape)).float().reshape(shape)
    return float(values) if form == "number" else values.to(device)


def scale_of(scale: Tensor | float | None, request: int, num_kv_heads: int) -> Tensor:
    """float64 [num_kv_heads], on the CPU."""
    if not isinstance(scale, Tensor):
        return torch.full((num_kv_heads,), 1.0 if scale is None else scale, dtype=torch.float64)
    scale = scale.double().cpu()
    return (
        scale[request]
        if scale.ndim == 2 and scale.shape[0] > 1
        else scale.flatten()
        if scale.ndim < 2
        else scale[0]
    ).expand(num_kv_heads)


class Needle:
    """A prompt of `rows` 8-bit rows over a haystack of equal tokens with a needle, whose probability is a
    quarter. All values are exact in e4m3, including probabilities divided by the needle's, so any difference
    from `expected` is lost in sums. V is VALUE, with all bits set, except -VALUE for the needle in every
    other column.

    Attributes:
        expected: float64 [head_dim], of each row, divided by VALUE.
    """

    VALUE = 1.875

    def __init__(self, tokens: int, place: int, rows: int, head_dim: int, device: torch.device) -> None:
        k, v = (
            torch.zeros(tokens, 1, head_dim, device=device),
            torch.full((tokens, 1, head_dim), self.VALUE, device=device),
        )
        q = torch.zeros(rows, 1, head_dim, device=device)
        q[:, :, 0], k[place, :, 0], v[place, :, ::2] = 1, 1, -self.VALUE
        weight = (tokens - 1) / 3
        self.q = q.to(torch.float8_e4m3fn)
        self.kv = KVCache.from_ragged(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))
        self.sm_scale = math.log(weight)
        self.expected = torch.ones(head_dim, dtype=torch.float64, device=device)
        self.expected[::2] = (tokens - 1 - weight) / (tokens - 1 + weight)
        indptr = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in (rows, tokens)]
        self.view = BSRView(indptr[0], PageTable.ragged(indptr[1]), causal=False)
        self.options = {
            "kv_dtype": torch.float8_e4m3fn,
            "q_dtype": torch.float8_e4m3fn,
            "max_rows": rows,
            "max_batch": 1,
            "num_ctas": 1,
            "device": device,
        }

    def attention(self, **options: Any) -> Attention:
        return Attention(1, 1, self.q.shape[2], **(self.options | options))

    def error(self, out: Tensor) -> float:
        return float((out[:, 0].double() / self.VALUE - self.expected).abs().max())


def rounded(tensor: Tensor, dtype: torch.dtype | str) -> Tensor:
    """An 8-bit copy with the same strides, including the memory between its elements. Of 4 bits: half as many
    bytes.
    """
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    shape, strides, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    numbers = stored(storage, dtype)
    if dtype in FOUR_BITS:
        pairs = stored(tensor, dtype).unflatten(-1, (-1, 2))
        shape[-1] //= 2
        if all(size == 1 or stride % 2 == 0 for size, stride in zip(shape[:-1], strides, strict=False)):
            strides, offset = [*(stride // 2 for stride in strides[:-1]), 1], offset // 2
        numbers.fill_(99).as_strided(shape, strides, offset).copy_(pairs[..., 0] | pairs[..., 1] << 4)
    return numbers.as_strided(shape, strides, offset)


def stored(tensor: Tensor, dtype: torch.dtype | str) -> Tensor:
    """The elements in 8 bits; int8 elements are INT8_FACTOR times as large, and NaN becomes a number. int4
    elements are one of uint8 each, around 7.5. FP4 elements are codes in uint8.
    """
    if dtype in FP4_DTYPES:
        numbers = (tensor.float() * FP4_FACTOR).clamp(-6, 6).nan_to_num(6)
        middles = ((E2M1[1:] + E2M1[:-1]) / 2).to(tensor.device)
        return (torch.bucketize(numbers.abs().contiguous(), middles) + 8 * (numbers < 0)).to(torch.uint8)
    if dtype == INT4:
        numbers = tensor.float() * INT4_FACTOR + 7.5
        return numbers.round().clamp(0, 15).nan_to_num(15).to(torch.uint8)
    assert isinstance(dtype, torch.dtype)
    if dtype != torch.int8:
        return tensor.to(dtype)
    return (tensor.float() * INT8_FACTOR).round().clamp(-127, 127).nan_to_num(99).to(dtype)


def split_int4(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of an int4 cache, and their zero points."""
    bits = scales.contiguous().view(torch.int32)
    return (bits & ~15).view(torch.float32), bits & 15


INT8_FACTOR = 40.0
INT4_FACTOR = 4.0
FP4_FACTOR = 2.0


def e2m1_values(codes: Tensor) -> Tensor:
    """float64, of codes from 0 to 15."""
    signed = torch.cat((E2M1, -E2M1)).double().to(codes.device)
    return signed[codes.long()]


def block_values(scales: BlockScales) -> Tensor:
    """float64, with their factor."""
    blocks = scales.blocks.double()
    return (torch.exp2(blocks - 127) if scales.blocks.dtype == torch.uint8 else blocks) * scales.factor


def token_scales(
    kv: KVCache, slots: list[Tensor], dtype: torch.dtype | str, seed: int, columns: int = 0
) -> Tensor | BlockScales:
    """Scales of the tokens in `slots`, [pages, page_size, heads] in an order of the dimensions that the seed
    chooses. Scales of other tokens are NaN or infinite. dtype: of the elements. columns: of a head, over FP4.
    """
    rng = numpy.random.default_rng([seed, 88])
    shape = kv.k.shape[:3]
    if dtype in FP4_DTYPES:
        return block_scales(rng, shape, slots, dtype == MXFP4, columns // 16, kv.device)
    values = torch.from_numpy(rng.uniform(0.2, 1.5, shape)).float()
    values /= INT8_FACTOR if dtype == torch.int8 else INT4_FACTOR if dtype == INT4 else 1.0
    if dtype == INT4:
        zero_points = torch.from_numpy(rng.integers(4, 12, shape, dtype=numpy.int32))
        zero_points[:, :, 0] = torch.from_numpy(rng.integers(0, 16, shape[:2], dtype=numpy.int32))
        values = (values.view(torch.int32) & ~15 | zero_points).view(torch.float32)
    used = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    for own in slots:
        used[own.cpu()] = True
    poison = torch.tensor([torch.nan, torch.inf])[torch.arange(len(used)) % 2]
    values.view(-1, shape[2])[~used] = poison[~used, None]
    order = rng.permutation(3)
    room = torch.full([2 * shape[dim] for dim in order], torch.nan, device=kv.device)
    place = room.permute(*numpy.argsort(order).tolist())[tuple(slice(size, 2 * size) for size in shape)]
    return place.copy_(values)


def block_scales(
    rng: numpy.random.Generator,
    shape: torch.Size,
    slots: list[Tensor],
    is_mx: bool,
    blocks: int,
    device: torch.device,
) -> BlockScales:
    """As token_scales(); `blocks` for each head."""
    if is_mx:
        values = torch.from_numpy(rng.integers(124, 129, (*shape, blocks))).to(torch.uint8)
    else:
        values = torch.from_numpy(rng.uniform(2.0, 30.0, (*shape, blocks))).to(torch.float8_e4m3fn)
    used = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    for own in slots:
        used[own.cpu()] = True
    values.view(torch.uint8).view(-1, shape[2], blocks)[~used] = 255 if is_mx else 127  # NaN
    order = rng.permutation(3)
    room = torch.full([*(2 * shape[dim] for dim in order), 2 * blocks], 255, dtype=torch.uint8, device=device)
    place = room.view(values.dtype).permute(*numpy.argsort(order).tolist(), 3)
    place = place[tuple(slice(size, 2 * size) for size in (*shape, blocks))]
    return BlockScales(place.copy_(values), 1.0 if is_mx else float(rng.uniform(0.02, 0.05)))


def rounded_cache(
    kv: KVCache,
    dtype: torch.dtype | str,
    k_scale: Tensor | BlockScales | float | None,
    v_scale: Tensor | BlockScales | float | None,
) -> KVCache:
    of_k, of_v = sides(dtype)
    return KVCache.from_pair(rounded(kv.k, of_k), rounded(kv.v, of_v), k_scale=k_scale, v_scale=v_scale)


class Float8Case:
    """A case whose cache has dtype `dtype`, and scales in these forms. If K has the form "token", so has V.
    q_form: Q also has this dtype, and a scale in this form.

    Attributes:
        case: with the 8-bit cache, and Q as passed to kernels.
        dtype: of the cache.
        options: of Attention.
        run_options: of Attention.run.
    """

    def __init__(
        self,
        spec: cases.Spec,
        device: torch.device | str,
        dtype: torch.dtype | str,
        k_form: str = "number",
        v_form: str = "number",
        q_form: str | None = None,
    ) -> None:
        built = case_tensors.build(spec, device)
        rng = numpy.random.default_rng([spec.seed, 8])
        self.dtype = dtype
        self._k_scale, self._v_scale = (
            token_scales(
                built.kv,
                built.slots,
                sides(dtype)[number],
                spec.seed + number,
                (spec.head_dim, spec.columns_of_v)[number],
            )
            if form == "token"
            else random_scale(rng, form, len(spec.qo_lens), spec.num_kv_heads, built.device)
            for number, form in enumerate((k_form, v_form))
        )
        self._q_scale = (
            None if q_form is None else random_scale(rng, q_form, 0, spec.num_kv_heads, built.device)
        )
        q = built.q if q_form is None else rounded(built.q, dtype)
        self.case = replace(built, kv=rounded_cache(built.kv, dtype, self._k_scale, self._v_scale), q=q)
        self.options = {"kv_dtype": dtype} | ({} if q_form is None else {"q_dtype": dtype})
        if k_form == "token":
            self.options["token_scales"] = True
        self.run_options = {} if q_form is None else {"q_scale": self._q_scale}

    def expected(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """float64 o and lse over the values that the 8-bit numbers represent. changes: to the oracle's
        arguments."""
        case, spec = self.case, self.case.spec
        q = (
            case.q.double().cpu()
            * scale_of(self._q_scale, 0, spec.num_kv_heads).repeat_interleave(spec.group_size)[:, None]
        )
        k_slots, v_slots = (
            stored(slots, dtype).double().cpu()
            for slots, dtype in zip((case.k_slots, case.v_slots), sides(self.dtype), strict=True)
        )
        heads = case.q.shape[1]
        outputs, sums, begin = (
            [torch.zeros(0, heads, v_slots.shape[-1], dtype=torch.float64)],
            [torch.zeros(0, heads, dtype=torch.float64)],
            0,
        )
        for request, (qo_len, own) in enumerate(zip(spec.qo_lens, case.slots, strict=True)):
            k, v = (
                self._represented(slots[own.cpu()], scale, request, own.cpu())
                for slots, scale in ((k_slots, self._k_scale), (v_slots, self._v_scale))
            )
            o, lse = oracle.attention(
                q[begin : begin + qo_len],
                k,
                v,
                sm_scale=spec.sm_scale,
                causal=spec.causal,
                window_left=spec.window_left,
                **{
                    "logits_soft_cap": spec.logits_soft_cap,
                    "request": request,
                    "first_row": begin,
                    **changes,
                },
            )
            outputs.append(o)
            sums.append(lse)
            begin += qo_len
        return torch.cat(outputs).to(case.q.device), torch.cat(sums).to(case.q.device)

    def _represented(
        self, rows: Tensor, scale: Tensor | BlockScales | float | None, request: int, slots: Tensor
    ) -> Tensor:
        """The values of a request's rows [tokens, heads, columns] in these slots."""
        if isinstance(scale, BlockScales):
            of_blocks = block_values(BlockScales(scale.blocks.cpu().flatten(0, 1)[slots], scale.factor))
            return e2m1_values(rows) * of_blocks.repeat_interleave(16, -1)
        if isinstance(scale, Tensor) and scale.ndim == 3:
            of_rows = scale.cpu().flatten(0, 1)[slots][:, :, None]
            if self.dtype == INT4:
                of_rows, zero_points = split_int4(of_rows)
                rows = rows - zero_points
            return rows * of_rows.double()
        return rows * scale_of(scale, request, self.case.spec.num_kv_heads)[:, None]

    def is_multiplied(self) -> bool:
        """Whether the Hopper kernel multiplies 8-bit elements."""
        spec = self.case.spec
        return (
            self._q_scale is not None
            and self.dtype == torch.float8_e4m3fn
            and spec.head_dim == spec.columns_of_v
            and spec.head_dim in (64, 128)
        )

    def check(
        self,
        out: Tensor,
        lse: Tensor | None,
        kernel: str | None = None,
        variant: oracle.Variant | None = None,
    ) -> None:
        """Compares with the oracle; rows of padding must still be NaN. kernel: the kernel that ran; None: the
        CPU's, or on a GPU any. variant: transforms Q, K or V.
        """
        expected = self.expected(variant=variant)
        is_multiplied = (
            variant is None
            and self.is_multiplied()
            and (
                kernel == "hopper"
                or (kernel is None and out.is_cuda and attention_kernels.is_available("hopper"))
            )
        )
        tolerance, tolerances = (
            (MULTIPLIED_TOLERANCE, (MULTIPLIED_TOLERANCE, MULTIPLIED_LSE_TOLERANCE))
            if is_multiplied
            else (TOLERANCE, ())
        )
        if self.options.get("token_scales"):
            # Zero points of some rows of int4 are far from their numbers.
            largest = 2 if self.dtype == INT4 else 1
            tolerance = largest * ROUNDED_TOLERANCE if self.case.spec.dtype == torch.bfloat16 else TOLERANCE
            tolerances = (tolerance, largest * lse_tolerance_of_rounded_k(self.case.spec))
        elif variant is not None:
            tolerances = (None, lse_tolerance_of_transforms(self.case, variant, self.case.spec.dtype))
        case_tensors.check(self.case, out, lse, expected, *tolerances)
        error = (out[: self.case.rows].double() - expected[0]).norm()
        assert error <= tolerance * expected[0].norm(), (
            f"{float(error / expected[0].norm()):.2e} > {tolerance}\n{self.case.spec}"
        )
        case_tensors.check_padding(self.case)


def lse_tolerance_of_rounded_k(spec: cases.Spec) -> float:
    """Tolerance of lse if K is multiplied by its scales and rounded to Q's type. An element's error is up to
    half an eps of it, and the errors of a score's products add up like random numbers.
    """
    sm_scale = spec.head_dim**-0.5 if spec.sm_scale is None else abs(spec.sm_scale)
    return 2 * torch.finfo(spec.dtype).eps * sm_scale * math.sqrt(spec.head_dim)


def lse_tolerance_of_transforms(
    case: case_tensors.Case, variant: oracle.Variant, dtype: torch.dtype
) -> float:
    """Tolerance of lse if `variant` transforms Q, otherwise 0; dtype: the dtype that rows are rounded to."""
    spec = case.spec
    return (
        cases.lse_tolerance_of_transformed_q(dtype, spec.head_dim, spec.sm_scale)
        if variant.query is not oracle.Variant.query
        else 0.0
    )


def rounding(of: oracle.Variant, variant: Variant, dtype: torch.dtype) -> oracle.Variant:
    """`of`, the definition of `variant`, with its transformed rows rounded to Q's dtype, as kernels multiply
    them.
    """

    def rounds(hook: str) -> Any:
        transform = getattr(of, hook)
        return lambda rows, at: transform(rows, at).to(dtype).double()

    return replace(
        of, **{hook: rounds(hook) for hook in ("query", "key", "value") if getattr(variant, f"has_{hook}")}
    )
