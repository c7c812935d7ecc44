"""The compiled kernels that SGLang's speculative decoding calls on a CPU, in torch and Python: correct, but
slow. All write into given tensors.
"""

import ctypes

import torch
from torch import Tensor


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The topk * num_steps slots after each request's tokens."""
    columns = seq_lens[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], columns].flatten())


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The slots of tokens [start, end) of each request, one request after another."""
    slots = torch.cat(
        [
            req_to_token[row, a:b]
            for row, a, b in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
        ]
    )
    out_cache_loc[: slots.shape[0]] = slots


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The slots of the accepted nodes, without gaps. accept_index: -1 for no node."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.shape[0]] = out_cache_loc[accepted]


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """The last accepted token of each request. accept_tokens: `stride` of each request."""
    last = torch.arange(accept_lens.shape[0]) * stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    tree_mask_mode: int,
) -> None:
    """The tree of each request, made from its selected draft tokens.

    A node whose parent was not selected, which ties can cause, is not in the tree.

    Args:
        parent_list: int64 [batch, groups]: the draft token (its place among all) before each group of topk
            tokens; the first group follows the root.
        selected_index: int64 [batch, num_nodes - 1]: the draft tokens that are nodes 1, 2, ...
        tree_mask: bool, flat: num_nodes x num_nodes cells of each request (mode 1: the only one on a CPU).
    """
    assert tree_mask_mode == 1
    visible = tree_mask[: verified_seq_len.shape[0] * num_nodes * num_nodes].view(-1, num_nodes, num_nodes)
    for request, prefix_len in enumerate(verified_seq_len.tolist()):
        selected = selected_index[request].tolist()
        node_of = {token: node for node, token in enumerate(selected, 1)}
        groups = [token // topk for token in selected]
        parents = [-1] + [
            0 if group == 0 else node_of.get(int(parent_list[request, group]), -1) for group in groups
        ]
        visible[request] = torch.eye(num_nodes, dtype=torch.bool)
        for node in range(1, num_nodes):
            if parents[node] >= 0:
                visible[request, node] |= visible[request, parents[node]]
        positions.view(-1, num_nodes)[request] = prefix_len + visible[request].sum(-1) - 1
        _link(parents, request, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    num_nodes: int,
) -> None:
    """Positions and links of the trees whose masks are bool [batch, num_nodes, num_nodes]: cell (i, j) is set
    if node j is above node i.
    """
    above = tree_mask.view(batch_size, num_nodes, num_nodes).tril(-1)
    positions.view(batch_size, num_nodes).copy_(verified_seq_len[:, None] + above.sum(-1))
    for request in range(batch_size):
        parents = [max((j for j in range(i) if above[request, i, j]), default=-1) for i in range(num_nodes)]
        _link(parents, request, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def _link(
    parents: list[int],
    request: int,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
) -> None:
    """First child and next sibling of each node, -1: none. parents: -1 for a root; nodes without a parent are
    not siblings.
    """
    num_nodes = len(parents)
    retrieve_index[request] = torch.arange(request * num_nodes, (request + 1) * num_nodes)
    for node in range(num_nodes):
        retrieve_next_token[request, node] = next(
            (i for i in range(node + 1, num_nodes) if parents[i] == node), -1
        )
        following = (i for i in range(node + 1, num_nodes) if parents[i] == parents[node] >= 0)
        retrieve_next_sibling[request, node] = next(following, -1)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows each tree while a child equals the model's choice after its parent.

    Args:
        predicts: int32 [batch * nodes], gets the model's choice after each accepted node.
        accept_index: int32 [batch, depth], gets the accepted nodes, including the root.
        accept_token_num: int32 [batch], gets their number without the root.
        candidates: int64 [batch, nodes], the draft tokens.
        target_predict: int64 [batch, nodes], the model's choices.
    """
    for request in range(candidates.shape[0]):
        node, accepted = 0, [0]
        while len(accepted) < accept_index.shape[1]:
            child = int(retrive_next_token[request, node])
            while child >= 0 and candidates[request, child] != target_predict[request, node]:
                child = int(retrive_next_sibling[request, child])
            if child < 0:
                break
            node = child
            accepted.append(node)
        accept_token_num[request] = len(accepted) - 1
        for place, node in enumerate(accepted):
            index = int(retrive_index[request, node])
            accept_index[request, place] = index
            predicts[index] = target_predict[request, node]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target_slots: Tensor, source_slots: Tensor
) -> None:
    """Copies slots within every buffer of a pool; reads all of them before writing any.

    Args:
        data_ptrs: uint64 [buffers], their addresses.
        strides: int64 [buffers], bytes of a slot.
    """
    targets, sources = target_slots.tolist(), source_slots.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(address + source * size, size) for source in sources]
        for target, slot in zip(targets, held, strict=True):
            ctypes.memmove(address + target * size, slot, size)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Records new slots, request by request, as the slots of tokens [start, end) of each request."""
    begin = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[begin : begin + last - first]
        begin += last - first
