"""Layers with 8-bit output, compared with vLLM's own path, which quantizes the layer's output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")

from float8_outputs import check_like_unfused
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm_float8 import builder_of, cache_of, fill, layer_of
from vllm_layer import make_batch, make_builder, make_cache, make_impl, make_spec
from vllm_steps import MIXED, fill_cache

from attn_backend.adapters.vllm import attention as vllm_attention
from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.attention import AttnImpl, CpuAttnImpl

DTYPE = torch.float8_e4m3fn


@pytest.fixture
def fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is configured to fuse quantization into attention."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=True))
    )
    monkeypatch.setattr(compat, "get_current_vllm_config_or_none", lambda: config)


def quantised_by_vllm(output: Tensor, scale: Tensor) -> Tensor:
    """Like vLLM's QuantFP8 with a static scale."""
    limit = torch.finfo(DTYPE).max
    return (output.float() * scale.reciprocal()).clamp(-limit, limit).to(DTYPE)


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "arguments", [{}, {"sliding_window": 9}, {"alibi_slopes": [0.1] * 6}, {"sinks": torch.linspace(-1, 1, 6)}]
)
def test_like_the_path_that_is_not_fused(arguments: dict[str, object], dtype: torch.dtype) -> None:
    """Layers of one plan, only one of them fused; rows of padding are left alone."""
    impls = [make_impl(**arguments) for _ in range(2)]
    cache, batch = make_cache("NHD", dtype=dtype), make_batch(*MIXED)
    builder = make_builder(list(impls), make_spec(dtype=dtype))
    assert len(builder.planned) == 1
    metadata = builder.build(0, batch.metadata)
    k, v = fill_cache(cache, batch)
    impls[0].do_kv_cache_update(
        None, k[batch.new_slots], v[batch.new_slots], cache, batch.metadata.slot_mapping
    )
    tokens = sum(batch.query_lens)
    query = torch.randn(tokens + 3, 6, 64).to(dtype)
    plain, output = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan, dtype=DTYPE)
    impls[0].forward(None, query, None, None, cache, metadata, plain)
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, 0.004)
        output.fill_(torch.nan)
        assert (
            impls[1].forward(None, query, None, None, cache, metadata, output, output_scale=scale) is output
        )
        check_like_unfused(output[:tokens], plain[:tokens], scale)
        assert (
            output[:tokens].float() == quantised_by_vllm(plain[:tokens], scale).float()
        ).float().mean() > (0.999 if dtype == torch.float32 else 0.9)
        assert output[tokens:].float().isnan().all()
        assert (output[:tokens].float().abs() == 448).any()  # beyond what 8 bits hold


@pytest.mark.usefixtures("fuses")
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_over_caches_of_8_bits(kv_cache_dtype: str) -> None:
    impl, layer, cache, batch = (
        make_impl(kv_cache_dtype=kv_cache_dtype),
        layer_of(0.05, 0.3),
        cache_of(kv_cache_dtype),
        make_batch(*MIXED),
    )
    metadata = builder_of([impl], torch.bfloat16).build(0, batch.metadata)
    fill(impl, layer, cache, batch, torch.bfloat16)
    query, scale = torch.randn(sum(batch.query_lens), 6, 64).bfloat16(), torch.tensor(0.01)
    plain, output = torch.empty_like(query), torch.empty_like(query, dtype=DTYPE)
    for out, out_scale in ((plain, None), (output, scale)):
        impl.forward(layer, query, None, None, cache, metadata, out, output_scale=out_scale)
    check_like_unfused(output, plain, scale)


@pytest.mark.usefixtures("fuses")
def test_a_scale_that_changes_under_a_plan() -> None:
    impl, cache, batch = make_impl(), make_cache("HND"), make_batch(*MIXED)
    metadata = make_builder([impl]).build(0, batch.metadata)
    k, v = fill_cache(cache, batch)
    impl.do_kv_cache_update(None, k[batch.new_slots], v[batch.new_slots], cache, batch.metadata.slot_mapping)
    query, scale = torch.randn(sum(batch.query_lens), 6, 64), torch.ones(1)
    plain, output = torch.empty_like(query), torch.empty_like(query, dtype=DTYPE)
    impl.forward(None, query, None, None, cache, metadata, plain)
    for value in (0.01, 0.5):
        scale.fill_(value)
        impl.forward(None, query, None, None, cache, metadata, output, output_scale=scale)
        check_like_unfused(output, plain, value)


