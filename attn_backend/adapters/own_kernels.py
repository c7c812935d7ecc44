"""Models that choose their attention kernels themselves, whatever backend the user chose.

The adapters see this once a model is built (served.py). `attn-backend doctor --model` reads this table before
an engine starts. docs/engines/limits.md shows it, and docs/reports/models.md with files and lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from attn_backend.adapters.checkpoint import PARTLY, SERVED, Checkpoint, Layer, Refusal, Verdict, refused
from attn_backend.adapters.served import WAY_OUT

ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


class Choice(NamedTuple):
    """
    Attributes:
        architectures: names in a checkpoint's configuration.
        where: the lines that choose the kernels, in the newest release (attn_backend/releases.py). None: a
            rule of the adapter refuses the model.
        layers: the layers that do not run on this backend.
        refuses: the engine itself refuses other backends than these.
        shown: how the table of the documentation describes it.
    """

    architectures: tuple[str, ...]
    where: tuple[str, ...]
    layers: Callable[[Checkpoint], tuple[Layer, ...]]
    refuses: str = ""
    shown: str = "refused"


class Missing(NamedTuple):
    """The engine has no such models.

    Attributes:
        architectures: their names, from the other engine.
    """

    architectures: tuple[str, ...]


class OwnKernels(NamedTuple):
    """None: the layers ask for the user's backend in this engine."""

    models: str
    vllm: Choice | Missing | None
    sglang: Choice | Missing | None

    def choice(self, engine: str) -> Choice | Missing | None:
        return self.vllm if engine == "vllm" else self.sglang


def _all(model: Checkpoint) -> tuple[Layer, ...]:
    return model.layers


def _all_with(field: str) -> Callable[[Checkpoint], tuple[Layer, ...]]:
    """All layers of checkpoints that set this field."""
    return lambda model: model.layers if model.get(field) else ()


def _with_causal_audio(model: Checkpoint) -> tuple[Layer, ...]:
    is_causal = (model.config.get("audio_config") or {}).get("is_causal")
    return model.layers if is_causal or "Realtime" in model.architecture else ()


def _with_sinks_of_pangu(model: Checkpoint) -> tuple[Layer, ...]:
    return model.layers if model.latents is None and model.get("param_sink_number", 0) > 0 else ()


def _sparse_of_minimax(model: Checkpoint) -> tuple[Layer, ...]:
    sparse = (model.get("sparse_attention_config") or {}).get("sparse_attention_freq") or []
    return tuple(layer for layer in model.layers if layer.index < len(sparse) and sparse[layer.index])


_PARTLY = "partly ours (dense layers only)"
_V4 = ("DeepseekV4ForCausalLM",)
_V41 = ("DeepseekV41ForCausalLM",)
_STEP = ("Step5ForCausalLM", "Step5ForConditionalGeneration")
_HY = ("HYV4ForCausalLM",)
_PANGU = ("PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM", "PanguUltraMoEForCausalLM")
_IQUEST = ("IQuestQ1ForCausalLM",)
_MOSS = ("MossVLForConditionalGeneration",)
_QWEN = ("Qwen4ExpForConditionalGeneration",)
_INKLING = ("InklingForConditionalGeneration",)
_MINIMAX = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")

