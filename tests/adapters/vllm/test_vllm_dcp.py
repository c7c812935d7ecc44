"""Decode context parallelism: builders and layers of all ranks with vLLM's own collectives and state merge,
compared with float64 attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")

from dcp_ranks import Ranks, lay_out, make_ranks, place
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm_layer import NUM_PAGES, PAGE, make_builder, make_impl, make_spec

from attn_backend.adapters.vllm import compat, dcp, support
from attn_backend.adapters.vllm.attention import AttnImpl, elements_of_row, token_scaled_view
from attn_backend.adapters.vllm.metadata import AttnMetadata
from attn_backend.adapters.vllm.rules import TOKEN_SCALED_CACHES

HEADS, WIDTH = 3, 64  # per rank
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

Lens = tuple[list[int], list[int]]
# decodes, a chunk, a prompt, a verification; requests with fewer tokens than ranks
MIXED: Lens = ([1, 1, 7, 40, 3, 1, 1], [33, 64, 23, 40, 100, 1, 3])
PROMPTS: Lens = ([40, 7], [40, 7])
SINGLE_TOKENS: Lens = ([1] * 6, [33, 64, 1, 2, 100, 3])


@pytest.fixture(autouse=True)
def no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")


def parallel(size: int, interleave: int = 1, heads: int = 1, **changes: Any) -> SimpleNamespace:
    """The fields of ParallelConfig that are read."""
    settings = {
        "decode_context_parallel_size": size,
        "prefill_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": interleave,
    }
    return SimpleNamespace(
        **settings | {"dcp_comm_backend": "ag_rs", "tensor_parallel_size": size * heads} | changes
    )


def model(dtype: torch.dtype = torch.float32, num_kv_heads: int = 1) -> SimpleNamespace:
    return SimpleNamespace(dtype=dtype, get_total_num_kv_heads=lambda: num_kv_heads)


class Deployment:
    """A layer on each rank, with its builder and its part of the cache."""

    def __init__(
        self,
        ranks: Ranks,
        interleave: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        cache_dtype: str = "auto",
        comm: str = "ag_rs",
        **layer: Any,
    ) -> None:
        self.ranks, self.size, self.interleave, self.dtype, self.device = (
            ranks,
            ranks.world_size,
            interleave,
            dtype,
            device,
        )
        stored = dtype if cache_dtype == "auto" else torch.float8_e4m3fn
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(0.5, device=device), _v_scale=torch.tensor(0.25, device=device)
        )
        self.soft_cap = layer.get("logits_soft_cap") or 0.0

        def make(rank: int) -> tuple[AttnImpl, Any, Tensor]:
            if device == "cpu":
                impl: AttnImpl = make_impl(HEADS, WIDTH, 1, kv_cache_dtype=cache_dtype, **layer)
            else:
                impl = AttnImpl(HEADS, WIDTH, WIDTH**-0.5, 1, kv_cache_dtype=cache_dtype, **layer)
            spec = make_spec(1, WIDTH, dtype if cache_dtype == "auto" else torch.uint8)
            config = {
                "parallel_config": parallel(self.size, interleave, dcp_comm_backend=comm),
                "model_config": model(dtype),
            }
            builder = make_builder(
                [impl], spec, device, cache_config=SimpleNamespace(cache_dtype=cache_dtype), **config
            )
            row = elements_of_row(2 * WIDTH, cache_dtype)
            cache = torch.full((NUM_PAGES, 1, PAGE, row), torch.nan, device=device).to(stored)
            return impl, builder, cache if cache_dtype == "auto" else cache.view(torch.uint8)

        self.impls, self.builders, self.caches = zip(*ranks.run(make), strict=True)

    def fill(
        self, lens: Lens, seed: int, shared_pages: int = 0, padding: int = 0, causal: bool = True
    ) -> None:
        """A batch; the tokens before its queries are in the caches."""
        generator = torch.Generator().manual_seed(seed)
        self.causal = causal
        self.batch = batch = lay_out(lens, self.size, self.interleave, generator, shared_pages, padding)
        self.k, self.v = torch.randn(2, len(batch.slots), 1, WIDTH, generator=generator).to(self.dtype)
        for tokens in batch.of_request:
            shared = tokens[: shared_pages * PAGE * self.size]
            self.k[shared], self.v[shared] = self.k[: len(shared)].clone(), self.v[: len(shared)].clone()
        self.q = torch.randn(len(batch.new) + padding, HEADS * self.size, WIDTH, generator=generator).to(
            self.dtype
        )
        if self.impls[0].has_token_scales:
            self._fill_with_token_scales(lens)
            return
        for rank, cache in enumerate(self.caches):
            mine = batch.old & (batch.owners == rank)
            rows = torch.cat(
                [self.stored(x[mine], scale) for x, scale in ((self.k, "_k_scale"), (self.v, "_v_scale"))], -1
            )
            cache[batch.slots[mine] // PAGE, :, batch.slots[mine] % PAGE] = rows.to(cache.device)
        # the values that the 8-bit cache represents; with several tokens a request, the step's tokens are not
        # read from it
        if self.caches[0].dtype == torch.uint8:
            read = batch.old | (max(lens[0]) == 1)
            for x, scale in ((self.k, "_k_scale"), (self.v, "_v_scale")):
                x[read] = (
                    self.stored(x[read], scale).view(torch.float8_e4m3fn).to(x.dtype)
                    * getattr(self.layer, scale).cpu()
                )

    def _fill_with_token_scales(self, lens: Lens) -> None:
        """Writes all tokens. The values of those that are read from the cache become what it has.

        The float32 values are kept for the step, which writes its tokens again, with the same result.
        """
        batch = self.batch
        for rank, (impl, cache) in enumerate(zip(self.impls, self.caches, strict=True)):
            mine = batch.owners == rank
            slots = batch.slots[mine]
            impl.do_kv_cache_update(self.layer, self.k[mine], self.v[mine], cache, slots)
            read = mine & (batch.old | (max(lens[0]) == 1))
            view = token_scaled_view(cache, WIDTH, TOKEN_SCALED_CACHES[impl.kv_cache_dtype])
            for x, elements, scales in ((self.k, view.k, view.k_scale), (self.v, view.v, view.v_scale)):
                assert isinstance(scales, Tensor)
                values = (elements.float() * scales[..., None]).flatten(0, 1)
                x[read] = values[batch.slots[read]]

    def stored(self, x: Tensor, scale: str) -> Tensor:
        if self.caches[0].dtype != torch.uint8:
            return x
        return (x.float() / getattr(self.layer, scale).cpu()).to(torch.float8_e4m3fn).view(torch.uint8)

    def build(self, rank: int, *, upper_bounds: bool = True) -> AttnMetadata:
        cm = self.batch.metadata(
            rank, self.size, self.interleave, self.device, causal=self.causal, upper_bounds=upper_bounds
        )
        metadata: AttnMetadata = self.builders[rank].build(0, cm)
        return metadata

    def forward(self, rank: int, metadata: AttnMetadata, more_rows: int = 0) -> Tensor:
        """One layer as vLLM runs it."""
        impl, cache = self.impls[rank], self.caches[rank]
        q = self.q[:, rank * HEADS : (rank + 1) * HEADS].to(self.device)
        k, v = (
            torch.cat([x[self.batch.new], x.new_zeros(self.batch.padding, 1, WIDTH)]).to(self.device)
            for x in (self.k, self.v)
        )
        impl.do_kv_cache_update(self.layer, k, v, cache, metadata.slot_mapping)
        q, k, v = (torch.cat([x, x.new_full((more_rows, *x.shape[1:]), torch.nan)]) for x in (q, k, v))
        output = torch.full_like(q, torch.nan)
        assert impl.forward(self.layer, q, k, v, cache, metadata, output) is output
        return output

    def check(self, outputs: list[Tensor]) -> None:
        rows = len(self.batch.new)
        output = torch.cat([of_rank[:rows].cpu() for of_rank in outputs], 1)
        mask = {"causal": self.causal, "logits_soft_cap": self.soft_cap}
        expected, _ = oracle.paged_attention(
            self.q[:rows], self.k, self.v, self.batch.lens[0], self.batch.of_request, **mask
        )
        error = (output.double() - expected).norm() / expected.norm()
        assert error <= TOLERANCE[self.dtype]

    def step(self) -> None:
        self.check(self.ranks.run(lambda rank: self.forward(rank, self.build(rank))))


def random_lens(generator: torch.Generator) -> Lens:
    """Decodes, chunks and prompts of up to 120 tokens, some of them short."""
    query_lens, kv_lens = [], []
    for _ in range(int(torch.randint(1, 8, (), generator=generator))):
        kind, short = torch.randint(0, 3, (2,), generator=generator).tolist()
        kv_len = int(torch.randint(1, 6 if short == 0 else 120, (), generator=generator))
        query_len = (1, int(torch.randint(1, min(kv_len, 30) + 1, (), generator=generator)), min(kv_len, 30))[
            kind
        ]
        query_lens.append(query_len)
        kv_lens.append(kv_len if kind < 2 else query_len)
    return query_lens, kv_lens


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_random_batches(monkeypatch: pytest.MonkeyPatch, size: int, interleave: int) -> None:
    """Batches share the same caches and workspaces, one after another."""
    deployment = Deployment(make_ranks(monkeypatch, size), interleave)
    generator = torch.Generator().manual_seed(size + interleave)
    for seed, lens in enumerate(
        [MIXED, PROMPTS, SINGLE_TOKENS, *(random_lens(generator) for _ in range(10))]
    ):
        deployment.fill(lens, seed)
        deployment.step()


def test_new_tokens_are_written_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(make_ranks(monkeypatch, 2), 4)
    deployment.fill(MIXED, 0)
    deployment.step()
    written = [int(cache.isfinite().all(-1).sum()) for cache in deployment.caches]
    owners = [
        sum(int((place(torch.arange(n), 2, 4)[0] == rank).sum()) for n in MIXED[1]) for rank in range(2)
    ]
    assert written == owners


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"logits_soft_cap": 2.0}),
        (torch.float32, {"cache_dtype": "fp8"}),
        (torch.float32, {"cache_dtype": "fp8_per_token_head"}),
        (torch.float32, {"comm": "a2a"}),
    ],
    ids=["bfloat16", "soft-cap", "fp8-cache", "token-scales", "a2a"],
)
def test_layers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]) -> None:
    deployment = Deployment(make_ranks(monkeypatch, 2), 4, dtype, **options)
    for seed, lens in enumerate([MIXED, SINGLE_TOKENS]):
        deployment.fill(lens, seed)
        deployment.step()


def test_shared_prefixes_and_drafts_that_are_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(make_ranks(monkeypatch, 2), 16)
    deployment.fill(([1, 1, 5, 1], [100, 90, 80, 120]), 0, shared_pages=2)
    deployment.step()
    deployment.fill(([4, 4], [30, 50]), 1, causal=False)
    deployment.step()


def test_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and rows that a full graph adds. Rows that a graph of the rest of the model adds stay
    untouched.
    """
    deployment = Deployment(make_ranks(monkeypatch, 2), 1)
    deployment.fill(([1, 1, 1], [33, 64, 2]), 0, padding=5)
    deployment.step()
    outputs = deployment.ranks.run(lambda rank: deployment.forward(rank, deployment.build(rank), more_rows=4))
    deployment.check(outputs)
    assert all(output[-4:].isnan().all() for output in outputs)


