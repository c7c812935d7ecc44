"""The needs of a checkpoint's attention layers, read from its config.json, and the verdict on them. No engine
is imported.

Field names differ between families, so each fact has a list of names. `attn-backend doctor --model` hands
the needs to the rules of both adapters, which answer with a Verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attn_backend.jit.manifest import HeadDims

DECODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder_only", "encoder_decoder"  # as vLLM names them

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_DIMS = ("head_dim", "hidden_size_per_head", "attention_head_dim", "attention_hidden_size_per_head")
_KINDS = ("layer_types", "layers_block_type", "block_types")
# in names of layers that keep a state instead of keys and values
_STATES = ("linear", "mamba", "conv", "recurrent", "kda", "delta", "lightning", "moe", "mlp", "ssm")
_ENCODERS = ("bert", "roberta", "xlm", "electra", "gte", "nomic")  # in model_type


def integer_option(options: Mapping[str, str], name: str, default: int) -> int:
    """The value of a server's option.

    Raises:
        ValueError: it is no integer.
    """
    text = options.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--{name} is {text!r}, must be an integer") from None


class NotAConfiguration(ValueError):
    """The file is missing, is no JSON object, or describes no model."""


@dataclass(frozen=True)
class Layer:
    """An attention layer.

    Attributes:
        heads: of K and V; of decompressed ones in models with latents.
        attn_type: vLLM's name.
        arguments: attention arguments that few models have.
    """

    index: int
    heads: HeadDims
    attn_type: str = DECODER
    has_window: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Latents:
    """Widths of a token's row in multi-head latent attention.

    Attributes:
        width: columns of the latent. rotated: columns of the part with rotary embeddings.
        is_sparse: an indexer selects the tokens that a row attends to.
    """

    width: int
    rotated: int
    is_sparse: bool = False


class Checkpoint:
    """
    Attributes:
        config: all of config.json. text: its part about the language model.
        architecture: the first one.
        num_layers: of the language model, with and without attention.
        layers: those with attention.
        latents: None without multi-head latent attention.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Raises:
            NotAConfiguration: config describes no model with layers.
        """
        self.config = config
        self.text: Mapping[str, Any] = _text_config(config)
        names = config.get("architectures") or self.text.get("architectures") or []
        if not names:
            raise NotAConfiguration("the configuration has no architectures: it must be a checkpoint's")
        self.architecture = str(names[0])
        self.num_layers = _number(self.text, _LAYERS) or len(self._kinds())
        self.latents = self._latents()
        self.layers = tuple(self._layer(index) for index in self._indices())

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """
        Args:
            path: config.json, or the folder that has it.

        Raises:
            NotAConfiguration: see the class.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise NotAConfiguration(
                f"{file} cannot be read ({error}): pass a config.json, or a folder that has one"
            ) from error
        if not isinstance(config, dict):
            raise NotAConfiguration(f"{file} has a JSON {type(config).__name__}, must have an object")
        return cls(config)

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the language model, or else of the whole model."""
        value = self.text.get(name)
        value = self.config.get(name) if value is None else value
        return default if value is None else value

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state, as in hybrids, also next to attention."""
        if len(self.layers) < self.num_layers:
            return True
        return any("mamba" in name or "ssm" in name for name in self.text)

    def _latents(self) -> Latents | None:
        width, rotated = self.get("kv_lora_rank"), self.get("qk_rope_head_dim")
        if width is None or rotated is None:
            return None
        return Latents(int(width), int(rotated), self.get("index_topk") is not None)

    def _indices(self) -> list[int]:
        """Numbers of the layers with attention."""
        of_all = range(self.num_layers)
        if kinds := self._kinds():
            attend = [not any(state in kind for state in _STATES) for kind in kinds[: self.num_layers]]
            return [index for index, attends in enumerate(attend) if attends]
        if pattern := self.get("hybrid_override_pattern"):  # Nemotron-H: "M-M*-"
            return [index for index, kind in enumerate(pattern) if kind == "*"]
        linear = self.get("linear_attn_config") or {}
        if linear.get("full_attn_layers"):  # Kimi Linear counts from 1
            return [index - 1 for index in linear["full_attn_layers"] if index <= self.num_layers]
        if softmax := self.get("attn_type_list"):  # MiniMax: 1 has a softmax
            return [index for index, kind in enumerate(softmax) if kind == 1]
        if chosen := self.get("attn_layer_indices") or self.get("full_attn_idxs"):
            return [int(index) for index in chosen]
        if period := self.get("full_attention_interval"):  # Qwen3-Next
            return [index for index in of_all if (index + 1) % period == 0]
        if period := self.get("attn_layer_period"):  # Jamba
            return [index for index in of_all if index % period == self.get("attn_layer_offset", 0)]
        return list(of_all) if _number(self.text, _HEADS) else []

    def _kinds(self) -> list[str]:
        return next((list(self.text[name]) for name in _KINDS if self.text.get(name)), [])

    def _layer(self, index: int) -> Layer:
        kinds = self._kinds()
        kind = kinds[index] if index < len(kinds) else ""
        windows = self.get("hybrid_layer_pattern")  # MiMo V2: 1 has a window
        has_window = "sliding" in kind or bool(windows and windows[index])
        arguments: tuple[tuple[str, Any], ...] = ()
        if self.architecture == "Rnj1ForCausalLM" and kind == "chunked_attention":
            arguments = (("chunk_lookback", 1),)
        return Layer(index, self._heads(kind, has_window), self._attn_type(), has_window, arguments)

    def _heads(self, kind: str, has_window: bool) -> HeadDims:
        if self.latents is not None:
            nope = int(self.get("qk_nope_head_dim", 0))
            return HeadDims(nope + self.latents.rotated, int(self.get("v_head_dim", nope)))
        head_dim = _number(self.text, _HEAD_DIMS)
        if not head_dim:
            heads, hidden = _number(self.text, _HEADS), _number(self.text, _HIDDEN)
            head_dim = hidden // heads if heads else 0
        if kind == "full_attention":  # Gemma 4
            head_dim = self.text.get("global_head_dim") or head_dim
        head_dim_v = self.text.get("v_head_dim") or head_dim
        if has_window:  # MiMo V2
            head_dim = self.text.get("swa_head_dim") or head_dim
            head_dim_v = self.text.get("swa_v_head_dim") or head_dim_v
        return HeadDims(int(head_dim), int(head_dim_v if self.text.get("v_head_dim") else head_dim))

    def _attn_type(self) -> str:
        model_type = str(self.text.get("model_type", "")).lower()
        is_encoder = any(name in model_type for name in _ENCODERS) and not self.get("is_decoder", False)
        sees_all = self.get("use_bidirectional_attention") in (True, "all") or self.get("is_causal") is False
        return ENCODER_ONLY if is_encoder or sees_all else DECODER


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _TEXT_CONFIGS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return _text_config(nested)
    return config


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these fields that is a number; 0 if there is none."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


SERVED, REFUSED, PARTLY = "served", "refused", "partly"


class Refusal(NamedTuple):
    """
    Attributes:
        what: the unsupported need of the model.
        way_out: an option to pass, or another backend.
    """

    what: str
    way_out: str


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        answer: SERVED, REFUSED or PARTLY.
        refusals: all reasons, of REFUSED.
        ours: numbers of the attention layers that this backend serves. others: numbers of the layers that
            run the model's own kernels.
        notes: facts that a user should know in any case.
    """

    answer: str
    refusals: tuple[Refusal, ...] = ()
    ours: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def refused(refusals: Iterable[Refusal]) -> Verdict:
    return Verdict(REFUSED, tuple(refusals))
