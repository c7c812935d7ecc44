"""flashinfer.logits_processor: a list of processing steps for logits. Steps before a draw are fused with it
into one launch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from torch import Tensor

from ..validation import refuse, require
from . import sampling
from .features import missing, refuse_given

__all__ = [
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
]


class TensorType(Enum):
    """The contents of a tensor in a pipe: scores, probabilities, or tokens."""

    LOGITS = auto()
    PROBS = auto()
    INDICES = auto()


@dataclass(frozen=True)
class TaggedTensor:
    """A tensor with its TensorType."""

    data: Tensor
    type: TensorType

    @classmethod
    def logits(cls, t: Tensor) -> TaggedTensor:
        return cls(t, TensorType.LOGITS)

    @classmethod
    def probs(cls, t: Tensor) -> TaggedTensor:
        return cls(t, TensorType.PROBS)

    @classmethod
    def indices(cls, t: Tensor) -> TaggedTensor:
        return cls(t, TensorType.INDICES)


class LogitsProcessor:
    """A step of a pipe. `makes`: maps each input type that it accepts to its output type."""

    makes: ClassVar[dict[TensorType, TensorType]] = {}
    letter: ClassVar[str] = "?"  # in the patterns of steps that are fused with a draw

    def __init__(self, **params: Any) -> None:
        self.params = params

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        """Runs only this step. options: the options of the call."""
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.params.items())})"


class Temperature(LogitsProcessor):
    """logits / temperature, an option of the call: a number above 0, or float32 [batch]."""

    makes: ClassVar = {TensorType.LOGITS: TensorType.LOGITS}
    letter = "T"

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        temperature = _option(options, "temperature")
        return tensor / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)


class Softmax(LogitsProcessor):
    """softmax(logits). enable_pdl: not used."""

    makes: ClassVar = {TensorType.LOGITS: TensorType.PROBS}
    letter = "S"

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        return sampling.softmax(tensor)


class TopK(LogitsProcessor):
    """Keeps the top_k (an option of the call) most likely tokens. joint_topk_topp: a following TopP applies
    to all tokens, not to those that TopK leaves.
    """

    makes: ClassVar = {TensorType.LOGITS: TensorType.LOGITS, TensorType.PROBS: TensorType.PROBS}
    letter = "K"

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        top_k = _option(options, "top_k")
        return (
            sampling.top_k_mask_logits(tensor, top_k)
            if given_type is TensorType.LOGITS
            else sampling.top_k_renorm_probs(tensor, top_k)
        )


class TopP(LogitsProcessor):
    """Keeps the most likely tokens whose total probability is top_p, an option of the call."""

    makes: ClassVar = {TensorType.PROBS: TensorType.PROBS}
    letter = "P"

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        return sampling.top_p_renorm_probs(tensor, _option(options, "top_p"))


class MinP(LogitsProcessor):
    """Keeps tokens at least min_p (an option of the call) times as likely as the most likely one."""

    makes: ClassVar = {TensorType.PROBS: TensorType.PROBS}
    letter = "M"

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        min_p = _option(options, "min_p")
        least = tensor.amax(-1, keepdim=True) * (min_p.unsqueeze(-1) if isinstance(min_p, Tensor) else min_p)
        kept = tensor.masked_fill(tensor < least, 0.0)
        return kept / kept.sum(-1, keepdim=True)


class Sample(LogitsProcessor):
    """Draws a token for each row. indices, generator, seed, offset: options of the call, as in
    flashinfer.sampling. deterministic: always true.
    """

    makes: ClassVar = {TensorType.LOGITS: TensorType.INDICES, TensorType.PROBS: TensorType.INDICES}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

    def apply(self, tensor: Tensor, given_type: TensorType, options: dict[str, Any]) -> Tensor:
        draw: Any = (
            sampling.sampling_from_logits if given_type is TensorType.LOGITS else sampling.sampling_from_probs
        )
        return draw(tensor, **_draw_options(options))


# Sequences of steps that are fused with a following draw, by their letters.
_TOGETHER = {TensorType.LOGITS: re.compile(r"T?(K?|S(K?P?|M)|KSP?)"), TensorType.PROBS: re.compile(r"K?P?|M")}

_FILTERS = {"K": "top_k", "P": "top_p", "M": "min_p"}


class LogitsPipe:
    """Runs steps in sequence: `LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])(logits,
    temperature=0.8, top_p=0.9)`.

    Args:
        processors: at least one.
        compile: whether steps before a draw are fused with it into one launch.
        input_type: the first step's input; needed if that step takes both logits and probabilities.

    Raises:
        ValueError: a step does not accept the previous step's output, or input_type is missing.
        NotImplementedError: custom rules.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Any = None,
        custom_validity_checks: Any = None,
    ) -> None:
        refuse_given(custom_fusion_rules=custom_fusion_rules, custom_validity_checks=custom_validity_checks)
        require(processors, "processors", processors, "at least one")
        self.processors = list(processors)
        if input_type is None:
            require(
                len(self.processors[0].makes) == 1,
                "input_type",
                None,
                f"given: {self.processors[0]} takes logits and probabilities",
            )
            input_type = next(iter(self.processors[0].makes))
        self.initial_type = input_type  # the first step's input
        self._types = [input_type]
        for i, processor in enumerate(self.processors):
            require(
                self._types[-1] in processor.makes,
                f"processors[{i}]",
                processor,
                f"a step that takes {self._types[-1].name}",
            )
            self._types.append(processor.makes[self._types[-1]])
        self._drawn_from = len(self.processors)  # the steps from this one on are one launch
        if compile:
            self.compile()

    def compile(self, custom_fusion_rules: Any = None, custom_validity_checks: Any = None) -> None:
        """Fuses the steps before the draw with it."""
        refuse_given(custom_fusion_rules=custom_fusion_rules, custom_validity_checks=custom_validity_checks)
        if not isinstance(self.processors[-1], Sample):
            return
        letters = "".join(processor.letter for processor in self.processors[:-1])
        starts = range(len(letters) + 1)
        self._drawn_from = next(
            i
            for i in starts
            if self._types[i] in _TOGETHER and _TOGETHER[self._types[i]].fullmatch(letters[i:])
        )

    def __call__(self, x: Tensor | TaggedTensor, **options: Any) -> Tensor:
        """Runs the steps.

        Args:
            x: [batch, vocab].
            options: used by the steps: temperature, top_k, top_p, min_p, indices, generator, seed, offset.

        Raises:
            ValueError: an option that is missing or wrong.
        """
        tensor = x.data if isinstance(x, TaggedTensor) else x
        if isinstance(x, TaggedTensor) and x.type is not self.initial_type:
            refuse("x.type", x.type, self.initial_type.name)
        for processor, given_type in zip(self.processors[: self._drawn_from], self._types, strict=False):
            tensor = processor.apply(tensor, given_type, options)
        return self._draw(tensor, options) if self._drawn_from < len(self.processors) else tensor

    def _draw(self, tensor: Tensor, options: dict[str, Any]) -> Tensor:
        """Runs the last steps in one launch. A temperature, or rows selected by indices, need another launch
        before.
        """
        steps = {processor.letter: processor for processor in self.processors[self._drawn_from : -1]}
        if "T" in steps:
            tensor = steps["T"].apply(tensor, TensorType.LOGITS, options)
        filters = {name: _option(options, name) for letter, name in _FILTERS.items() if letter in steps}
        order: Any = "joint" if "K" in steps and steps["K"].params.get("joint_topk_topp") else "top_k_first"
        draw = _draw_options(options)
        if self._types[self._drawn_from] is TensorType.LOGITS and "M" not in steps:
            return sampling.top_k_top_p_sampling_from_logits(
                tensor, filters.get("top_k", 0), filters.get("top_p", 1.0), filter_apply_order=order, **draw
            )
        probs = sampling.softmax(tensor) if "S" in steps else tensor
        return sampling.draw_from_probs(probs, filter_order=order, **filters, **draw)

    def __repr__(self) -> str:
        return f"LogitsPipe([{' -> '.join(type(processor).__name__ for processor in self.processors)}])"


def _option(options: dict[str, Any], name: str) -> Any:
    """An option of the call, checked to be above 0 if it is a number."""
    value = options.get(name)
    if not isinstance(value, Tensor) and not (isinstance(value, int | float) and value > 0):
        refuse(name, value, "a number above 0 or a tensor [batch]")
    return value


def _draw_options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: options[name]
        for name in ("indices", "generator", "seed", "offset")
        if options.get(name) is not None
    }


Compiler = missing("logits_processor.Compiler")
FusionRule = missing("logits_processor.FusionRule")
Op = missing("logits_processor.Op")
ParameterizedOp = missing("logits_processor.ParameterizedOp")
compile_pipeline = missing("logits_processor.compile_pipeline")
legalize_processors = missing("logits_processor.legalize_processors")
