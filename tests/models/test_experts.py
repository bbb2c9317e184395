"""Checkpoints with experts: one by one or in one tensor, quantized alike or not, whole or not."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CASES, Make, Sequence, make_model
from torch import Tensor

from penstock.errors import WeightsError
from penstock.models.load import load_dummy, load_model
from penstock.models.sources import open_source
from penstock.nn import Decoder
from penstock.nn.experts import ExpertBank, Experts
from penstock.quant import Codes, format_of, parse_scheme
from penstock.quant.files import write_checkpoint
from penstock.quant.methods import rtn

MIXED = ("mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss")


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    return Sequence(model).feed(tokens)


def copied(folder: Path, to: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A checkpoint like `folder`'s with other tensors."""
    to.mkdir()
    stored = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(stored | config))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe"])
def test_experts_in_one_tensor(tiny: Make, name: str, tmp_path: Path) -> None:
    """As transformers keeps them in memory."""
    case = tiny(name)
    joined = {k: v for k, v in case.oracle.state_dict().items() if k != "lm_head.weight"}
    joined["lm_head.weight"] = case.oracle.state_dict()["lm_head.weight"]
    assert any(k.endswith("experts.gate_up_proj") for k in joined)
    joined = {k: v.clone() for k, v in joined.items()}
    folder = copied(case.folder, tmp_path / "joined", joined)
    model = load_model(folder, max_model_len=case.case.max_len, strict=True).model
    assert torch.equal(logits(model, case.prompt), logits(case.load().model, case.prompt))


