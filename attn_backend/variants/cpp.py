"""The C++ of a variant: expressions as hooks of a struct, and structs with their parameters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .expressions import (
    SCORE,
    Kind,
    Node,
    Visibility,
    bias_slope,
    constant,
    is_interval,
    is_never_negative,
    mask_visibility,
    nodes_of,
)
from .params import Param, is_cpp_word

INCLUDES = '#include "attention/variant/variant_math.h"\n#include "attention/variant/variants.h"\n'
_TYPES = {Kind.BOOL: "bool", Kind.INT: "int32_t", Kind.FLOAT: "float"}
_VARIABLES = {
    "score": "logit",
    "b": "row.request",
    "h": "row.qo_head",
    "q_idx": "row.position",
    "kv_idx": "kv_position",
}
_SYMBOLS = {
    **{
        "add": "+",
        "sub": "-",
        "mul": "*",
        "lt": "<",
        "le": "<=",
        "gt": ">",
        "ge": ">=",
        "eq": "==",
        "ne": "!=",
    },
    **{"and": "&", "or": "|", "xor": "^", "shift_right": ">>", "divide": "/"},
}
_PREFIXES = {"not": "!", "invert": "~", "negate": "-"}
_MAX_EXPRESSION = 90  # characters; longer expressions get a name

# The C++ signatures of hooks: type of the result, types and names of the arguments.
HOOKS = {
    "logits": ("float", (("float", "logit"), ("const ScoreRow&", "row"), ("int32_t", "kv_position"))),
    "bias_slope": ("float", (("const ScoreRow&", "row"),)),
    "mask": ("bool", (("const ScoreRow&", "row"), ("int32_t", "kv_position"))),
    "range": ("TokenRange", (("const ScoreRow&", "row"),)),
    "output": ("float", (("float", "value"), ("const ScoreRow&", "row"), ("int32_t", "column"))),
    "query": (
        "Pair",
        (("Pair", "x"), ("int32_t", "first"), ("int32_t", "second"), ("const ScoreRow&", "row")),
    ),
    "key": (
        "Pair",
        (("Pair", "x"), ("int32_t", "first"), ("int32_t", "second"), ("const KvToken&", "token")),
    ),
    "value": (
        "Pair",
        (("Pair", "x"), ("int32_t", "first"), ("int32_t", "second"), ("const KvToken&", "token")),
    ),
}
TRANSFORMS = ("query", "key", "value")


@dataclass(frozen=True)
class PairLayout:
    """The elements of a row that are transformed together, as in csrc/attention/variant/variants.h.

    Args:
        distance: columns between the two elements of a pair; None: half of the head's columns.
        columns: number of transformed columns, starting at the first; None: all.
    """

    distance: int | None = None
    columns: int | None = None


@dataclass(frozen=True)
class Body:
    """The inside of a variant's struct.

    Args:
        name: of the variant.
        params: its parameters.
        hooks: names in HOOKS that it defines.
        uses_softmax: whether its logits go through a softmax.
        code: C++ of the hooks, indented.
        pairs: the elements that the transforms of Q, K and V take.
        tells_requests_apart: whether a transform of K or V may differ between requests for the same token at
            the same position.
        skips_kv_tiles: whether plans look for holes in the mask.
    """

    name: str
    params: tuple[Param, ...]
    hooks: frozenset[str]
    uses_softmax: bool
    code: str
    pairs: PairLayout = PairLayout()
    tells_requests_apart: bool = False
    skips_kv_tiles: bool = False

    @property
    def hides(self) -> bool:
        """Whether it has a mask or a range, which also acts as a mask."""
        return bool(self.hooks & {"mask", "range"})

    @property
    def reads_positions(self) -> bool:
        """Whether results may depend on the positions of rows and tokens in their requests.

        For a user's C++, every position that it names counts as read.
        """
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", self.code, flags=re.DOTALL)
        names_token = re.search(r"\b(logits|mask)\s*\([^)]*\bint(32_t)?\s+\w+\s*\)", text)
        return (
            names_token is not None
            or "range" in self.hooks
            or re.search(r"\.\s*(position|index|kv_len)\b", text) is not None
        )

    @property
    def mask_params(self) -> list[str]:
        """Names of the parameters that the mask may read: for a user's C++, all parameters."""
        if not self.hides:
            return []
        text = self.code if "#line" in self.code else self.code[self.code.index(" mask(") :]
        return [param.name for param in self.params if re.search(rf"\b{param.cpp_name}\b", text)]


