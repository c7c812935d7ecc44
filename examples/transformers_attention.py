"""Hugging Face transformers on attn_backend: `generate`, and continuous batching over its paged cache.

    python examples/transformers_attention.py [--model FOLDER_OR_NAME] [--device cuda]

Generates greedily with transformers' own attention and with this package's, and compares the tokens. Without
--model: a small random Llama.

The example registers two functions with transformers:

- "attn_backend" serves the ordinary forward pass. The cache is one tensor for each layer, and each request is
  one page of it.
- "paged|eager" is replaced for `generate_batch`. The function reads the paged cache in place, instead of
  copying each request's tokens for every layer. Continuous batching accepts only transformers' own names.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
from packages import needs
from torch import Tensor, nn

from attn_backend import Attention, BSRView, KVCache, PageTable

with needs("transformers"):
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.masking_utils import flash_attention_mask

PROMPT_LENS = (5, 40, 17, 23)
# a chunk has fewer tokens than the prompts together, so some are read in parts
CACHE_BLOCKS, CHUNK = 64, 32


@dataclass
class Planner:
    """The Attention of each head shape, and the plans of a forward pass: its layers run in order, and layers
    with the same window share a plan.
    """

    attentions: dict[Any, Attention] = field(default_factory=dict)
    last_layer: int = -1

    def attention(
        self, query: Tensor, num_kv_heads: int, window_left: int, rows: int, batch: int
    ) -> Attention:
        """An Attention with room for a batch. query: [rows, num_qo_heads, head_dim]."""
        key = (query.shape[1:], num_kv_heads, query.dtype, query.device, window_left)
        known = self.attentions.get(key)
        if known is None or rows > known.max_rows or batch > known.max_batch:
            max_rows, max_batch = 1 << max(rows - 1, 63).bit_length(), 1 << max(batch - 1, 7).bit_length()
            heads = (query.shape[1], num_kv_heads, query.shape[2])
            self.attentions[key] = Attention(
                *heads, dtype=query.dtype, device=query.device, max_rows=max_rows, max_batch=max_batch
            )
            self.last_layer = -1
        return self.attentions[key]

    def run(
        self,
        module: nn.Module,
        query: Tensor,
        kv: KVCache,
        view: BSRView,
        scaling: float | None,
        soft_cap: float | None,
    ) -> Tensor:
        """query: [rows, num_qo_heads, head_dim]."""
        attention = self.attention(query, kv.num_kv_heads, view.window_left, len(query), view.batch_size)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer <= self.last_layer or self.last_layer < 0:  # another forward pass
            self.planned: set[int] = set()
        self.last_layer = layer
        if id(attention) not in self.planned:
            attention.plan(view)
            self.planned.add(id(attention))
        return attention.run(query, kv, sm_scale=scaling, logits_soft_cap=soft_cap or 0.0)


PLANNER = Planner()


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """query: [batch, num_qo_heads, q_len, head_dim]; key, value: [batch, num_kv_heads, kv_len, head_dim];
    attention_mask: bool or int [batch, kv_len], False for padding, which may be on either side. Returns
    [batch, q_len, num_qo_heads, head_dim].
    """
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    device, int32 = query.device, torch.int32
    if attention_mask is None:
        # Request i is page i: nothing is copied.
        kv, lens = (
            KVCache.from_pair(key, value, layout="HND"),
            torch.full((batch,), kv_len, dtype=int32, device=device),
        )
        table = PageTable.block_table(torch.arange(batch, dtype=int32, device=device)[:, None], lens, kv_len)
        rows = query.transpose(1, 2).flatten(0, 1)
        qo_indptr = torch.arange(0, batch * q_len + 1, q_len, dtype=int32, device=device)
    else:
        seen = attention_mask.bool()
        kv = KVCache.from_ragged(key.transpose(1, 2)[seen], value.transpose(1, 2)[seen])
        table = PageTable.ragged(indptr_of(seen.sum(1)))
        is_query = seen[:, kv_len - q_len :]
        rows, qo_indptr = query.transpose(1, 2)[is_query], indptr_of(is_query.sum(1))
    view = BSRView(
        qo_indptr,
        table,
        causal=bool(getattr(module, "is_causal", True)),
        window_left=-1 if sliding_window is None else sliding_window - 1,
    )
    out = PLANNER.run(module, rows.contiguous(), kv, view, scaling, softcap)
    if attention_mask is None:
        return out.unflatten(0, (batch, q_len)), None
    padded = out.new_zeros(batch, q_len, *out.shape[1:])
    padded[is_query] = out
    return padded, None


def indptr_of(lens: Tensor) -> Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)


def paged_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query: [1, num_qo_heads, rows, head_dim], key, value: [1, num_kv_heads, rows, head_dim], the rows of
    all requests concatenated.

    options: transformers' cache and its indices. These are `cu_seq_lens_q` [batch + 1], and by kind of layer
    `cu_seq_lens_k` [batch + 1], `write_index` [rows], the slots of the new tokens, and `read_index`, the
    slots of all tokens of each request. `read_index` is empty if no request has older tokens.
    """
    cache = options["cache"]
    allocator = cache.layer_to_allocator[module.layer_idx]
    write_index, read_index = options["write_index"][allocator.index], options["read_index"][allocator.index]
    kv_indptr = options["cu_seq_lens_k"][allocator.layer_type].int()
    k_slots, v_slots = allocator._kv_token_views[module.layer_idx]
    k, v = (tokens[0].transpose(0, 1) for tokens in (key, value))
    k_slots.index_copy_(0, write_index, k)
    v_slots.index_copy_(0, write_index, v)
    if len(read_index):
        ones = torch.ones(len(kv_indptr) - 1, dtype=torch.int32, device=query.device)
        slots = min(len(k_slots), len(v_slots))  # views of one tensor; one of them begins later
        kv, table = (
            KVCache.from_slots(k_slots[:slots], v_slots[:slots]),
            PageTable.csr(kv_indptr, read_index.int(), ones, 1),
        )
    else:
        kv, table = KVCache.from_ragged(k, v), PageTable.ragged(kv_indptr)
    view = BSRView(
        options["cu_seq_lens_q"].int(),
        table,
        causal=True,
        window_left=-1 if sliding_window is None else sliding_window - 1,
    )
    out = PLANNER.run(module, query[0].transpose(0, 1).contiguous(), kv, view, scaling, softcap)
    return out.unsqueeze(0), None


