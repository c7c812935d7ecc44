"""Finding, keying and compiling kernels."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_nvcc import FATBIN, FakeKernels, cubin, fake_nvcc

from attn_backend.jit import code_address, cubins, manifest
from attn_backend.jit.build import fault, spilled_bytes
from attn_backend.jit.manifest import HeadDims, KernelShape
from attn_backend.stored_formats import FORMATS

needs_nvcc = pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")


def test_kernel_set_is_complete() -> None:
    head_dims = {"standard": (64, 96, 128, 192, "192_128", 256, 512, "576_512"), "sinks": (64, 128, 256)}
    shapes = [
        f"{dtype}_d{head_dim}_{variant}"
        for dtype in ("bf16", "f16")
        for variant, dims in head_dims.items()
        for head_dim in dims
    ]
    samplers = {f"sampling_{source}" for source in ("f32", "f16", "bf16", "probs", "speculative")}
    shapes += [f"bf16_e4m3_d{head_dim}_standard" for head_dim in (64, 128, 256)]
    shapes += [
        f"bf16_{form}_d{head_dim}_standard"
        for form in ("e4m3_tokens", "int8_tokens", "int4_tokens_rotated")
        for head_dim in (64, 128)
    ]
    shapes += [f"bf16{cache}_to_e4m3_d128_standard" for cache in ("", "_e4m3")]
    # on Hopper one kernel serves all caches
    widened = [f"bf16_{form}_standard" for form in ("e4m3_d512", "e4m3_d576_512", "latent_d576_512")]
    multiplied = [
        "bf16_e4m3_q_d64_standard",
        "bf16_e4m3_q_d128_standard",
        "bf16_e4m3_q_to_e4m3_d128_standard",
    ]
    merges = {
        "merge_bf16",
        "merge_f16",
        "merge_e4m3",
        "merge_states_f32",
        "merge_states_f16",
        "merge_states_bf16",
    }
    appends = {"append", "append_latent"} | {
        f"append_qkv_{dtype}{cache}"
        for dtype in ("bf16", "f16")
        for cache in ("", "_float8", "_tokens", "_int4_rotated", "_int8_nvfp4")
    }
    alibi = [f"{dtype}_d{head_dim}_alibi" for dtype in ("bf16", "f16") for head_dim in (64, 128)]
    everywhere = (
        {"plan", "selected_slots"}
        | appends
        | merges
        | {f"attention_sm80_{shape}" for shape in [*shapes, *widened]}
        | samplers
    )
    dequantizers = {
        f"dequantize_{dtype}_{stored}"
        for dtype in ("bf16", "f16")
        for stored in (
            *("e4m3", "e5m2", "e4m3_tokens", "int8_tokens", "int4_tokens", "nvfp4", "mxfp4"),
            "int8_nvfp4",
        )
    }
    hopper = dequantizers | {
        f"attention_{design}_{shape}"
        for design in ("sm90", "sm90_gather")
        for shape in [*shapes, *multiplied, *alibi, "bf16_int8_nvfp4_d128_standard"]
    }
    hopper |= {f"attention_sm90_{shape}" for shape in widened}
    assert set(manifest.kernels("sm_80")) == everywhere | {f"attention_sm80_{shape}" for shape in alibi}
    assert set(manifest.kernels("sm_90a")) == everywhere | hopper


HEADS = HeadDims.of(72)


def test_names_say_what_kernels_are_for() -> None:
    name = "attention_sm90_bf16_e4m3_q_d72_standard"
    assert manifest.attention_name("sm90", KernelShape("bf16", HEADS, "e4m3", float8_q=True)) == name
    assert manifest.compile_options(name) == " --head-dim 72 --kv-dtype float8_e4m3fn --float8-q"
    source = manifest.source_of(name, "sm_90a")
    assert source is not None
    assert (
        "attn::Float8E4M3, attn::HeadShape<72, 72>, attn::WithScales<attn::StandardVariant, true>, "
        "attn::Float8E4M3, attn::BFloat16>" in source
    )
    assert manifest.compile_options(name.replace("_q_", "_")) == " --head-dim 72 --kv-dtype float8_e4m3fn"
    for kv_dtype, element in (("int8", "int8_tokens"), ("float8_e4m3fn", "e4m3_tokens")):
        of_tokens = name.replace("e4m3_q", element)
        options = f" --head-dim 72 --kv-dtype {kv_dtype} --token-scales"
        assert manifest.compile_options(of_tokens) == options
        source = manifest.source_of(of_tokens, "sm_90a")
        assert source is not None
        assert "attn::WithTokenScales<attn::StandardVariant>" in source
        assert manifest.source_of(of_tokens.replace("d72", "d512"), "sm_90a") is None
    for name, options in (
        ("attention_sm90_bf16_rotated_d72_standard", " --head-dim 72 --rotation"),
        ("append_qkv_bf16_rotated", " --rotation"),
        ("append_qkv_f16_float8_rotated", " --kv-dtype float8_e4m3fn --rotation"),
        ("append_qkv_f16_tokens_rotated", " --kv-dtype float8_e4m3fn --token-scales --rotation"),
        ("append_qkv_f16_int4", " --kv-dtype int4"),
        ("append_qkv_f16_int4_rotated", ""),
        (
            "attention_sm90_bf16_int4_tokens_rotated_d32_standard",
            " --head-dim 32 --kv-dtype int4 --rotation",
        ),
    ):
        assert manifest.compile_options(name) == options
        source = manifest.source_of(name, "sm_90a")
        assert source is not None
        assert ("attn::WithRotation<attn::StandardVariant>" in source) == name.startswith("attention")
        assert ("kKernelRotates = true" in source) == (name.startswith("append") and "rotated" in name)
    for impossible in ("bf16_rotated_d192_128", "bf16_rotated_d512", "bf16_e4m3_q_rotated_d72"):
        assert manifest.source_of(f"attention_sm90_{impossible}_standard", "sm_90a") is None
    name = "attention_sm90_bf16_e4m3_q_to_e4m3_d72_standard"
    assert (
        manifest.attention_name("sm90", KernelShape("bf16", HEADS, "e4m3", float8_q=True, float8_out=True))
        == name
    )
    assert manifest.compile_options(name) == " --head-dim 72 --kv-dtype float8_e4m3fn --float8-q --float8-out"
    name = "attention_sm90_gather_bf16_f16_d72_standard"
    assert manifest.attention_name("sm90_gather", KernelShape("bf16", HEADS, "f16")) == name
    assert manifest.compile_options(name) == " --head-dim 72 --kv-dtype float16"
    source = manifest.source_of(name, "sm_90a")
    assert source is not None
    assert (
        "attn::Float16, attn::Float16, attn::HeadShape<72, 72>, attn::StandardVariant, attn::BFloat16, "
        "attn::BFloat16>" in source
    )
    assert manifest.compile_options("append_qkv_f16_bf16") == " --kv-dtype bfloat16"
    assert manifest.source_of("append_qkv_f16_bf16", "sm_80") is not None
    for nothing in (
        "attention_sm80_bf16_bf16_d64_standard",
        "append_qkv_bf16_bf16",
        "attention_sm90_bf16_f16_d64_standard",
    ):
        assert manifest.source_of(nothing, "sm_80") is None


@pytest.mark.parametrize("also", [(), ("nvfp4",), ("nvfp4", "mxfp4")])
def test_every_append_kernel_is_shipped_or_late(
    also: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (*manifest.SHIPPED_TOKEN_ELEMENTS, *also)
    monkeypatch.setattr(manifest, "SHIPPED_TOKEN_ELEMENTS", shipped)
    built = [kernel.name for kernel in manifest._all.__wrapped__() if kernel.name.startswith("append_qkv_")]
    assert len(built) == len(set(built))
    for element in manifest.CUDA_ELEMENTS:
        for stored in (stored for stored in FORMATS if stored.has_scales):
            names = [
                manifest.append_qkv_name(element, stored.element, rotation) for rotation in (False, True)
            ]
            assert [name in built for name in names] == [manifest.late_append(name) is None for name in names]
            is_shipped = stored.append[0] != "fp4" or len(also) > 0
            assert [name in built for name in names] == [
                is_shipped and stored.element not in manifest.SHIPPED_ROTATED,
                is_shipped and stored.element in manifest.SHIPPED_ROTATED,
            ]


def test_arch_of_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_BACKEND_ARCH", raising=False)
    assert cubins.arch_of((9, 0)) == "sm_90a"
    assert cubins.arch_of((8, 0)) == cubins.arch_of((8, 9)) == cubins.arch_of((10, 0)) == "sm_80"
    with pytest.raises(ValueError, match=r"compute capability is 7\.5"):
        cubins.arch_of((7, 5))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    return FakeKernels(tmp_path, monkeypatch)


def test_key_follows_all_that_the_compiler_reads(
    fake: FakeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, compiler = '#include "common/a.h"\n', str(fake.nvcc)
    header, deeper = tmp_path / "common" / "a.h", tmp_path / "common" / "b.h"
    header.parent.mkdir()
    deeper.write_text("// one\n")
    header.write_text('#include "common/b.h"\n')
    first = cubins.cache_key(source, "sm_90a", compiler)
    assert cubins.cache_key(source, "sm_90a", compiler) == first
    assert cubins.cache_key(source + "// two\n", "sm_90a", compiler) != first
    for path in (header, deeper):
        before = path.read_text()
        path.write_text(before + "// two\n")
        assert cubins.cache_key(source, "sm_90a", compiler) != first, path
        path.write_text(before)
    newer = str(fake_nvcc(tmp_path / "newer", "", version="Build fake.2"))
    assert cubins.cache_key(source, "sm_90a", newer) != first
    same = str(fake_nvcc(tmp_path / "same", ""))
    assert cubins.cache_key(source, "sm_90a", same) == first


def test_key_follows_flags_and_arch(
    fake: FakeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, compiler = fake.sources["k"], str(fake.nvcc)

    def key(*flags: str, arch: str = "sm_90a") -> str:
        monkeypatch.setattr(cubins, "arch_flags", lambda arch: list(flags))
        return cubins.cache_key(source, arch, compiler)

    first = key("-O3", "-I/here")
    assert key("-O2", "-I/here") != first
    assert key("-O3", "-G", "-I/here") != first
    assert key("-O3", "-I/here", arch="sm_80") != first
    assert key("-O3", "-I/there") == first, "where the sources lie does not matter"


def test_key_follows_what_is_done_to_the_compilers_output(
    fake: FakeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, compiler = fake.sources["k"], str(fake.nvcc)
    first = cubins.cache_key(source, "sm_90a", compiler)
    other = tmp_path / "code_address.py"
    other.write_text(Path(code_address.__file__).read_text() + "# and more\n")
    monkeypatch.setattr(code_address, "__file__", str(other))
    assert cubins.cache_key(source, "sm_90a", compiler) != first


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ATTN_BACKEND_CACHE", raising=False)
    assert cubins.cache_dir() == Path("/home/somebody/.cache/attn_backend")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cubins.cache_dir() == Path("/cache/attn_backend")
    monkeypatch.setenv("ATTN_BACKEND_CACHE", "~/kernels")
    assert cubins.cache_dir() == Path("/home/somebody/kernels")


@needs_nvcc
def test_compiles_once_and_survives_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        paths = [path for path, _ in pool.map(lambda _: cubins.compile_kernel("append", "sm_90a"), range(2))]
    assert paths[0] == paths[1]
    assert paths[0].stat().st_size > 0
    modified = paths[0].stat().st_mtime_ns
    assert cubins.compile_kernel("append", "sm_90a")[0].stat().st_mtime_ns == modified
    assert sorted(path.suffix for path in paths[0].parent.iterdir()) == [".cubin", ".txt"], (
        "no partial files are left"
    )
    assert {path.stat().st_mode & 0o777 for path in paths[0].parent.iterdir()} == {0o644}


@needs_nvcc
def test_source_that_does_not_compile_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cubins, "kernel_sources", lambda arch: {"broken": "this is not CUDA\n"})
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="nvcc failed on kernel broken"):
        cubins.compile_kernel("broken", "sm_90a")


def test_without_a_compiler_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cubins, "nvcc", lambda: None)
    monkeypatch.setattr(cubins, "PACKAGE", tmp_path)
    monkeypatch.setattr(cubins, "kernel_sources", lambda arch: {"plan": "// a kernel\n"})
    with pytest.raises(RuntimeError, match="neither in the package nor compilable"):
        cubins.compile_kernel("plan", "sm_90a")


def test_a_whole_cubin_of_the_package_is_used(fake: FakeKernels) -> None:
    for arch, content in (("sm_90a", cubin()), ("sm_80", FATBIN)):
        shipped = cubins.shipped_kernel("k", arch)
        shipped.parent.mkdir(parents=True)
        shipped.write_bytes(content)
        assert cubins.find_kernel("k", arch) == shipped
    assert fake.runs() == 0


def test_without_jit_only_what_was_compiled_ahead_is_used(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    with pytest.raises(
        RuntimeError,
        match=r"kernel k for sm_90a is not compiled, and ATTN_BACKEND_JIT=0.*"
        r"`attn-backend compile --arch sm_90a` compiles it ahead",
    ):
        cubins.find_kernel("k", "sm_90a")
    assert fake.runs() == 0
    path, _ = cubins.compile_kernel("k", "sm_90a")
    assert cubins.find_kernel("k", "sm_90a") == path


def test_without_a_compiler_what_another_machine_compiled_is_used(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = cubins.compile_kernel("k", "sm_90a")
    monkeypatch.setattr(cubins, "nvcc", lambda: None)
    assert cubins.find_kernel("k", "sm_90a") == path
    for spoil in (lambda: fake.sources.update(k="// another kernel\n"), lambda: path.write_bytes(b"")):
        cubins.find_kernel.cache_clear()
        spoil()
        with pytest.raises(
            RuntimeError, match="kernel k for sm_90a is neither in the package nor compilable"
        ):
            cubins.find_kernel("k", "sm_90a")
        fake.sources["k"] = "// a kernel\n"
    assert fake.runs() == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (cubin()[:-1], "is truncated"),
        (b"", "is empty"),
        (b"version https://git-lfs", "is neither a cubin nor"),
    ],
)
def test_a_damaged_cubin_of_the_package_is_not_used(
    content: bytes, reason: str, fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = cubins.shipped_kernel("k", "sm_90a")
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(content)
    compiled = cubins.find_kernel("k", "sm_90a")
    assert compiled.read_bytes() == cubin()
    assert compiled.is_relative_to(fake.cache)
    compiled.unlink()
    cubins.find_kernel.cache_clear()
    monkeypatch.setattr(cubins, "nvcc", lambda: None)
    with pytest.raises(
        RuntimeError, match=f"{shipped} {reason}.*: reinstall attn-backend; .* no nvcc was found"
    ):
        cubins.find_kernel("k", "sm_90a")


def test_spills_are_counted() -> None:
    assert spilled_bytes("0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads") == 24
    assert spilled_bytes("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 0


def test_faults_are_found() -> None:
    spilled = "40 bytes stack frame, {} bytes spill stores, {} bytes spill loads"
    assert fault(f"{spilled.format(0, 0)}\nUsed 168 registers") == ""
    assert fault(spilled.format(20, 20)) == "SPILLS"
    assert (
        fault(
            "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized "
            "due to ..."
        )
        == "SERIALIZES WGMMA"
    )


def test_importing_needs_no_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", "import attn_backend"], check=True, env=environment)
