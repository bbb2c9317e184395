"""What the recipes for speculation write is in the public layouts, and means what they mean.

The references are made of transformers' own modules, from the saved files, a token at a time.
"""

import json
import shutil
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.speculation.draft import Draft
from recipes.speculation.eagle import Eagle
from recipes.speculation.eagle3 import Eagle3, stream_layers
from recipes.speculation.guesser import Guesser
from recipes.speculation.medusa import Medusa
from recipes.speculation.target import Target
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from penstock.errors import ConfigError

TEXT = torch.tensor([[5, 9, 2, 33, 17, 60, 8, 41, 23, 7, 12, 90]])
DEPTH = 3


def saved(guesser: Guesser, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Round the weights to what is stored, save, and read the files."""
    with torch.no_grad():
        for weight in guesser.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape))
                weight.copy_(weight.to(torch.bfloat16))
    guesser.save(folder)
    (file,) = folder.glob("*.safetensors")
    return json.loads((folder / "config.json").read_text()), load_file(file)


def shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def all_guesses(guesser: Guesser, target: Target) -> list[Tensor]:
    with torch.no_grad():
        return list(guesser.guesses(target.look(TEXT, guesser.stream_ids), DEPTH))


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_is_blocks_and_a_projection(target: Target, tmp_path: Path, shared: bool) -> None:
    torch.manual_seed(1)
    heads = Medusa(target, 3, 2, shared_head=shared)
    config, tensors = saved(heads, tmp_path)
    assert (tmp_path / "medusa_lm_head.safetensors").exists()
    assert config["medusa_num_heads"] == 3
    assert config["medusa_num_layers"] == 2
    assert config["hidden_size"] == 32
    assert config["vocab_size"] == 96
    assert config["medusa_shared_lm_head"] is shared
    blocks = {f"{k}.{i}.linear" for k in range(3) for i in range(2)}
    expected = {f"{name}.weight": [32, 32] for name in blocks}
    expected |= {f"{name}.bias": [32] for name in blocks}
    if not shared:
        expected |= {f"{k}.2.weight": [96, 32] for k in range(3)}
    assert shapes(tensors) == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}

    features = target.model.model(TEXT)[0]
    for k, logits in enumerate(all_guesses(heads, target)):
        x = features[:, : TEXT.shape[1] - 2 - k]
        for i in range(2):
            weight, bias = (tensors[f"{k}.{i}.linear.{end}"].float() for end in ("weight", "bias"))
            x = x + F.silu(x @ weight.T + bias)
        projection = target.head if shared else tensors[f"{k}.2.weight"].float()
        torch.testing.assert_close(logits, x @ projection.T)


def test_new_medusa_heads_begin_near_the_targets_own_guess(target: Target) -> None:
    heads = Medusa(target, 2, 1)
    for head in heads.heads:
        assert not head[0].linear.weight.any()
        nn.init.zeros_(head[0].linear.bias)
    seen = target.look(TEXT)
    for k, logits in enumerate(heads.guesses(seen, 2)):
        torch.testing.assert_close(logits, seen.logits[:, : logits.shape[1]], msg=str(k))


def llama_config(config: dict[str, Any]) -> LlamaConfig:
    fields = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    found = LlamaConfig(**fields)
    found._attn_implementation = "eager"
    return found


def load_layer(
    tensors: dict[str, Tensor], prefix: str, config: LlamaConfig, inputs: int
) -> LlamaDecoderLayer:
    """transformers' decoder layer with these weights, its norms taken out where they have none."""
    layer = LlamaDecoderLayer(config, 0).eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(inputs, old.out_features, bias=False))
    own = {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items()
           if name.startswith(prefix) and "hidden_norm" not in name}  # fmt: skip
    missing = layer.load_state_dict(own, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"input_layernorm.weight"}
    return layer


