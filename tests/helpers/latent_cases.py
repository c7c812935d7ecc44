"""MLA latents in every cache format, and the values that their bytes represent; batches over them compared
with the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
import torch
from torch import Tensor

from attn_backend import BSRView, KVCache, PageTable

LATENT, WIDTH = 512, 576
SM_SCALE = 192**-0.5
# ||o - ref|| / ||ref|| over 16-bit and 8-bit latents. 8-bit values and their scales are exact, but their
# products are rounded to 16 bits.
TOLERANCE, FLOAT8_TOLERANCE = 5e-3, 1e-2
PLAIN = "plain"  # latents of Q's dtype
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "scaled": torch.uint8}


def scaled_rows(latents: Tensor) -> Tensor:
    """Float [..., 576] as uint8 [..., 656]: each 128 of the first 512 columns divided by their largest
    magnitude / 448.
    """
    groups = latents[..., :LATENT].float().unflatten(-1, (4, 128))
    scales = (groups.abs().amax(-1) / 448).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    parts = numbers, scales.contiguous(), latents[..., LATENT:].bfloat16().contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def numbers_of(rows: Tensor, scale: float) -> Tensor:
    """The values of a cache's rows: float64 [..., 576]."""
    if rows.dtype != torch.uint8:
        return rows.double() * scale
    latent = rows[..., :LATENT].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[..., LATENT : LATENT + 16].contiguous().view(torch.float32).double()
    rope = rows[..., LATENT + 16 :].contiguous().view(torch.bfloat16).double()
    return torch.cat([latent * scales.repeat_interleave(128, -1), rope], -1)


# Layouts of Q's two parts: as an engine's layer makes them (strides of rows and heads in any order), dense,
# or slices of one tensor. The others have overlapping rows that TMA cannot load, in both parts or in one.
FORMS_OF_Q = ("engine", "dense", "one tensor", "expanded", "expanded rope")


