"""GPT-NeoX and Pythia: both blocks read the layer's input. Source: arXiv:2204.06745."""

from __future__ import annotations

from torch import Tensor

from penstock.models.common import activation, attention, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule
from penstock.nn.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec


def _split_heads(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Rows in the order head, (q k v), dimension → (q k v), head, dimension."""
    a = spec.layers[0].attention
    rows: Tensor = tensor.unflatten(0, (a.num_heads, 3, a.head_dim))
    return rows.transpose(0, 1).flatten(0, 2)


_RULES: tuple[Rule, ...] = (
    Rename("gpt_neox.embed_in.weight", "embed.weight"),
    Rename("embed_out.weight", "head.weight"),
    Rename("lm_head.weight", "head.weight"),
    Rename("gpt_neox.final_layer_norm.{p}", "norm.{p}"),
    Rename("gpt_neox.layers.{i}.input_layernorm.{p}", "layers.{i}.attention_norm.{p}"),
    Rename("gpt_neox.layers.{i}.post_attention_layernorm.{p}", "layers.{i}.mlp_norm.{p}"),
    Rename(
        "gpt_neox.layers.{i}.attention.query_key_value.{p}",
        "layers.{i}.attention.qkv.{p}",
        _split_heads,
    ),
    Rename("gpt_neox.layers.{i}.attention.dense.{p}", "layers.{i}.attention.out.{p}"),
    Rename("gpt_neox.layers.{i}.mlp.dense_h_to_4h.{p}", "layers.{i}.mlp.up.{p}"),
    Rename("gpt_neox.layers.{i}.mlp.dense_4h_to_h.{p}", "layers.{i}.mlp.down.{p}"),
    Ignore("gpt_neox.layers.*.attention.bias"),  # causal masks
    Ignore("gpt_neox.layers.*.attention.masked_bias"),
    Ignore("gpt_neox.layers.*.attention.rotary_emb.inv_freq"),
)


@register("GPTNeoXForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a GPT-NeoX."""
    dim, heads = head_dim(c), c.integer("num_attention_heads")
    c.only("num_key_value_heads", (heads,), heads)
    c.replace(  # the usual names outside of rope_parameters aren't read for this family
        rope_theta=c.number("rotary_emb_base", 10_000.0),
        partial_rotary_factor=c.number("rotary_pct", 0.25),
    )
    rotation = rope(c, dim, partial=0.25)
    layer = LayerSpec(
        attention=attention(c, rotation, dim, bias=c.flag("attention_bias", True)),
        mlp=MlpSpec(
            intermediate=c.integer("intermediate_size"),
            activation=activation(c, "hidden_act", "gelu", gated=False),
            gated=False,
            bias=True,
        ),
        parallel=c.flag("use_parallel_residual", True),
    )
    spec = DecoderSpec(
        vocab_size=c.integer("vocab_size"),
        hidden=c.integer("hidden_size"),
        layers=(layer,) * c.integer("num_hidden_layers"),
        norm=NormSpec("layer", eps=c.number("layer_norm_eps", 1e-5), bias=True),
        max_position=c.integer("max_position_embeddings", 2048),
        tied=c.flag("tie_word_embeddings", False),
    )
    return model_spec(c, "gpt_neox", spec, _RULES)