def body_from_expressions(
    name: str, score: Node | None, mask: Node | None, params: Mapping[str, Param]
) -> tuple[Body, Visibility]:
    """The body of traced functions, and the interval of tokens that their mask lets through."""
    hooks = {}
    if score is not None and score is not SCORE:
        hooks["logits"] = _hook("logits", score, params)
        if (slope := bias_slope(score)) is not None:
            hooks["bias_slope"] = _hook("bias_slope", slope, params)
    visibility = mask_visibility(constant(True) if mask is None else mask)
    if visibility.mask is not None:
        hooks["mask"] = _hook("mask", visibility.mask, params)
    has_holes = visibility.mask is not None and not is_interval(visibility.mask)
    code = "\n".join(hooks.values())
    body = Body(name, tuple(params.values()), frozenset(hooks), True, code, skips_kv_tiles=has_holes)
    return body, visibility


def _hook(name: str, result: Node, params: Mapping[str, Param]) -> str:
    """A hook that returns `result`."""
    statements = _Statements(params)
    text = statements.returned(result)
    return_type, arguments = HOOKS[name]
    named = ", ".join(
        f"{kind} {argument}" if re.search(rf"\b{argument}\b", text) else f"{kind} /*{argument}*/"
        for kind, argument in arguments
    )
    return f"  ATTN_HD {return_type} {name}({named}) const {{\n{text}  }}\n"


class _Statements:
    """Expressions as text; common subexpressions are computed once."""

    def __init__(self, params: Mapping[str, Param]) -> None:
        self._params = params
        self._texts: dict[Node, str] = {}

    def returned(self, result: Node) -> str:
        nodes = list(nodes_of(result))
        uses = Counter(arg for node in nodes for arg in node.args)
        lines: list[str] = []
        for node in nodes:
            text = self._text(node)
            is_plain = node.is_constant or node.op in ("variable", "scalar", "size")
            if node is not result and not is_plain and (uses[node] > 1 or len(text) > _MAX_EXPRESSION):
                name = f"t{len(lines)}"
                lines.append(f"    const {_TYPES[node.kind]} {name} = {text};\n")
                text = name
            self._texts[node] = text
        return "".join(lines) + f"    return {self._texts[result]};\n"

    def _operand(self, node: Node) -> str:
        """The text, in parentheses if it is compound."""
        text = self._texts[node]
        return text if re.fullmatch(r"[\w.:]+(\[\d+\])?", text) or _is_one_call(text) else f"({text})"

    def _text(self, node: Node) -> str:
        args = node.args
        match node.op:
            case "constant":
                return _constant(node)
            case "variable":
                return _VARIABLES[str(node.value)]
            case "scalar":
                return self._params[str(node.value)].cpp_name
            case "size":
                return f"{self._params[node.value[0]].cpp_name}.sizes[{node.value[1]}]"
            case "load":
                param = self._params[str(node.value)]
                element = f"{param.cpp_name}({', '.join(self._texts[arg] for arg in args)})"
                return f"static_cast<{_TYPES[node.kind]}>({element})" if param.needs_cast else element
            case "cast":
                return (
                    f"{self._operand(args[0])} != 0"
                    if node.kind == Kind.BOOL
                    else f"static_cast<{_TYPES[node.kind]}>({self._texts[args[0]]})"
                )
            case "divide":
                return self._division(*args)
            case "floor_divide" | "floor_modulo" if node.kind == Kind.INT and args[1].is_constant:
                return self._division_by_constant(node.op, *args)
            case "xor" if node.kind == Kind.BOOL:
                return f"{self._operand(args[0])} != {self._operand(args[1])}"
            case "select" if (
                node.kind == Kind.BOOL
            ):  # & and | of booleans are ints, so one call would mix two C++ types
                return f"select<bool>({', '.join(self._texts[arg] for arg in args)})"
            case "shift_left":  # also of negative numbers
                return (
                    f"static_cast<int32_t>(static_cast<uint32_t>({self._texts[args[0]]}) << "
                    f"{self._operand(args[1])})"
                )
            case op if op in _SYMBOLS:
                return f"{self._operand(args[0])} {_SYMBOLS[op]} {self._operand(args[1])}"
            case op if op in _PREFIXES:
                return f"{_PREFIXES[op]}{self._operand(args[0])}"
        return f"{node.op}({', '.join(self._texts[arg] for arg in args)})"

    def _division(self, a: Node, b: Node) -> str:
        """A division: exact if its result may become an integer; for scores as fast as a multiplication."""
        if b.is_constant:
            value = b.value
            is_power = value != 0 and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5
            if (is_power or _has_score(a)) and value != 0 and 2.0**-120 < abs(value) < 2.0**120:
                return f"{self._operand(a)} * {_float(1 / value)}"
        if _has_score(a) or _has_score(b):
            return f"quick_divide({self._texts[a]}, {self._texts[b]})"
        return f"{self._operand(a)} / {self._operand(b)}"

    def _division_by_constant(self, op: str, a: Node, b: Node) -> str:
        divisor = b.value
        if divisor > 0 and divisor & (divisor - 1) == 0:
            shift = divisor.bit_length() - 1
            return (
                f"{self._operand(a)} >> {shift}"
                if op == "floor_divide"
                else f"{self._operand(a)} & {divisor - 1}"
            )
        if divisor > 0 and is_never_negative(a):
            return f"{self._operand(a)} {'/' if op == 'floor_divide' else '%'} {divisor}"
        return f"{op}({self._texts[a]}, {self._texts[b]})"


