"""EAGLE heads on disk, in each public layout, and those that are broken or of something else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.heads.made import LAYOUTS, Layout, Made
from tests.models.tiny import Tiny, make_tiny
from tests.speculate.eagle_reference import (
    CONFIG,
    DRAFT_IDS,
    HIDDEN,
    VOCAB,
    Tensors,
    make_tensors,
    write,
)
from torch import Tensor, nn

from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models.heads.eagle import open_eagle_checkpoint
from penstock.nn import Decoder
from penstock.nn.eagle import EagleHead, FeatureHead, FusingHead
from penstock.quant import formats_of
from penstock.tokenizer import VocabMap


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Decoder:
    return tiny.load().model


def filled(folder: Path, fuses: bool, target: Decoder, **options: Any) -> EagleHead:
    found = open_eagle_checkpoint(folder, fuses, target, strict=True, **options)
    kind = FusingHead if fuses else FeatureHead
    head = kind(found.spec, target, formats_of(None, torch.float32), 256)
    found.fill(head)
    return head


def held(head: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in head.named_parameters() if "stor" not in n}


def same(one: EagleHead, other: EagleHead) -> bool:
    a, b = held(one), held(other)
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fuses", [False, True])
def test_every_layout_gives_the_same_head(tmp_path: Path, target: Decoder, fuses: bool) -> None:
    tensors = make_tensors(fuses)
    want = filled(write(tmp_path / "plain", tensors), fuses, target)
    layouts = {
        "saved by torch": write(tmp_path / "a", tensors, binary=True),
        "vLLM's names": write(
            tmp_path / "b",
            {
                (name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"): tensor
                for name, tensor in renamed(tensors, "midlayer.", "layers.0.").items()
            },
        ),
        "old rotary tables": write(
            tmp_path / "c",
            tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        ),
    }
    for name, folder in layouts.items():
        assert same(filled(folder, fuses, target), want), name


def test_speculators_layout(tmp_path: Path, target: Decoder) -> None:
    """The layer's config under transformer_layer_config, and the layers' numbers beside it."""
    tensors = make_tensors(True)
    want = filled(write(tmp_path / "plain", tensors), True, target)
    folder = write(tmp_path / "speculators", renamed(tensors, "midlayer.", "layers.0."))
    layer = {k: v for k, v in CONFIG.items() if k != "architectures"}
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "speculators_config": {"algorithm": "eagle3"},
                "draft_vocab_size": len(DRAFT_IDS),
                "norm_before_residual": True,
                "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
                "transformer_layer_config": layer,
            }
        )
    )
    head = filled(folder, True, target)
    assert same(head, want)
    assert head.spec.states == (0, 1, 3) and head.spec.residual_is_normed
    assert head.spec.layer.attention.rope == want.spec.layer.attention.rope


def test_which_states_are_read(tmp_path: Path, target: Decoder) -> None:
    """Inputs of layers as vLLM counts them, outputs within eagle_config, and neither."""
    tensors, number = make_tensors(True), iter(range(9))

    def states(**changes: Any) -> tuple[int, ...]:
        folder = write(tmp_path / str(next(number)), tensors, **changes)
        return open_eagle_checkpoint(folder, True, target, strict=True).spec.states

    ids = "eagle_aux_hidden_state_layer_ids"
    assert states() == (2, 1, 0)
    assert states(**{ids: [3, 0, 1]}) == (3, 0, 1)
    assert states(eagle_config={ids: [0, 1, 2], "use_aux_hidden_state": True}) == (1, 2, 3)
    assert states(**{ids: [0, 1, 2]}, eagle_config={ids: [0, 1, 2]}) == (0, 1, 2)
    assert states(eagle_config={ids: []}) == (2, 1, 0)


def test_optional_tensors(tmp_path: Path, target: Decoder, tiny: Tiny) -> None:
    tensors = make_tensors(False)
    del tensors["fc.bias"]
    more = {
        "layers.0.input_layernorm.weight": torch.full((HIDDEN,), 0.5),
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
    } | {f"layers.0.self_attn.{x}_proj.bias": torch.ones(64 if x == "q" else 32) for x in "qkv"}
    bare = filled(write(tmp_path / "bare", tensors), False, target)
    assert bare.embed is None and "of_embedding.bias" not in held(bare)
    head = filled(write(tmp_path / "more", tensors | more), False, target)
    assert head.embed is not None
    assert torch.equal(head.embed.parameter("weight"), more["embed_tokens.weight"])
    assert torch.equal(held(head)["layer.attention.qkv.bias"], torch.ones(128))
    assert torch.equal(held(head)["layer.attention_norm.weight"], torch.full((HIDDEN,), 0.5))
    # a copy of the target's table isn't held twice
    copy = {"embed_tokens.weight": tiny.oracle.model.embed_tokens.weight.detach()}
    assert filled(write(tmp_path / "copy", tensors | copy), False, target).embed is None


def test_a_head_smaller_than_its_target(tmp_path: Path, target: Decoder) -> None:
    """EAGLE-3 with a table of its own may have another hidden size."""
    tensors = make_tensors(True)
    small = {n: t for n, t in tensors.items() if n in ("d2t", "t2d")}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            small[name] = tensor[:32]
        elif "weight" in name:
            rows = 32 if any(x in name for x in ("fc", "o_proj", "down")) else len(tensor)
            columns = {"fc": 192, "o_proj": 64, "down": 96}.get(
                next((x for x in ("fc", "o_proj", "down") if x in name), ""),
                64 if "self_attn" in name else 32,
            )
            small[name] = tensor[:rows, :columns].contiguous()
    small["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    changes = {"hidden_size": 32, "head_dim": 16, "target_hidden_size": 64}
    head = filled(write(tmp_path / "small", small, **changes), True, target)
    assert head.spec.hidden == 32 and head.spec.width == 192
    said = r"fc.weight is \[32, 192\], but a head of hidden size 64 that reads 3 states of 64"
    with pytest.raises(WeightsError, match=said):
        filled(write(tmp_path / "unsaid", small, head_dim=16), True, target)
    del small["embed_tokens.weight"]
    with pytest.raises(ConfigError, match="hidden size of 32, and the target has one of 64"):
        filled(write(tmp_path / "none", small, **changes), True, target)


def test_tokens_of_the_drafts_vocabulary(tmp_path: Path, target: Decoder) -> None:
    tensors = make_tensors(True)
    found = open_eagle_checkpoint(write(tmp_path / "part", tensors), True, target)
    assert found.ids is not None and found.ids.tolist() == DRAFT_IDS.tolist()
    whole = tensors | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    whole |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB).bool()}
    assert open_eagle_checkpoint(write(tmp_path / "all", whole), True, target).ids is None
    del whole["d2t"], whole["t2d"]
    assert open_eagle_checkpoint(write(tmp_path / "bare", whole), True, target).ids is None


def test_a_target_with_a_reduced_vocabulary(tmp_path: Path, tiny: Tiny, target: Decoder) -> None:
    """Rows of tokens that it lacks are left out; a head that was trained for it is as it is."""
    tensors = make_tensors(True) | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    kept = list(range(0, 2 * VOCAB, 2))
    reduced = VocabMap.of(2 * VOCAB, kept, {})
    own = open_eagle_checkpoint(write(tmp_path / "own", tensors), True, target, reduced)
    assert own.ids is not None and own.ids.tolist() == (2 * DRAFT_IDS).tolist()
    wide = tensors | {"embed_tokens.weight": torch.randn(2 * VOCAB, HIDDEN)}
    wide["t2d"] = torch.zeros(2 * VOCAB, dtype=torch.bool)
    folder = write(tmp_path / "wide", wide, vocab_size=2 * VOCAB)
    found = open_eagle_checkpoint(folder, True, target, reduced)
    there = DRAFT_IDS % 2 == 0
    assert found.ids is not None and found.ids.tolist() == DRAFT_IDS[there].tolist()
    assert torch.equal(found.tensors["lm_head.weight"], wide["lm_head.weight"][there])
    assert torch.equal(found.tensors["embed_tokens.weight"], wide["embed_tokens.weight"][kept])
    assert isinstance(found.ids, np.ndarray) and found.spec.head_size == int(there.sum())


# ── what doesn't fit, or isn't whole ─────────────────────────────────────────────────────────────


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def replacing(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


AUX = "eagle_aux_hidden_state_layer_ids"
BAD: list[tuple[bool, Callable[[Tensors], Tensors], dict[str, Any], type[Exception], str]] = [
    (False, without(), {"hidden_size": 128}, ConfigError, "hidden size of 128, .* one of 64"),
    (False, without(), {"vocab_size": 512}, ConfigError, "vocabulary of 512, .* one of 320"),
    (False, without(), {"num_hidden_layers": 2}, UnsupportedModelError, "=2; heads of one layer"),
    (False, without("fc.weight"), {}, WeightsError, "no fc.weight"),
    (False, without("layers.0.mlp.up_proj.weight"), {}, WeightsError, "lacks 1 of .*up_proj"),
    (
        False, replacing("layers.1.mlp.up_proj.weight", torch.ones(2, 2)), {},
        UnsupportedModelError, "a head of 2 layers",
    ),
    (
        False, replacing("embedding_layernorm.weight", torch.ones(64)), {},
        WeightsError, "no place in 'eagle': embedding_layernorm",
    ),
    (
        False, replacing("fc.weight", torch.ones(64, 192)), {},
        WeightsError, r"fc.weight is \[64, 192\], .* two rows of 64 has \[64, 128\]",
    ),
    (
        False, replacing("layers.0.self_attn.q_proj.weight", torch.ones(8, 64)), {},
        WeightsError, r"q_proj.weight is \[8, 64\], but by config.json, .* it is \[64, 64\]",
    ),
    (
        False, replacing("fc.bias", torch.ones(64, dtype=torch.int64)), {},
        WeightsError, "is torch.int64",
    ),
    (False, without(), {"rope_scaling": {"type": "odd"}}, UnsupportedModelError, "isn't built"),
    (False, without(), {"hidden_act": "relu"}, UnsupportedModelError, "hidden_act='relu'"),
    (False, without(), {"new_key": 5}, UnsupportedModelError, "nothing reads: new_key"),
    (True, without("norm.weight"), {}, WeightsError, "lacks 1 of .*norm.weight"),
    (True, without("d2t"), {}, WeightsError, "lacks d2t, .* 320 tokens the 107 rows"),
    (True, replacing("d2t", torch.zeros(5, dtype=torch.int64)), {}, WeightsError, "d2t is"),
    (
        True, replacing("d2t", torch.full((107,), 300)), {},
        WeightsError, "tokens from 300 to 406",
    ),
    (True, replacing("t2d", torch.ones(512).bool()), {}, ConfigError, "vocabulary of 512"),
    (True, without(), {"draft_vocab_size": 100}, WeightsError, "107 rows, .*draft_vocab_size=100"),
    (True, without(), {"target_hidden_size": 96}, ConfigError, "hidden size of 96"),
    (True, without(), {AUX: [0, 1]}, WeightsError, r"reads 2 states of 64 has \[64, 128\]"),
    (True, without(), {AUX: [0, 1, 9]}, ConfigError, r"\[0, 1, 9\], and the target has 3"),
    (True, without(), {AUX: [1, 1, 2]}, ConfigError, "must name different ones, from 0 to 3"),
    (
        True, without(), {"eagle_config": {"use_aux_hidden_state": False}},
        UnsupportedModelError, "use_aux_hidden_state=False",
    ),
    (True, without(), {"norm_before_fc": True}, UnsupportedModelError, "norm_before_fc=True"),
    (
        True, replacing("midlayer.self_attn.k_proj.weight", torch.ones(32, 64)), {},
        WeightsError, r"k_proj.weight is \[32, 64\], but by config.json, .* it is \[32, 128\]",
    ),
    (
        True, replacing("midlayer.self_attn.o_proj.weight", torch.tensor(1.0)), {},
        WeightsError, r"o_proj.weight is \[\], .* it is \[64, 64\]",
    ),
    (
        False, replacing("fc.weight", torch.tensor(1.0)), {},
        WeightsError, r"fc.weight is \[\], but a head of hidden size 64",
    ),
    (
        False, replacing("embed_tokens.weight", torch.ones(320)), {},
        WeightsError, r"embed_tokens.weight is \[320\], .* it is \[any, 64\]",
    ),
    (
        False, replacing("embed_tokens.weight", torch.tensor(1.0)), {},
        WeightsError, r"embed_tokens.weight is \[\], .* it is \[any, 64\]",
    ),
    (
        True, replacing("lm_head.weight", torch.ones(107)), {},
        WeightsError, r"lm_head.weight is \[107\], .* it is \[any, 64\]",
    ),
    (True, replacing("t2d", torch.tensor(True)), {}, WeightsError, r"t2d is \[\], .* is \[any\]"),
    (True, replacing("d2t", torch.tensor(0)), {}, WeightsError, r"d2t is torch.int64 of \[\]"),
    (True, replacing("d2t", torch.zeros(107)), {}, WeightsError, "d2t is torch.float32 of"),
    (True, replacing("d2t", torch.zeros(107).bool()), {}, WeightsError, "d2t is torch.bool of"),
    (False, without(), {"rms_norm_eps": 0}, ConfigError, "rms_norm_eps must be above 0.*: 0.0"),
    (False, without(), {"rms_norm_eps": -1e-5}, ConfigError, "rms_norm_eps must be above 0"),
    (False, without(), {"rms_norm_eps": 1e-300}, ConfigError, "rms_norm_eps must be above 0"),
    (
        False, without(), {"rms_norm_eps": float("nan")},
        UnsupportedModelError, "rms_norm_eps must be a number: nan",
    ),
    (False, without(), {"rms_norm_eps": 10**400}, ConfigError, "a number that is too large"),
    (False, without(), {"attention_bias": "no"}, ConfigError, "attention_bias must be .*: 'no'"),
    (True, without(), {"attention_bias": 1}, ConfigError, "must be true or false: 1"),
    (False, without(), {"rope_theta": 1e-300}, ConfigError, "can't be rotated by its rope_theta"),
    (
        False, without(), {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0}},
        ConfigError, "rope parameters of type 'yarn': ",
    ),
    (
        False, without(), {"rope_scaling": {"type": "linear", "factor": 1e-320}},
        ConfigError, "type 'linear': they aren't finite",
    ),
    (False, without(), {"head_dim": 10**400}, ConfigError, "a number that is too large"),
]  # fmt: skip


@pytest.mark.parametrize(("fuses", "change", "config", "error", "message"), BAD)
def test_heads_that_do_not_fit(
    tmp_path: Path,
    target: Decoder,
    fuses: bool,
    change: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    draft = {"draft_vocab_size": len(DRAFT_IDS)} if fuses else {}
    folder = write(tmp_path / "head", change(make_tensors(fuses)), **draft | config)
    with pytest.raises(error, match=message):
        filled(folder, fuses, target)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("key", ["head_dim", "num_attention_heads", "intermediate_size"])
def test_sizes_of_a_config_are_held_against_the_tensors(
    tmp_path: Path, target: Decoder, fuses: bool, key: str
) -> None:
    """Nothing of such a size is made: 10^9 of a head would be a table of terabytes."""
    changes = {key: 10**9, "head_dim": 16} | ({key: 10**9} if key == "head_dim" else {})
    folder = write(tmp_path / "head", make_tensors(fuses), **changes)
    start = time.perf_counter()
    with pytest.raises(WeightsError, match=r"but by config.json, .* 1000000000"):
        filled(folder, fuses, target)
    assert time.perf_counter() - start < 5


def test_positions_of_a_config_make_no_table(tmp_path: Path, target: Decoder) -> None:
    """How long sequences are is the target's matter."""
    tensors = make_tensors(False)
    want = filled(write(tmp_path / "plain", tensors), False, target)
    many = filled(write(tmp_path / "many", tensors, max_position_embeddings=10**18), False, target)
    assert same(many, want)
    assert many.table is not None and want.table is not None
    assert torch.equal(many.table.cos_sin, want.table.cos_sin)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_damaged_values(
    tmp_path: Path, target: Decoder, fuses: bool, value: str, dtype: torch.dtype
) -> None:
    tensors = make_tensors(fuses)
    for name in [name for name, tensor in tensors.items() if tensor.is_floating_point()]:
        bad = tensors[name].to(dtype).clone()
        bad.view(-1)[[0, -1]] = float(value)
        folder = write(tmp_path / "head", tensors | {name: bad})
        said = f"^2 of {bad.numel()} values of {name} in {folder}/model.* damaged"
        with pytest.raises(WeightsError, match=said):
            filled(folder, fuses, target)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_tensors_of_another_hidden_size(
    tmp_path: Path, target: Decoder, fuses: bool, own: bool
) -> None:
    """Whether config.json says it or not, and with a table of its own too."""
    tensors = make_tensors(fuses, hidden=96)
    if own:
        tensors["embed_tokens.weight"] = torch.ones(VOCAB, 96)
    for size in (HIDDEN, 96):
        folder = write(tmp_path / str(size), tensors, head_dim=16, hidden_size=size)
        with pytest.raises(ConfigError, match=r"made for a hidden size of 96, .* one of 64"):
            filled(folder, fuses, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fuses", [False, True])
def test_heads_of_medusa(tmp_path: Path, target: Decoder, layout: Layout, fuses: bool) -> None:
    folder = Made(HIDDEN, VOCAB).write(tmp_path / "heads", layout)
    with pytest.raises(ConfigError, match=r"holds Medusa heads, .* set method='medusa'"):
        filled(folder, fuses, target)


@pytest.mark.parametrize("fuses", [False, True])
def test_a_head_of_the_other_kind(tmp_path: Path, target: Decoder, fuses: bool) -> None:
    folder = write(tmp_path / "head", make_tensors(fuses))
    with pytest.raises(ConfigError, match=f"set method='{'eagle3' if fuses else 'eagle'}'"):
        filled(folder, not fuses, target)


def test_broken_files(tmp_path: Path, target: Decoder) -> None:
    for binary, name in ((False, "model.safetensors"), (True, "pytorch_model.bin")):
        folder = write(tmp_path / name, make_tensors(False), binary=binary)
        whole = (folder / name).read_bytes()
        for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:size])
            with pytest.raises(WeightsError, match=r"can.t be read|isn.t a file of tensors"):
                filled(folder, False, target)
    torch.save({"fc.weight": Path("x")}, folder / name)
    with pytest.raises(WeightsError, match="isn't a file of tensors only"):
        filled(folder, False, target)
    torch.save({"fc.weight": torch.eye(4).to_sparse()}, folder / name)
    with pytest.raises(WeightsError, match=r"'fc\.weight' in it is sparse"):
        filled(folder, False, target)
    (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match=r"none of model\.safetensors, pytorch_model\.bin"):
        filled(folder, False, target)
    with pytest.raises(ModelNotFoundError, match="is no folder"):
        filled(tmp_path / "nowhere", False, target)
