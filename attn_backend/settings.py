"""Settings from environment variables, and the message for a refused value."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from reprlib import repr as shown  # shortens long values
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .machine import cache_folder

PREFIX = "ATTN_BACKEND_"


def _if_empty(instead: object) -> BeforeValidator:
    return BeforeValidator(lambda value: instead if value == "" else value)


_DEQUANTIZED_MIB, _MAX_DEQUANTIZED_MIB = 128, 1 << 20

Switch = Annotated[bool, _if_empty("0")]


class Settings(BaseModel):
    """Each field is set by the variable ATTN_BACKEND_FIELD."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    arch: Annotated[Literal["sm_90a", "sm_80"] | None, _if_empty(None)] = Field(
        None,
        description="kernel build that a GPU uses: sm_90a or sm_80 (default: the build made for it); sm_80 "
        "tests the generic build on Hopper",
    )
    cache: Annotated[Path | None, _if_empty(None)] = Field(
        None,
        description="folder of compiled kernels, and of the demo's model and data set (default attn_backend/ "
        "in XDG_CACHE_HOME or ~/.cache)",
    )
    cascade: Switch = Field(True, description="look for shared prefixes in an engine's batches")
    cpu_isa: Annotated[Literal["baseline", "avx2", "avx512", "amx"] | None, _if_empty(None)] = Field(
        None,
        description="highest CPU instruction set to use: baseline, avx2, avx512 or amx (default: all)",
    )
    cuda_compiler: Annotated[Literal["nvcc", "nvrtc"] | None, _if_empty(None)] = Field(
        None, description="compiler of a variant's kernels: nvcc or nvrtc (default: nvcc if it is installed)"
    )
    debug: Switch = Field(
        False,
        description="report metadata errors that only the device can detect, and refuse a second thread; "
        "synchronizes",
    )
    dequantized_mib: Annotated[int, _if_empty(_DEQUANTIZED_MIB)] = Field(
        _DEQUANTIZED_MIB,
        ge=0,
        le=_MAX_DEQUANTIZED_MIB,
        description="MiB of each workspace on Hopper for a 16-bit copy of what prompts read from an 8-bit or "
        "4-bit cache; a prompt that finds no room there is slower",
    )
    dump: Annotated[Path | None, _if_empty(None)] = Field(
        None,
        description="write the metadata of batches that were refused or clamped to this folder, for "
        "`attn-backend plan`; synchronizes",
    )
    jit: Switch = Field(
        True,
        description="compile missing kernels on first use; 0: only `attn-backend compile` does",
    )
    metrics: Switch = Field(
        False, description="count plans and KV tokens, for the engine's Prometheus endpoint"
    )
    prefetch_code: Switch = Field(True, description="prefetch the code of attention kernels to the L2 cache")
    require_layers: Switch = Field(
        True,
        description="refuse to start an engine if this backend was chosen but serves no attention layer of "
        "the model; 0: only warn",
    )
    sampler: Switch | None = Field(
        None,
        description="0: the engine samples; 1: this package does, also instead of SGLang's `pytorch` "
        "(default: in vLLM yes, else on request)",
    )
    vllm_cpu: Switch = Field(False, description="replace vLLM's CPU attention backend")

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads the environment variables. Warns of unknown ones, once per process.

        Raises:
            ValueError: the message gives the variable, its value and the requirement.
        """
        if environment is os.environ:
            warn_of_unknown_variables()
        try:
            return cls.model_validate(
                {
                    name: environment[variable]
                    for name in cls.model_fields
                    if (variable := PREFIX + name.upper()) in environment
                }
            )
        except ValidationError as error:
            name, rest = refusal(error).split(" ", 1)
            raise ValueError(f"{PREFIX}{name.upper()} {rest}") from None

    def cache_folder(self) -> Path:
        """The folder of compiled kernels and downloads.

        Raises:
            RuntimeError: the variable is not set, and there is no home directory.
        """
        return cache_folder(self.cache)


def unknown_variables() -> dict[str, str]:
    """Environment variables with our prefix that are not settings, each with the most similar setting, or ""
    if none is similar.
    """
    unknown = {}
    for variable in os.environ:
        name = variable.upper().removeprefix(PREFIX).lower()
        if variable.upper().startswith(PREFIX) and (
            name not in Settings.model_fields or variable != PREFIX + name.upper()
        ):
            nearest = get_close_matches(name, Settings.model_fields, 1, cutoff=0.5)
            unknown[variable] = PREFIX + nearest[0].upper() if nearest else ""
    return unknown


@cache
def warn_of_unknown_variables() -> None:
    for variable, nearest in unknown_variables().items():
        hint = f"did you mean {nearest}?" if nearest else "`attn-backend doctor` lists the settings"
        logging.getLogger("attn_backend").warning(
            "attn_backend: %s is unknown and has no effect: %s", variable, hint
        )


def refusal(error: ValidationError, known: Iterable[str] = ()) -> str:
    """The message for a validation error, worded like all other errors: the field, its value and the
    requirement.

    Unknown fields come first; `known`: the fields that exist.
    """
    fault = min(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    name, *inside = fault["loc"] or ("",)
    name = f"{name}{''.join(f'[{part}]' for part in inside if isinstance(part, int))}"
    match fault["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            return f"{name!r} is unknown; known are {', '.join(known)}"
        case "value_error":  # raised by one of our validators, with a complete message
            return str(fault["ctx"]["error"])
        case "too_long":
            return (
                f"len({name}) is {fault['ctx']['actual_length']}, must be at most "
                f"{fault['ctx']['max_length']}"
            )
        case "bool_parsing":
            return f"{name} is {shown(fault['input'])}, must be 0 or 1"
    must = (
        fault["msg"]
        .replace("Input should be", "must be")
        .replace("List should have", "must have")
        .replace("after validation, not 0", "")
        .rstrip()
    )
    return f"{name} is {shown(fault['input'])}, {must}"
