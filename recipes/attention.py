"""Causal attention to train with: torch's own kernel on a GPU, blocks of products on a CPU.

torch's fused CPU kernel took 44% of a training step of the 8 M model at 1,024 tokens; products in
blocks of queries, each with the keys up to its end, take half of that (docs/training.md).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128  # queries; 64, 128, 256, 512 were tried


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √D) v, each query over the keys up to its own place; [B, H, T, D].

    q [B, H, T, D]; k, v [B, H / group, T, D], shared by `group` heads. mask [B, 1, T, T]: which
    keys count, causal ones only; None: all up to the query's place.
    """
    if q.device.type == "cpu":
        return _in_blocks(q, k, v, mask)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, length, size = q.shape
    shared = k.shape[1]
    group = heads // shared
    q = (q * size**-0.5).view(batch, shared, group, length, size)
    parts = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        rows = (end - start) * group
        queries = q[:, :, :, start:end].reshape(batch * shared, rows, size)
        keys = k[:, :, :end].reshape(batch * shared, end, size)
        values = v[:, :, :end].reshape(batch * shared, end, size)
        scores = torch.bmm(queries, keys.transpose(1, 2)).float()
        scores = scores.view(batch, shared, group, end - start, end)
        if mask is None:
            places = torch.arange(end, device=q.device)
            seen = places[start:, None] >= places
        else:
            seen = mask[:, :, None, start:end, :end]
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        found = torch.bmm(shares.view(batch * shared, rows, end), values)
        parts.append(found.view(batch, shared, group, end - start, size))
    return torch.cat(parts, 3).view(batch, heads, length, size)
