"""StarCoder 2: layer norms, biases, no gate. Source: Lozhkov et al. 2024, arXiv:2402.19173."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.common import (
    DENSE_RULES,
    activation,
    attention,
    decoder,
    head_dim,
    layer_windows,
    model_spec,
    sliding_window,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Rename, Rule
from penstock.nn.spec import LayerSpec, MlpSpec, NormSpec

_MLP_RULES: tuple[Rule, ...] = (
    Rename("model.layers.{i}.mlp.c_fc.{p}", "layers.{i}.mlp.up.{p}"),
    Rename("model.layers.{i}.mlp.c_proj.{p}", "layers.{i}.mlp.down.{p}"),
)


@register("Starcoder2ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a StarCoder 2; every layer slides where `sliding_window` isn't null."""
    c.assume(num_key_value_heads=2, max_position_embeddings=4096)
    for key, built in (
        ("norm_type", "layer_norm"), ("mlp_type", "default"), ("scale_attn_weights", True),
    ):  # fmt: skip
        c.only(key, (built,), built)
    for key in (
        "activation_function",  # older spellings, which hidden_act and norm_epsilon override
        "layer_norm_epsilon",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",  # scores are float32 anyway
    ):
        c.get(key)
    dim, bias = head_dim(c), c.flag("use_bias", True)
    base = attention(c, rope(c, dim), dim, bias=bias)
    mlp = MlpSpec(
        intermediate=c.integer("intermediate_size"),
        activation=activation(c, "hidden_act", "gelu_pytorch_tanh", gated=False),
        gated=False,
        bias=bias,
    )
    window = sliding_window(c, None)
    windows = layer_windows(c, c.integer("num_hidden_layers"), window, lambda _: window > 0)
    layers = [LayerSpec(replace(base, window=w), mlp) for w in windows]
    norm = NormSpec("layer", eps=c.number("norm_epsilon", 1e-5), bias=True)
    spec = decoder(c, layers, tied=True, norm=norm)
    return model_spec(c, "starcoder2", spec, (*_MLP_RULES, *DENSE_RULES))
