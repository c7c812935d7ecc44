"""An attention backend for mini-sglang (github.com/sgl-project/mini-sglang): everything that an adapter for
another engine has to do, in one class.

    # mini-sglang's server, with all of its options
    python examples/mini_sglang.py --model Qwen/Qwen3-0.6B --attn attn_backend

The server's schedulers are spawned processes, which load the main program's file again. So your own program
must also call `mini_sglang.register()` at a place that they execute, not behind `if __name__ == "__main__"`.
`LLM(model, attention_backend="attn_backend")` runs in the process that creates it.

Such an engine keeps its requests' tokens in slots of a cache. For each request, a row of a table has the slot
of each token. That table is the page table, unchanged: `PageTable.token_slots`. Nothing is copied, and plan
finds shared prefixes (equal slots, which a radix cache makes).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from packages import needs
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

MAX_ROWS = 8192  # per step: at least --max-prefill-length plus the running requests
MAX_BATCH = 512  # requests of a step, including those that pad a CUDA graph's batch


@dataclass
class Metadata:
    """A batch in the form that the device needs.

    is_planned: by one of its layers, or before the replay of a CUDA graph.
    """

    qo_indptr: Tensor  # int32 [batch + 1]
    kv_lens: Tensor  # int32 [batch]
    rows: Tensor  # int32 [batch], of the table
    is_planned: bool = False

    def get_last_indices(self, batch_size: int) -> Tensor:
        """Rows of the logits to sample."""
        return self.qo_indptr[1 : batch_size + 1] - 1


class AttnBackend:
    """context: mini-sglang's, with `kv_cache`, `page_table` (int32 [requests, longest], slots of tokens) and
    `page_size`.
    """

    def __init__(self, context: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.context = context
        self.heads = (num_qo_heads, num_kv_heads, head_dim)
        cache = context.kv_cache
        self.device: torch.device = cache.device
        # One object, one workspace: CUDA graphs of all batch sizes, and the steps between them.
        self.attention = Attention(
            *self.heads, dtype=cache.dtype, device=self.device, max_rows=MAX_ROWS, max_batch=MAX_BATCH
        )

    def prepare_metadata(self, batch: Any) -> None:
        """Once per step. Three small copies to the device, without waiting."""
        requests = batch.padded_reqs
        ends = torch.tensor([0] + [request.extend_len for request in requests]).cumsum(0).tolist()
        lists = (
            ends,
            [request.device_len for request in requests],
            [request.table_idx for request in requests],
        )
        batch.attn_metadata = Metadata(*(self._on_device(values) for values in lists))

    def _on_device(self, values: list[int]) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.tensor(values, dtype=torch.int32, pin_memory=pinned).to(self.device, non_blocking=True)

    def _plan(self, metadata: Metadata) -> None:
        table = PageTable.token_slots(
            self.context.page_table, metadata.rows, metadata.kv_lens, self.context.page_size
        )
        self.attention.plan(BSRView(metadata.qo_indptr, table, causal=True))
        metadata.is_planned = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Any) -> Tensor:
        """One layer. q: [rows, num_qo_heads, head_dim], k, v: [rows, num_kv_heads * head_dim].

        Captured in CUDA graphs, whose batches are planned beforehand.
        """
        if not batch.attn_metadata.is_planned:
            self._plan(batch.attn_metadata)
        cache = self.context.kv_cache
        kv = KVCache.from_pair(cache.k_cache(layer_id), cache.v_cache(layer_id))
        heads = (-1, self.heads[1], self.heads[2])
        append_kv(k.view(heads), v.view(heads), kv, batch.out_loc)
        return self.attention.run(q, kv, after_append=True)

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        """Does nothing: graphs need no additional tensors.

        A plan leaves everything that a captured run reads in the workspace.
        """

    def prepare_for_capture(self, batch: Any) -> None:
        self.prepare_metadata(batch)
        self._plan(batch.attn_metadata)

    def prepare_for_replay(self, batch: Any) -> None:
        self._plan(batch.attn_metadata)


def register() -> None:
    """Makes mini-sglang's option accept the name `attn_backend`."""
    from minisgl.attention import SUPPORTED_ATTENTION_BACKENDS
    from minisgl.core import get_global_ctx
    from minisgl.distributed import get_tp_info
    from minisgl.utils import div_even

    @SUPPORTED_ATTENTION_BACKENDS.register("attn_backend")
    def create(config: Any) -> AttnBackend:
        ranks = get_tp_info().size
        heads = (
            div_even(config.num_qo_heads, ranks),
            div_even(config.num_kv_heads, ranks, allow_replicate=True),
            config.head_dim,
        )
        return AttnBackend(get_global_ctx(), *heads)


SOURCE = "git+https://github.com/sgl-project/mini-sglang"
if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv[1:]} and find_spec("minisgl") is None:
    sys.exit(f"{__doc__}\nmini-sglang's own options are listed once it is installed: pip install {SOURCE}")
if __name__ in ("__main__", "__mp_main__"):  # the second in a spawned scheduler
    with needs("mini-sglang", source=SOURCE):
        register()
if __name__ == "__main__":
    from minisgl.server import launch_server

    launch_server()
