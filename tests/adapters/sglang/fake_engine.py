"""A small engine around the backend: SGLang's own pools and layers, requests with shuffled slots, and a
float64 attention reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

MAX_TOKENS = 192
MAX_REQUESTS = 6


@dataclass(frozen=True)
class LayerShape:
    num_qo_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = -1
    logit_cap: float = 0.0
    attn_type: AttentionType = AttentionType.DECODER
    chunk: int = 0  # the engine's: model_config(attention_chunk_size=chunk)
    v_head_dim: int = 64
    temperature_len: int = -1

    @property
    def is_local(self) -> bool:
        """Whether a hybrid pool keeps only the end of a request for it."""
        return self.window >= 0 or self.chunk > 0

    def build(self, layer_id: int) -> RadixAttention:
        layer = RadixAttention(
            self.num_qo_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.num_kv_heads,
            layer_id,
            v_head_dim=self.v_head_dim,
            logit_cap=self.logit_cap,
            sliding_window_size=self.window,
            attn_type=self.attn_type,
            use_irope=self.chunk > 0,
        )
        layer.xai_temperature_len = self.temperature_len
        return layer


@dataclass
class Request:
    """One sequence: K and V of its tokens in every layer, and their slots."""

    row: int
    k: list[Tensor] = field(default_factory=list)  # a layer: [tokens, num_kv_heads, head_dim]
    v: list[Tensor] = field(default_factory=list)
    length: int = 0


def model_config(**changes: object) -> SimpleNamespace:
    """The fields of SGLang's ModelConfig that the backend reads."""
    config = {
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "context_len": MAX_TOKENS,
        "is_multimodal": False,
        "attention_chunk_size": None,
    }
    config["hf_config"] = SimpleNamespace(architectures=["LlamaForCausalLM"])
    return SimpleNamespace(**{**config, **changes})


def plans_of(backend: SGLangAttentionBackend) -> Mapping[Any, Any]:
    """The plans of an SGLangAttentionBackend, by what their layers have in common."""
    return backend._planners


