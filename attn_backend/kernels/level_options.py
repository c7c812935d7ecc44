"""What `plan` tells the host library of the levels of a composition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from ..metadata import BSRView, Composition
from ..metadata.checks import check_values
from ..metadata.structure import check_plain, refuse
from .structs import pack

if TYPE_CHECKING:
    from .attention_variant import AttentionVariant


@lru_cache(maxsize=256)
def level_options(
    index: int,
    num_levels: int,
    page_size: int,
    window_left: int,
    entry_step: int,
    causal: bool,
    finds_row_ranges: bool,
    pages_change: bool,
    has_slots: bool,
    positions: tuple[int, int, int, int],
) -> bytes:
    """LevelOptions of csrc/. Kept, as they are the same from step to step."""
    kv_offsets, of_rows, requests, num_rows = positions
    return pack(
        "LevelOptions",
        index=index,
        num_levels=num_levels,
        page_size=page_size,
        window_left=window_left,
        kv_offsets=kv_offsets,
        positions={"positions": of_rows, "requests": requests, "num_rows": num_rows},
        entry_step=entry_step,
        causal=causal,
        finds_row_ranges=finds_row_ranges,
        pages_change=pages_change,
        has_slots=has_slots,
    )


_NO_POSITIONS = (0, 0, 0, 0)


def positions_of(view: BSRView) -> tuple[int, int, int, int]:
    """Addresses of kv_offsets, positions and requests, 0 for none, and the rows of the last two."""
    if view.kv_offsets is None and view.positions is None and view.requests is None:
        return _NO_POSITIONS
    addresses = []
    for name, tensor in (
        ("kv_offsets", view.kv_offsets),
        ("positions", view.positions),
        ("requests", view.requests),
    ):
        addresses.append(0 if tensor is None else check_plain(name, tensor).data_ptr())
    of_rows = view.positions if view.positions is not None else view.requests
    return (*addresses, 0 if of_rows is None else of_rows.shape[0])  # type: ignore[return-value]


def tensors_of(view: BSRView) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a view, by the names that those who made it know."""
    table = view.table
    indices = {
        "csr": "kv_indices",
        "block_table": "block_table",
        "token_slots": "req_to_token",
        "ragged": "",
    }[table.form]
    tensors = (
        view.qo_indptr,
        view.rows,
        table.indices,
        table.indptr,
        table.last_page_len,
        table.kv_lens,
        table.rows,
    )
    for name, tensor in zip(
        ("qo_indptr", "rows", indices, "kv_indptr", "kv_last_page_len", "kv_lens", "rows"),
        tensors,
        strict=True,
    ):
        if tensor is not None:
            yield name, tensor


def levels_of(composition: object, max_levels: int, max_rows: int) -> Sequence[BSRView]:
    """The levels of a composition, all with the cache's page size."""
    if not isinstance(composition, Composition):
        refuse("composition", composition, "a Composition or a BSRView")
    if len(composition.levels) > max_levels:
        refuse("len(composition.levels)", len(composition.levels), f"at most max_levels = {max_levels}")
    page_size = composition.page_size
    if all(view.table.page_size == page_size for view in composition.levels):
        return composition.levels
    return [_in_pages_of(page_size, level, view, max_rows) for level, view in enumerate(composition.levels)]


def _in_pages_of(page_size: int, level: int, view: BSRView, max_rows: int) -> BSRView:
    if view.table.page_size == page_size:
        return view
    if view.pages_change:
        refuse(
            f"levels[{level}].pages_change",
            True,
            f"False with pages of {view.table.page_size} tokens in a cache of {page_size}: plan copies the "
            f"page ids",
        )
    if view.device.type == "cpu":  # now: messages then have the caller's values
        try:
            check_values(view, max_rows)
        except ValueError as error:
            raise ValueError(f"levels[{level}]: {error}") from None
    return replace(view, table=view.table.in_pages_of(page_size))


def visibility_of(view: BSRView, num_levels: int, variant: AttentionVariant | None) -> tuple[bool, int]:
    """causal and window_left of a level.

    Raises:
        ValueError: there are several levels, and the view lacks what they need.
    """
    if variant is not None:
        return variant.visibility(view, num_levels)
    return view.causal is not False, view.window_left if num_levels == 1 else window_of_level(view)


def window_of_level(view: BSRView, of_variant: int = -1, name: str = "") -> int:
    """window_left of one of several levels: what a plan and the standard kernels know of it, from the level's
    end on. A window that counts positions is the variant's mask. of_variant: the variant's window.

    Raises:
        ValueError: the view does not say what positions its window or the variant's counts, or its window is
            not the variant's.
    """
    if of_variant >= 0:
        for given in ("kv_offsets", "positions"):
            if getattr(view, given) is None:
                raise ValueError(
                    f"{given} is None, must be given: variant {name} has a window, which counts positions "
                    f"over all levels"
                )
    if view.window_left < 0 or view.positions is None:
        return view.window_left
    if view.window_left != of_variant:
        instead = (
            f"-1, or that of the Attention: variant=builtin.sliding_window({view.window_left}), or it "
            f"combined with another variant"
        )
        refuse("window_left", view.window_left, instead)
    return -1
