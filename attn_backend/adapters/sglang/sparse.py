"""Sparse attention over latents (DeepSeek V3.2, GLM 5): SGLang's own backend with our attention.

The indexer, its metadata and the pools remain SGLang's. They and the models know SGLang's backend by its
class and its name, `dsa`, so this class derives from it and has that name. It selects SGLang's path
`flashmla_sparse` for every step: SGLang then looks up the selected tokens, and calls one method.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_topk
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from torch import Tensor

from attn_backend import KVCache
from attn_backend.adapters.metrics import export_counts, log_start
from attn_backend.adapters.selected import SelectedAttention
from attn_backend.adapters.served import warn_if_untried
from attn_backend.metadata.kv_cache import SCALED_LATENT_BYTES, SCALED_LATENT_DTYPE
from attn_backend.metadata.views import count_slots

from . import compat
from .backend import logger
from .support import check_runner, longest_extend, refuse

_NAME = "dsa"  # which SGLang's models look for
_WAY = "flashmla_sparse"


class SparseBackend(DeepseekSparseAttnBackend):
    """Serves layers with selected tokens. The constructor raises ValueError for what it cannot serve."""

    def __init__(self, runner: Any) -> None:
        check_runner(runner)
        super().__init__(runner)
        self.dsa_prefill_impl = self.dsa_decode_impl = _WAY
        self.enable_auto_select_prefill_impl = False
        device = torch.device(self.device)
        warn_if_untried(device, logger)
        draft_tokens = int(compat.setting("spec.speculative_num_draft_tokens", 0) or 0)
        max_rows = longest_extend(runner) + runner.req_to_token_pool.size * max(1, draft_tokens)
        topk = get_dsa_index_topk(runner.model_config.hf_config)

        def make(kv_dtype: torch.dtype | None) -> SelectedAttention:
            return SelectedAttention(
                self.num_q_heads,
                topk,
                max_rows=max_rows,
                dtype=runner.dtype,
                kv_dtype=kv_dtype,
                device=device,
            )

        # For prompts over an 8-bit pool SGLang dequantizes the tokens that they see.
        self._rows = {runner.dtype: make(None)}
        if self.dsa_kv_cache_store_fp8:
            self._rows[SCALED_LATENT_DTYPE] = make(SCALED_LATENT_DTYPE)
        self._planned: SelectedAttention | None = None  # it holds this step's plan
        self._last_layer = -1
        log_start(logger)

    @property
    def prefill_attention_backend_str(self) -> str:
        return _NAME

    @prefill_attention_backend_str.setter
    def prefill_attention_backend_str(self, name: str | None) -> None:
        """SGLang writes the server's names here."""

    @property
    def decode_attention_backend_str(self) -> str:
        return _NAME

    @decode_attention_backend_str.setter
    def decode_attention_backend_str(self, name: str | None) -> None:
        """As for prefills."""

    def init_forward_metadata(self, *args: Any, **kwargs: Any) -> None:
        export_counts(logger)
        super().init_forward_metadata(*args, **kwargs)

    def init_forward_metadata_out_graph(self, *args: Any, **kwargs: Any) -> None:
        export_counts(logger)
        super().init_forward_metadata_out_graph(*args, **kwargs)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._note(layer)
        out: Tensor = super().forward_decode(q, k, v, layer, *args, **kwargs)
        return out

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._note(layer)
        out: Tensor = super().forward_extend(q, k, v, layer, *args, **kwargs)
        return out

    def _note(self, layer: Any) -> None:
        """Notices a new step: layer numbers begin again. A captured graph then plans in its first layer."""
        if layer.layer_id <= self._last_layer:
            self._planned = None
        self._last_layer = layer.layer_id

    def _forward_flashmla_sparse(
        self,
        q_all: Tensor,
        kv_cache: Tensor,
        v_head_dim: int,
        page_table_1: Tensor,
        sm_scale: float,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            q_all: [rows, num_heads, 576].
            kv_cache: [slots, 1, 576], or 656 bytes a slot, of 8-bit floats for SGLang.
            page_table_1: int32 [rows, topk], slots; a negative one means none.
            topk_length: int32 [rows], an upper bound on the selected tokens of any layer, which SGLang knows
                before the indexer runs.

        Returns:
            [rows, num_heads, 512]
        """
        if attn_sink is not None:
            refuse("attention sinks over selected tokens")
        is_scaled = kv_cache.shape[-1] == SCALED_LATENT_BYTES
        cache = KVCache.from_latent(kv_cache.view(SCALED_LATENT_DTYPE) if is_scaled else kv_cache, v_head_dim)
        rows = self._rows[cache.dtype]
        if self._planned is not rows:
            counts = count_slots(page_table_1)
            if topk_length is not None and topk_length.shape == counts.shape:
                counts = torch.maximum(counts, topk_length)  # another layer may select more than this one
            rows.plan(counts)
            self._planned = rows
        return rows.run(q_all, cache, page_table_1, sm_scale=sm_scale)