class Steps:
    """A layer over a cache of what it has read, a token at a time."""

    def __init__(self, layer: LlamaDecoderLayer, config: LlamaConfig) -> None:
        self.layer, self.cache = layer, DynamicCache(config=config)
        self.rotary, self.place = LlamaRotaryEmbedding(config), 0

    def attention(self, x: Tensor) -> Tensor:
        places = torch.tensor([[self.place]])
        self.place += 1
        attention = self.layer.self_attn
        named = signature(attention.forward).parameters
        name = "cache" if "cache" in named else "past_key_values"  # since transformers 5.24
        found, _ = attention(x, self.rotary(x, places), attention_mask=None, **{name: self.cache})
        return found


def test_eagle_goes_on_from_its_own_features(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(2)
    head = Eagle(target, fc_bias=True, save_embedding=True)
    config, tensors = saved(head, tmp_path)
    attention = {"q_proj": [32, 32], "k_proj": [16, 32], "v_proj": [16, 32], "o_proj": [32, 32]}
    mlp = {"gate_proj": [48, 32], "up_proj": [48, 32], "down_proj": [32, 48]}
    assert shapes(tensors) == {
        "embed_tokens.weight": [96, 32],
        "fc.weight": [32, 64],
        "fc.bias": [32],
        "layers.0.post_attention_layernorm.weight": [32],
        **{f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"layers.0.mlp.{name}.weight": shape for name, shape in mlp.items()},
    }
    assert config["num_hidden_layers"] == 1
    assert config["bias"] is True
    llama = llama_config(config)
    layer = load_layer(tensors, "layers.0.", llama, 32)
    features = target.model.model(TEXT)[0]
    embedded = tensors["embed_tokens.weight"].float()[TEXT]
    assert embedded.equal(target.embedding[TEXT])

    def step(steps: Steps, token: int, feature: Tensor) -> Tensor:
        both = torch.cat((embedded[:, token : token + 1], feature), -1)
        x = both @ tensors["fc.weight"].float().T + tensors["fc.bias"].float()
        x = x + steps.attention(x)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    found = all_guesses(head, target)
    with torch.no_grad():
        for place in range(TEXT.shape[1] - 1 - DEPTH):
            steps = Steps(layer, llama)
            for t in range(place + 1):
                x = step(steps, t + 1, features[:, t : t + 1])
            for d in range(DEPTH):
                torch.testing.assert_close(found[d][:, place], (x @ target.head.T)[:, 0])
                x = step(steps, place + 2 + d, x)


def test_eagle3_goes_on_from_its_own_stream(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(3)
    counts = torch.randperm(96)
    head = Eagle3(target, counts, draft_vocab_size=40, intermediate_size=24)
    config, tensors = saved(head, tmp_path)
    attention = {"q_proj": [32, 64], "k_proj": [16, 64], "v_proj": [16, 64], "o_proj": [32, 32]}
    mlp = {"gate_proj": [24, 32], "up_proj": [24, 32], "down_proj": [32, 24]}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    assert shapes(tensors) == {
        "d2t": [40], "t2d": [96], "fc.weight": [32, 96], "norm.weight": [32],
        "lm_head.weight": [40, 32],
        **{f"midlayer.{name}.weight": [32] for name in norms},
        **{f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"midlayer.mlp.{name}.weight": shape for name, shape in mlp.items()},
    }  # fmt: skip
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    kept = torch.arange(40) + tensors["d2t"]
    assert sorted(kept.tolist()) == sorted(counts.topk(40).indices.tolist())
    assert kept.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert config["draft_vocab_size"] == 40
    layers = config["eagle_aux_hidden_state_layer_ids"]
    assert layers == [1, 2, 3]  # whose inputs are read, and whose outputs
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]

    llama = llama_config(config)
    layer = load_layer(tensors, "midlayer.", llama, 64)
    hidden_norm, norm = LlamaRMSNorm(32, 1e-5), LlamaRMSNorm(32, 1e-5)
    hidden_norm.weight = nn.Parameter(tensors["midlayer.hidden_norm.weight"].float())
    norm.weight = nn.Parameter(tensors["norm.weight"].float())
    streams: list[Tensor] = []
    for i in layers:
        target.model.model.layers[i].register_forward_pre_hook(
            lambda _, inputs, kwargs: streams.append(inputs[0] if inputs else kwargs["x"]),
            with_kwargs=True,
        )
    with torch.no_grad():
        target.model(TEXT)
        fused = torch.cat(streams[:3], -1) @ tensors["fc.weight"].float().T

        def step(steps: Steps, token: int, x: Tensor) -> Tensor:
            embedded = layer.input_layernorm(target.embedding[TEXT[:, token : token + 1]])
            x = x + steps.attention(torch.cat((embedded, hidden_norm(x)), -1))
            return x + layer.mlp(layer.post_attention_layernorm(x))

        found = all_guesses(head, target)
        for place in range(TEXT.shape[1] - 1 - DEPTH):
            steps = Steps(layer, llama)
            for t in range(place + 1):
                x = step(steps, t + 1, fused[:, t : t + 1])
            for d in range(DEPTH):
                expected = norm(x)[:, 0] @ tensors["lm_head.weight"].float().T
                torch.testing.assert_close(found[d][:, place][:, kept], expected)
                others = found[d][:, place][:, ~tensors["t2d"]]
                assert others.equal(torch.full_like(others, -torch.inf))
                x = step(steps, place + 2 + d, x)


def test_a_draft_is_a_model_of_its_own(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(4)
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    draft = Draft(target, **shape, intermediate_size=24)
    config, tensors = saved(draft, tmp_path)
    assert config["hidden_size"] == 16
    assert config["head_dim"] == 8
    assert config["vocab_size"] == 96
    assert ("lm_head.weight" in tensors) is not target.saved_config()["tie_word_embeddings"]
    assert (tmp_path / "tokenizer.json").read_bytes() == (
        target.folder / "tokenizer.json"
    ).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits = model(TEXT).logits
    for d, found in enumerate(all_guesses(draft, target)):
        torch.testing.assert_close(found, logits[:, 1 + d : -1])


def test_a_draft_begins_with_the_most_of_the_targets_table(target: Target) -> None:
    draft = Draft(target, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
    own = draft.model.get_input_embeddings().weight
    u, values, _ = torch.linalg.svd(target.embedding, full_matrices=False)
    best = u[:, :16] * values[:16]  # of that rank, the nearest there is
    torch.testing.assert_close(own @ own.T, best @ best.T, atol=1e-3, rtol=1e-3)


def test_a_head_that_is_scaled_is_refused(target: Target, tmp_path: Path) -> None:
    shutil.copytree(target.folder, tmp_path, dirs_exist_ok=True)
    config = target.saved_config() | {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 8.0,
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.25,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="aren't its head times its last hidden state"):
        Target(tmp_path)


def test_layers_whose_inputs_are_read() -> None:
    assert stream_layers(32) == (2, 16, 29)  # as vLLM reads them
    assert stream_layers(8) == (2, 4, 5)
    for few in range(3, 8):
        assert len(set(stream_layers(few))) == 3
        assert max(stream_layers(few)) == few - 1
    with pytest.raises(ConfigError, match="the target has 2 layers"):
        stream_layers(2)


def test_what_cant_be_made_is_refused(target: Target) -> None:
    counts = torch.ones(96)
    with pytest.raises(ConfigError, match="from 0 to 3, not 1, 1, 2"):
        Eagle3(target, counts, layers=[1, 1, 2])
    with pytest.raises(ConfigError, match="96 tokens, not 97"):
        Eagle3(target, counts, draft_vocab_size=97)
    with pytest.raises(ConfigError, match="at least one block"):
        Medusa(target, 4, 0, shared_head=True)
    with pytest.raises(ConfigError, match="multiple of 3 heads"):
        Draft(target, hidden_size=16, num_heads=3)
    for head in (Eagle(target), Eagle3(target, counts)):
        with pytest.raises(ConfigError, match="--self-fed must be at least 1, not 0"):
            type(head)(target, *([counts] if isinstance(head, Eagle3) else []), steps=0)
