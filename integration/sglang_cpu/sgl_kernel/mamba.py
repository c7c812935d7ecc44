"""The compiled kernels that SGLang calls on a CPU for gated delta networks (GDN), short convolutions and the
layers around them, in torch and Python: correct, but slow. States of requests are updated in place.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, normalize, rms_norm, silu, softplus


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    activation: str | None = None,
    **unused: object,
) -> Tensor:
    """x: [channels, tokens] of all requests. conv_states: [slots, channels, width - 1]."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        if tokens.start < tokens.stop:
            state = conv_states[slot] if has_initial_state[request] else torch.zeros_like(conv_states[slot])
            out[:, tokens] = _convolve(x[:, tokens], state, weight, bias, activation)
            conv_states[slot] = torch.cat([state, x[:, tokens]], 1)[:, -state.shape[1] :]
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **unused: object,
) -> Tensor:
    """x: [requests, channels], a token of each request."""
    out = torch.empty_like(x)
    for request, slot in enumerate(conv_state_indices.tolist()):
        token, state = x[request, :, None], conv_states[slot].clone()
        out[request] = _convolve(token, state, weight, bias, activation)[:, 0]
        conv_states[slot] = torch.cat([state, token], 1)[:, 1:]
    return out


def _convolve(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Each channel by itself, over the state and the tokens."""
    out = conv1d(torch.cat([state, x], 1)[None], weight[:, None], bias, groups=len(weight))[0]
    return silu(out) if activation else out


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay of states, and the weights of new values: [1, tokens, value heads]."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias))[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **unused: object,
) -> tuple[Tensor, None, None]:
    """q, k: [1, tokens, heads, columns]. v: [1, tokens, value heads, columns]. initial_state: [slots, value
    heads, rows, columns] of all requests.
    """
    out = torch.empty_like(v)
    repeats = v.shape[2] // q.shape[2]
    q = normalize(q[0].float(), dim=-1, eps=1e-6).repeat_interleave(repeats, 1) * q.shape[-1] ** -0.5
    k = normalize(k[0].float(), dim=-1, eps=1e-6).repeat_interleave(repeats, 1)
    starts = cu_seqlens.tolist()
    for request, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(starts[request], starts[request + 1]):
            state = state * g[0, token].exp()[:, None, None]
            change = (v[0, token] - (state * k[token, :, :, None]).sum(1)) * beta[0, token, :, None]
            state = state + k[token, :, :, None] * change[:, None]
            out[0, token] = (state * q[token, :, :, None]).sum(1)
        initial_state[slot] = state
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **unused: object,
) -> Tensor:
    """A token of each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices}
    return chunk_gated_delta_rule_cpu(q, k, v, g, beta, cu_seqlens=cu_seqlens, **states)[0]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads: int, num_value_heads: int, head_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[Q, K and V], Z, B and A of rows [Q, K, V, Z] and [B, A]."""
    qkv, z = mixed_qkvz.split(
        [2 * num_heads * head_dim + num_value_heads * value_dim, num_value_heads * value_dim], -1
    )
    b, a = mixed_ba.chunk(2, -1)
    return qkv.contiguous(), z.reshape(-1, num_value_heads, value_dim), b.contiguous(), a.contiguous()


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    x *= gate.reshape(x.shape).sigmoid()


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """[rows * heads, head_dim] each, with weights around 0."""
    return (
        rms_norm(q.reshape(-1, head_dim), (head_dim,), 1 + q_weight, eps),
        rms_norm(k.reshape(-1, head_dim), (head_dim,), 1 + k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q_gate: [rows, heads * 2 * head_dim], a head's Q and then its gate."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, -1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, eps) * silu(gate)


# SGLang takes these from torch's registry of operators, when it imports its models.
for _kernel in (
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)
