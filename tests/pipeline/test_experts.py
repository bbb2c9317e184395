"""Exports and engines of models with experts, and what isn't built for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models.load import load_model
from penstock.models.sources import open_source
from penstock.nn.experts import ExpertBank, Experts
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.onnx_decoder import check_expressible
from penstock.pipeline.parts import Parts
from penstock.pipeline.qat import QatOptions, train
from penstock.pipeline.quantize import quantize_model
from penstock.pipeline.sensitivity import measure
from penstock.quant import parse_scheme
from tests.lora_files import write_adapter
from tests.models.tiny import Tiny, make_tiny

from .conftest import Build, needs_native

NAMES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss")


@pytest.fixture(scope="module", params=NAMES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(str(request.param), tmp_path_factory.mktemp(str(request.param)))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("mixtral", tmp_path_factory.mktemp("mixtral"))


def greedy(folder: Path, **options: Any) -> list[int]:
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=128, num_blocks=8, **options)
    prompt = {"prompt_token_ids": [5, 9, 200, 31, 44] * 7}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def values_of(bank: ExpertBank) -> Tensor:
    """[E, N, K]; [E, 2·N, K] where gated."""
    of, n, k = bank.weight_format, bank.out_features, bank.in_features
    each = ({part: held[e] for part, held in bank.packed.items()} for e in range(bank.count))
    return torch.stack([of.unpack(packed, n, k, bank.gated) for packed in each])


@needs_native
def test_exported_and_built_is_what_loading_rounds(
    tiny: Tiny, tmp_path: Path, engine_of: Build
) -> None:
    """The same codes of every expert, the router as it was, and the same tokens from an engine."""
    export = export_model(tiny.folder, tmp_path / "e", weights=NewWeights(quant="w8a16"))
    names = load_file(tmp_path / "e" / "model.safetensors").keys()
    router = "mlp.router.weight" if tiny.oracle.config.model_type == "gpt_oss" else "gate.weight"
    assert any(name.endswith(router) for name in names)
    stored = load_model(tmp_path / "e", max_model_len=128).model
    rounded = load_model(tiny.folder, max_model_len=128, quantization="w8a16").model
    for one, other in zip(stored.layers, rounded.layers, strict=True):
        if isinstance(one.mlp, Experts):
            for bank in ("up", "down"):
                a, b = (values_of(getattr(layer.mlp, bank)) for layer in (one, other))
                assert torch.equal(a, b)
    mixed = [layer for layer in stored.layers if isinstance(layer.mlp, Experts)]
    assert export.graph.operators().count("experts") == len(mixed)
    engine = engine_of(tmp_path / "e", max_model_len=128)
    assert greedy(engine) == greedy(tmp_path / "e") == greedy(tmp_path / "e", enforce_eager=True)


def test_patterns_name_all_experts_of_a_layer(mixtral: Tiny, tmp_path: Path) -> None:
    special = {"*.mlp.down": None, "layers.0.*": "w4a16-g32"}
    weights = NewWeights(quant="w8a16", special=special, layout="compressed-tensors")
    export_model(mixtral.folder, tmp_path / "e", weights=weights)
    formats = load_model(tmp_path / "e", max_model_len=64).model.formats
    assert [formats.of(f"layers.{i}.mlp.down").name for i in range(3)] == [
        "w4a16-g32", "bfloat16", "bfloat16",
    ]  # fmt: skip
    assert [formats.of(f"layers.{i}.mlp.up").name for i in range(3)] == [
        "w4a16-g32", "w8a16", "w8a16",
    ]  # fmt: skip
    odd = NewWeights(quant="w4a16-g32", layout="gptq")  # 100 between the matrices
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down\.0 .*'\*\.mlp\.down=none'"):
        export_model(mixtral.folder, tmp_path / "g", weights=odd)
    one = NewWeights(quant="w8a16", special={"layers.0.mlp.down.3": None})
    with pytest.raises(ConfigError, match=r"is none of this model's 42 matrices.*mlp\.down"):
        export_model(mixtral.folder, tmp_path / "f", weights=one)


def test_an_adapter_of_an_expert_is_merged(mixtral: Tiny, tmp_path: Path) -> None:
    expert = "model.layers.1.block_sparse_moe.experts.3.w2"
    change = write_adapter(tmp_path / "a", [(expert, (64, 100))], 4, 1)
    export_model(mixtral.folder, tmp_path / "e", weights=NewWeights(merge_lora=tmp_path / "a"))
    before = load_file(mixtral.folder / "model.safetensors")[f"{expert}.weight"]
    after = load_file(tmp_path / "e" / "model.safetensors")[f"{expert}.weight"]
    torch.testing.assert_close(after.float(), before + change[expert], rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_shared_block_s_gate(tmp_path: Path) -> None:
    """It merges, and a server says so."""
    tiny, gate = make_tiny("qwen2-moe", tmp_path / "m"), "model.layers.3.mlp.shared_expert_gate"
    change = write_adapter(tmp_path / "a", [(gate, (1, 64))], 4, 1)
    with pytest.raises(UnsupportedModelError, match=r"gates of shared experts.*--merge-lora"):
        LLM(tiny.folder, skip_tokenizer_init=True, max_model_len=64, enable_lora=True).load_lora(
            "a", tmp_path / "a"
        )
    export_model(tiny.folder, tmp_path / "e", weights=NewWeights(merge_lora=tmp_path / "a"))
    before, after = (
        load_file(folder / "model.safetensors")[f"{gate}.weight"]
        for folder in (tiny.folder, tmp_path / "e")
    )
    torch.testing.assert_close(after.float(), before + change[gate], rtol=1e-4, atol=1e-4)


def test_an_export_of_gpt_oss_says_who_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its experts lie in one tensor elsewhere; of other families each has its name on the Hub."""
    for name in ("gpt-oss", "qwen3-moe"):
        tiny, to = make_tiny(name, tmp_path / name), tmp_path / f"{name}-e"
        caplog.clear()
        with caplog.at_level(logging.WARNING, "penstock"):
            export_model(tiny.folder, to, weights=NewWeights(quant="w8a16"))
        assert ("which Penstock reads and transformers doesn't" in caplog.text) is (
            name == "gpt-oss"
        )
    again = transformers.AutoModelForCausalLM.from_pretrained
    _, about = again(tiny.folder, output_loading_info=True)
    assert not about["missing_keys"]


def test_what_isn_t_built_for_experts(mixtral: Tiny) -> None:
    text = CalibrationSet("text", (tuple(range(3, 40)),) * 2)
    scheme = parse_scheme("w4a16-g32")
    with pytest.raises(UnsupportedModelError, match="experts, which gptq isn't built for"):
        list(quantize_model(mixtral.folder, QuantizeConfig(scheme, "gptq"), text))
    with pytest.raises(UnsupportedModelError, match="experts, which a budget isn't built for"):
        measure(mixtral.folder, [scheme], text)
    with pytest.raises(UnsupportedModelError, match="Layer 0 has experts, which --onnx"):
        check_expressible(mixtral.load().model)
    config = QuantizeConfig(scheme, "rtn")
    with pytest.raises(UnsupportedModelError, match="experts"):
        list(train(open_source(mixtral.folder), config, text, QatOptions(steps=1)))


def test_every_matrix_has_a_name(mixtral: Tiny) -> None:
    modules = Parts.of(open_source(mixtral.folder)).modules()
    assert len(modules) == 3 * (2 + 2 * 6) + 1
    assert modules[:4] == [
        "layers.0.attention.qkv", "layers.0.attention.out", "layers.0.mlp.up.0",
        "layers.0.mlp.up.1",
    ]  # fmt: skip
