"""The operators: one file for each family with its maths, shapes, schema and reference."""

from penstock.ops.attention import paged_attention
from penstock.ops.embedding import embedding
from penstock.ops.linear import ACTIVATIONS, Activation, linear, linear_add_
from penstock.ops.norm import layer_norm, rms_norm
from penstock.ops.registry import Op, define_op, has_native, implementations, op, op_names
from penstock.ops.rotary_cache import rotary_cache
from penstock.ops.softcap import softcap_

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Op",
    "define_op",
    "embedding",
    "has_native",
    "implementations",
    "layer_norm",
    "linear",
    "linear_add_",
    "op",
    "op_names",
    "paged_attention",
    "rms_norm",
    "rotary_cache",
    "softcap_",
]
