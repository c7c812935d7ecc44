"""The device of the servers, and the installed software, for reports."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess

from attn_backend.machine import CPUINFO, serving_dtype


def find_device() -> str:
    """`cuda` when the NVIDIA driver lists a GPU, else `cpu`.

    Needs no torch, so the choice of environment can depend on it.
    """
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def default_dtype(device: str) -> str:
    """The `--dtype` of servers if the user names none: the faster one on a CPU, the model's own on a GPU."""
    return serving_dtype() if device == "cpu" else "auto"


def uses_multicast() -> bool:
    """Whether collectives may use NVLink multicast: every GPU reports it, and NCCL_NVLS_ENABLE is not 0."""
    if os.environ.get("NCCL_NVLS_ENABLE") == "0":
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    count, supported, multicast_supported = ctypes.c_int(), ctypes.c_int(), 132
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return count.value > 0 and all(
        driver.cuDeviceGetAttribute(ctypes.byref(supported), multicast_supported, device) == 0
        and supported.value == 1
        for device in range(count.value)
    )


def device_name(device: str) -> str:
    """The GPU's or the processor's name, for reports."""
    if device == "cuda":
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            check=False,
            capture_output=True,
            text=True,
        )
        return listed.stdout.splitlines()[0].strip() if listed.stdout else "unknown GPU"
    names = [
        line.partition(":")[2].strip()
        for line in CPUINFO.read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def package_versions(python: str) -> dict[str, str]:
    """Versions of torch, the engines and this package as the interpreter `python` sees them."""
    names = ["torch", "vllm", "sglang", "attn-backend"]
    code = (
        "import importlib.metadata as m, json\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return None\n"
        f"print(json.dumps({{name: version(name) for name in {names}}}))"
    )
    printed = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    return {name: version for name, version in json.loads(printed).items() if version}
