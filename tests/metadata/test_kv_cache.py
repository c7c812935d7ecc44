"""KV caches: every storage form is the same view, nothing is copied."""

from __future__ import annotations

import pytest
import torch

from attn_backend import KVCache

PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 5, 4, 3, 8


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype)


def assert_is_view(kv: KVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """k, v: [pages, page_size, heads, head_dim], the expected views."""
    assert kv.k.shape == k.shape
    assert torch.equal(kv.k, k)
    assert torch.equal(kv.v, v)
    assert kv.k.data_ptr() == k.data_ptr()
    assert kv.v.data_ptr() == v.data_ptr()
    assert (kv.num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim) == tuple(k.shape)
    assert kv.dtype == k.dtype
    assert kv.device == k.device


def test_from_tensor() -> None:
    kv = numbered(PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM)
    assert_is_view(KVCache.from_tensor(kv), kv[:, 0], kv[:, 1])
    kv = numbered(PAGES, 2, HEADS, PAGE_SIZE, HEAD_DIM)
    assert_is_view(KVCache.from_tensor(kv, "HND"), kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2))


def test_from_pair() -> None:
    k, v = numbered(2, PAGES, PAGE_SIZE, HEADS, HEAD_DIM).unbind(0)
    assert_is_view(KVCache.from_pair(k, v), k, v)
    k, v = numbered(2, PAGES, HEADS, PAGE_SIZE, HEAD_DIM).unbind(0)
    assert_is_view(KVCache.from_pair(k, v, "HND"), k.transpose(1, 2), v.transpose(1, 2))


def test_from_packed() -> None:
    kv = numbered(PAGES, HEADS, PAGE_SIZE, 2 * HEAD_DIM)
    assert_is_view(
        KVCache.from_packed(kv), kv[..., :HEAD_DIM].transpose(1, 2), kv[..., HEAD_DIM:].transpose(1, 2)
    )
    kv = numbered(PAGES, PAGE_SIZE, HEADS, 2 * HEAD_DIM)
    assert_is_view(KVCache.from_packed(kv, "NHD"), kv[..., :HEAD_DIM], kv[..., HEAD_DIM:])


def test_from_slots_cuts_off_what_is_no_page() -> None:
    k, v = numbered(2, PAGES * PAGE_SIZE + 3, HEADS, HEAD_DIM).unbind(0)
    whole = PAGES * PAGE_SIZE
    assert_is_view(
        KVCache.from_slots(k, v, PAGE_SIZE),
        k[:whole].view(PAGES, PAGE_SIZE, HEADS, HEAD_DIM),
        v[:whole].view(PAGES, PAGE_SIZE, HEADS, HEAD_DIM),
    )
    assert_is_view(KVCache.from_slots(k, v), k[:, None], v[:, None])


def test_from_ragged_takes_slices_of_a_fused_projection() -> None:
    qkv = numbered(17, 4 * HEADS, HEAD_DIM)
    k, v = qkv[:, 2 * HEADS : 3 * HEADS], qkv[:, 3 * HEADS :]
    kv = KVCache.from_ragged(k, v)
    assert_is_view(kv, k[:, None], v[:, None])
    assert kv.k.stride(0) == 4 * HEADS * HEAD_DIM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    kv = numbered(PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM, dtype=dtype)
    assert KVCache.from_tensor(kv).dtype == dtype


def test_any_strides_but_head_dim() -> None:
    room = numbered(HEADS + 1, PAGE_SIZE + 2, 2, PAGES + 1, HEAD_DIM + 8)
    kv = room.permute(3, 2, 1, 0, 4)[:PAGES, :, 1 : PAGE_SIZE + 1, :HEADS, 8:]
    assert_is_view(KVCache.from_tensor(kv), kv[:, 0], kv[:, 1])


def test_strides_of_single_elements_are_plain() -> None:
    k = numbered(7, 1, 1, HEAD_DIM).as_strided((7, 1, 1, HEAD_DIM), (HEAD_DIM, 13, 17, 1))
    kv = KVCache.from_pair(k, k)
    assert kv.k.stride() == (HEAD_DIM, HEAD_DIM, HEAD_DIM, 1)
    assert torch.equal(kv.k, k)
    one_page = KVCache.from_tensor(numbered(1, 2, PAGE_SIZE, HEADS, HEAD_DIM))
    assert one_page.k.stride() == (PAGE_SIZE * HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEAD_DIM, 1)
    assert KVCache.from_slots(numbered(9, 2, 1)[:, :, :1], numbered(9, 2, 1)).k.stride() == (2, 2, 1, 1)


def test_writes_go_to_the_engine_s_tensor() -> None:
    kv = torch.zeros(PAGES, HEADS, PAGE_SIZE, 2 * HEAD_DIM)
    KVCache.from_packed(kv).v[3, 2, 1] = 7.0
    assert (kv[3, 1, 2, HEAD_DIM:] == 7).all()
    assert kv.sum() == 7 * HEAD_DIM


