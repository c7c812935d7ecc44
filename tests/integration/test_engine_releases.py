"""Every class, method, argument and attribute of the engines that the adapters use, in every supported
release.

The tests read the sources of the releases (`python -m integration.engine_sources` fetches them once), and
import nothing.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_interface import (
    ASKED,
    ASKED_BY_VARIABLE,
    BASES,
    CALLS,
    DSA,
    IMPL_ARGUMENTS,
    MAYBE,
    MEMBERS,
    MLA,
    MODULES,
    SPARSE_MLA,
)
from engine_modules import Parameters, Release, parameters_of

from attn_backend.adapters.vllm.rules import (
    BYTES_OF_ROWS_SINCE,
    OWN_CACHE,
    TOKEN_SCALED_CACHES,
    bytes_of_row,
)
from attn_backend.metadata.kv_cache import side_dtypes
from attn_backend.releases import (
    RELEASES,
    SGLANG_ON_CPU_SINCE,
    is_before,
    was_checked,
)
from integration.engine_sources import CannotFetch, releases_to_check, sources

pytestmark = pytest.mark.slow  # the first run fetches 600 MB
ADAPTERS = Path(__file__).resolve().parents[2] / "attn_backend" / "adapters"
CHECKED = releases_to_check()
ALL = [
    pytest.param(engine, version, id=f"{engine}-{version}")
    for engine, versions in CHECKED.items()
    for version in versions
]


@cache
def _read(engine: str, version: str) -> Release | str:
    """The release, or the reason why it is missing."""
    try:
        return Release(sources(engine, version))
    except (CannotFetch, OSError) as error:
        return str(error)


def read(engine: str, version: str) -> Release:
    """Skips the test if the release cannot be fetched.

    `make test` sets REQUIRE_ENGINES: there it fails instead.
    """
    found = _read(engine, version)
    if isinstance(found, Release):
        return found
    if os.environ.get("REQUIRE_ENGINES") == "1":
        pytest.fail(found)
    pytest.skip(found)


@pytest.fixture
def release(engine: str, version: str) -> Release:
    return read(engine, version)


def adapter_files(engine: str) -> list[Path]:
    return sorted((ADAPTERS / engine).glob("*.py"))


def our_classes(file: str) -> dict[str, ast.ClassDef]:
    body = ast.parse((ADAPTERS / file).read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def our_class(path: str) -> ast.ClassDef:
    file, _, name = path.partition(":")
    return our_classes(file)[name]


def our_methods(path: str) -> dict[str, ast.FunctionDef]:
    """Of a class of ours, and of its bases in the same file."""
    file, _, name = path.partition(":")
    classes, found = our_classes(file), {}
    for base in map(ast.unparse, classes[name].bases):
        found |= our_methods(f"{file}:{base}") if base in classes else {}
    return found | {node.name: node for node in classes[name].body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_what_is_imported_is_there(engine: str, version: str, release: Release) -> None:
    missing = []
    for file in adapter_files(engine):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == engine:
                for alias in node.names:
                    path = f"{node.module}:{alias.name}"
                    known = release.find(str(node.module), alias.name) or release.module(
                        f"{node.module}.{alias.name}"
                    )
                    if known is None and path not in MAYBE and node.module != engine:
                        missing.append(f"{file.name}: {path}")
    assert not missing


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_members_are_there(engine: str, version: str, release: Release) -> None:
    missing = []
    for path, names in MEMBERS[engine].items():
        module, _, name = path.partition(":")
        class_ = release.find(module, name)
        if not isinstance(class_, ast.ClassDef):
            missing += [path] if path not in MAYBE else []
            continue
        missing += [
            f"{path}.{name}"
            for name in names.split()
            if release.member(module, class_, name) is None and f"{path}.{name}" not in MAYBE
        ]
    assert not missing


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_names_of_modules_are_there(engine: str, version: str, release: Release) -> None:
    paths = [f"{module}:{name}" for module, names in MODULES[engine].items() for name in names.split()]
    assert not [path for path in paths if release.find(*path.split(":")) is None and path not in MAYBE]


def unlisted_parts(dotted: str) -> Iterator[str]:
    """Parts of a setting of vLLM that its configurations lack. A part x_config has the class XConfig."""
    members = {path.partition(":")[2]: names.split() for path, names in MEMBERS["vllm"].items()}
    owner = "VllmConfig"
    for part in dotted.split("."):
        if part not in (members[owner] if owner.endswith("Config") else ["name"]):  # of an enumeration
            yield part
        owner = part.title().replace("_", "")


def test_unlisted_parts() -> None:
    assert list(unlisted_parts("compilation_config.pass_config.fuse_attn_quant")) == []
    assert list(unlisted_parts("attention_config.fuse_attn_quant")) == ["fuse_attn_quant"]


@pytest.mark.parametrize("engine", RELEASES)
def test_what_the_adapters_ask_for_is_in_the_tables(engine: str) -> None:
    """Each name that getattr or hasattr looks for. If an engine renamed one, it would silently read as a
    default.
    """
    listed = {
        name for table in (MEMBERS, MODULES) for names in table[engine].values() for name in names.split()
    } | set(ASKED)
    unlisted = []
    for file in (*adapter_files(engine), *ADAPTERS.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            where = str(file.relative_to(ADAPTERS))
            if engine == "vllm" and isinstance(node, ast.Call) and ast.unparse(node.func) == "setting":
                unlisted += [(where, part) for part in unlisted_parts(ast.literal_eval(node.args[0]))]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                name = node.args[1]
                if not isinstance(name, ast.Constant):
                    unlisted += (
                        [(where, ast.unparse(name))]
                        if (where, ast.unparse(name)) not in ASKED_BY_VARIABLE
                        else []
                    )
                elif name.value not in listed and not str(name.value).startswith("_attn_backend_"):
                    unlisted.append((where, name.value))
    assert not unlisted


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_calls_are_accepted(engine: str, version: str, release: Release) -> None:
    refused = []
    for path, (positional, named) in CALLS[engine].items():
        parameters = release.parameters(path)
        names = named.split()
        if parameters is None or not _accepts(parameters, positional, names):
            refused.append(f"{path}({positional} arguments{', ' if names else ''}{named}): {parameters}")
    assert not refused


def _accepts(parameters: Parameters, positional: int, named: list[str]) -> bool:
    given = set(parameters.names[:positional]) | set(named)
    enough = all(
        name in given for name in [*parameters.names[: parameters.num_required], *parameters.required_named]
    )
    return (
        enough
        and (parameters.has_args or positional <= parameters.num_positional)
        and (parameters.has_kwargs or set(named) <= set(parameters.names))
    )


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_overrides_take_what_the_engine_gives(engine: str, version: str, release: Release) -> None:
    """By position and by name; they also have everything that the engine requires."""
    wrong = []
    for ours, base in BASES[engine]:
        methods = our_methods(ours)
        wrong += [f"{ours} lacks {name}" for name in release.abstract_methods(base) if name not in methods]
        for name, method in methods.items():
            theirs = release.parameters(f"{base}.{name}")
            if theirs is None or name == "__init_subclass__":
                continue
            # the engine creates some of the others with different arguments
            if name == "__init__" and not ours.endswith("MetadataBuilder"):
                continue
            mine = parameters_of(method)
            for place, parameter in enumerate(theirs.names):
                by_position = place < theirs.num_positional
                taken = (
                    parameter in mine.names
                    if not by_position
                    else mine.names[place : place + 1] == [parameter]
                )
                if not taken and not (mine.has_kwargs and (mine.has_args or not by_position)):
                    wrong.append(f"{ours}.{name} does not take {parameter!r} at {place}: {theirs.names}")
            if mine.num_required > theirs.num_positional and not theirs.has_args:
                wrong.append(f"{ours}.{name} needs more than {theirs.names}")
    assert not wrong


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_layers_of_vllm_make_implementations_as_ours_expects(version: str) -> None:
    release = read("vllm", version)
    layer = release.module("vllm.model_executor.layers.attention.attention")
    assert layer is not None
    calls = [
        node
        for node in ast.walk(layer)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "impl_cls"
    ]
    assert [[ast.unparse(argument) for argument in call.args] for call in calls] == [IMPL_ARGUMENTS.split()]
    ours = next(
        node
        for node in our_class("vllm/attention.py:AttnImpl").body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    assert parameters_of(ours).names[:10] == IMPL_ARGUMENTS.split()
    assert parameters_of(ours).has_kwargs


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_mla_names_what_ours_reads(version: str) -> None:
    """Arguments that are read by name, and the two forms of chunks of a cached prefix."""
    release = read("vllm", version)
    decode = release.parameters(f"{MLA}:MLACommonMetadataBuilder._build_decode")
    assert decode is not None
    assert {"query_start_loc_device", "dcp_tot_seq_lens_device"} < set(decode.names)
    layer = release.find(MLA, "MLACommonMetadataBuilder.build")
    assert layer is not None
    calls = [
        node
        for node in ast.walk(layer)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._build_decode"
    ]
    assert [bool(call.args) for call in calls] == [False], "by names alone"
    chunk = release.parameters(
        "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend.run_prefill_context_chunk"
    )
    assert chunk is not None
    module = release.module(MLA)
    assert module is not None
    fields = {
        node.name: {ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    if chunk.names[0] == "chunk":
        assert "chunks" in fields["ChunkedContextMetadata"]
        assert {"index", "query_start_loc", "cu_seq_lens"} < fields["ContextChunk"]
    else:
        assert chunk.names[0] == "chunk_idx"
        assert "cu_seq_lens" in fields["ChunkedContextMetadata"]
        assert "chunks" not in fields["ChunkedContextMetadata"]


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_metadata_of_sparse_mla_has_the_fields_that_are_filled(version: str) -> None:
    """vLLM's builder makes ours with field names, which differ in other releases. The indexer's result must
    be in the place that ours reads.
    """
    release = read("vllm", version)
    build = release.find(SPARSE_MLA, "SparseMLACommonMetadataBuilder.build")
    base = release.find(MLA, "MLACommonMetadata")
    assert isinstance(build, ast.FunctionDef)
    assert isinstance(base, ast.ClassDef)
    calls = [
        node
        for node in ast.walk(build)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.metadata_cls"
    ]
    filled = {keyword.arg for call in calls for keyword in call.keywords}
    assert len(calls) == 1
    assert not calls[0].args
    fields = [
        field
        for class_ in (base, our_class("vllm/sparse_mla.py:SparseMlaMetadata"))
        for field in class_.body
        if isinstance(field, ast.AnnAssign)
    ]
    assert filled <= {ast.unparse(field.target) for field in fields}
    assert {ast.unparse(field.target) for field in fields if field.value is None} <= filled
    assert {"block_table", "req_id_per_token", "num_actual_tokens"} <= filled
    assert "torch.int32" in ast.unparse(
        release.find(SPARSE_MLA, "SparseMLACommonMetadataBuilder.__init__") or build
    )
    names = release.find("vllm.config.cache", "CacheDType")
    assert isinstance(names, ast.Assign)
    assert "fp8_ds_mla" in ast.literal_eval(names.value.slice)  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_vllm_shares_kv_over_ranks_as_ours_expects(version: str) -> None:
    """Its own backend calls the group and both merges as ours does. With shared MLA latents, requests with
    several new tokens are prefills.
    """
    release = read("vllm", version)
    stock = release.find("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl")
    assert isinstance(stock, ast.ClassDef)
    text = ast.unparse(stock)
    assert "get_dcp_group().all_gather(query, dim=1)" in text
    assert re.search(
        r"self\.dcp_combine\(\w+, \w+\.transpose\(0, 1\), get_dcp_group\(\), return_lse=True\)", text
    )
    assert "self.dcp_combine = dcp_a2a_lse_reduce if dcp_a2a else cp_lse_ag_out_rs" in text
    assert "dcp_comm_backend == 'a2a'" in text
    ops = "vllm.v1.attention.ops"
    in_one = release.module(f"{ops}.dcp") is not None
    for name, module in {"cp_lse_ag_out_rs": "common", "dcp_a2a_lse_reduce": "dcp_alltoall"}.items():
        parameters = release.parameters(f"{ops}.{'dcp' if in_one else module}:{name}")
        assert parameters is not None
        assert parameters.names[:3] == ["cp_attn_out", "cp_attn_lse", "cp_group"]
        assert {"return_lse", "is_lse_base_on_e"} < set(parameters.names)
    threshold = release.find(
        "vllm.v1.attention.backend", "AttentionMetadataBuilder._init_reorder_batch_threshold"
    )
    assert isinstance(threshold, ast.FunctionDef)
    assert "decode_context_parallel_size > 1 and (not supports_dcp_with_varlen)" in ast.unparse(threshold)
    assert "lse_base_on_e: bool = True" in ast.unparse(
        release.module("vllm.v1.attention.backend") or threshold
    )


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_functions_that_the_sampler_replaces_have_known_arguments(version: str) -> None:
    """The sampler uses the same lists to decide whether it may replace these functions."""
    release = read("vllm", version)
    namespace: dict[str, object] = {}
    source = (ADAPTERS / "vllm" / "sampler.py").read_text()
    wanted = ("V2_SAMPLER", "V1_SAMPLER", "_V2_BATCHES", "_KNOWN_ARGUMENTS")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and re.match(
            rf"\(?({'|'.join(wanted)})", ast.unparse(node.targets[0])
        ):
            exec(ast.unparse(node), namespace)
    known = namespace["_KNOWN_ARGUMENTS"]
    assert isinstance(known, dict)
    for (module, name), lists in known.items():
        found = release.find(module, name)
        assert isinstance(found, ast.FunctionDef), f"{module}:{name}"
        names = [
            argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)
        ]
        assert " ".join(names) in lists, f"{module}:{name}({' '.join(names)})"


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_the_builder_of_chunks_is_known_by_its_name(version: str) -> None:
    release = read("vllm", version)
    module = release.module("vllm.model_executor.layers.attention.chunked_local_attention")
    assert module is not None
    builder = next(
        node
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and node.name == "ChunkedLocalAttentionBuilder"
    )
    assert {node.name for node in builder.body if isinstance(node, ast.FunctionDef)} <= {
        "build",
        "update_block_table",
        "get_cudagraph_support",
    }


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_layers_of_vllm_bring_scales_to_8_bit_caches(version: str) -> None:
    """They are buffers, which do not move; also checks the names of such caches."""
    release = read("vllm", version)
    function = release.find("vllm.model_executor.layers.attention.attention", "set_default_quant_scales")
    assert isinstance(function, ast.FunctionDef)
    assert parameters_of(function).names == ["layer", "register_buffer"]
    for name in ("_k_scale", "_v_scale"):
        assert f"layer.register_buffer('{name}', torch.tensor(1.0, dtype=torch.float32))" in ast.unparse(
            function
        )
        assert f".{name}" in (ADAPTERS / "vllm" / "attention.py").read_text()
    names = release.find("vllm.config.cache", "CacheDType")
    assert isinstance(names, ast.Assign)
    assert {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"} <= set(
        ast.literal_eval(names.value.slice)
    )  # type: ignore[attr-defined]
    dtypes = release.find("vllm.utils.torch_utils", "STR_DTYPE_TO_TORCH_DTYPE")
    assert isinstance(dtypes, ast.Assign)
    assert all(f"'{name}': torch.{name}" in ast.unparse(dtypes) for name in ("float16", "bfloat16"))


def specs_of_vllm(release: Release) -> dict[str, Any]:
    """The release's own classes of a layer's spec, and its modes of quantization."""
    module = release.module("vllm.v1.kv_cache_interface")
    assert module is not None
    names = ("KVQuantMode", "KVCacheSpec", "AttentionSpec", "FullAttentionSpec", "SlidingWindowSpec")
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in names]
    made = types.ModuleType("specs_of_vllm")
    vars(made).update({"get_dtype_size": lambda dtype: dtype.itemsize, "torch": torch})
    for node in classes:
        node.decorator_list = [d for d in node.decorator_list if "dataclass" in ast.unparse(d)]
    imports = (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
        "from enum import IntEnum\nfrom fractions import Fraction\n"
    )
    exec(imports + "\n".join(map(ast.unparse, classes)), vars(made))
    return vars(made)


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_vllm_takes_our_own_name_of_a_cache_since_0_33(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier releases refuse it. The mode of such names is an alias: its name is another mode's."""
    release = read("vllm", version)
    names = release.find("vllm.config.cache", "CacheDType")
    assert isinstance(names, ast.Assign)
    assert OWN_CACHE not in ast.literal_eval(names.value.slice)  # type: ignore[attr-defined]
    takes_names = release.find("vllm.config.cache", "register_kv_cache_dtype") is not None
    assert takes_names == (not is_before(version, "0.33.0"))
    if not takes_names:
        return
    handler = release.find("vllm.config.cache", "KVCacheDTypeHandler")
    assert isinstance(handler, ast.ClassDef)
    asked = {node.name for node in handler.body if isinstance(node, ast.FunctionDef)}
    assert asked == {"torch_dtype", "quant_mode"}  # compat.OwnCacheHandler
    monkeypatch.setitem(sys.modules, "specs_of_vllm", types.ModuleType("specs_of_vllm"))
    made = specs_of_vllm(release)
    mode = made["KVQuantMode"].CUSTOM
    assert (mode.name, mode.is_custom_mode) == ("OCTAVE_K3V4", True)
    assert not any((mode.is_per_token_head, mode.is_nvfp4, mode.is_turboquant))
    of_both = sum(sum(bytes_of_row(128, side)) for side in side_dtypes(TOKEN_SCALED_CACHES[OWN_CACHE]))
    assert of_both == (128 + 4) + (64 + 8)
    fields = {"block_size": 32, "num_kv_heads": 4, "head_size": 128, "dtype": torch.uint8}
    fields |= {"kv_quant_mode": mode, "state_content_bytes": of_both}  # compat.with_bytes_of_scales
    for spec in (
        made["FullAttentionSpec"](**fields),
        made["SlidingWindowSpec"](sliding_window=64, **fields),
    ):
        assert spec.page_size_bytes == 32 * 4 * of_both


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_pages_of_vllm_have_room_for_a_scale_of_each_token_and_head(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bytes for each token and head. Releases add them to the pages of all backends, or ask the backend."""
    release = read("vllm", version)
    monkeypatch.setitem(sys.modules, "specs_of_vllm", types.ModuleType("specs_of_vllm"))
    made = specs_of_vllm(release)
    names = release.find("vllm.config.cache", "CacheDType")
    dtypes = release.find("vllm.utils.torch_utils", "STR_DTYPE_TO_TORCH_DTYPE")
    assert isinstance(names, ast.Assign)
    assert isinstance(dtypes, ast.Assign)
    for name, dtype, columns in (
        ("int8_per_token_head", torch.int8, 2 * 128),
        ("fp8_per_token_head", torch.uint8, 2 * 128),
        ("int4_per_token_head", torch.uint8, 128),  # two in a byte
        ("nvfp4", torch.uint8, 128 + 8),  # and 16 bytes of scales
    ):
        asks = hasattr(made["AttentionSpec"], "state_content_bytes")
        if name == "nvfp4" and not asks:
            continue  # refused
        assert name in ast.literal_eval(names.value.slice)  # type: ignore[attr-defined]
        assert f"'{name}': {dtype}" in ast.unparse(dtypes)
        mode = made["KVQuantMode"][name.upper()]
        assert name == "nvfp4" or mode.is_per_token_head
        fields = {
            "block_size": 32,
            "num_kv_heads": 4,
            "head_size": 128,
            "dtype": dtype,
            "kv_quant_mode": mode,
        }
        assert asks == (
            release.parameters("vllm.v1.attention.backend:AttentionBackend.customize_spec") is not None
        )
        assert asks == (not is_before(version, BYTES_OF_ROWS_SINCE))
        if asks:
            fields["state_content_bytes"] = columns + 8  # compat.with_bytes_of_scales
        for spec in (
            made["FullAttentionSpec"](**fields),
            made["SlidingWindowSpec"](sliding_window=20, **fields),
        ):
            is_whole = (
                not asks and type(spec).__name__ == "SlidingWindowSpec"
            )  # as compat.takes_bytes_of_rows() says
            assert spec.page_size_bytes == 32 * 4 * ((2 * 128 if is_whole else columns) + 8)


@pytest.mark.parametrize("version", CHECKED["sglang"])
def test_pools_of_sglang_take_8_bits_as_they_are(version: str) -> None:
    """K and V in the pool's dtype are not divided again, and are stored as uint8."""
    release = read("sglang", version)
    writes = release.find("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer")
    assert isinstance(writes, ast.FunctionDef)
    converting = [
        node for node in ast.walk(writes) if isinstance(node, ast.If) and "div_" in ast.unparse(node)
    ]
    assert [ast.unparse(node.test) for node in converting if "dtype" in ast.unparse(node.test)] == [
        "cache_k.dtype != self.dtype"
    ]
    assert "cache_k = cache_k.view(self.store_dtype)" in ast.unparse(writes)
    pool = release.find("sglang.srt.mem_cache.memory_pool", "KVCache")
    assert isinstance(pool, ast.ClassDef)
    assert "self.store_dtype = torch.uint8" in ast.unparse(pool)
    names = release.find("sglang.srt.mem_cache.kv_cache_dtype", "configure_kv_cache_dtype")
    assert isinstance(names, ast.FunctionDef)
    assert all(
        f"server_args_kv_cache_dtype == '{name}'" in ast.unparse(names)
        for name in ("fp8_e4m3", "fp8_e5m2", "mxfp8")
    )


@pytest.mark.parametrize("version", CHECKED["sglang"])
def test_fp4_pools_of_sglang(version: str) -> None:
    """Four tensors, by their slots; get_raw_kv_buffer() returns them in this order. Pools of windows have no
    scales, and neither have copies in host memory.
    """
    release = read("sglang", version)
    methods, pools = "sglang.srt.layers.quantization.fp4_kv_cache_quant_method", "sglang.srt.mem_cache"
    create = release.find(methods, "FP4MXBlock16KVCacheMethod.create_buffers")
    raw = release.find(f"{pools}.memory_pool", "MHATokenToKVPool.get_raw_kv_buffer")
    names = release.find(f"{pools}.kv_cache_dtype", "configure_kv_cache_dtype")
    assert create is not None
    assert raw is not None
    assert names is not None
    text = ast.unparse(create)
    assert text.count("torch.zeros((m, head_num, head_dim // 2), dtype=store_dtype") == 2
    assert text.count("(m, head_num * head_dim // self.SCALE_BLOCK_SIZE), dtype=store_dtype") == 2
    returned = "self.k_buffer[local_layer_id], self.v_buffer[local_layer_id], k_scale, v_scale"
    assert f"return ({returned})" in ast.unparse(raw)
    assert "('nvfp4', 'fp4_mx_block16')" in ast.unparse(names)
    of_windows = release.find(
        f"{pools}.kv_cache_configurator", "KVCacheConfigurator._build_hybrid_swa_kv_pool"
    )
    host = release.find(f"{pools}.pool_host.mha", "MHATokenToKVPoolHost")
    assert of_windows is not None
    assert host is not None
    assert "quant_method" not in ast.unparse(of_windows)
    assert "k_scale_buffer" not in ast.unparse(host)


@pytest.mark.parametrize("version", CHECKED["sglang"])
def test_sparse_attention_of_sglang_is_one_method(version: str) -> None:
    """All uses of the selected tokens in flashmla_sparse, with the same number of slots for each row in every
    layer. Models also look for a name on the backend.
    """
    release = read("sglang", version)
    backend = release.find(DSA, "DeepseekSparseAttnBackend")
    assert isinstance(backend, ast.ClassDef)
    calls = [
        node
        for node in ast.walk(backend)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._forward_flashmla_sparse"
    ]
    named = [{keyword.arg for keyword in call.keywords} for call in calls]
    assert named
    assert all(
        {"q_all", "kv_cache", "page_table_1", "sm_scale", "v_head_dim"}
        <= names
        <= {"q_all", "kv_cache", "page_table_1", "sm_scale", "v_head_dim", "topk_length", "attn_sink"}
        for names in named
    )
    assert not any(call.args for call in calls)
    text = ast.unparse(backend)
    assert "_impl == 'flashmla_sparse'" in text
    stamped = release.module("sglang.srt.model_executor.model_runner_components.attention_backend_setup")
    assert stamped is not None
    assert "attn_backend.decode_attention_backend_str = resolved.decode" in ast.unparse(stamped)


@pytest.mark.parametrize("version", CHECKED["sglang"])
def test_settings_have_the_names_that_are_asked_for(version: str) -> None:
    """A name that a release lacks would silently read as its default."""
    release = read("sglang", version)
    text = "".join(file.read_text() for file in adapter_files("sglang"))
    paths = set(re.findall(r'setting\("([a-z_.]+)"', text)) | set(
        re.findall(r'"--[a-z-]+": \(?"([a-z_.]+)"', text)
    )
    assert len(paths) > 8
    assert {"parallel.attn_dcp_size", "parallel.attn_cp_size"} < paths
    for path in paths:
        group, *_, field = path.split(".")
        assert release.find("sglang.srt.runtime_context", f"get_{group}") is not None, path
        # computed from these
        field = {"attn_dcp_size": "dcp_size", "attn_dp_rank": "dp_size"}.get(field, field)
        is_later = field == "enable_unified_cache_external_linker" and is_before(version, "0.5.20")
        assert (field in release.fields) != is_later, path


@pytest.mark.parametrize("version", CHECKED["sglang"])
def test_checks_of_names_are_where_the_hooks_look(version: str) -> None:
    release = read("sglang", version)
    from attn_backend.adapters.sglang import plugin

    known = [
        all(
            release.find(*path.split(":")) is not None
            for check in checks
            for path in (check.function, check.view)
        )
        for checks in plugin.CHECKS
    ]
    assert known.count(True) == 1
    assert {
        *plugin.BACKEND_OPTIONS,
        "speculative_draft_attention_backend",
        "kv_cache_dtype",
    } <= release.fields
    for check in plugin.CHECKS[known.index(True)]:
        module, _, name = check.function.partition(":")
        function = release.find(module, name)
        assert isinstance(function, ast.FunctionDef)
        assert len(parameters_of(function).names) <= 1  # the server's arguments, which may be self
        text = ast.unparse(function)
        assert f"'{check.accepted}'" in text
        assert "resolved_view(" in text or "_resolved_attention_backends(" in text
        assert not [
            name
            for name in plugin.SERVED
            if check.of_models and f"'{name}'" not in text and name not in MAYBE
        ]


@pytest.mark.parametrize("engine", RELEASES)
def test_what_some_releases_lack_is_in_others(engine: str) -> None:
    """Either the first or the last one. No release has names that are missing from vLLM's source
    distribution."""
    ends = [read(engine, version) for version in (RELEASES[engine][0], RELEASES[engine][-1])]
    paths = [
        path
        for path in MAYBE
        if path.startswith(f"{engine}.") and not path.startswith("vllm.vllm_flash_attn.")
    ]
    assert not [path for path in paths if all(release.find(*path.split(":")) is None for release in ends)]


def test_models_with_masks_over_images_are_in_the_table() -> None:
    from attn_backend.adapters.sglang import rules

    assert {
        path.partition(":")[2] for path, names in MEMBERS["sglang"].items() if names == "prepare_attn_masks"
    } == set(rules.MASKS_OVER_IMAGES)


def test_reasons_are_about_names_that_are_used() -> None:
    touched = {
        f"{path}.{name}"
        for members in MEMBERS.values()
        for path, names in members.items()
        for name in names.split()
    }
    touched |= {
        f"{module}:{name}"
        for modules in MODULES.values()
        for module, names in modules.items()
        for name in names.split()
    }
    touched |= {path for members in MEMBERS.values() for path in members}
    text = "".join(file.read_text() for file in ADAPTERS.rglob("*.py"))
    assert all(name in touched or name.rpartition(":")[2] in text for name in MAYBE)
    assert all(re.search(rf"(get|has)attr\(.*, [\"']{name}[\"']", text) for name in ASKED)
    assert all(
        f", {name}" in (ADAPTERS / file).read_text().replace('"', "'") for file, name in ASKED_BY_VARIABLE
    )


def test_members_are_named_in_the_adapters() -> None:
    """An adapter still reads everything that the table lists."""
    text = "".join(file.read_text() for file in ADAPTERS.rglob("*.py"))
    unread = {
        name
        for table in (MEMBERS, MODULES)
        for members in table.values()
        for names in members.values()
        for name in names.split()
        if not re.search(rf"\b{name}\b", text)
    }
    assert not unread


@pytest.mark.parametrize("version", CHECKED["vllm"])
def test_releases_that_let_plugins_add_names(version: str) -> None:
    release = read("vllm", version)
    registry = "vllm.v1.attention.backends.registry"
    names = release.find(registry, "AttentionBackendEnum")
    assert isinstance(names, ast.ClassDef)
    adds_names = release.member(registry, names, "register") is not None
    assert adds_names != is_before(version, "0.32.0")


@pytest.mark.parametrize("version", CHECKED["sglang"])
def test_releases_that_start_no_triton_on_a_cpu(version: str) -> None:
    starts = read("sglang", version).find("sglang.srt.utils.common", "support_triton")
    assert isinstance(starts, ast.FunctionDef)
    assert ("current_platform" in ast.unparse(starts)) != is_before(version, SGLANG_ON_CPU_SINCE)


def test_releases_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_CHECK_RELEASES", raising=False)
    assert releases_to_check() == RELEASES
    monkeypatch.setenv("ATTN_CHECK_RELEASES", "vllm==0.34.0 vllm==0.34.1")
    assert releases_to_check() == {"vllm": ("0.34.0", "0.34.1"), "sglang": ()}


def test_builds_for_other_devices_are_of_a_release() -> None:
    assert was_checked("vllm", "0.32.0+cpu")
    assert not was_checked("vllm", "0.25.1")
    assert not was_checked("sglang", "0.5.230")
