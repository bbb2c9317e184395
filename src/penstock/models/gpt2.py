"""GPT-2: learned positions, layer norms, transposed weights. Source: Radford et al. 2019."""

from __future__ import annotations

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.common import activation, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


def _transposed(tensor: Tensor, _: DecoderSpec) -> Tensor:
    """[K, N] → [N, K]; a bias stays as it is."""
    return tensor.t()


_RULES: tuple[Rule, ...] = (
    Rename("wte.weight", "embed.weight"),
    Rename("wpe.weight", "positions.weight"),
    Rename("lm_head.weight", "head.weight"),
    Rename("ln_f.{p}", "norm.{p}"),
    Rename("h.{i}.ln_1.{p}", "layers.{i}.attention_norm.{p}"),
    Rename("h.{i}.attn.c_attn.{p}", "layers.{i}.attention.qkv.{p}", _transposed),
    Rename("h.{i}.attn.c_proj.{p}", "layers.{i}.attention.out.{p}", _transposed),
    Rename("h.{i}.ln_2.{p}", "layers.{i}.mlp_norm.{p}"),
    Rename("h.{i}.mlp.c_fc.{p}", "layers.{i}.mlp.up.{p}", _transposed),
    Rename("h.{i}.mlp.c_proj.{p}", "layers.{i}.mlp.down.{p}", _transposed),
    Ignore("h.*.attn.bias"),  # causal masks
    Ignore("h.*.attn.masked_bias"),
)


@register("GPT2LMHeadModel")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GPT-2."""
    hidden, heads = c.integer("n_embd"), c.integer("n_head")
    positions = c.integer("n_positions", 1024)
    c.get("n_ctx")  # an older name, which n_positions overrides
    c.get("reorder_and_upcast_attn")  # scores are float32 anyway
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd {hidden} is not a multiple of n_head {heads}.")
    dim = hidden // heads
    scale = dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    mlp = MlpSpec(
        intermediate=c.integer("n_inner", 4 * hidden),
        activation=activation(c, "activation_function", "gelu_new", gated=False),
        gated=False,
        bias=True,
    )
    attentions = [
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=dim,
            scale=scale / (i + 1) if by_layer else scale,
            rope=None,
            qkv_bias=True,
            out_bias=True,
        )
        for i in range(c.integer("n_layer"))
    ]
    spec = DecoderSpec(
        vocab_size=c.integer("vocab_size"),
        hidden=hidden,
        layers=tuple(LayerSpec(attention, mlp) for attention in attentions),
        norm=NormSpec("layer", eps=c.number("layer_norm_epsilon", 1e-5), bias=True),
        max_position=positions,
        tied=c.flag("tie_word_embeddings", True),
        learned_positions=positions,
    )
    return model_spec(c, "gpt2", spec, _RULES, prefixes=("transformer.",))
