"""Lets SGLang start without a GPU: put this folder on PYTHONPATH, for its server and for its clients.

The package index has torchvision only for CUDA. With a CPU build of torch its import fails, because operators
of its compiled part are missing; SGLang only needs to import it. So the operators are declared just before
torchvision is imported. LoRA pins memory, for which torch needs a GPU: just before SGLang's torch code for
LoRA is imported, torch is made to leave memory as it is. The server's arguments refuse DFLASH on CPUs, though
its worker has a path without kernels: just after the check is imported, it is made to read another device.
FP4 pools are torch tensors: their check is made to see a GPU, and their dtype to need none. SGLang gives
DFLASH's draft model bfloat16: just after it is imported, it is made to take embeddings in its own type.
Hybrids use Triton for convolutions, gated norms and shared experts: just after those modules are imported,
they are made to use torch. `sgl_kernel`, in this folder, replaces SGLang's compiled kernels.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, SimpleNamespace
from typing import Any


class _Before(MetaPathFinder):
    """Does something just before a module is imported."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module, self.action = module, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self.module:
            sys.meta_path.remove(self)
            self.action()
        return None  # the ordinary finders go on


class _After(MetaPathFinder):
    """Does something to a module just after it has been imported."""

    def __init__(self, module: str, action: Callable[[ModuleType], None]) -> None:
        self.module, self.action = module, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _declare_operators() -> None:
    import torch

    try:
        built_for_cpu = "+cpu" in version("torchvision")
    except PackageNotFoundError:
        return
    if torch.version.cuda is None and not built_for_cpu:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


def _leave_memory_unpinned() -> None:
    import torch

    if torch.version.cuda is not None:
        return

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def without(*given: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*given, **named)

        return without

    for name in ("tensor", "arange", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[assignment,method-assign,return-value]


def _leave_streams_unrecorded() -> None:
    import torch

    if torch.version.cuda is None:
        torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment,method-assign]


def _allow_dflash(hook: Any) -> None:
    import torch

    if torch.version.cuda is not None or not hasattr(hook, "resolving_view"):
        return
    view = hook.resolving_view

    class OnAnotherDevice:
        """A server's settings, except the device."""

        device = "xpu"  # the check requires more of CUDA and of NPUs

        def __init__(self, settings: Any) -> None:
            self._settings = settings

        def __getattr__(self, name: str) -> Any:
            return getattr(self._settings, name)

    _replace_in(hook, "_handle_dflash", "resolving_view", lambda arguments: OnAnotherDevice(view(arguments)))


def _allow_fp4(hook: Any) -> None:
    import torch

    if torch.version.cuda is None and hasattr(hook, "get_platform"):
        gpu = SimpleNamespace(is_cuda=True, is_sm100=False, is_sm120=False)
        _replace_in(hook, "handle_kv4_compatibility", "get_platform", lambda: gpu)


def _know_fp4(common: Any) -> None:
    import torch

    if torch.version.cuda is None:
        common.is_float4_e2m1fn_x2 = lambda dtype: dtype == torch.float4_e2m1fn_x2


def _replace_in(module: Any, check: str, name: str, replacement: Callable[..., Any]) -> None:
    """Makes a function of a module see a replacement for another one."""
    function, original = getattr(module, check), getattr(module, name)

    @functools.wraps(function)
    def with_replacement(server_args: Any) -> None:
        setattr(module, name, replacement)
        try:
            function(server_args)
        finally:
            setattr(module, name, original)

    setattr(module, check, with_replacement)


def _take_embeddings(dflash: Any) -> None:
    forward = dflash.DFlashDraftModel.forward

    @functools.wraps(forward)
    def in_its_type(model: Any, *given: Any, input_embeds: Any, **named: Any) -> Any:
        return forward(model, *given, input_embeds=input_embeds.to(model.fc.weight.dtype), **named)

    dflash.DFlashDraftModel.forward = in_its_type


def _declare_layers_with_states() -> None:
    import torch

    if torch.version.cuda is None:
        import_module("sgl_kernel.mamba")


def _convolve_in_torch(causal_conv1d: Any) -> None:
    import torch

    if torch.version.cuda is None:
        mamba = import_module("sgl_kernel.mamba")
        causal_conv1d.causal_conv1d_fn = mamba.causal_conv1d_fn_cpu
        causal_conv1d.causal_conv1d_update = mamba.causal_conv1d_update_cpu


def _normalize_in_torch(norms: Any) -> None:
    import torch

    norms._use_cpu = torch.version.cuda is None  # otherwise only with AMX


def _add_shared_experts_in_torch(elementwise: Any) -> None:
    import torch

    def add(hidden: Any, gate: Any, shared: Any, out: Any) -> None:
        out += (hidden @ gate).sigmoid()[:, None] * shared

    if torch.version.cuda is None:
        elementwise.fused_gate_sigmoid_mul_add = add


sys.meta_path[:0] = [
    _Before("torchvision", _declare_operators),
    _Before("sglang.srt.lora.backend.torch_backend", _leave_memory_unpinned),
]
sys.meta_path.insert(0, _Before("sglang.srt.speculative.dflash_worker_v2", _leave_streams_unrecorded))
sys.meta_path.insert(0, _After("sglang.srt.arg_groups.speculative_hook", _allow_dflash))
sys.meta_path.insert(0, _After("sglang.srt.arg_groups.kv_cache_hook", _allow_fp4))
sys.meta_path.insert(0, _After("sglang.srt.utils.common", _know_fp4))
sys.meta_path.insert(0, _After("sglang.srt.models.dflash", _take_embeddings))
sys.meta_path.insert(0, _Before("sglang.srt.models.registry", _declare_layers_with_states))
sys.meta_path.insert(0, _After("sglang.srt.layers.attention.mamba.causal_conv1d", _convolve_in_torch))
sys.meta_path.insert(0, _After("sglang.kernels.ops.attention.fla.layernorm_gated", _normalize_in_torch))
sys.meta_path.insert(0, _After("sglang.kernels.ops.attention.fla.fused_norm_gate", _normalize_in_torch))
sys.meta_path.insert(0, _After("sglang.kernels.ops.elementwise.elementwise", _add_shared_experts_in_torch))
