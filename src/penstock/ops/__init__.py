"""The operators: one file for each family with its maths, shapes, schema and reference."""

from penstock.ops.activation import gelu, gelu_mul, silu_mul, softcap_
from penstock.ops.argmax import argmax
from penstock.ops.attention import paged_attention
from penstock.ops.draw import draw_from, draw_plain
from penstock.ops.embedding import embedding
from penstock.ops.linear import linear
from penstock.ops.norm import add_rms_norm, layer_norm, rms_norm
from penstock.ops.registry import Op, define_op, has_native, implementations, op, op_names
from penstock.ops.rotary_cache import rotary_cache
from penstock.ops.top_k import softmax_top_k, top_k

__all__ = [
    "Op",
    "add_rms_norm",
    "argmax",
    "define_op",
    "draw_from",
    "draw_plain",
    "embedding",
    "gelu",
    "gelu_mul",
    "has_native",
    "implementations",
    "layer_norm",
    "linear",
    "op",
    "op_names",
    "paged_attention",
    "rms_norm",
    "rotary_cache",
    "silu_mul",
    "softcap_",
    "softmax_top_k",
    "top_k",
]
