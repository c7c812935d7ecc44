"""The model that a server loads: a folder, `smollm2`, `smollm2-4-kv-heads`, or a folder with only a config
(random weights).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.cache import cache_folder, cached_folder
from integration.environment import REPOSITORY
from integration.smollm2 import KV_HEADS, WITH_MORE_HEADS, cache_name
from integration.tokenizer import write_word_tokenizer

SMOLLM2_KV_HEADS = {"smollm2": KV_HEADS, f"smollm2-{WITH_MORE_HEADS}-kv-heads": WITH_MORE_HEADS}
TOKENIZER_SOURCE = REPOSITORY / "integration" / "tokenizer.py"


@dataclass(frozen=True)
class Model:
    """A model on disk.

    `random_weights`: the folder has no weights, and the engine generates them (`--load-format dummy`).
    """

    name: str
    folder: Path
    random_weights: bool


def resolve_model(model: str, python: str) -> Model:
    """Find or make the model `model`: `smollm2`, `smollm2-4-kv-heads`, a folder, or the name of a folder in
    integration/models.

    `python` is the engine's interpreter; it converts SmolLM2. Raises ValueError if the model does not exist.
    """
    if kv_heads := SMOLLM2_KV_HEADS.get(model.lower()):
        name = (
            "SmolLM2-135M-Instruct" if kv_heads == KV_HEADS else f"SmolLM2-135M-Instruct, {kv_heads} KV heads"
        )
        return Model(name, _make_smollm2(python, kv_heads), random_weights=False)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        folder = REPOSITORY / "integration" / "models" / model
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model: {model!r} is neither {' nor '.join(SMOLLM2_KV_HEADS)}, nor a folder with a config.json, "
            f"nor one of integration/models"
        )
    folder = folder.resolve()
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return Model(folder.name, folder, random_weights=False)
    return Model(
        folder.name,
        folder if (folder / "tokenizer.json").is_file() else _add_tokenizer(folder),
        random_weights=True,
    )


def _make_smollm2(python: str, kv_heads: int) -> Path:
    folder = cache_folder() / cache_name(kv_heads)
    if not folder.is_dir():
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "TQDM_DISABLE": "1",
        }
        if (
            subprocess.run(
                [python, "-m", "integration.smollm2", "--kv-heads", str(kv_heads)],
                check=False,
                cwd=REPOSITORY,
                env=environment,
            ).returncode
            != 0
        ):
            raise RuntimeError("SmolLM2 could not be prepared (see above)")
    return folder


def _add_tokenizer(folder: Path) -> Path:
    """A cached copy of a config-only folder, with a word-level tokenizer added."""
    text = (folder / "config.json").read_text()
    config: dict[str, Any] = json.loads(text)

    def fill(target: Path) -> None:
        shutil.copy(folder / "config.json", target)
        eos = config.get("eos_token_id")
        write_word_tokenizer(
            target, config["vocab_size"], config.get("bos_token_id"), eos[0] if isinstance(eos, list) else eos
        )

    recipe = text + TOKENIZER_SOURCE.read_text()  # a copy from an older version is not used
    return cached_folder(f"models/{folder.name}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}", fill)