K = numbered(PAGES, PAGE_SIZE, HEADS, HEAD_DIM)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("layout", lambda: KVCache.from_pair(K, K, "NDH")),
        ("layout", lambda: KVCache.from_tensor(torch.stack([K, K], 1), "nhd")),
        ("layout", lambda: KVCache.from_packed(torch.cat([K, K], -1), None)),
        ("kv", lambda: KVCache.from_tensor(K)),
        ("kv", lambda: KVCache.from_tensor(torch.stack([K, K], 0))),
        ("kv", lambda: KVCache.from_tensor([K, K])),
        ("kv", lambda: KVCache.from_packed(K[..., :7])),
        ("kv", lambda: KVCache.from_packed(K[0])),
        ("k", lambda: KVCache.from_pair(K[0], K[0])),
        ("k", lambda: KVCache.from_pair(K[..., ::2], K[..., ::2])),
        ("k", lambda: KVCache.from_pair(K.transpose(2, 3), K.transpose(2, 3))),
        ("k", lambda: KVCache.from_pair(K.double(), K.double())),
        ("k", lambda: KVCache.from_pair(K.to(torch.int32), K.to(torch.int32))),
        ("k", lambda: KVCache.from_pair(K[:, :0], K[:, :0])),
        ("k", lambda: KVCache(None, K)),
        ("v", lambda: KVCache.from_pair(K, K[..., ::2])),
        ("v", lambda: KVCache.from_pair(K, K[:3])),
        ("v", lambda: KVCache.from_pair(K, K.half())),
        ("v", lambda: KVCache.from_pair(K, K.to("meta"))),
        ("v", lambda: KVCache.from_pair(K, None)),
        ("k", lambda: KVCache.from_slots(K, K)),
        ("v", lambda: KVCache.from_slots(K[0], K)),
        ("page_size", lambda: KVCache.from_slots(K[0], K[0], 0)),
        ("k", lambda: KVCache.from_ragged(K, K)),
    ],
)
def test_refuses(argument: str, make: object) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
        make()


def test_unchecked_views_are_those_that_are_checked() -> None:
    cache = torch.randn(3, 2, 1, 2, 16)  # pages of one token, which may have any stride
    k, v = cache.unbind(1)
    checked, unchecked = KVCache.from_pair(k, v), KVCache.unchecked(k.as_strided(k.shape, (64, 7, 16, 1)), v)
    for name in ("k", "v"):
        one, other = getattr(checked, name), getattr(unchecked, name)
        assert (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
    eight = cache.to(torch.float8_e4m3fn).unbind(1)
    of_heads = torch.tensor([0.5, 2.0])
    for scales in ((None, None), (0.5, None), (of_heads, 3.0), (None, of_heads)):
        checked, unchecked = (
            KVCache.from_pair(*eight, k_scale=scales[0], v_scale=scales[1]),
            KVCache.unchecked(*eight, *scales),
        )
        for name in ("k_scale", "v_scale"):
            one, other = getattr(checked, name), getattr(unchecked, name)
            assert one is other or one == other


EIGHT = torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.int8)
OF_TOKENS = torch.ones(PAGES, PAGE_SIZE, HEADS)


def test_a_scale_for_each_token_and_head() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        kv = KVCache.from_pair(
            *(EIGHT.to(dtype).transpose(1, 2).contiguous() for _ in range(2)),
            "HND",
            k_scale=OF_TOKENS,
            v_scale=OF_TOKENS,
        )
        assert kv.k_scale is OF_TOKENS
        assert kv.has_token_scales
    assert not KVCache.from_pair(*(EIGHT.to(torch.float8_e4m3fn) for _ in range(2))).has_token_scales


@pytest.mark.parametrize(
    ("dtype", "k_scale", "v_scale", "message"),
    [
        (
            torch.int8,
            None,
            None,
            r"k_scale is None, must be a float32 tensor \[pages, .*\] = \[5, 4, 3\]: int8 has no other",
        ),
        (torch.int8, 0.5, 0.5, "k_scale is 0.5, must be a float32 tensor"),
        (
            torch.int8,
            OF_TOKENS,
            None,
            r"v_scale is None, must be a float32 tensor .* = \[5, 4, 3\], as k_scale",
        ),
        (
            torch.float8_e4m3fn,
            0.5,
            OF_TOKENS,
            "v_scale is .*, must be no tensor for each token and head, as k_scale",
        ),
        (torch.int8, OF_TOKENS[1:], OF_TOKENS, r"k_scale is .*, must be .* \[pages, .*\] = \[5, 4, 3\]$"),
        (torch.int8, OF_TOKENS.double(), OF_TOKENS, "k_scale is .*, must be a float32 tensor"),
        (torch.int8, OF_TOKENS.to("meta"), OF_TOKENS, "k_scale"),
        (torch.float8_e5m2, OF_TOKENS, OF_TOKENS, r"k_scale is .*, must be .*\[batch, num_kv_heads\]$"),
        (torch.bfloat16, OF_TOKENS, OF_TOKENS, "k_scale is .*, must be None: a bfloat16 cache has no scales"),
    ],
)
def test_refused_scales_of_tokens(dtype: torch.dtype, k_scale: object, v_scale: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache.from_pair(EIGHT.to(dtype), EIGHT.to(dtype), k_scale=k_scale, v_scale=v_scale)  # type: ignore[arg-type]
