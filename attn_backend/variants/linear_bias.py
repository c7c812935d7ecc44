"""Biases that grow evenly from token to token, as ALiBi's does: kernels add them for less than other score
functions.
"""

from __future__ import annotations

from .expressions import KV_IDX, Q_IDX, SCORE, Kind, Node, negate


def bias_slope(score: Node) -> Node | None:
    """What a traced score grows by from token to token, if it is score + slope * (kv_idx - q_idx), and the
    slope is the same for all tokens. None for others, and for a slope that is a number below 0: kernels begin
    with the last tokens, whose scores then are the smallest.
    """
    if score.op not in ("add", "sub"):
        return None
    unbiased, bias = score.args
    if score.op == "add" and bias is SCORE:
        unbiased, bias = bias, unbiased
    if unbiased is not SCORE or bias.op != "mul":
        return None
    for slope, distance in (bias.args, bias.args[::-1]):
        of_distance = (
            tuple(_integer(arg) for arg in _integer(distance).args) if _integer(distance).op == "sub" else ()
        )
        if (
            of_distance not in ((KV_IDX, Q_IDX), (Q_IDX, KV_IDX))
            or slope.kind != Kind.FLOAT
            or slope.variables & {"score", "kv_idx"}
        ):
            continue
        is_turned = (of_distance == (Q_IDX, KV_IDX)) != (score.op == "sub")
        grows_by = negate(slope) if is_turned else slope
        is_falling = grows_by.is_constant and float(grows_by.value) < 0  # type: ignore[arg-type]
        return None if is_falling else grows_by
    return None


def _integer(node: Node) -> Node:
    """What a float was made of, if it was an integer."""
    return node.args[0] if node.op == "cast" and node.args[0].kind == Kind.INT else node
