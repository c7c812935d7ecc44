"""Lets SGLang start without a GPU: put this folder on PYTHONPATH, for its server and for its clients.

The package index has torchvision for CUDA only. Beside a torch for CPUs it fails at import, because operators that its compiled part would define are missing;
SGLang needs it importable and nothing more. So the operators are declared just before torchvision is imported. `sgl_kernel`, in this folder, stands in for
SGLang's compiled kernels.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()
        return None  # the ordinary finders go on


def _declare_operators() -> None:
    import torch

    try:
        built_for_cpu = "+cpu" in version("torchvision")
    except PackageNotFoundError:
        return
    if torch.version.cuda is None and not built_for_cpu:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
