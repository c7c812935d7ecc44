"""Built-in variants whose kernels ship: found by their content, without a compiler."""

from __future__ import annotations

import re
from pathlib import Path

import case_tensors
import cases
import pytest
import torch
import variant_sources
from fake_nvcc import FATBIN, FakeKernels, cubin
from variant_fuzz.catalogue import by_reference

from attn_backend import Variant
from attn_backend.jit import compilers, cubins, manifest
from attn_backend.jit.manifest import SHIPPED_VARIANTS, HeadDims
from attn_backend.variants import builtin

HOPPER, GENERIC = manifest.DESIGNS["hopper"], manifest.DESIGNS["generic"]
SLOPES = torch.rand(4)
SHIPPED = {
    "alibi": builtin.alibi(),
    "bound": builtin.alibi(SLOPES),
    "causal": builtin.alibi() & builtin.causal(),
    "window": builtin.causal() & builtin.sliding_window(70) & builtin.alibi(),
}
NOT_SHIPPED = {
    "another alibi": variant_sources.ALIBI,
    "with more": builtin.alibi() & builtin.soft_cap(3.0),
    "with a mask": builtin.alibi() & builtin.document(),
    "twice": builtin.alibi(SLOPES) & builtin.alibi(),
}


@pytest.mark.parametrize("shipped", SHIPPED_VARIANTS, ids=lambda shipped: shipped.name)
def test_the_shipped_sources_are_those_of_the_built_ins(shipped: manifest.VariantSource) -> None:
    variant = Variant.builtin(shipped.name)
    assert shipped.source == variant.source, (
        f"jit/manifest.py must have, for {shipped.name}:\n{variant.source}"
    )
    assert (shipped.has_mask, shipped.has_output) == (variant.has_mask, variant.has_output)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    """A package with all kernels, on a machine without a compiler."""
    fake = FakeKernels(tmp_path, monkeypatch)
    for arch, content in (("sm_90a", cubin(b"from the package")), ("sm_80", FATBIN)):
        for name in manifest.kernels(arch):
            path = cubins.shipped_kernel(name, arch)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    monkeypatch.setattr(compilers, "nvcc", lambda: None)
    monkeypatch.setattr(compilers, "nvrtc", lambda: None)
    return fake


def found(
    variant: Variant,
    target: str = "sm_90a",
    design: manifest.Design = HOPPER,
    element: str = "bf16",
    head_dim: int = 128,
    **options: bool,
) -> list[Path]:
    arch = cubins.arch_of_target(target)
    kernels = manifest.variant_kernels(
        arch, design, manifest.KernelShape(element, HeadDims.of(head_dim)), variant, **options
    )
    return [
        cubins.find_variant_kernel(variant, kernel, target, lambda: "the command")
        for kernel in kernels.values()
    ]


@pytest.mark.parametrize("variant", SHIPPED.values(), ids=SHIPPED)
@pytest.mark.parametrize("element", manifest.CUDA_ELEMENTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_those_of_the_package_are_used(
    variant: Variant, element: str, head_dim: int, package: FakeKernels
) -> None:
    on_hopper = [f"attention_{design}_{element}_d{head_dim}_alibi" for design in ("sm90", "sm90_gather")]
    assert found(variant, element=element, head_dim=head_dim) == [
        cubins.shipped_kernel(name, "sm_90a") for name in on_hopper
    ]
    generic = [cubins.shipped_kernel(f"attention_sm80_{element}_d{head_dim}_alibi", "sm_80")]
    for target in ("sm_80", "sm_100", "sm_120"):
        assert found(variant, target, GENERIC, element, head_dim) == generic


@pytest.mark.parametrize("variant", NOT_SHIPPED.values(), ids=NOT_SHIPPED)
def test_no_other_variant_is_taken_for_a_shipped_one(variant: Variant, package: FakeKernels) -> None:
    with pytest.raises(RuntimeError, match=r"is not compiled, and ATTN_BACKEND_JIT=0 .*the command"):
        found(variant)


def test_other_forms_are_compiled(package: FakeKernels) -> None:
    for options in ({"head_dim": 256}, {"design": GENERIC}, {"sinks": True}):
        with pytest.raises(RuntimeError, match=r"variant alibi .* is not compiled"):
            found(builtin.alibi(), **options)  # type: ignore[arg-type]


def test_a_damaged_one_is_compiled_or_named(package: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = cubins.shipped_kernel("attention_sm90_bf16_d128_alibi", "sm_90a")
    shipped.write_bytes(cubin()[:-1])
    with pytest.raises(
        RuntimeError,
        match=rf"{re.escape(str(shipped))} is truncated: reinstall attn-backend; variant alibi .* is not "
        rf"compiled",
    ):
        found(builtin.alibi())
    monkeypatch.setattr(compilers, "nvcc", lambda: str(package.nvcc))
    kernel = manifest.variant_kernels(
        "sm_90a", HOPPER, manifest.KernelShape("bf16", HeadDims.of(128)), builtin.alibi()
    )["attention"]
    compiled = cubins.find_variant_kernel(builtin.alibi(), kernel, "sm_90a")
    assert compiled.read_bytes() == cubin()
    assert compiled.is_relative_to(package.cache)


def test_combinations_share_what_is_compiled(package: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "nvcc", lambda: str(package.nvcc))
    places = set()
    for variant in SHIPPED.values():
        kernel = manifest.variant_kernels(
            "sm_90a", HOPPER, manifest.KernelShape("bf16", HeadDims.of(256)), variant
        )["attention"]
        places.add(cubins.find_variant_kernel(variant, kernel, "sm_90a"))
    assert len(places) == package.runs() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SHIPPED)
def test_results_on_a_gpu(
    name: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses only kernels that a wheel ships, and compiles nothing else."""
    monkeypatch.setattr(cubins, "shipped_kernel", lambda kernel, arch: cubins.compile_kernel(kernel, arch)[0])
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    monkeypatch.setattr(cubins, "_nvcc_flags", lambda _: pytest.fail(f"{name} is not shipped"))
    variant = SHIPPED[name]
    args = {} if name == "bound" else {"slopes": SLOPES}
    on_gpu = {name: arg.cuda() for name, arg in args.items()}
    for seed in range(4):
        spec = cases.random_spec(seed, "cuda").with_(
            head_dim=head_dim, dtype=dtype, group_size=2, num_kv_heads=2, causal=True, logits_soft_cap=0.0
        )
        case = case_tensors.build(spec, "cuda")
        attention = case.attention(variant=variant, kernel=None)  # none of the other design ships
        attention.plan(case.view)
        attention.run(
            case.q, case.kv, out=case.out, lse=case.lse, sm_scale=spec.sm_scale, variant_args=on_gpu
        )
        case_tensors.check(
            case, case.out, case.lse, case.on_cpu().expected(variant=by_reference(variant, args))
        )
