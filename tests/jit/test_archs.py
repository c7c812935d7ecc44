"""ATTN_BACKEND_ARCH: every kernel lookup takes the build for that arch, on the GPUs that can run it."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import variant_sources
from loaded_code import Driver
from needs import needs_nvcc, needs_nvrtc

from attn_backend.jit import compilers, cubins, kernel_cache, manifest
from attn_backend.jit.manifest import ARCHS, MLA_HEAD_DIMS, HeadDims
from attn_backend.kernels import native, sampling
from attn_backend.kernels.attention import AttentionConfig, choose_design
from attn_backend.kernels.variant import AttentionVariant
from attn_backend.variants import builtin

CUDA = torch.device("cuda", 0)
GENERIC = manifest.DESIGNS["generic"]
NARROW = HeadDims.of(128)


@pytest.fixture
def arch() -> str:
    return "sm_80"


@pytest.fixture
def hopper(arch: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A simulated GPU under ATTN_BACKEND_ARCH=`arch`.

    Returns name and arch of each kernel that is looked up.
    """
    monkeypatch.setenv("ATTN_BACKEND_ARCH", arch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(
        native, "find_kernel", lambda name, arch: found.append((name, arch)) or Path(arch, name)
    )
    return found


@pytest.mark.parametrize(
    ("arch", "capability", "expected", "target"),
    [
        ("", (9, 0), "sm_90a", "sm_90a"),
        ("sm_90a", (9, 0), "sm_90a", "sm_90a"),
        ("sm_80", (9, 0), "sm_80", "compute_80"),
        ("sm_80", (8, 9), "sm_80", "sm_80"),
        ("", (10, 0), "sm_80", "sm_100"),
        ("sm_80", (12, 0), "sm_80", "compute_80"),
    ],
)
def test_archs_that_a_gpu_runs(
    arch: str, capability: tuple[int, int], expected: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_ARCH", arch)
    assert cubins.arch_of(capability) == expected
    assert cubins.target_of(capability) == target
    assert cubins.is_target(target)
    assert cubins.arch_of_target(target) == expected


def test_a_target_is_what_some_gpu_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("sm_90a", "sm_90", "sm_100a", "sm_100", "sm_103", "sm_86", "compute_80", "sm_", "cpu")
    assert [target for target in targets if cubins.is_target(target)] == [
        "sm_90a",
        "sm_100",
        "compute_80",
    ]
    # An arch only for 10.0, like sm_100a: GPUs of 10.3 still get sm_100.
    monkeypatch.setitem(
        manifest.BUILDS, "sm_100a", replace(manifest.BUILDS["sm_90a"], capability=(10, 0), has_siblings=True)
    )
    monkeypatch.setattr(cubins, "ARCHS", tuple(manifest.BUILDS))
    monkeypatch.delenv("ATTN_BACKEND_ARCH", raising=False)
    assert cubins.target_of((10, 3)) == "sm_100"
    assert [target for target in targets if cubins.is_target(target)] == [
        "sm_90a",
        "sm_100a",
        "sm_100",
        "compute_80",
    ]


@pytest.mark.parametrize(("capability", "must_be"), [((8, 0), "'sm_80'"), ((10, 0), "'sm_80'")], ids=str)
def test_an_arch_that_the_gpu_cannot_run_is_refused(
    capability: tuple[int, int], must_be: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_ARCH", "sm_90a")
    text = (
        rf"^ATTN_BACKEND_ARCH is 'sm_90a', must be {must_be} on a GPU of compute capability "
        rf"{capability[0]}\.{capability[1]}$"
    )
    for lookup in (cubins.arch_of, cubins.target_of):
        with pytest.raises(ValueError, match=text):
            lookup(capability)


def test_only_the_designs_of_the_arch(hopper: list[tuple[str, str]]) -> None:
    assert choose_design(None, CUDA, NARROW) is choose_design("generic", CUDA, NARROW) is GENERIC
    with pytest.raises(
        ValueError, match=r"kernel is 'hopper', must be 'generic' or None: this GPU runs kernels of sm_80"
    ):
        choose_design("hopper", CUDA, NARROW)


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_only_the_designs_that_serve_the_heads(hopper: list[tuple[str, str]]) -> None:
    rope = builtin.rope(builtin.rope_frequencies(64))
    for dims, variant in ((NARROW, rope), (MLA_HEAD_DIMS, None), (MLA_HEAD_DIMS, variant_sources.ALIBI)):
        assert (
            choose_design(None, CUDA, dims, variant)
            is choose_design("hopper", CUDA, dims, variant)
            is manifest.DESIGNS["hopper"]
        )
    assert (
        choose_design(None, CUDA, MLA_HEAD_DIMS, rope)
        is choose_design("generic", CUDA, MLA_HEAD_DIMS, rope)
        is GENERIC
    )
    assert choose_design(None, torch.device("cpu"), MLA_HEAD_DIMS, rope) is None
    because = "it has no kernels for head_dim = 576, head_dim_v = 512 and variants that transform Q, K or V"
    for device in (CUDA, torch.device("cpu")):
        with pytest.raises(ValueError, match=f"^kernel is 'hopper', must be 'generic' or None: {because}$"):
            choose_design("hopper", device, MLA_HEAD_DIMS, rope)
    with pytest.raises(
        ValueError, match=r"^kernel is hopper, must be generic for sm_90a, head_dim 576_512 and variant rope$"
    ):
        cubins.compile_ahead(rope, ["sm_90a"], "hopper", "bfloat16", MLA_HEAD_DIMS, "")


def test_kernels_of_heads_are_those_of_designs_that_serve_them(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = replace(manifest.DESIGNS["hopper"], serves=lambda dims, transforms: dims == NARROW)
    monkeypatch.setitem(manifest.DESIGNS, "hopper", picky)
    names = {
        dims: [
            kernel.name
            for kernel in manifest.attention_kernels(manifest.KernelShape("bf16", dims), ["standard"])
        ]
        for dims in (NARROW, MLA_HEAD_DIMS)
    }
    assert names[NARROW] == [
        f"attention_{stem}_bf16_d128_standard" for stem in ("sm90", "sm90_gather", "sm80")
    ]
    assert names[MLA_HEAD_DIMS] == ["attention_sm80_bf16_d576_512_standard"]
    assert [manifest.default_design("sm_90a", dims) for dims in names] == [picky, GENERIC]


def test_kernels_of_attention(hopper: list[tuple[str, str]]) -> None:
    config = AttentionConfig(
        8,
        2,
        128,
        128,
        *[torch.bfloat16] * 3,
        CUDA,
        4,
        4,
        1,
        None,
        True,
        False,
        kernel=None,
        variant=None,
        sinks=False,
        float8_out=True,
    )
    files = config.kernel_files(None)
    assert files["attention"] == "sm_80/attention_sm80_bf16_d128_standard"
    assert {"plan", "merge_bf16"} < {name for name, _ in hopper}
    assert {arch for _, arch in hopper} == {"sm_80"}
    assert all(name in manifest.kernels("sm_80") for name, _ in hopper)


# The needs of models with latents, and of Gemma 4: heads, dtype, dtype of the cache.
WIDE_HEADS = [
    *(
        (dims, dtype, dtype)
        for dims in ((576, 512), (192, 128), (512, 512), (256, 256))
        for dtype in (torch.bfloat16, torch.float16)
    ),
    *((dims, torch.bfloat16, torch.float8_e4m3fn) for dims in ((576, 512), (512, 512), (256, 256))),
    ((576, 512), torch.bfloat16, torch.uint8),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dims", "dtype", "kv_dtype"), WIDE_HEADS)
def test_kernels_of_wide_heads_are_in_the_package(
    hopper: list[tuple[str, str]], arch: str, dims: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Kernels of every design of the arch."""
    for kernel, design in manifest.DESIGNS.items():
        if arch in design.archs:
            room = (4, 4, 1, None, True, False)
            AttentionConfig(
                16,
                1,
                *dims,
                dtype,
                dtype,
                kv_dtype,
                CUDA,
                *room,
                kernel,
                variant=None,
                sinks=False,
                float8_out=False,
            ).kernel_files(None)
    assert {name for name, _ in hopper} > {"plan"}
    assert [found for found in hopper if found[1] != arch or found[0] not in manifest.kernels(arch)] == []


def test_sampling_has_no_clusters(hopper: list[tuple[str, str]]) -> None:
    assert sampling._kernel.__wrapped__("f32", CUDA) == (f"sm_80/{manifest.sampling_name('f32')}", 1)


def test_other_kernels(hopper: list[tuple[str, str]]) -> None:
    for name in ("append", "append_latent", "selected_slots", manifest.merge_states_name("f32")):
        assert native.kernel_file(name, CUDA) == f"sm_80/{name}"


def test_kernels_of_variants(
    hopper: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    variant = AttentionVariant(variant_sources.ALIBI, GENERIC, torch.bfloat16, 128, CUDA)
    with pytest.raises(
        RuntimeError,
        match=r"attention_sm80_bf16_d128 for compute_80.* `attn-backend compile .* --arch compute_80` "
        r"compiles it ahead",
    ):
        variant.files()


@pytest.mark.parametrize(
    "compiler", [pytest.param("nvcc", marks=needs_nvcc), pytest.param("nvrtc", marks=needs_nvrtc)]
)
def test_variants_are_compiled_to_ptx(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CUDA_COMPILER", compiler)
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    kernel = manifest.variant_kernels(
        "sm_80", GENERIC, manifest.KernelShape("bf16", HeadDims.of(64)), variant_sources.SLANTED
    )["merge"]
    entry = cubins.find_variant_kernel(variant_sources.SLANTED, kernel, cubins.PTX_OF_SM80)
    assert kernel_cache.fault(entry) == ""
    content = entry.read_bytes()
    assert all(
        compilers.damage(content[:length]) for length in (*range(0, len(content), 997), len(content) - 1)
    )
    assert content.startswith({"nvcc": b"\x50\xed\x55\xba", "nvrtc": b"//"}[compiler])


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHS)
def test_the_driver_knows_what_a_kernel_was_compiled_for(arch: str) -> None:
    """csrc/runtime/driver.cpp checks whether the kernel has griddepcontrol."""
    if arch == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU does not run sm_90a")
    driver, function, version = Driver(), ctypes.c_void_p(), ctypes.c_int()
    module = driver.load(cubins.find_kernel("merge_bf16", arch))
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"merge_kernel")
    driver.call("cuFuncGetAttribute", ctypes.byref(version), 5, function)  # CU_FUNC_ATTRIBUTE_PTX_VERSION
    assert version.value == {"sm_90a": 90, "sm_80": 80}[arch]