def test_ranks_meet_only_where_there_is_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also communicate if the host does not know the lengths, or while a graph is captured."""
    ranks = make_ranks(monkeypatch, 2)
    deployment = Deployment(ranks, 1)
    deployment.fill(PROMPTS, 0)
    deployment.step()
    assert ranks.num_exchanges == 0
    deployment.check(
        ranks.run(lambda rank: deployment.forward(rank, deployment.build(rank, upper_bounds=False)))
    )
    assert ranks.num_exchanges == 3  # queries, LSE, outputs
    deployment.fill(([40, 7], [40, 8]), 0)
    deployment.step()
    assert ranks.num_exchanges == 6


@pytest.mark.parametrize(
    ("mode", "captured_lens", "replayed_lens", "single_tokens"),
    [
        (CUDAGraphMode.FULL, PROMPTS, ([30, 17], [60, 90]), False),
        (CUDAGraphMode.FULL, ([1], [1]), ([1], [90]), False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, ([1, 1], [1, 1]), ([1, 1], [60, 90]), True),
        (CUDAGraphMode.FULL_DECODE_ONLY, ([1, 1], [1, 1]), ([1, 1], [1, 2]), True),
    ],
)
def test_a_captured_graph_serves_other_batches(
    monkeypatch: pytest.MonkeyPatch,
    mode: CUDAGraphMode,
    captured_lens: Lens,
    replayed_lens: Lens,
    single_tokens: bool,
) -> None:
    """The graph is captured with the metadata of one batch, and runs with the plans of another.

    A graph for all batches may be captured with single tokens.
    """
    monkeypatch.setattr(dcp, "is_captured", lambda device: True)
    deployment = Deployment(make_ranks(monkeypatch, 2), 1)
    for builder in deployment.builders:
        builder.vllm_config.compilation_config.cudagraph_mode = mode
    deployment.fill(captured_lens, 0)
    captured = deployment.ranks.run(deployment.build)
    assert all(metadata.single_tokens == single_tokens for metadata in captured)
    deployment.fill(replayed_lens, 1)
    deployment.ranks.run(deployment.build)
    for rank, metadata in enumerate(captured):
        metadata.slot_mapping.copy_(deployment.batch.metadata(rank, 2, 1, "cpu").slot_mapping)
    deployment.check(deployment.ranks.run(lambda rank: deployment.forward(rank, captured[rank])))


def test_drafts_are_verified_by_graphs_of_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a graph may be replayed for single tokens, which are then planned in its form."""
    deployment = Deployment(make_ranks(monkeypatch, 2), 1)
    for builder in deployment.builders:
        builder.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    deployment.fill(SINGLE_TOKENS, 0)
    assert not any(metadata.single_tokens for metadata in deployment.ranks.run(deployment.build))