def parts_of_q(q: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """[rows, heads, 512] and [rows, heads, 64] of q [rows, heads, 576], in one of FORMS_OF_Q.

    Memory between rows and heads is NaN. "expanded": all rows equal the first.
    """
    rows, heads, _ = q.shape
    latent, rope = q[..., :LATENT], q[..., LATENT:]
    if form == "one tensor":
        return latent, rope
    if form.startswith("expanded"):
        return latent[:1].expand(rows, -1, -1) if form == "expanded" else latent.contiguous(), rope[
            :1
        ].expand(rows, -1, -1)
    if form == "dense":
        return latent.contiguous(), rope.contiguous()
    # a product's output, transposed; rows of padded heads
    by_head = q.new_full((heads + 2, rows + 1, LATENT), torch.nan)
    by_head[:heads, :rows] = latent.transpose(0, 1)
    # a layer's projection: 128 columns that are absorbed, 64 that are rotated
    projected = q.new_full((rows, heads, 192), torch.nan)
    projected[..., 128:] = rope
    return by_head[:heads, :rows].transpose(0, 1), projected[..., 128:]


@dataclass
class Batch:
    """Requests over latents of one format. Unused slots, and memory beyond the pages, are NaN."""

    q: Tensor  # [rows, heads, 576]
    kv: KVCache
    view: BSRView
    rows: list[Tensor]  # for each request: float64 [tokens, 576]
    causal: bool
    trees: list[Tensor] | None = None  # for each request: bool [queries, queries], the queries that each sees

    def share(self, pages: int) -> None:
        """All requests begin with the first one's first pages."""
        table = self.view.table.indices
        assert table is not None
        table[1:, :pages] = table[0, :pages]
        tokens = pages * self.view.table.page_size
        for rows in self.rows[1:]:
            rows[:tokens] = self.rows[0][:tokens]

    def expected(self) -> tuple[Tensor, Tensor]:
        indptr, parts = self.view.qo_indptr.tolist(), []
        for i, own in enumerate(self.rows):
            keys, of_request = own[:, None], slice(indptr[i], indptr[i + 1])
            mask = {} if self.trees is None else {"variant": _sees_tree(self.trees[i], len(own))}
            parts.append(
                oracle.attention(
                    self.q[of_request].double().cpu(),
                    keys,
                    keys[..., :LATENT],
                    causal=self.causal,
                    sm_scale=SM_SCALE,
                    **mask,
                )
            )
        o, lse = zip(*parts, strict=True)
        return torch.cat(o), torch.cat(lse)

    def tree_arguments(self) -> dict[str, Tensor]:
        """Of builtin.tree_mask."""
        assert self.trees is not None
        packed = [np.packbits(tree.numpy().flatten(), bitorder="little") for tree in self.trees]
        begins = torch.tensor([0, *(len(one) for one in packed)]).cumsum(0).int()
        device = self.q.device
        return {
            "packed_mask": torch.from_numpy(np.concatenate(packed)).to(device),
            "mask_indptr": begins.to(device),
        }

    def check(self, out: Tensor, lse: Tensor) -> None:
        expected, expected_lse = self.expected()
        tolerance = FLOAT8_TOLERANCE if self.kv.k.element_size() == 1 else TOLERANCE
        error, size = float((out.double().cpu() - expected).norm()), float(expected.norm())
        # 0 if no row sees anything
        assert error <= tolerance * size, f"{error:.2e} > {tolerance} * {size:.2e}"
        empty = expected_lse.isneginf()
        assert lse.cpu()[empty].isneginf().all()
        torch.testing.assert_close(lse.double().cpu()[~empty], expected_lse[~empty], rtol=5e-3, atol=1e-2)


def _sees_tree(tree: Tensor, kv_len: int) -> oracle.Variant:
    """All tokens before a request's queries, and among the queries, those that the tree allows."""
    first = kv_len - len(tree)
    return oracle.Variant(
        mask=lambda pairs: (pairs.token < first) | tree[pairs.index, (pairs.token - first).clamp(min=0)]
    )


def make_tree_batch(form: str, nodes: list[int], kv_lens: list[int], **options: object) -> Batch:
    """Like make_batch. The queries of each request are a tree, each below an earlier node."""
    batch = make_batch(form, nodes, kv_lens, causal=False, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(len(nodes))
    batch.trees = []
    for count in nodes:
        tree = torch.eye(count, dtype=torch.bool)
        for node in range(1, count):
            tree[node] |= tree[int(torch.randint(node, (), generator=generator))]
        batch.trees.append(tree)
    return batch


def make_batch(
    form: str,
    qo_lens: list[int],
    kv_lens: list[int],
    *,
    heads: int = 16,
    page_size: int = 16,
    scale: float | Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    row_bytes: int = 0,
) -> Batch:
    """form: one of FORMATS, or PLAIN. row_bytes: row stride; 0: contiguous."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in kv_lens]
    num_pages = sum(pages) + 2
    numbers = (
        torch.randn(num_pages, page_size, WIDTH, generator=generator)
        * torch.rand(num_pages, page_size, 1, generator=generator)
        * 4
    )
    numbers[..., 128:256] *= 8  # different scales for different columns
    order = torch.randperm(num_pages, generator=generator).int()
    table = torch.zeros(len(kv_lens), max(pages, default=0) + 1, dtype=torch.int32)
    used = torch.zeros(num_pages, page_size, dtype=torch.bool)
    begin = 0
    for i, (count, length) in enumerate(zip(pages, kv_lens, strict=True)):
        table[i, :count] = order[begin : begin + count]
        begin += count
        for token in range(length):
            used[table[i, token // page_size], token % page_size] = True
    numbers[~used] = torch.nan
    if form == "e4m3":
        numbers /= 8
    kv_dtype = dtype if form == PLAIN else FORMATS[form]
    dense = scaled_rows(numbers.bfloat16()) if form == "scaled" else numbers.to(kv_dtype)
    as_bytes = dense.view(torch.uint8)
    storage = torch.full((num_pages, page_size, max(row_bytes, as_bytes.shape[-1])), 0xFF, dtype=torch.uint8)
    storage[..., : as_bytes.shape[-1]] = as_bytes
    cache = storage.to(device)[..., : as_bytes.shape[-1]].view(kv_dtype)
    of_all = 1.0 if scale is None else float(scale)
    rows = []
    for i, length in enumerate(kv_lens):
        places = torch.arange(length)
        rows.append(numbers_of(dense[table[i, places // page_size].long(), places % page_size], of_all))
    q = torch.randn(sum(qo_lens), heads, WIDTH, generator=generator).to(dtype).to(device) * 0.1
    indptr = torch.tensor([0, *qo_lens]).cumsum(0).int().to(device)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    view = BSRView(indptr, PageTable.block_table(table.to(device), lens, page_size), causal=causal)
    return Batch(
        q,
        KVCache.from_latent(cache, scale=scale.to(device) if isinstance(scale, Tensor) else scale),
        view,
        rows,
        causal,
    )