def register() -> None:
    AttentionInterface.register("attn_backend", forward)
    # which tokens are padding; the causal part needs no tensor
    AttentionMaskInterface.register("attn_backend", flash_attention_mask)
    AttentionInterface.register("paged|eager", paged_forward)


def load(model: str | None, device: str) -> Any:
    if model is not None:
        return (
            AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
            )
            .to(device)
            .eval()
        )
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def generated(
    model: Any, prompts: list[list[int]], attn_implementation: str, new_tokens: int
) -> list[list[int]]:
    """Greedy tokens of a batch whose prompts are padded on the left."""
    model.set_attn_implementation(attn_implementation)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
    )
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[:, longest:].tolist()


def generated_continuously(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The same with continuous batching."""
    model.set_attn_implementation("paged|eager")
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=CACHE_BLOCKS, max_batch_tokens=CHUNK)
    results = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching, warmup=False
    )
    by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder or name of a causal language model; default: a small random Llama"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to generate (%(default)s)")
    arguments = parser.parse_args()
    register()
    model = load(arguments.model, arguments.device)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, model.config.vocab_size, (length,), generator=generator).tolist()
        for length in PROMPT_LENS
    ]
    expected = generated(model, prompts, "sdpa", arguments.new_tokens)
    for name, tokens in (
        ("generate", generated(model, prompts, "attn_backend", arguments.new_tokens)),
        ("generate_batch", generated_continuously(model, prompts, arguments.new_tokens)),
    ):
        same = sum(
            a == b
            for mine, theirs in zip(tokens, expected, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        print(f"{name}: {same} of {arguments.new_tokens * len(prompts)} tokens as with sdpa")


if __name__ == "__main__":
    main()
