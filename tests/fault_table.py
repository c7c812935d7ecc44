"""Small realistic faults that the tests must notice. `python -m tests.faults` puts them into the sources. A fault whose text is no longer there is an error:
give it the new text, or take it from the list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str  # once in the file
    new: str
    tests: tuple[str, ...]  # arguments of pytest: what must fail


DRAWS = ("tests/kernels/test_sampling_draws.py",)
DEVICE = "tests/csrc/test_device_kernels.py"
ATTENTION = "tests/csrc/test_attention_kernels.py"
FLOAT8_OUTPUTS = ("tests/csrc/test_float8_output_kernels.py", "-k", "16_bits and hopper and dtype0")
FLOAT8_QUERIES = ("tests/csrc/test_float8_kernels.py", "-k", "queries_of_8_bits and hopper and 64")
SGLANG = ("tests/adapters/sglang/test_sglang_backend.py",)
VLLM = ("tests/adapters/vllm",)
CUBINS = ("tests/kernels/test_cubins.py",)

FAULTS = (
    Fault(
        "sample_from_probs: seed and position swapped",
        "attn_backend/kernels/sampling.py",
        "seed, position = draws(batch, device, seed, position, generator)\n",
        "position, seed = draws(batch, device, seed, position, generator)\n",
        DRAWS,
    ),
    Fault(
        "chain_speculative_sampling: seed and position swapped",
        "attn_backend/kernels/sampling.py",
        "seed, position = draws(batch, device, seed, position, generator, of_row=rows)",
        "position, seed = draws(batch, device, seed, position, generator, of_row=rows)",
        DRAWS,
    ),
    Fault(
        "speculation: the last draw at the first position",
        "csrc/sampling/cpu/sampling.cpp",
        "drawn.position.value = position + accepted;",
        "drawn.position.value = position;",
        DRAWS,
    ),
    Fault(
        "token mask: rows as far apart as the vocabulary needs",
        "csrc/sampling/cpu/sampling.cpp",
        "const uint32_t* words = params.token_mask + row * params.mask_stride;",
        "const uint32_t* words = params.token_mask + row * ((params.vocab + 31) / 32);",
        ("tests/kernels/test_sampling.py",),
    ),
    Fault(
        "token mask of a bad row: the same",
        "csrc/sampling/cpu/sampling.cpp",
        "const uint32_t* words = params_.token_mask + row_ * params_.mask_stride;",
        "const uint32_t* words = params_.token_mask + row_ * ((params_.vocab + 31) / 32);",
        ("tests/kernels/test_sampling.py",),
    ),
    Fault(
        "a negative target does not spoil the row",
        "csrc/sampling/sampling.h",
        "rest < 0.0f && target >= 0.0f && draft >= 0.0f ? 0.0f : rest",
        "rest < 0.0f ? 0.0f : rest",
        DRAWS,
    ),
    Fault(
        "append: V's token stride taken from K",
        "csrc/runtime/append.cpp",
        "params.v_token_stride = v.stride(0);",
        "params.v_token_stride = k.stride(0);",
        ("tests/kernels/test_append.py",),
    ),
    Fault(
        "append: V's head stride taken from K",
        "csrc/runtime/append.cpp",
        "params.v_head_stride = v.stride(1);",
        "params.v_head_stride = k.stride(1);",
        ("tests/kernels/test_append.py",),
    ),
    Fault(
        "append_qkv: weights of Q's norm for K",
        "csrc/cache/cpu/append_qkv.cpp",
        "finish(p_.k_norm, true);",
        "finish(p_.q_norm, true);",
        ("tests/kernels/test_append_qkv.py",),
    ),
    Fault(
        "append_qkv: positions of a table are not bounded",
        "csrc/cache/qkv_params.h",
        "clamp(position, 0, p.num_positions - 1)",
        "clamp(position, 0, p.num_positions)",
        ("tests/kernels/test_append_qkv.py",),
    ),
    Fault(
        "packed rows of exactly 2^31",
        "attn_backend/kernels/attention_config.py",
        "max_rows * group_size > MAX_INT32",
        "max_rows * group_size > MAX_INT32 + 1",
        ("tests/kernels/test_attention.py", "-k", "packed_rows"),
    ),
    Fault(
        "planned tensors are let go",
        "attn_backend/kernels/attention.py",
        "        self._levels = levels\n",
        "",
        ("tests/kernels/test_attention.py", "-k", "keeps_its_tensors"),
    ),
    Fault(
        "costs of row tiles that leave states",
        "attn_backend/kernels/schedule.py",
        'return self.of_tiles("kind").long() + len(self.kv_tile_cost) // 2 * leaves_states',
        'return self.of_tiles("kind").long()',
        ("tests/kernels/test_schedule.py",),
    ),
    Fault(
        "OpenMP used in a child after fork()",
        "csrc/common/cpu/parallel.cpp",
        "  if (opened_a_region) openmp_lost_in_fork.store(true, std::memory_order_relaxed);\n",
        "",
        ("tests/csrc/test_parallel.py",),
    ),
    Fault(
        "a pool of threads used in a child after fork()",
        "csrc/common/cpu/parallel.cpp",
        "  own_pool.store(nullptr, std::memory_order_release);\n",
        "",
        ("tests/csrc/test_parallel.py",),
    ),
    Fault(
        "an instruction set replaced by a lesser one",
        "csrc/common/cpu/isa.cpp",
        'if (std::strcmp(name, "avx2") == 0) return Isa::kAvx2;',
        'if (std::strcmp(name, "avx2") == 0) return Isa::kBaseline;',
        ("tests/csrc/test_cpu_isa.py", "-k", "avx2"),
    ),
    Fault(
        "planner: more row tiles than there is room for are no error",
        "csrc/planner/host/planner.cpp",
        "  if (counted > config.max_tiles) planned.errors |= kQoIndptrInvalid;\n",
        "",
        ("tests/csrc/test_device_planner.py", "-k", "room"),
    ),
    Fault(
        "device append: V's page stride taken from K",
        "csrc/cache/append.cu",
        "const int64_t v_token = page * p.v_cache.page_stride",
        "const int64_t v_token = page * p.k_cache.page_stride",
        (DEVICE, "-k", "append"),
    ),
    Fault(
        "generic kernel: V read from K",
        "csrc/attention/sm80/kv_loader.cuh",
        "const KvTensor& tensor = is_v ? params.v : params.k;",
        "const KvTensor& tensor = params.k;",
        (ATTENTION, "-k", "random_cases and generic"),
    ),
    Fault(
        "merge: a later CTA's part",
        "csrc/attention/merge/merge.cuh",
        "first_cta, link) + number - 1;",
        "first_cta, link) + number;",
        (ATTENTION, "-k", "random_cases"),
    ),
    Fault(
        "merge: parts of other CTAs left out where rows are in several groups",
        "csrc/attention/merge/merge.cuh",
        "parts.of_link = 1 + inside.end - inside.begin;",
        "parts.of_link = 1;",
        (ATTENTION, "-k", "forests_and_chunks"),
    ),
    Fault(
        "walk: a head too many",
        "csrc/attention/work_cursor.cuh",
        "if (++now.head == num_kv_heads) {",
        "if (++now.head > num_kv_heads) {",
        (ATTENTION, "-k", "random_cases and hopper"),
    ),
    Fault(
        "work queue: another row tile",
        "csrc/planner/schedule.h",
        "2 * group.tile_begin + of_group - 1 - tile",
        "2 * group.tile_begin + of_group - tile",
        (ATTENTION, "-k", "work_queue"),
    ),
    Fault(
        "Hopper kernel: scores are not waited for",
        "csrc/attention/sm90/consumer.cuh",
        "        ptx::wgmma_wait<1>();\n",
        "",
        (ATTENTION, "-k", "random_cases and hopper"),
    ),
    Fault(
        "Hopper kernel: a fence forgotten",
        "csrc/attention/sm90/consumer_base.cuh",
        "  ptx::fence_async_proxy();  // before wgmma reads it, and TMA writes it again\n",
        "",
        (ATTENTION, "-k", "random_cases and hopper"),
    ),
    Fault(
        "Hopper kernel: another swizzle",
        "csrc/attention/sm90/swizzled_tile.cuh",
        "(((chunk & 7) ^ (row & 7)) << 4)",
        "(((chunk & 7) ^ (row & 3)) << 4)",
        (ATTENTION, "-k", "random_cases and hopper"),
    ),
    Fault(
        "Hopper kernel: a barrier for too many warps",
        "csrc/attention/sm90/shared_memory.cuh",
        "ptx::mbarrier_init(q_free(slot), kConsumerWarps);",
        "ptx::mbarrier_init(q_free(slot), kConsumerWarps + 1);",
        (ATTENTION, "-k", "every_kind and hopper"),
    ),
    Fault(
        "masks: a token too far",
        "csrc/attention/warp_state.cuh",
        "scores_before(tokens.end - first_column)",
        "scores_before(tokens.end + 1 - first_column)",
        (ATTENTION, "-k", "random_cases"),
    ),
    Fault(
        "device sampling: another bit of the mask",
        "csrc/sampling/device/source.cuh",
        "__ldg(mask + (first >> 5)) >> (first & 31)",
        "__ldg(mask + (first >> 5)) >> (first & 15)",
        (DEVICE, "-k", "sampling"),
    ),
    Fault(
        "SGLang: no bound on rows",
        "attn_backend/adapters/sglang/plan.py",
        "if batch.num_rows <= self.attention.max_rows and batch_size <= self.attention.max_batch:",
        "if batch_size <= self.attention.max_batch:",
        SGLANG,
    ),
    Fault(
        "SGLang: the cache's view kept when the pool is reallocated",
        "attn_backend/adapters/sglang/layer_cache.py",
        "if self._kv is None or self._buffers is None or k is not self._buffers[0] or (v is not self._buffers[1] and not self._makes_v_anew):",
        "if self._kv is None:",
        ("tests/adapters/sglang",),
    ),
    Fault("SGLang: padding slots not zeroed", "attn_backend/adapters/sglang/window.py", "self._buffer[count:].zero_()", "pass", SGLANG),
    Fault("SGLang: after_append always", "attn_backend/adapters/sglang/backend.py", "after_append=appended,", "after_append=True,", SGLANG),
    Fault("vLLM: after_append always", "attn_backend/adapters/vllm/impl.py", "after_append=appended,", "after_append=True,", VLLM),
    Fault("vLLM: a window cuts the images of Gemma 3", "attn_backend/adapters/layer_variants.py", "return before | (", "return before & window >= 0 | (", VLLM),
    Fault("vLLM: no window cuts the images of Gemma 4", "attn_backend/adapters/layer_variants.py", "key.window_left if key.cuts_spans else -1", "-1", VLLM),
    Fault("vLLM: images of the step before", "attn_backend/adapters/spans.py", "                self.clear()\n", "                pass\n", VLLM),
    Fault("vLLM: sinks are loaded once", "attn_backend/adapters/vllm/impl.py", "self._float_sinks.copy_(sinks)", "pass", VLLM),
    Fault(
        "SGLang: chunks counted from the window pool's first token",
        "attn_backend/adapters/sglang/plan.py",
        "kv_offsets=tokens_before if key.needs_variant else None",
        "kv_offsets=None",
        SGLANG,
    ),
    Fault(
        "SGLang: decompressed keys planned behind a prefix, too",
        "attn_backend/adapters/sglang/backend.py",
        "if plan.key.of_this_step and batch.has_prefixes:",
        "if False:",
        ("tests/adapters/sglang/test_sglang_mla.py",),
    ),
    Fault(
        "vLLM: chunks of a prefix run the plan of the last one",
        "attn_backend/adapters/vllm/mla_prefill.py",
        "if number != self._planned_chunk:",
        "if False:",
        ("tests/adapters/vllm/test_vllm_mla.py",),
    ),
    Fault(
        "append_mla_kv: the rotated part from the latent's columns",
        "attn_backend/kernels/append_mla.py",
        "KVCache.unchecked(k[..., :width], k[..., width:], kv.k_scale, kv.k_scale)",
        "KVCache.unchecked(k[..., -width:], k[..., : k.shape[3] - width], kv.k_scale, kv.k_scale)",
        ("tests/kernels/test_append_mla.py",),
    ),
    Fault(
        "masks with holes: each listed KV tile counts as seen by all rows",
        "csrc/attention/kv_tile_lists.h",
        "of_view.tokens(p, kv_tile).begin, !answer.some_hidden)",
        "of_view.tokens(p, kv_tile).begin, true)",
        (ATTENTION, "-k", "masks_with_holes"),
    ),
    Fault(
        "sparse MLA: a plan finds prefixes in slots that the next layer changes",
        "csrc/runtime/bindings.cpp",
        "!options.pages_change",
        "true",
        ("tests/kernels/test_sparse_mla.py",),
    ),
    Fault(
        "sparse MLA: tokens that a row does not see",
        "csrc/planner/selection.h",
        "if (token < 0 || token >= row.num_tokens) return -1;",
        "if (token < 0) return -1;",
        ("tests/kernels/test_selected_slots.py",),
    ),
    Fault(
        "sparse MLA: a plan goes on with as many tokens as were planned",
        "csrc/planner/selection.h",
        "tile.kv_end = static_cast<int32_t>(min_of<int64_t>(length, room));",
        "",
        ("tests/kernels/test_sparse_mla.py",),
    ),
    Fault(
        "sparse MLA: a later KV chunk has the tokens of the first",
        "csrc/planner/selection.h",
        "max_of(min_of(count, planned) - begin, 0)",
        "min_of(count, planned)",
        ("tests/kernels/test_sparse_mla.py", "-k", "fewer_than"),
    ),
    Fault(
        "sparse MLA on a GPU: a warp's slots where those of the warp before are",
        "csrc/planner/device/selection.cuh",
        "if (i < warp) place += of_warp;",
        "if (i + 1 < warp) place += of_warp;",
        ("tests/csrc/test_device_selection.py",),
    ),
    Fault(
        "sparse MLA: every part of a long step runs the plan of the first",
        "attn_backend/adapters/selected.py",
        "if self._first_planned != begin:",
        "if False:",
        ("tests/adapters/test_selected.py",),
    ),
    Fault(
        "SGLang: sparse MLA goes on with the plan of the step before",
        "attn_backend/adapters/sglang/sparse.py",
        "if layer.layer_id <= self._last_layer:",
        "if False:",
        ("tests/adapters/sglang/test_sglang_sparse.py",),
    ),
    Fault(
        "latents: scales of their own are those of the columns before",
        "csrc/attention/widened_row.cuh",
        "const int number = piece * kBlockColumns / Latent::kColumnsOfScale;",
        "const int number = max_of(piece - 1, 0) * kBlockColumns / Latent::kColumnsOfScale;",
        ("tests/csrc/test_latent_kernels.py", "-k", "scaled"),
    ),
    Fault(
        "latents: the producer's writes are not fenced",
        "csrc/attention/sm90/widening_copier.cuh",
        "    ptx::fence_async_proxy();\n",
        "",
        ("tests/csrc/test_latent_kernels.py", "-k", "hopper"),
    ),
    Fault(
        "vLLM's first sampler: a position too far",
        "attn_backend/adapters/vllm/sampler.py",
        "Draws(seeds, self.seq_lens[: batch.num_reqs] - 1)",
        "Draws(seeds, self.seq_lens[: batch.num_reqs])",
        VLLM,
    ),
    Fault(
        "cache key: without the compiler's flags",
        "attn_backend/kernels/cubins.py",
        ', *(flag for flag in flags(arch) if not flag.startswith("-I"))]',
        "]",
        CUBINS,
    ),
    Fault("cache key: without code_address", "attn_backend/kernels/cubins.py", "    digest.update(code_address.recipe())\n", "", CUBINS),
    Fault(
        "8-bit products: wgmma reads a transposed V that no fence has followed",
        "csrc/attention/sm90/float8_consumer.cuh",
        "    ptx::fence_async_proxy();  // before wgmma reads it\n",
        "",
        FLOAT8_QUERIES,
    ),
    Fault(
        "8-bit products: V is transposed to where it is still multiplied",
        "csrc/attention/sm90/float8_consumer.cuh",
        "shared.widened(num_multiplied & 1)",
        "shared.widened(0)",
        FLOAT8_QUERIES,
    ),
    Fault(
        "8-bit products: a KV tile's P V is added to what its registers held",
        "csrc/attention/sm90/float8_consumer.cuh",
        "Transposed::columns(values, k), k > 0);",
        "Transposed::columns(values, k), 1);",
        FLOAT8_QUERIES,
    ),
    Fault(
        "8-bit outputs: merge forgets the scale",
        "csrc/attention/merge/merge.cuh",
        "values[i] *= out_factor;",
        "values[i] *= 1.0f;",
        FLOAT8_OUTPUTS,
    ),
    Fault(
        "8-bit outputs: the second row of a lane is staged where the first is",
        "csrc/attention/output.cuh",
        "        *reinterpret_cast<uint16_t*>(staged + Tile::offset(row, n / 2) + n % 2 * 8",
        "        *reinterpret_cast<uint16_t*>(staged + Tile::offset(row - half * 8, n / 2) + n % 2 * 8",
        FLOAT8_OUTPUTS,
    ),
    Fault(
        "8-bit outputs on a CPU: a scale too small to be inverted makes NaN of 0",
        "csrc/attention/params.h",
        "return min_of(1.0f / (out_scale_data == nullptr ? out_scale : *out_scale_data), kMaxFloat);",
        "return 1.0f / (out_scale_data == nullptr ? out_scale : *out_scale_data);",
        ("tests/kernels/test_float8_output.py", "-k", "cpu and scale_of_0"),
    ),
)