OWN_KERNELS = (
    OwnKernels(
        "DeepSeek V4, and V4.1 as `DeepseekV4ForCausalLM`",
        Choice(
            (*_V4, "DeepseekV4ForConditionalGeneration"), ("models/deepseek_v4/nvidia/model.py:526",), _all
        ),
        Choice(
            _V4,
            ("arg_groups/model_overrides/deepseek_v4.py:24",),
            _all,
            shown="refused, since `dsv4` replaces the choice",
        ),
    ),
    OwnKernels(
        "DeepSeek V4.1 as `DeepseekV41ForCausalLM`",
        Choice(_V41, ("models/deepseek_v41/nvidia/model.py:202",), _all),
        Missing(_V41),
    ),
    OwnKernels(
        "Qwen4-Exp",
        Choice(
            ("Qwen4ExpForCausalLM", *_QWEN),
            ("models/qwen4_exp/nvidia/qsa.py:475",),
            _all_with("indexer_n_heads"),
        ),
        Choice(_QWEN, ("layers/attention/attention_registry.py:486",), _all_with("indexer_n_heads")),
    ),
    OwnKernels(
        "dots3",
        Choice(("Dots3NoteForCausalLM",), ("models/dots3_note/nvidia/model.py:231, 481",), _all),
        Choice(("Dots3NoteForCausalLM",), ("layers/attention/dots_hybrid_backend.py:559",), _all),
    ),
    OwnKernels("Step 5", Choice(_STEP, ("models/step5/nvidia/model.py:1184",), _all), Missing(_STEP)),
    OwnKernels(
        "HY V4 with sinks",
        Choice(_HY, ("models/hy_v4/nvidia/attention.py:523",), _all_with("learnable_sink")),
        Choice(_HY, (), lambda model: (), shown="refused: sinks over selected tokens"),
    ),
    OwnKernels(
        "openPangu with sinks",
        Choice(_PANGU, ("model_executor/models/openpangu.py:641",), _with_sinks_of_pangu),
        Missing(_PANGU),
    ),
    OwnKernels(
        "Inkling",
        Choice(("InklingForCausalLM", *_INKLING), ("models/inkling/nvidia/attention.py:180",), _all),
        Choice(
            _INKLING,
            ("models/inkling_common/attn.py:744",),
            _all,
            refuses="fa4 and triton",
            shown="refused by SGLang, which accepts `fa4` and `triton`",
        ),
    ),
    OwnKernels(
        "IQuest Q1",
        Missing(_IQUEST),
        Choice(
            _IQUEST,
            ("arg_groups/model_overrides/iquest_q1.py:18",),
            _all,
            refuses="fa3",
            shown="refused by SGLang, which accepts `fa3`",
        ),
    ),
    OwnKernels(
        "MOSS-VL",
        Missing(_MOSS),
        Choice(
            _MOSS,
            ("arg_groups/model_overrides/moss_vl.py:27",),
            _all,
            refuses="flashinfer for prompts",
            shown="refused by SGLang, which accepts `flashinfer` for prompts",
        ),
    ),
    OwnKernels(
        "Voxtral with a causal encoder",
        Choice(
            ("VoxtralForConditionalGeneration", "VoxtralRealtimeGeneration"),
            ("model_executor/models/whisper_causal.py:321",),
            _with_causal_audio,
            refuses="its own backends",
            shown="refused by vLLM, which accepts its own backends",
        ),
        None,
    ),
    OwnKernels(
        "MiniMax M3",
        Choice(_MINIMAX, ("models/minimax_m3/nvidia/model.py:518",), _sparse_of_minimax, shown=_PARTLY),
        Choice(_MINIMAX, ("layers/attention/attention_registry.py:388",), _sparse_of_minimax, shown=_PARTLY),
    ),
)


def choice_of(engine: str, model: Checkpoint) -> Choice | Missing | None:
    """The entry for a model in an engine, or None: its layers ask for the user's backend."""
    for entry in OWN_KERNELS:
        choice = entry.choice(engine)
        if choice is not None and model.architecture in choice.architectures:
            return choice
    return None


def judge(
    engine: str, model: Checkpoint, other_backend: str, refusals: Iterable[Refusal | None] = ()
) -> Verdict:
    """Whether the layers of a model run on this backend.

    Args:
        refusals: of the engine's rules. They count unless the model's own kernels are refused.
    """
    all_layers = tuple(layer.index for layer in model.layers)
    choice = choice_of(engine, model)
    if isinstance(choice, Missing):
        what = f"{model.architecture}, which {ENGINE_NAMES[engine]} does not have"
        return refused([Refusal(what, "use another engine")])
    others = () if choice is None else tuple(layer.index for layer in choice.layers(model))
    if others and choice is not None and choice.refuses:
        what = f"{model.architecture}: {ENGINE_NAMES[engine]} only accepts {choice.refuses} for it"
        return refused([Refusal(what, other_backend)])
    if others and len(others) == len(all_layers):
        what = f"{model.architecture}: its own kernels run all {len(others)} attention layers"
        return refused([Refusal(what, WAY_OUT)])
    if found := [refusal for refusal in refusals if refusal is not None]:
        return refused(found)
    ours = tuple(sorted({*all_layers} - {*others}))
    return Verdict(PARTLY if others else SERVED, ours=ours, others=others)