def test_profiling_run(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(make_ranks(monkeypatch, 2), 1)
    q = torch.randn(8, HEADS, WIDTH)
    output = deployment.ranks.run(
        lambda rank: deployment.impls[rank].forward(
            deployment.layer, q, q, q, torch.empty(0), None, torch.empty_like(q)
        )
    )
    assert all((of_rank == 0).all() for of_rank in output)


def test_what_vllm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(make_ranks(monkeypatch, 2), 1)
    for impl, builder in zip(deployment.impls, deployment.builders, strict=True):
        assert impl.need_to_return_lse_for_decode
        assert impl.supports_mtp_with_cp_non_trivial_interleave_size
        assert not impl.supports_quant_query_input
        assert not builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"attn_type": "encoder_decoder"}, "attention of type encoder_decoder"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "another one's KV cache"),
        ({"num_kv_heads": 3}, "3 KV heads"),
        ({"head_size": 96}, "values of 96 columns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_are_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], what: str) -> None:
    layer: dict[str, Any] = {"num_heads": HEADS, "head_size": WIDTH, "num_kv_heads": 1, **changes}
    with pytest.raises(
        NotImplementedError,
        match=f"{what}.*with decode context parallelism: pass --decode-context-parallel-size 1",
    ):
        make_ranks(monkeypatch, 2).run(lambda _: make_impl(**layer))


def refusal(ranks: Ranks, spec: Any = None, **changes: Any) -> str:
    settings = {"parallel_config": parallel(ranks.world_size), "model_config": model(), **changes}
    with pytest.raises(NotImplementedError) as refused:
        ranks.run(
            lambda _: make_builder([make_impl(HEADS, WIDTH, 1)], spec or make_spec(1, WIDTH), **settings)
        )
    return str(refused.value)


def test_deployments_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 ranks" in refusal(make_ranks(monkeypatch, 3))
    ranks = make_ranks(monkeypatch, 2)
    assert "not one KV head" in refusal(
        ranks, parallel_config=parallel(2, tensor_parallel_size=6), model_config=model(num_kv_heads=2)
    )
    images = SimpleNamespace(**vars(model()), is_mm_prefix_lm=True)
    assert "masks of chunks or images" in refusal(
        ranks,
        model_config=images,
        scheduler_config=SimpleNamespace(
            max_num_seqs=8, max_num_batched_tokens=256, disable_chunked_mm_input=True
        ),
    )
    assert "some layers that share KV" in refusal(ranks, make_spec(1, WIDTH, dcp_sharded=False))
    with monkeypatch.context() as patch:
        patch.setattr(compat, "batch_invariant", lambda: True)
        assert "VLLM_BATCH_INVARIANT" in refusal(ranks)
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    assert "on a CPU" in refusal(ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_on_one_gpu(monkeypatch: pytest.MonkeyPatch, size: int, interleave: int) -> None:
    """All ranks on the same GPU, with vLLM's kernels for the state merge."""
    deployment = Deployment(make_ranks(monkeypatch, size, "cuda"), interleave, torch.bfloat16, "cuda")
    generator = torch.Generator().manual_seed(size + interleave)
    for seed, lens in enumerate(
        [MIXED, PROMPTS, SINGLE_TOKENS, *(random_lens(generator) for _ in range(10))]
    ):
        deployment.fill(lens, seed)
        deployment.step()


class Alone:
    """The first of two ranks. The other rank mirrors it, so no threads are needed, which a graph could not
    capture.
    """

    world_size, rank_in_group = 2, 0

    def run(self, work: Any) -> list[Any]:
        return [work(0)]

    def all_gather(self, mine: Tensor, dim: int) -> Tensor:
        return torch.cat([mine, mine], dim)

    def reduce_scatter(self, mine: Tensor, dim: int) -> Tensor:
        return (2 * mine).chunk(2, dim)[0].contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("captured_lens", "replayed_lens"),
    [(PROMPTS, ([40, 7], [100, 90])), (([1] * 4, [1] * 4), ([1] * 4, [100, 2, 37, 1]))],
    ids=["prompts", "single-tokens"],
)
def test_a_graph_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, captured_lens: Lens, replayed_lens: Lens
) -> None:
    """Captured with requests without context; a batch with context gets the same bits as from launched
    kernels.
    """
    monkeypatch.setattr(parallel_state, "_DCP", Alone())
    deployment = Deployment(Alone(), 1, torch.bfloat16, "cuda")  # type: ignore[arg-type]
    impl, builder, cache = deployment.impls[0], deployment.builders[0], deployment.caches[0]
    deployment.fill(captured_lens, 0)
    cm = deployment.batch.metadata(0, 2, 1, "cuda")
    q, k, v = (
        torch.randn(sum(captured_lens[0]), heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        for heads in (HEADS, 1, 1)
    )
    output = torch.empty_like(q)

    def run(metadata: AttnMetadata) -> None:
        impl.do_kv_cache_update(deployment.layer, k, v, cache, cm.slot_mapping)
        impl.forward(deployment.layer, q, k, v, cache, metadata, output)

    captured = builder.build(0, cm)
    run(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured)

    deployment.fill(replayed_lens, 1)
    other = deployment.batch.metadata(0, 2, 1, "cuda")
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        getattr(cm, name).copy_(getattr(other, name))
    cm.seq_lens_cpu_upper_bound = other.seq_lens_cpu_upper_bound
    metadata = builder.build(0, cm)
    assert metadata.has_context
    run(metadata)
    expected = output.clone()
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
    assert expected.isfinite().all()