def _is_one_call(text: str) -> bool:
    """Whether a text is f(...), whose last parenthesis closes the first."""
    begin = re.match(r"[\w.:<>]+\(", text)
    if begin is None or not text.endswith(")"):
        return False
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i >= begin.end() and i < len(text) - 1:
            return False
    return depth == 0


def _has_score(node: Node) -> bool:
    return "score" in node.variables


def _constant(node: Node) -> str:
    if node.kind == Kind.BOOL:
        return "true" if node.value else "false"
    if node.kind == Kind.FLOAT:
        return _float(float(node.value))
    return str(node.value) if node.value != -(2**31) else "-2147483647 - 1"


def _float(value: float) -> str:
    if not math.isfinite(value):
        return (
            "infinity() - infinity()" if math.isnan(value) else "infinity()" if value > 0 else "-infinity()"
        )
    text = str(np.float32(value))  # shortest text that reads back as the same float32
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def whole_source(bodies: Sequence[Body], params_bytes: int) -> str:
    """The file of a variant. UserVariant is the only body, or has one member per body. Asserts compare the
    struct with what Python has read from its text: launches depend on it.

    Bodies without hooks and parameters, for masks that are intervals, generate nothing: alibi() & causal()
    has the source of alibi().
    """
    uses_softmax = str(all(body.uses_softmax for body in bodies)).lower()
    has_transforms = str(any(not body.hooks.isdisjoint(TRANSFORMS) for body in bodies)).lower()
    transforms = " || ".join(f"VariantHooks<UserVariant>::k{name.title()}" for name in TRANSFORMS)
    bodies = [body for body in bodies if body.hooks or body.params] or bodies[:1]
    # a separate mask() would not include the range
    is_one = len(bodies) == 1 and "range" not in bodies[0].hooks
    text = _struct("UserVariant", bodies[0]) if is_one else _combined(bodies)
    return (
        f"{INCLUDES}\nnamespace attn {{\n\n{text}\n"
        f'static_assert(sizeof(UserVariant::Params) == {params_bytes}, "not as Python packs it");\n'
        f"static_assert(UserVariant::kUsesSoftmax == {uses_softmax},\n"
        f'              "kUsesSoftmax must be the literal true or false");\n'
        f"static_assert(({transforms}) == {has_transforms},\n"
        f'              "query(), key() and value() must not come from macros or conditional directives");\n'
        f"\n}}  // namespace attn\n"
    )