def test_a_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, the rest in bfloat16: nothing is widened, and nothing kept twice."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    case = CASES["gpt-oss"]
    case = replace(case, changes={**case.changes, "intermediate_size": 96})
    oracle, folder = make_model(case), tmp_path / "oss"
    oracle.save_pretrained(folder)
    random = torch.Generator().manual_seed(0)
    tensors, own = load_file(folder / "model.safetensors"), oracle.state_dict()
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        count, k, n = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, n, k // 32, 16), generator=random).byte()
        scales = torch.randint(122, 126, (count, n, k // 32), generator=random).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        own[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    for tensor in own.values():
        tensor.copy_(tensor.bfloat16())
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    to = copied(
        folder, tmp_path / "published", rounded, dtype="bfloat16", quantization_config=published
    )
    loaded = load_model(to, max_model_len=case.max_len, strict=True)
    formats = loaded.model.formats
    assert {formats.of(f"layers.1.mlp.{part}").name for part in ("up", "down")} == {"mxfp4"}
    assert {formats.of(m).name for m in ("layers.1.attention.qkv", "head")} == {"bfloat16"}
    tokens = torch.randint(3, 320, (50,), generator=random)
    with torch.inference_mode():
        want = oracle(tokens[None]).logits[0].log_softmax(-1)
    got = logits(loaded.model, tokens).log_softmax(-1)
    assert (want.exp() * (want - got)).sum(-1).median() < 2e-3


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("quantization", ["w8a8", "w4a16-g32-asym", "fp8"])
def test_rounded_on_load_is_each_expert_rounded(tiny: Make, name: str, quantization: str) -> None:
    case = tiny(name)
    model = load_model(
        case.folder, max_model_len=case.case.max_len, quantization=quantization
    ).model
    plain, source = case.load("bfloat16").model, open_source(case.folder)
    parts = {"up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    if name == "mixtral":
        parts = {"up": ("w1", "w3"), "down": ("w2",)}
    block = "block_sparse_moe" if name == "mixtral" else "mlp"
    for i, (layer, own) in enumerate(zip(model.layers, plain.layers, strict=True)):
        if not isinstance(layer.mlp, Experts):
            continue
        assert str(layer.mlp.router.weight_format.name) == "bfloat16"
        assert torch.equal(layer.mlp.router.packed["weight"], own.mlp.router.packed["weight"])
        for at, names in parts.items():
            bank = getattr(layer.mlp, at)
            assert bank.is_complete
            assert all(part.is_contiguous() for part in bank.packed.values())
            for e in range(bank.count):
                stems = [f"model.layers.{i}.{block}.experts.{e}.{n}.weight" for n in names]
                whole = torch.cat([source.read(stem) for stem in stems])
                own = bank.weight_format.pack(whole, bank.gated)
                assert all(torch.equal(bank.packed[k][e], own[k].to(bank.packed[k])) for k in own)


def codes_of(source: Any, quantized: Any) -> list[tuple[str, Tensor | Codes]]:
    scheme = parse_scheme("w8a16")
    return [
        (n, rtn.quantize(source.read(n).float(), scheme) if quantized(n) else source.read(n))
        for n in source.names()
    ]


def test_experts_that_are_quantized_apart_are_widened(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer's experts are stored as one: where one of them isn't quantized, none stays so."""
    case = tiny("mixtral")
    source = open_source(case.folder)

    def quantized(name: str) -> bool:
        return "experts" in name and not ("layers.1." in name and "experts.2.w2" in name)

    write_checkpoint(tmp_path / "q", source.config, codes_of(source, quantized))
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = load_model(tmp_path / "q", max_model_len=case.case.max_len)
    assert "5 quantized tensors are widened" in caplog.text
    formats = loaded.model.formats
    assert formats.of("layers.1.mlp.down").name == "bfloat16"
    assert formats.of("layers.0.mlp.down").name == formats.of("layers.1.mlp.up").name == "w8a16"
    assert logits(loaded.model, case.prompt).isfinite().all()


def test_a_router_that_is_quantized_is_widened(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no say in what the model's matrices are stored as."""
    case = tiny("mixtral")
    source = open_source(case.folder)
    tensors = codes_of(source, lambda name: name.endswith("block_sparse_moe.gate.weight"))
    write_checkpoint(tmp_path / "q", source.config, tensors)
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = load_model(tmp_path / "q", max_model_len=case.case.max_len)
    assert "3 quantized tensors are widened" in caplog.text and "or they are routers" in caplog.text
    assert loaded.model.formats.name == "bfloat16"
    assert logits(loaded.model, case.prompt).isfinite().all()


def test_no_file_makes_names_without_end(tmp_path: Path, tiny: Make) -> None:
    case = tiny("qwen3-moe")
    tensors = load_file(case.folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(10**6, 0, 64)
    folder = copied(case.folder, tmp_path / "empty", tensors)
    with pytest.raises(WeightsError, match=r"gate_up_proj has the shape \[1000000, 0, 64\]"):
        load_model(folder, max_model_len=64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.2.block_sparse_moe.experts.4.w2.weight"),
         r"lacks 1 of the tensors of .*: model\.layers\.2\.block_sparse_moe\.experts\.4\.w2"),
        (lambda t: t.pop("model.layers.2.block_sparse_moe.experts.4.w3.weight"),
         r"layers\.2\.mlp\.up\.4\.weight \(from .*experts\.\{e\}\.w3"),
        (lambda t: t.update({"model.layers.0.block_sparse_moe.experts.6.w2.weight":
                             torch.zeros(64, 100)}),
         r"1 of the checkpoint.s tensors have no place in 'mixtral'.*experts\.6\.w2"),
        (lambda t: t.update({"model.layers.0.block_sparse_moe.experts.5.w2.weight":
                             torch.zeros(64, 99)}),
         r"needs shape \[64, 100\].*\[64, 99\]"),
        (lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(6, 200)}),
         r"gate_up_proj has the shape \[6, 200\]"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_wrong(tiny: Make, tmp_path: Path, change: Any, says: str) -> None:
    case = tiny("mixtral")
    tensors = load_file(case.folder / "model.safetensors")
    change(tensors)
    folder = copied(case.folder, tmp_path / "wrong", tensors)
    with pytest.raises(WeightsError, match=says):
        load_model(folder, max_model_len=64)


def bank_of(name: str) -> ExpertBank:
    return ExpertBank(3, 64, 20, False, format_of(parse_scheme(name)))


def test_scales_of_one_expert_that_float16_doesn_t_hold() -> None:
    """The bank's become float32, and all stand for what they stood for."""
    bank, held = bank_of("w4a16-g32"), format_of(parse_scheme("w4a16-g32"))
    random = torch.Generator().manual_seed(0)
    each = [torch.randn(20, 64, generator=random) for _ in range(3)]
    packed = [held.pack_codes(rtn.quantize(w, parse_scheme("w4a16-g32"))) for w in each]
    codes = rtn.quantize(each[1], parse_scheme("w4a16-g32"))
    wide = held.pack_codes(replace(codes, scale=codes.scale * 1.0001))
    assert (packed[0]["scale"].dtype, wide["scale"].dtype) == (torch.float16, torch.float32)
    packed[1] = wide
    for number, own in enumerate(packed):
        bank.put(number, own)
    assert bank.is_complete
    for number, own in enumerate(packed):
        of_bank = {part: tensor[number] for part, tensor in bank.packed.items()}
        assert torch.equal(held.unpack(of_bank, 20, 64), held.unpack(own, 20, 64))


def test_a_bank_takes_one_kind_of_matrix() -> None:
    bank, random = bank_of("w4a16-g32"), torch.randn(20, 64)
    bank.put(0, format_of(parse_scheme("w4a16-g32")).pack(random))
    assert not bank.is_complete
    with pytest.raises(WeightsError, match=r"Expert 1 is stored as .*zero.*quantized alike"):
        bank.put(1, format_of(parse_scheme("w4a16-g32-asym")).pack(random))


def test_a_joined_tensor_of_fewer_experts(tiny: Make, tmp_path: Path) -> None:
    case = tiny("gpt-oss")
    tensors = load_file(case.folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    folder = copied(case.folder, tmp_path / "few", {**tensors, name: tensors[name][:5].clone()})
    with pytest.raises(WeightsError, match=r"holds 5 experts, but config\.json says 6"):
        load_model(folder, max_model_len=64)


@pytest.mark.parametrize("name", MIXED)
def test_random_weights(tiny: Make, name: str) -> None:
    case = tiny(name)
    model = load_dummy(case.folder, max_model_len=case.case.max_len, quantization="w8a8").model
    assert logits(model, case.prompt).isfinite().all()
