"""Hooks that a user wrote in C++: which they are, whether their signatures are right, and how they become a
part of the generated file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .cpp import HOOKS, TRANSFORMS, Body, Pairs
from .params import Param, is_cpp_word

# The members of a KvToken that are the same in all requests that share it.
_SHARED = ("position", "kv_head")


def body_from(cpp: object, params: Sequence[Param], name: str, pairs: Pairs) -> Body:
    """Refuses what a compiler would not explain in the user's terms; the compiler reports the rest.

    Raises:
        ValueError: no hook, one with another signature, or pairs that no hook takes; names the line.
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
    if not found.keys() & set(TRANSFORMS) and pairs != Pairs():
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


# A directive that reads a file. Blanks and comments may stand inside of it, and a backslash joins lines.
_INCLUDES = re.compile(r"(?:#|%:)(?:\s|\\\s*\n|/\*.*?\*/)*(?:include|include_next|import|embed)\b", re.DOTALL)


def _refuse_includes(cpp: str, name: str) -> None:
    """Refuses what reads a file: a compiler's errors would quote that file."""
    spliced = re.sub(r"\\[ \t]*\n", "", cpp)
    match = _INCLUDES.search(spliced)
    if match:
        raise ValueError(
            f"cpp of {source_name(name)} has `{' '.join(match[0].split())}`, must include no file: put its "
            f"text into cpp"
        )


def source_name(name: str) -> str:
    """What compilers call the user's text."""
    return f"<variant {name}>"


def _tells_requests_apart(arguments: str, inside: str) -> bool:
    """Whether a transform of K or V reads a member of its token that differs between requests, or gives the
    token to another function.
    """
    name = re.findall(r"\w+", arguments.rsplit(",", maxsplit=1)[-1])[-1]
    if name in ("KvToken", "const"):  # the type: it has no name
        return False
    return bool(re.search(rf"\b{name}\b(?!\s*\.\s*(?:{'|'.join(_SHARED)})\b)", inside))


def _inside_of_braces(code: str, outer: str, begin: int) -> str:
    """What the first pair of outer braces after `begin` encloses."""
    opening = outer.find("{", begin)
    return "" if opening < 0 else code[opening + 1 : outer.find("}", opening)]


def _signature(hook: str) -> str:
    result, arguments = HOOKS[hook]
    return f"{result} {hook}({', '.join(f'{kind} {argument}' for kind, argument in arguments)}) const"


def _type_of(argument: str) -> str:
    """Without the argument's name and meaningless spaces: const ScoreRow& -> constScoreRow&."""
    words = re.findall(r"[\w:]+|&", argument)
    if len(words) > 1 and words[-1] != "&" and words[-2] not in ("const",):
        words.pop()
    words = [word.removeprefix("attn::").removeprefix("std::") for word in words]
    if words[1:2] == ["const"]:  # ScoreRow const&
        words[:2] = ["const", words[0]]
    return " ".join("int32_t" if word == "int" else word for word in words if word != "ATTN_HD")


def _without_comments(cpp: str) -> str:
    """Comments, strings and preprocessor lines become spaces: everything else stays where it is."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[ \t]*#[^\n]*",
        blank,
        cpp,
        flags=re.DOTALL | re.MULTILINE,
    )


def _outside_of_braces(text: str, name: str) -> str:
    """What is inside of braces becomes spaces, too."""
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