def _struct(name: str, body: Body) -> str:
    members = "".join(
        f"  const {param.cpp_type}{'&' if param.is_tensor else ''} {param.cpp_name};\n"
        for param in body.params
    )
    initial = ", ".join(f"{param.cpp_name}(params.{param.cpp_name})" for param in body.params)
    constructor = (
        f"  ATTN_HD {name}(const Params& {'params' if body.params else '/*params*/'}, int32_t "
        f"/*kv_head*/){' : ' if initial else ''}{initial} {{}}\n"
    )
    struct = f"struct {name} : VariantBase {{\n"
    if body.params:
        struct += (
            "  struct Params {\n"
            + "".join(f"    {param.cpp_type} {param.cpp_name};\n" for param in body.params)
            + "  };\n"
        )
    struct += _flags([body], "kUsesSoftmax" in body.code)
    return "\n".join(filter(None, [struct, members, constructor, body.code])) + "};\n"


def _flags(bodies: Sequence[Body], declares_softmax: bool = False) -> str:
    """Members that differ from VariantBase's. declares_softmax: the code itself has kUsesSoftmax."""
    flags = {
        "kUsesSoftmax = false": not declares_softmax and not all(body.uses_softmax for body in bodies),
        "kMaskReadsHead = false": not any(map(_mask_reads_head, bodies)),
        "kSkipsTiles = true": any(body.skips_kv_tiles for body in bodies),
    }
    text = "".join(f"  static constexpr bool {flag};\n" for flag, is_set in flags.items() if is_set)
    return text + _pair_layouts(bodies)


def has_bias_slope(bodies: Sequence[Body]) -> bool:
    """Whether only one of the bodies changes the logits, by a bias with a slope."""
    return ["bias_slope" in body.hooks for body in bodies if "logits" in body.hooks] == [True]


def pairs_of(hook_name: str, bodies: Sequence[Body]) -> PairLayout:
    """The elements that a transform takes, in several bodies.

    Raises:
        ValueError: the bodies differ.
    """
    having = [body for body in bodies if hook_name in body.hooks]
    for body in having[1:]:
        if body.pairs != having[0].pairs:
            raise ValueError(
                f"variants {having[0].name} and {body.name} both have {hook_name}(), for "
                f"{_describe(having[0].pairs)} and for {_describe(body.pairs)}, "
                "must be for the same"
            )
    return having[0].pairs if having else PairLayout()


def _describe(pairs: PairLayout) -> str:
    return f"pair_distance={pairs.distance}, pair_columns={pairs.columns}"


def _pair_layouts(bodies: Sequence[Body]) -> str:
    """Members for pair layouts that differ from VariantBase's."""
    text = ""
    for hook_name in TRANSFORMS:
        pairs = pairs_of(hook_name, bodies)
        if pairs != PairLayout():
            text += (
                f"  static constexpr PairLayout k{hook_name.capitalize()}Pairs{{{pairs.distance or 0}, "
                f"{pairs.columns or 0}}};\n"
            )
    return text


def _mask_reads_head(body: Body) -> bool:
    """Whether the mask may depend on the head. For a user's C++, true if it names the head anywhere."""
    if not body.hides:
        return False
    is_users = "#line" in body.code
    return "head" in (body.code if is_users else body.code[body.code.index(" mask(") :])