class FakeEngine:
    """`layers`: the shapes of the model's layers (same heads).

    `hybrid`: layers with a window get a separate pool. `kv_dtype`: the pool's dtype.
    """

    def __init__(
        self,
        layers: tuple[LayerShape, ...] = (LayerShape(),),
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        hybrid: bool = False,
        device: str = "cpu",
        kv_dtype: torch.dtype | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.max_tokens = max_tokens
        self.generator = torch.Generator().manual_seed(0)
        self.device = device
        self.page_size, self.dtype, self.shapes = page_size, dtype, layers
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.model = nn.ModuleList(shape.build(i) for i, shape in enumerate(layers))
        heads, head_dim, v_head_dim = layers[0].num_kv_heads, layers[0].head_dim, layers[0].v_head_dim
        size = MAX_REQUESTS * max_tokens
        if hybrid:
            windowed = [i for i, shape in enumerate(layers) if shape.is_local]
            full = [i for i, shape in enumerate(layers) if not shape.is_local]
            pool = SWAKVPool(size, size, page_size, self.kv_dtype, heads, head_dim, windowed, full, device)
            # Like the allocator: pages in shuffled order; slot 0 belongs to no request.
            order = torch.randperm(size // page_size, generator=self.generator) + 1
            mapping = torch.zeros(size + page_size, dtype=torch.int64)
            mapping[page_size:] = (order[:, None] * page_size + torch.arange(page_size)).flatten()
            pool.register_mapping(torch.cat([mapping, torch.tensor([-1])]).to(device))
        else:
            shape = (heads, head_dim, len(layers))
            pool = MHATokenToKVPool(
                size,
                page_size,
                self.kv_dtype,
                *shape,
                device,
                enable_memory_saver=False,
                v_head_dim=v_head_dim,
                quant_method=self.quant_method(),
            )
        self.pool = pool
        for layer_id in range(len(layers)):
            for buffer in self.buffers(layer_id):  # slots that no request wrote must never be read
                buffer.fill_(255 if buffer.dtype == torch.uint8 else float("nan"))
        self.req_to_token_pool = ReqToTokenPool(MAX_REQUESTS, max_tokens, device, enable_memory_saver=False)
        pages = torch.randperm(size // page_size, generator=self.generator) + 1
        slots = (
            (pages[:, None] * page_size + torch.arange(page_size)).flatten().view(MAX_REQUESTS, max_tokens)
        )
        self.req_to_token_pool.req_to_token[1:] = slots
        self.requests = [
            Request(row + 1, [torch.empty(0)] * len(layers), [torch.empty(0)] * len(layers))
            for row in range(MAX_REQUESTS)
        ]

    def quant_method(self) -> Any:
        """How the pool stores K and V, if a dtype does not say it."""
        return None

    def buffers(self, layer_id: int) -> tuple[Tensor, ...]:
        """The pool's tensors of a layer."""
        stored: tuple[Tensor, ...] = self.pool.get_kv_buffer(layer_id)
        return stored

    def share_prefix(self, owner: int, others: list[int]) -> None:
        """Like a radix tree: the other requests begin with all tokens of `owner`, in the same slots."""
        first = self.requests[owner]
        table = self.req_to_token_pool.req_to_token
        for request in (self.requests[i] for i in others):
            table[request.row, : first.length] = table[first.row, : first.length]
            request.k, request.v, request.length = list(first.k), list(first.v), first.length

    def runner(self, **changes: object) -> SimpleNamespace:
        """The attributes of SGLang's ModelRunner that a backend's constructor reads."""
        runner = SimpleNamespace(
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            kv_cache_dtype_str="auto",
            page_size=self.page_size,
            is_draft_worker=False,
            model=self.model,
            model_config=model_config(context_len=self.max_tokens),
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.pool,
        )
        for name, value in changes.items():
            setattr(runner, name, value)
        return runner

    def batch(
        self, mode: ForwardMode, requests: list[int], new_lens: list[int], spec_info: object = None
    ) -> SimpleNamespace:
        """A step of these requests; each gets new tokens.

        A verifying step's lengths do not count its draft tokens, as in the engine.
        """
        rows = torch.tensor([self.requests[i].row for i in requests])
        old = torch.tensor([self.requests[i].length for i in requests])
        new = torch.tensor(new_lens, dtype=torch.int32)
        table = self.req_to_token_pool.req_to_token.cpu()
        slots = [table[row, a : a + n] for row, a, n in zip(rows, old, new_lens, strict=True)]
        is_extend = mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND_V2)
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=rows.to(self.device),
            seq_lens=(old if mode.is_target_verify() else old + new).to(self.device),
            extend_seq_lens=new.to(self.device) if is_extend else None,
            extend_seq_lens_cpu=new_lens if is_extend else None,
            extend_prefix_lens=old.to(self.device) if is_extend else None,
            extend_prefix_lens_cpu=old.tolist() if is_extend else None,
            encoder_lens=None,
            out_cache_loc=torch.cat(slots).to(self.device, torch.int64),
            positions=torch.cat([torch.arange(n) + a for a, n in zip(old, new_lens, strict=True)]).to(
                self.device
            ),
            spec_info=spec_info,
            _attn_output=None,
        )

    def tensors(self, batch: SimpleNamespace, layer_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as a model hands them over: views of one projection."""
        shape = self.shapes[layer_id]
        rows = batch.positions.shape[0]
        sizes = [
            shape.num_qo_heads * shape.head_dim,
            shape.num_kv_heads * shape.head_dim,
            shape.num_kv_heads * shape.v_head_dim,
        ]
        q, k, v = (
            torch.randn(rows, sum(sizes), generator=self.generator)
            .to(self.device, self.dtype)
            .split(sizes, dim=-1)
        )
        return q, k.view(rows, shape.num_kv_heads, -1), v.view(rows, shape.num_kv_heads, -1)

    def remember(self, requests: list[int], new_lens: list[int], layer_id: int, k: Tensor, v: Tensor) -> None:
        """Keeps a copy of the new tokens for the reference."""
        layer = self.model[layer_id]
        k, v = self.held(k, layer.k_scale), self.held(v, layer.v_scale)
        for i, k_new, v_new in zip(requests, k.cpu().split(new_lens), v.cpu().split(new_lens), strict=True):
            request = self.requests[i]
            request.k[layer_id] = torch.cat([request.k[layer_id], k_new]) if request.length else k_new
            request.v[layer_id] = torch.cat([request.v[layer_id], v_new]) if request.length else v_new

    def held(self, x: Tensor, scale: Tensor | float | None) -> Tensor:
        """The values in float64, as a cache of the pool's dtype stores them."""
        if self.kv_dtype == self.dtype:
            return x.double()
        factor, largest = 1.0 if scale is None else float(scale), torch.finfo(self.kv_dtype).max
        return (x.float() / factor).clamp(-largest, largest).to(self.kv_dtype).double() * factor

    def advance(self, requests: list[int], new_lens: list[int]) -> None:
        for i, n in zip(requests, new_lens, strict=True):
            self.requests[i].length += n

    def reference(
        self,
        requests: list[int],
        new_lens: list[int],
        layer_id: int,
        q: Tensor,
        trees: list[Tensor] | None = None,
    ) -> Tensor:
        """float64 [rows, num_qo_heads * head_dim]. Call it after remember() and before advance().

        trees: one bool mask [new tokens, new tokens] per request: the tokens that each new token sees.
        """
        shape = self.shapes[layer_id]
        group = shape.num_qo_heads // shape.num_kv_heads
        outputs = []
        for place, (i, rows) in enumerate(zip(requests, q.cpu().split(new_lens), strict=True)):
            k = self.requests[i].k[layer_id].repeat_interleave(group, dim=1)
            v = self.requests[i].v[layer_id].repeat_interleave(group, dim=1)
            logits = (
                torch.einsum("qhd,khd->hqk", rows.double().view(len(rows), shape.num_qo_heads, -1), k)
                * shape.head_dim**-0.5
            )
            if shape.logit_cap:
                logits = shape.logit_cap * torch.tanh(logits / shape.logit_cap)
            query_pos = torch.arange(len(k) - len(rows), len(k))[:, None]
            key_pos = torch.arange(len(k))[None]
            if shape.temperature_len > 0:
                logits = logits * (query_pos.double().log2() / math.log2(shape.temperature_len)).where(
                    query_pos > shape.temperature_len, 1.0
                )
            hidden = (
                key_pos > query_pos
                if shape.attn_type == AttentionType.DECODER
                else torch.zeros(len(rows), len(k), dtype=torch.bool)
            )
            if shape.window >= 0:
                hidden = hidden | (key_pos < query_pos - shape.window)
                if shape.attn_type != AttentionType.DECODER:
                    hidden = hidden | (key_pos > query_pos + shape.window)
            if shape.chunk:
                hidden = hidden | (key_pos // shape.chunk != query_pos // shape.chunk)
            if trees is not None:
                hidden[:, len(k) - len(rows) :] |= ~trees[place]
            probabilities = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", probabilities, v).reshape(len(rows), -1))
        return torch.cat(outputs)


def capture(run: Callable[[], list[Tensor]], device: str) -> Callable[[], list[Tensor]]:
    """A function that runs the step again: from a graph on a GPU, without Python."""
    if device == "cpu":
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()

    def replay() -> list[Tensor]:
        graph.replay()
        return captured

    return replay
