"""K-EXAONE: EXAONE 4's heads, with norms before the blocks, and DeepSeek-V3's experts.

Source: LG AI Research 2026, the model's card; transformers' `exaone_moe`.
"""

from __future__ import annotations

from penstock.models.common import (
    DENSE_RULES,
    EXPERT_RULES,
    QK_NORM_RULES,
    SHARED_RULES,
    decoder,
    gated_mlp,
    mixed_blocks,
    model_spec,
    routed_experts,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.exaone4 import exaone_heads
from penstock.models.registry import register
from penstock.models.spec import Ignore, ModelSpec, Rename
from penstock.nn.spec import LayerSpec

_RULES = (
    Rename("model.layers.{i}.mlp.e_score_correction_bias", "layers.{i}.mlp.correction.weight"),
    Ignore("mtp.*"),  # what guesses
    *QK_NORM_RULES,
    *SHARED_RULES,
    *EXPERT_RULES,
    *DENSE_RULES,
)


@register("ExaoneMoeForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a K-EXAONE; the first layers have no experts, what guesses is left."""
    c.assume(moe_intermediate_size=1024, topk_group=1, intermediate_size=16_384)
    for key in ("num_nextn_predict_layers", "is_moe_layer"):
        c.get(key)
    c.replace(  # DeepSeek's names
        n_routed_experts=c.integer("num_experts", 64),
        n_shared_experts=c.integer("num_shared_experts", 1),
    )
    mixed = routed_experts(c, 64, 8, normalize=True, scale=2.5, groups=1)
    heads, blocks = exaone_heads(c), mixed_blocks(c, gated_mlp(c), mixed, 1)
    layers = [LayerSpec(own, block) for own, block in zip(heads, blocks, strict=True)]
    return model_spec(c, "exaone_moe", decoder(c, layers, eps=1e-5), _RULES)