def _combined(bodies: Sequence[Body]) -> str:
    """Each body becomes a separate struct inside UserVariant, so that member names cannot clash."""
    names = _names(bodies)
    parts = list(zip(bodies, names, strict=True))
    text = "struct UserVariant : VariantBase {\n"
    for body, name in parts:
        text += _struct(_struct_name(name), body) + "\n"
    with_params = [name for body, name in parts if body.params]
    if with_params:
        text += (
            "  struct Params {\n"
            + "".join(f"    {_struct_name(name)}::Params {name};\n" for name in with_params)
            + "  };\n"
        )
    text += _flags(bodies)
    text += "\n" + "".join(f"  const {_struct_name(name)} {name};\n" for name in names)
    initial = [
        f"{name}({f'params.{name}' if name in with_params else f'{_struct_name(name)}::Params{{}}'}, kv_head)"
        for name in names
    ]
    text += (
        f"\n  ATTN_HD UserVariant(const Params& {'params' if with_params else '/*params*/'}, int32_t "
        f"kv_head)\n      : {', '.join(initial)} {{}}\n\n"
    )
    for hook_name, (return_type, arguments) in HOOKS.items():
        having = [name for body, name in parts if hook_name in body.hooks]
        if not having and not (hook_name == "mask" and any(body.hides for body in bodies)):
            continue
        if hook_name == "bias_slope" and not has_bias_slope(bodies):
            continue
        passed = [argument for _, argument in arguments]
        text += (
            f"  ATTN_HD {return_type} "
            f"{hook_name}({', '.join(f'{kind} {argument}' for kind, argument in arguments)}) const {{\n"
        )
        if hook_name == "mask":
            in_range = (
                "range(row).contains(kv_position)" if any("range" in body.hooks for body in bodies) else ""
            )
            masks = " & ".join(f"{name}.mask({', '.join(passed)})" for name in having)
            text += f"    return {' && '.join(filter(None, (in_range, masks)))};\n"
        elif hook_name == "bias_slope":
            text += f"    return {having[0]}.bias_slope(row);\n"
        elif hook_name == "range":
            text += f"    TokenRange seen = {having[0]}.range(row);\n"
            text += (
                "".join(f"    seen = intersection(seen, {name}.range(row));\n" for name in having[1:])
                + "    return seen;\n"
            )
        else:
            text += (
                "".join(f"    {passed[0]} = {name}.{hook_name}({', '.join(passed)});\n" for name in having)
                + f"    return {passed[0]};\n"
            )
        text += "  }\n"
    return text + "};\n"


def _names(bodies: Sequence[Body]) -> list[str]:
    """Names of the parts: their variants' names, numbered if not unique."""
    names: list[str] = []
    for body in bodies:
        name = f"{body.name}_part"
        names.append(name if name not in names else f"{body.name}_part_{len(names)}")
    return names


def _struct_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


# The members of a KvToken that are the same in all requests that share it.
_SHARED = ("position", "kv_head")


def body_from_source(cpp: object, params: Sequence[Param], name: str, pairs: PairLayout) -> Body:
    """Checks for errors that a compiler would not explain in the user's terms; the compiler reports the rest.

    Raises:
        ValueError: no hook, a hook with a wrong signature, or pairs that no hook takes; names the line.
    """
    if not isinstance(cpp, str):
        raise ValueError(
            f"cpp is a {type(cpp).__name__}, must be a string of C++: any of the hooks {', '.join(HOOKS)}"
        )
    for param in params:
        if is_cpp_word(param.name):
            raise ValueError(
                f"params: {param.name!r} means something else in C++ or in a variant, must be another name"
            )
    _refuse_includes(cpp, name)
    code = _without_comments(cpp)
    outer = _outside_of_braces(code, name)
    found = {}
    tells_requests_apart = False
    for match in re.finditer(rf"\b({'|'.join(HOOKS)})\s*\(([^)]*)\)", outer):
        hook, arguments = match.groups()
        line = cpp.count("\n", 0, match.start()) + 1
        place = f"\n  {source_name(name)}:{line}: {cpp.splitlines()[line - 1].strip()}"
        if hook in found:
            raise ValueError(f"{hook}() is defined twice, must be once{place}")
        result = re.search(r"([\w:]+)\s*$", outer[: match.start()])
        types = [_type_of(argument) for argument in arguments.split(",")]
        wanted_result, wanted = HOOKS[hook]
        is_const = re.match(r"\s*const\b", outer[match.end() :])
        if (
            result is None
            or result.group(1) != wanted_result
            or types != [_type_of(kind) for kind, _ in wanted]
            or not is_const
        ):
            raise ValueError(f"{hook}() must be `{_signature(hook)}`{place}")
        found[hook] = result.start()
        if hook in ("key", "value"):
            # Macros are not expanded.
            tells_requests_apart |= "#define" in cpp or _tells_requests_apart(
                arguments, _inside_of_braces(code, outer, match.end())
            )
    if not found:
        raise ValueError(
            "cpp has no hook, must have any of\n  " + "\n  ".join(f"{_signature(hook)};" for hook in HOOKS)
        )
    if "bias_slope" in found and "logits" not in found:
        raise ValueError(
            "cpp has bias_slope() without logits(), must have both: logit + bias_slope(row) * (kv_position - "
            "row.position)"
        )
    if not found.keys() & set(TRANSFORMS) and pairs != PairLayout():
        raise ValueError(
            f"pair_distance is {pairs.distance} and pair_columns {pairs.columns}, must be None: cpp has none "
            f"of {', '.join(TRANSFORMS)}"
        )
    code = cpp
    for start in sorted(found.values(), reverse=True):
        if not re.search(r"\bATTN_HD\s*$", outer[:start]):
            code = f"{code[:start]}ATTN_HD {code[start:]}"
    uses_softmax = not re.search(r"\bkUsesSoftmax\s*(=\s*|\{\s*)false\b", outer)
    lines = f'#line 1 "{source_name(name)}"\n{code}\n#line 1 "<generated for variant {name}>"\n'
    return Body(name, tuple(params), frozenset(found), uses_softmax, lines, pairs, tells_requests_apart)


