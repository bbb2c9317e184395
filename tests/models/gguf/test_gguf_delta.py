"""Layers with a gated delta rule in GGUF: what converters move goes back, codes in whole rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_writing import Floats, write_model
from test_gguf_models import as_checkpoint, compare, logits, make, matrices, whole

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.models import load_model
from penstock.models.gguf.source import GgufSource
from penstock.models.spec import Stack
from penstock.models.weights import WeightPlan, _keeps
from penstock.pipeline.export import export_model
from penstock.quant import Codes


def test_projections_of_a_delta_rule_in_one_matrix(tmp_path: Path) -> None:
    """As the first files of Qwen3-Next have them."""
    model = make("qwen3-next")
    for apart in (True, False):
        write_model(model, tmp_path / f"{apart}.gguf", whole(Kind.F32), heads_apart=apart)
    old, new = (GgufSource(tmp_path / f"{apart}.gguf") for apart in (False, True))
    assert old.names() == new.names()
    assert {"ssm_in", "attn_gate"} & {
        name.split(".")[2] for name in old._container.tensors if name.startswith("blk")
    } == {"ssm_in"}
    for name in old.names():
        a, b = old.read(name), new.read(name)
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        assert old.shape(name) == new.shape(name) == a.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "heads", "dim", "kept"),
    [
        ("qwen3_5", 4, 128, False),  # a block has columns of two heads that lie elsewhere
        ("qwen3_5", 2, 128, True),
        ("qwen3_5", 4, 256, True),
        ("qwen3-next", 4, 128, True),
    ],
)
def test_a_delta_rule_in_k_quants(
    name: str, heads: int, dim: int, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole rows move, and whole blocks; queries part from their gates."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    if name == "qwen3-next":
        sizes["moe_intermediate_size"] = 256
    sizes |= {"linear_num_value_heads": heads, "linear_value_head_dim": dim, "head_dim": 64}
    model = make(name, **sizes, attention_bias=False)

    def choose(stem: str, values: Floats) -> Kind:
        if any(part in stem for part in ("ssm_alpha", "ssm_beta", "ssm_ba", "ssm_conv1d")):
            return Kind.F32
        better = "attn_v" in stem or "attn_qkv" in stem
        return matrices(Kind.Q6_K if better else Kind.Q4_K)(stem, values)

    back = write_model(model, tmp_path / "m.gguf", choose)
    folder = as_checkpoint(model, back, tmp_path / "hf")
    held = load_model(tmp_path / "m.gguf").model.formats
    deltas = [f"layers.{i}.attention" for i, t in enumerate(model.config.layer_types) if "li" in t]
    attends = f"layers.{model.config.layer_types.index('full_attention')}.attention"
    assert {held.of(f"{at}.out").name for at in deltas} == {"q4_k-a8" if kept else "bfloat16"}
    assert {held.of(f"{at}.mixed").name for at in deltas} == {"mixed_k-a8"}
    assert held.of(f"{attends}.qkv").name == "mixed_k-a8"
    assert held.of(f"{attends}.gate").name == "q4_k-a8"
    said = [r.getMessage() for r in caplog.records if "widened" in r.getMessage()]
    assert len(said) == (0 if kept else 1)
    assert kept or "3 tensors (3 Q4_K) are widened" in said[0]
    compare(tmp_path / "m.gguf", folder, Kind.Q4_K)


@pytest.mark.parametrize(("by", "kept"), [(8, False), (16, True)])
def test_sixteen_rows_are_of_one_kind(by: int, kept: bool, tmp_path: Path) -> None:
    """What a rule makes of rows of several K-quants is kept where panels don't mix them."""
    model = make("llama", hidden_size=256, intermediate_size=256, head_dim=16)

    def choose(stem: str, values: Floats) -> Kind:
        return matrices(Kind.Q6_K if "attn_k" in stem else Kind.Q4_K)(stem, values)

    write_model(model, tmp_path / "m.gguf", choose)
    source, spec = GgufSource(tmp_path / "m.gguf"), load_model(tmp_path / "m.gguf").spec
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk"]
    rule = Stack((*names,), "x", lambda rows, _: rows.roll(by, 0), of_rows=True)
    assert _keeps(WeightPlan(rule, [*names]), source, spec) is kept
    assert not _keeps(WeightPlan(replace(rule, of_rows=False), [*names]), source, spec)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3_5", "qwen3_5-moe"])
