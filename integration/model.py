"""The model that a server loads: a folder, a name in CONVERTED such as `smollm2`, or a folder with only a
config (random weights).
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
from integration.gguf_models import MODELS
from integration.smollm2 import WITH_MORE_HEADS, cache_name
from integration.tokenizer import write_word_tokenizer

TOKENIZER_SOURCE = REPOSITORY / "integration" / "tokenizer.py"


@dataclass(frozen=True)
class Converted:
    """A model that the engine's interpreter downloads and converts: `python -m COMMAND`."""

    title: str
    cache_name: str
    command: tuple[str, ...]


CONVERTED = {
    name: Converted(model.title, model.cache_name, ("integration.gguf_models", name))
    for name, model in MODELS.items()
} | {
    f"smollm2-{WITH_MORE_HEADS}-kv-heads": Converted(
        f"{MODELS['smollm2'].title}, {WITH_MORE_HEADS} KV heads",
        cache_name(WITH_MORE_HEADS),
        ("integration.smollm2", "--kv-heads", str(WITH_MORE_HEADS)),
    )
}


@dataclass(frozen=True)
class Model:
    """A model on disk.

    `random_weights`: the folder has no weights, and the engine generates them (`--load-format dummy`).
    """

    name: str
    folder: Path
    random_weights: bool


def resolve_model(model: str, python: str) -> Model:
    """Find or make the model `model`: a name in CONVERTED, a folder, or the name of a folder in
    integration/models.

    `python` is the engine's interpreter; it converts models. Raises ValueError if the model does not exist.
    """
    if converted := CONVERTED.get(model.lower()):
        return Model(converted.title, _converted_folder(python, converted), random_weights=False)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        folder = REPOSITORY / "integration" / "models" / model
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model: {model!r}, must be one of {', '.join(CONVERTED)}, a folder with a config.json, or "
            f"one of integration/models"
        )
    folder = folder.resolve()
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return Model(folder.name, folder, random_weights=False)
    return Model(
        folder.name,
        folder if (folder / "tokenizer.json").is_file() else _add_tokenizer(folder),
        random_weights=True,
    )


def _converted_folder(python: str, model: Converted) -> Path:
    folder = cache_folder() / model.cache_name
    if not folder.is_dir():
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "TQDM_DISABLE": "1",
        }
        if (
            subprocess.run(
                [python, "-m", *model.command],
                check=False,
                cwd=REPOSITORY,
                env=environment,
            ).returncode
            != 0
        ):
            raise RuntimeError(f"{model.title} could not be prepared (see above)")
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