# A directive that reads a file. It may contain blanks and comments, and a backslash joins lines.
_INCLUDES = re.compile(r"(?:#|%:)(?:\s|\\\s*\n|/\*.*?\*/)*(?:include|include_next|import|embed)\b", re.DOTALL)


def _refuse_includes(cpp: str, name: str) -> None:
    """Refuses directives that read a file: a compiler's errors would quote that file."""
    spliced = re.sub(r"\\[ \t]*\n", "", cpp)
    if match := _INCLUDES.search(spliced):
        raise ValueError(
            f"cpp of {source_name(name)} has `{' '.join(match[0].split())}`, must include no file: put its "
            f"text into cpp"
        )


def source_name(name: str) -> str:
    """The file name that compilers report for the user's text."""
    return f"<variant {name}>"


def _tells_requests_apart(arguments: str, inside: str) -> bool:
    """Whether a transform of K or V reads a token member that differs between requests, or passes the token
    to another function.
    """
    name = re.findall(r"\w+", arguments.rsplit(",", maxsplit=1)[-1])[-1]
    if name in ("KvToken", "const"):  # the type: the argument has no name
        return False
    return bool(re.search(rf"\b{name}\b(?!\s*\.\s*(?:{'|'.join(_SHARED)})\b)", inside))


def _inside_of_braces(code: str, outer: str, begin: int) -> str:
    """The text inside the first pair of outer braces after `begin`."""
    opening = outer.find("{", begin)
    return "" if opening < 0 else code[opening + 1 : outer.find("}", opening)]


def _signature(hook: str) -> str:
    result, arguments = HOOKS[hook]
    return f"{result} {hook}({', '.join(f'{kind} {argument}' for kind, argument in arguments)}) const"


def _type_of(argument: str) -> str:
    """The type, without the argument's name and meaningless spaces: const ScoreRow& -> constScoreRow&."""
    words = re.findall(r"[\w:]+|&", argument)
    if len(words) > 1 and words[-1] != "&" and words[-2] not in ("const",):
        words.pop()
    words = [word.removeprefix("attn::").removeprefix("std::") for word in words]
    if words[1:2] == ["const"]:  # ScoreRow const&
        words[:2] = ["const", words[0]]
    return " ".join("int32_t" if word == "int" else word for word in words if word != "ATTN_HD")


def _without_comments(cpp: str) -> str:
    """Replaces comments, strings and preprocessor lines with spaces, so that all else keeps its position."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[ \t]*#[^\n]*",
        blank,
        cpp,
        flags=re.DOTALL | re.MULTILINE,
    )


def _outside_of_braces(text: str, name: str) -> str:
    """Also replaces text inside braces with spaces."""
    depth = 0
    characters = []
    for character in text:
        depth -= character == "}"
        if depth < 0:
            break
        characters.append(character if depth == 0 or character == "\n" else " ")
        depth += character == "{"
    if depth:
        line = 1 + characters.count("\n")
        raise ValueError(f"cpp has a brace without its partner\n  {source_name(name)}:{line}")
    return "".join(characters)