@pytest.mark.usefixtures("fuses")
def test_a_profiling_run() -> None:
    """Runs without metadata; vLLM's compiled graph passes the scale here too."""
    output = torch.full((4, 6, 64), torch.nan).to(DTYPE)
    make_impl().forward(
        None, torch.zeros(4, 6, 64), None, None, torch.empty(0), None, output, output_scale=torch.ones(1)
    )
    assert output.float().eq(0).all()


@pytest.mark.usefixtures("fuses")
def test_what_is_fused() -> None:
    """One scale for the whole tensor, known in advance."""
    impl = make_impl()
    others = (
        "kFp8DynamicTensorSym",
        "kFp8DynamicTokenSym",
        "kFp8StaticTokenSym",
        "kFp8Dynamic128Sym",
        "kNvfp4Dynamic",
        "kNvfp4Static",
    )
    keys = {name: getattr(quant_utils, name) for name in others if hasattr(quant_utils, name)}
    assert len(keys) >= 4
    assert impl.fused_output_quant_supported(quant_utils.kFp8StaticTensorSym)
    assert not any(impl.fused_output_quant_supported(key) for key in keys.values())


@pytest.mark.usefixtures("fuses")
def test_on_a_gpu_where_kernels_are_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_attention.torch, "get_default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(vllm_attention.torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kv_cache_dtype in ("auto", "fp8"):
        supported = {
            size: AttnImpl(8, size, 1.0, 2, kv_cache_dtype=kv_cache_dtype).spec.float8_out
            for size in (64, 128, 256)
        }
        assert supported == {64: False, 128: True, 256: False}


def test_nothing_is_fused_unless_vllm_is_configured_to() -> None:
    impl = make_impl()
    assert not impl.spec.float8_out
    assert not impl.fused_output_quant_supported(quant_utils.kFp8StaticTensorSym)
    output = torch.empty(4, 6, 64, dtype=DTYPE)
    with pytest.raises(NotImplementedError, match=r"does not quantize its output.*fuse_attn_quant"):
        impl.forward(
            None, torch.zeros(4, 6, 64), None, None, torch.empty(0), None, output, output_scale=torch.ones(1)
        )


# CUDA operators that the pass names but does not call here.
CUDA_OPERATORS = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
)


@pytest.mark.slow
def test_vllms_pass_takes_the_quantisation_out_of_the_graph() -> None:
    """vLLM's own pass over the graph of one layer and its output quantization: it queries the layer, and
    passes it the scale.
    """
    vllm_config = pytest.importorskip("vllm.config")
    declared = torch.library.Library("_C", "FRAGMENT")
    for name in CUDA_OPERATORS:
        if not hasattr(torch.ops._C, name):
            declared.define(f"{name}(Tensor! out, Tensor input) -> ()")
    from torch._subclasses import FakeTensorMode
    from vllm.model_executor.layers.attention import Attention

    attn_quant_fusion = pytest.importorskip("vllm.compilation.passes.fusion.attn_quant_fusion")
    passes = vllm_config.PassConfig(fuse_attn_quant=True)
    config = vllm_config.VllmConfig(
        compilation_config=vllm_config.CompilationConfig(pass_config=passes, splitting_ops=[])
    )
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with vllm_config.set_current_vllm_config(config):
        layer = Attention.__new__(Attention)
        torch.nn.Module.__init__(layer)
        layer.layer_name, layer.num_heads, layer.head_size, layer.impl = (
            "model.layers.0.attn",
            6,
            64,
            make_impl(),
        )
        config.compilation_config.static_forward_context[layer.layer_name] = layer
        fusion = attn_quant_fusion.AttnQuantFusionPass(config)
        unfused = attn_quant_fusion.AttnFp8StaticQuantPattern(layer, torch.bfloat16)
        with FakeTensorMode():
            graph = fusion._trace_fn(unfused.pattern, unfused.get_inputs()).graph
        fusion(graph)
    assert fusion.matched_count == 1
    (attention,) = [node for node in graph.nodes if "output_scale" in node.kwargs]
    assert attention.kwargs["output_scale"] is not None
    assert attention.kwargs["output_block_scale"] is None
    assert not [node for node in graph.nodes if "clamp" in str(node.target)]


@pytest.mark.usefixtures("fuses")
def test_scales_of_blocks_are_refused() -> None:
    impl: CpuAttnImpl = make_impl()
    output = torch.empty(4, 6, 64, dtype=DTYPE)
    with pytest.raises(NotImplementedError, match="does not quantize its output by blocks"):
        impl.forward(
            None,
            torch.zeros(4, 6, 64),
            None,
            None,
            torch.empty(0),
            None,
            output,
            torch.ones(1),
            torch.ones(4, 3),
        )
