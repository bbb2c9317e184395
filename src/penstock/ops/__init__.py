"""The operators: one file for each family with its maths, shapes, schema and reference."""

from penstock.ops.add import add_
from penstock.ops.argmax import argmax
from penstock.ops.attention import paged_attention
from penstock.ops.delta import delta_rule
from penstock.ops.draw import draw_beyond, draw_from, draw_nucleus, draw_plain
from penstock.ops.embedding import embedding
from penstock.ops.experts import experts
from penstock.ops.foreign import define_row_operator, foreign_rows, row_operator
from penstock.ops.gate import alternate, gate
from penstock.ops.gate_by import gate_by_
from penstock.ops.gate_rows import gate_rows_
from penstock.ops.grouped_linear import combine, grouped_linear
from penstock.ops.kept_rows import keep_rows, kept_rows, place_rows_
from penstock.ops.linear import (
    ACTIVATIONS,
    Activation,
    linear,
    linear_add_,
    linear_unordered,
    linear_unordered_add_,
)
from penstock.ops.lora import lora_add_
from penstock.ops.mamba2 import mamba2
from penstock.ops.mask import mask_
from penstock.ops.mla import head_linear, mla_attention, mla_cache, mla_query
from penstock.ops.multiply import multiply_, scale_
from penstock.ops.norm import layer_norm, rms_norm
from penstock.ops.pack import pack
from penstock.ops.quantize import quantize_int4, quantize_int8
from penstock.ops.ranks import gather_columns, gather_embedding
from penstock.ops.records import pack_records
from penstock.ops.registry import Op, define_op, has_native, implementations, op, op_names
from penstock.ops.ring import gather_rows, ring_attention
from penstock.ops.ring_mla import ring_mla_attention, ring_mla_cache
from penstock.ops.rotary_cache import rotary_cache
from penstock.ops.rotate import rotate
from penstock.ops.route import route, sort_tokens
from penstock.ops.short_conv import short_conv
from penstock.ops.softcap import softcap_
from penstock.ops.stages import hand_on, take_over
from penstock.ops.top_k import scaled_top_k, softmax_top_k, top_k
from penstock.ops.uniforms import uniforms

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Op",
    "add_",
    "alternate",
    "argmax",
    "combine",
    "define_op",
    "define_row_operator",
    "delta_rule",
    "draw_beyond",
    "draw_from",
    "draw_nucleus",
    "draw_plain",
    "embedding",
    "experts",
    "foreign_rows",
    "gate",
    "gate_by_",
    "gate_rows_",
    "gather_columns",
    "gather_embedding",
    "gather_rows",
    "grouped_linear",
    "hand_on",
    "has_native",
    "head_linear",
    "implementations",
    "keep_rows",
    "kept_rows",
    "layer_norm",
    "linear",
    "linear_add_",
    "linear_unordered",
    "linear_unordered_add_",
    "lora_add_",
    "mamba2",
    "mask_",
    "mla_attention",
    "mla_cache",
    "mla_query",
    "multiply_",
    "op",
    "op_names",
    "pack",
    "pack_records",
    "paged_attention",
    "place_rows_",
    "quantize_int4",
    "quantize_int8",
    "ring_attention",
    "ring_mla_attention",
    "ring_mla_cache",
    "rms_norm",
    "rotary_cache",
    "rotate",
    "route",
    "row_operator",
    "scale_",
    "scaled_top_k",
    "short_conv",
    "softcap_",
    "softmax_top_k",
    "sort_tokens",
    "take_over",
    "top_k",
    "uniforms",
]