def test_an_export_keeps_codes(name: str, tmp_path: Path) -> None:
    write_model(make(name), tmp_path / "m.gguf", matrices(Kind.Q8_0))
    export_model(tmp_path / "m.gguf", tmp_path / "out")
    got, want = (
        [logits(tmp_path / at, "auto", quantization=q) for q in ("a16", "a8")]
        for at in ("out", "m.gguf")
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_layers_that_all_have_experts_need_no_width(tmp_path: Path) -> None:
    """As converters write Qwen3.5-MoE, whose config.json has none."""
    model = make("qwen3_5-moe")
    del model.config.intermediate_size
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    source = GgufSource(tmp_path / "m.gguf")
    assert "intermediate_size" not in source.config
    assert logits(tmp_path / "m.gguf", "float32").isfinite().all()


@pytest.mark.parametrize(
    ("method", "value", "error", "match"),
    [
        ("add_ssm_group_count", 3, UnsupportedModelError, "a multiple of the 3 key heads, not 4"),
        ("add_ssm_group_count", 0, UnsupportedModelError, "a multiple of the 0 key heads"),
        ("add_ssm_inner_size", 130, UnsupportedModelError, "a multiple of the 4 value heads"),
        ("add_ssm_inner_size", 64, WeightsError, r"blk\.\d\.attn_.* has the shape .* not \d+ rows"),
        ("add_ssm_state_size", 32, WeightsError, r"attn_qkv.* has the shape .* not 256 rows"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3_5"])
def test_sizes_that_are_wrong(
    name: str, method: str, value: int, error: type[Exception], match: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    true = getattr(gguf.GGUFWriter, method)
    monkeypatch.setattr(gguf.GGUFWriter, method, lambda writer, _: true(writer, value))
    write_model(make(name), tmp_path / "m.gguf", whole(Kind.F32))
    with pytest.raises(error, match=match):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(("kinds", "stored"), [
    ((Kind.Q4_K, Kind.Q4_K), "Q4_K"),
    ((Kind.Q8_0, Kind.Q8_0), "Q8_0"),
    ((Kind.Q8_0, Kind.Q4_0), "Q8_0 and Q4_0"),
    ((Kind.Q8_0, Kind.F16), "Q8_0 and F16"),
    ((Kind.F16, Kind.F16), "F16"),
    ((Kind.F16, Kind.F32), "F16 and F32"),
])  # fmt: skip
def test_parts_of_a_projection(kinds: tuple[Kind, Kind], stored: str, tmp_path: Path) -> None:
    """In one matrix again, as it was or widened."""
    model = make("qwen3-next", hidden_size=256)

    def choose(stem: str, values: Floats) -> Kind:
        parts = dict(zip(("attn_qkv", "attn_gate"), kinds, strict=True))
        return parts.get(stem.split(".")[-2], Kind.F32)

    back = write_model(model, tmp_path / "m.gguf", choose)
    source = GgufSource(tmp_path / "m.gguf")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    quantized = any(kind in (Kind.Q4_K, Kind.Q8_0, Kind.Q4_0) for kind in kinds)
    kept = kinds[0] is kinds[1] and quantized
    assert source.stored_as(name) == stored
    assert source.is_widened(name) is (quantized and not kept)
    assert (source.scheme(name) is not None) is kept
    found = source.read(name)
    values = found.dequantize() if isinstance(found, Codes) else found.float()
    assert source.shape(name) == values.shape and torch.equal(values, back[name])


def test_layers_that_nobody_tells_apart(tmp_path: Path) -> None:
    model = make("qwen3_5")
    model.config.layer_types = ["full_attention"]
    write_model(model, tmp_path / "m.gguf", whole(Kind.F32))
    with pytest.raises(UnsupportedModelError, match="one entry for each of 4 layers"):
        load_model(tmp_path / "m.gguf")


def test_rates_above_0_have_no_logarithms(tmp_path: Path) -> None:
    write_model(make("qwen3_5"), tmp_path / "m.gguf", whole(Kind.F32))
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    rates = GgufSource(tmp_path / "m.gguf")._where["model.layers.2.linear_attn.A_log"][1]
    at = raw.index(rates.data.tobytes())
    raw[at : at + 4] = np.float32(0.5).tobytes()
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(WeightsError, match=r"blk\.2\.ssm_a has values above 0"):
        load_model(tmp_path / "m.gguf")


def test_more_layers_guess_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = gguf.GGUFWriter.add_nextn_predict_layers
    wrong = lambda writer, _: true(writer, 5)  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, "add_nextn_predict_layers", wrong)
    write_model(make("qwen3_5"), tmp_path / "m.gguf", whole(Kind.F32), guesses=1)
    with pytest.raises(UnsupportedModelError, match=r"nextn_predict_layers must be below the 5 l"):
        load_model(tmp_path / "m.gguf")
