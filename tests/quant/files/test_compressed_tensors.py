"""Against the package of that name: it reads what is written, and what it writes is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.models.sources import open_source
from penstock.quant import Codes, parse_scheme
from penstock.quant.files import find_matrices, layouts_for, write_checkpoint
from penstock.quant.files.compressed_tensors import FORMATS
from penstock.quant.levels import levels
from tests.quant.files.made import SCHEMES, Memory, random_codes

pytest.importorskip("compressed_tensors", reason="compressed-tensors is the reference")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)

HERE = [name for name in SCHEMES if "compressed-tensors" in layouts_for(parse_scheme(name))]


def decompress(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """The matrix of module `a`, by the package."""
    parsed = QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    compressor = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
    local = {name.removeprefix("a."): t for name, t in stored.items() if name.startswith("a.")}
    result: Tensor = compressor.decompress(local, scheme)["weight"]
    return result


@pytest.mark.parametrize("name", HERE)
def test_the_package_reads_what_is_written(name: str, tmp_path: Path) -> None:
    codes = random_codes(name, 200, 256)
    write_checkpoint(tmp_path, {}, [("a.weight", codes)])
    source = open_source(tmp_path)
    checkpoint = source._checkpoint  # type: ignore[attr-defined]
    stored = {part: checkpoint.raw(part) for part in checkpoint.names()}
    config = source.config["quantization_config"]
    if codes.scheme.kind in ("mxfp4", "nvfp4"):  # which it always gives in bfloat16
        scale = codes.scale.repeat_interleave(codes.scheme.group, 1)
        if codes.outer is not None:
            scale = scale / stored["a.weight_global_scale"]
        value = levels(codes.scheme.kind)[codes.values.long()]
        assert torch.equal(decompress(stored, config), (value * scale).bfloat16())
        assert torch.allclose(value * scale, codes.dequantize(), rtol=2**-22, atol=0)
        return
    stored["a.weight_scale"] = stored["a.weight_scale"].float()  # it computes in their type
    assert torch.equal(decompress(stored, config), codes.dequantize())
    if codes.input_scale is not None:
        assert stored["a.input_scale"].tolist() == [codes.input_scale]


def args(**values: Any) -> QuantizationArgs:
    return QuantizationArgs(**{"num_bits": 8, "type": "int", "symmetric": True, **values})


TOKEN = args(dynamic=True, strategy="token")
STATIC = args(dynamic=False, strategy="tensor")
BLOCKS = args(type="float", strategy="block", block_structure=[128, 128])
THEIRS = {
    # what the package is asked for, and the scheme that it means here
    "w4a16-g128": (args(num_bits=4, strategy="group", group_size=128), None, "pack-quantized"),
    "w4a16-g32-asym": (
        args(num_bits=4, strategy="group", group_size=32, symmetric=False), None, "pack-quantized"),
    "w4a16-channel-asym": (
        args(num_bits=4, strategy="channel", symmetric=False), None, "pack-quantized"),
    "w8a16": (args(strategy="channel"), None, "pack-quantized"),
    "w8a16-g64-asym": (
        args(strategy="group", group_size=64, symmetric=False), None, "pack-quantized"),
    "w8a16-tensor": (args(strategy="tensor"), None, "pack-quantized"),
    "w8a8": (args(strategy="channel"), TOKEN, "int-quantized"),
    "w8a8-asym": (args(strategy="channel", symmetric=False), TOKEN, "int-quantized"),
    "w8a8-tensor-static": (args(strategy="tensor"), STATIC, "int-quantized"),
    "w4a8-g128": (args(num_bits=4, strategy="group", group_size=128), TOKEN, "int-quantized"),
    "fp8": (args(type="float", strategy="channel"), None, "naive-quantized"),
    "fp8-tensor": (args(type="float", strategy="tensor"), None, "naive-quantized"),
    "fp8-block": (BLOCKS, None, "naive-quantized"),
    "fp8-w8a8": (args(type="float", strategy="channel"),
                 args(type="float", dynamic=True, strategy="token"), "float-quantized"),
    "fp8-w8a8-tensor-static": (args(type="float", strategy="tensor"),
                               args(type="float", strategy="tensor"), "float-quantized"),
    "fp8-w8a8-block": (BLOCKS, args(type="float", dynamic=True, strategy="group", group_size=128),
                       "float-quantized"),
    "fp8-w8a8-block-static": (BLOCKS, args(type="float", strategy="tensor"), "float-quantized"),
    "mxfp4": (args(num_bits=4, type="float", strategy="group", group_size=32), None,
              "mxfp4-pack-quantized"),
    "nvfp4": (args(num_bits=4, type="float", strategy="tensor_group", group_size=16), None,
              "nvfp4-pack-quantized"),
    # what no scheme says: values in float32
    None: (args(num_bits=4, strategy="group", group_size=16), None, "pack-quantized"),
    "2 bits": (args(num_bits=2, strategy="group", group_size=64), None, "pack-quantized"),
    "fp8 in other blocks": (args(type="float", strategy="block", block_structure=[64, 32]), None,
                            "naive-quantized"),
}  # fmt: skip


def compress(
    weights: QuantizationArgs, inputs: QuantizationArgs | None, kind: str, shape: tuple[int, int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Module `a` with random weights, by the package, and the config that says so."""
    torch.manual_seed(3)
    n, k = shape
    weight = torch.randn(n, k) * 0.1
    rows, columns = {"tensor": (n, k), "channel": (1, k)}.get(
        str(weights.strategy), (1, weights.group_size)
    )
    if weights.block_structure:
        rows, columns = weights.block_structure
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    top = blocks.abs().amax((1, 3))
    state: dict[str, Tensor] = {"weight": weight}
    if weights.type == "float":
        scale = top / (448.0 if weights.num_bits == 8 else 6.0)
        if kind.startswith("mxfp4"):
            scale = 2.0 ** torch.ceil(torch.log2(scale))
        if kind.startswith("nvfp4"):
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            scale = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        scale = top / (2 ** (weights.num_bits - 1) - 1)
        if not weights.symmetric:
            state["weight_zero_point"] = torch.randint(-3, 4, scale.shape, dtype=torch.int8)
    if weights.strategy == "tensor":
        scale = scale.flatten()
        state |= {k: v.flatten() for k, v in state.items() if k == "weight_zero_point"}
    state["weight_scale"] = scale
    if inputs is not None and not inputs.dynamic:
        state["input_scale"] = torch.tensor([0.021])
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs, format=kind
    )
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed"
    )
    return (
        {f"a.{part}": tensor for part, tensor in stored.items()},
        json.loads(config.model_dump_json()),
    )


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("shape", [(24, 256), (200, 128)])
def test_what_the_package_writes_is_read(name: str | None, shape: tuple[int, int]) -> None:
    stored, config = compress(*THEIRS[name], shape)
    found = find_matrices(config, Memory(stored))
    assert list(found.matrices) == ["a.weight"]
    matrix = found.matrices["a.weight"]
    assert set(matrix.parts) == stored.keys()
    assert matrix.shape == shape
    read = matrix.read()
    theirs = decompress(stored, config)
    if name is None or " " in name:
        assert matrix.scheme is None
        assert isinstance(read, Tensor)
        assert torch.equal(read, theirs.float())
        assert any("widened" in text for text in found.notices)
        return
    assert isinstance(read, Codes)
    assert matrix.scheme == read.scheme == parse_scheme(name)
    if name in ("mxfp4", "nvfp4"):
        ours = read.dequantize()
        assert torch.allclose(theirs.float(), ours, rtol=2**-8, atol=0)  # theirs is bfloat16
        assert (theirs == ours.bfloat16()).float().mean() > 0.99
    else:
        assert torch.equal(read.dequantize(), theirs)
    if name.endswith("static"):
        assert read.input_scale == torch.tensor(0.021).item()
    assert not found.notices


FLOAT = args(type="float", strategy="channel")


@pytest.mark.parametrize(
    ("weights", "inputs", "name", "says"),
    [
        (args(strategy="channel"), args(dynamic=True, strategy="tensor"), "w8a8",
         "a scale for each token, not one for all tokens of a batch"),
        (FLOAT, args(type="float", dynamic=True, strategy="tensor"), "fp8-w8a8",
         "a scale for each token, not one for all tokens of a batch"),
        (BLOCKS, args(type="float", dynamic=True, strategy="tensor"), "fp8-w8a8-block",
         "each 128 values of a token, not one for all tokens of a batch"),
        (BLOCKS, args(type="float", dynamic=True, strategy="token"), "fp8-w8a8-block",
         "a scale for each 128 values of a token, not one for all of it"),
        (args(strategy="channel"), args(symmetric=False, strategy="tensor"), "w8a16",
         "stay in bfloat16, not in the checkpoint's int8 with a zero point, by tensor"),
        (args(strategy="channel"), args(symmetric=False, dynamic=True, strategy="token"), "w8a16",
         "stay in bfloat16, not in the checkpoint's int8 with a zero point, by token"),
        (FLOAT, args(type="float", dynamic=True, strategy="group", group_size=128), "fp8",
         "stay in bfloat16, not in the checkpoint's float8, by group"),
        (args(num_bits=4, strategy="group", group_size=128),
         args(type="float", dynamic=True, strategy="token"), "w4a16-g128",
         "stay in bfloat16, not in the checkpoint's float8, by token"),
    ],
)  # fmt: skip
def test_activations_that_differ_from_the_checkpoint_s(
    weights: QuantizationArgs, inputs: QuantizationArgs, name: str, says: str
) -> None:
    kind = "float-quantized" if weights.type == "float" else "int-quantized"
    stored, config = compress(weights, inputs, kind, (128, 256))
    if not inputs.symmetric and not inputs.dynamic:
        stored["a.input_zero_point"] = torch.tensor([3], dtype=torch.int8)
    found = find_matrices(config, Memory(stored))
    matrix = found.matrices["a.weight"]
    assert set(matrix.parts) == stored.keys()
    assert matrix.scheme == parse_scheme(name)
    (notice,) = found.notices
    assert says in notice


def test_static_activations_need_their_scale() -> None:
    stored, config = compress(*THEIRS["fp8-w8a8-tensor-static"], (24, 256))
    del stored["a.input_scale"]
    with pytest.raises(WeightsError, match="a lacks input_scale"):
        find_matrices(config, Memory(stored))


def test_every_format_is_tried() -> None:
    assert {kind for _, _, kind in THEIRS.values()} == set(FORMATS)


@pytest.fixture
def packed() -> tuple[dict[str, Tensor], dict[str, Any]]:
    return compress(*THEIRS["w4a16-g32-asym"], (24, 256))


def test_targets_and_ignore(packed: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """Exactly named modules come before patterns, patterns before a kind of layer."""
    stored, config = packed
    group = config["config_groups"]["group_0"]
    eight, _ = compress(*THEIRS["w8a16"], (24, 256))
    eight_group = compress(*THEIRS["w8a16"], (24, 256))[1]["config_groups"]["group_0"]
    mixed = {
        "m.0.down": eight, "m.1.down": eight, "m.0.up": stored, "m.1.up": stored,
    }  # fmt: skip
    tensors = {p.replace("a.", f"{m}.", 1): t for m, s in mixed.items() for p, t in s.items()}
    groups = {
        "group_0": {**group, "targets": ["Linear"]},
        "group_1": {**eight_group, "targets": ["m.0.down", r"re:.*1\.down$"]},
    }
    found = find_matrices({**config, "config_groups": groups}, Memory(tensors))
    schemes = {name: m.scheme.name for name, m in found.matrices.items() if m.scheme}
    assert schemes == {
        "m.0.down.weight": "w8a16", "m.1.down.weight": "w8a16",
        "m.0.up.weight": "w4a16-g32-asym", "m.1.up.weight": "w4a16-g32-asym",
    }  # fmt: skip
    config = {**config, "config_groups": groups, "ignore": ["lm_head", r"re:.*0\.up"]}
    with pytest.raises(WeightsError, match=r"ignores .*but m\.0\.up is quantized"):
        find_matrices(config, Memory(tensors))


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("weight_packed", lambda t: t[:-1], r"shape \[23, 32\], but its matrix needs \[24, 32\]"),
        ("weight_packed", lambda t: t.short(), "is torch.int16, not torch.int32"),
        ("weight_packed", None, "a lacks weight_packed"),
        ("weight_shape", None, "a lacks weight_shape"),
        ("weight_scale", lambda t: t[:, :4], r"shape \[24, 4\], but its matrix needs \[24, 8\]"),
        ("weight_zero_point", None, "a lacks weight_zero_point"),
        ("weight_scale", lambda t: t.clone().fill_(float("nan")), "192 of the 192 scales"),
        ("weight_scale", lambda t: t.int(), "holds scales in torch.int32"),
        ("weight_zero_point", lambda t: t[:2], r"shape \[2, 8\], but its matrix needs \[3, 8\]"),
    ],
)
def test_damaged_tensors(
    packed: tuple[dict[str, Tensor], dict[str, Any]], part: str, change: Any, says: str
) -> None:
    stored, config = packed
    if change is None:
        del stored[f"a.{part}"]
    else:
        stored[f"a.{part}"] = change(stored[f"a.{part}"])
    with pytest.raises(WeightsError, match=says):
        find_matrices(config, Memory(stored)).matrices["a.weight"].read()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "marlin-24"}, "format 'marlin-24'; read are pack-quantized, int-quantized"),
        ({"quantization_status": "frozen"}, "quantization_status='frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {}}}, "transform_config, which isn't built"),
        ({"config_groups": {}}, "has no config_groups"),
        ({"weights": {"num_bits": 3}}, "num_bits=3; read are 2, 4, 8"),
        ({"weights": {"strategy": "attn_head"}}, "strategy 'attn_head'"),
        ({"output_activations": {"num_bits": 8}}, "quantized outputs aren't built"),
    ],
)
def test_what_is_not_read(
    packed: tuple[dict[str, Tensor], dict[str, Any]], change: dict[str, Any], says: str
) -> None:
    stored, config = packed
    group = config["config_groups"]["group_0"]
    for key, value in change.items():
        if key == "weights":
            group["weights"] |= value
        elif key == "output_activations":
            group[key] = value
        else:
            config[key] = value
            if key == "format":
                group[key] = None
    with pytest.raises(UnsupportedModelError, match=says):
        find_matrices(config, Memory(stored))


def test_a_config_of_another_checkpoint(
    packed: tuple[dict[str, Tensor], dict[str, Any]],
) -> None:
    stored, config = packed
    with pytest.raises(WeightsError, match="none of the 1 tensors is in its layout"):
        find_matrices(config, Memory({"a.weight": torch.ones(2, 2)}))
    config["config_groups"]["group_0"]["targets"] = ["re:.*down"]
    with pytest.raises(
        WeightsError, match=r"no group of quantization_config targets it: re:\.\*down"
    ):
        find_matrices(config, Memory(stored))
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    with pytest.raises(WeightsError, match=r"a\.weight and .* give the same matrix"):
        find_matrices(config, Memory(stored | {"a.weight": torch.ones(2, 2)}))


def test_columns_in_the_order_of_activations(
    packed: tuple[dict[str, Tensor], dict[str, Any]],
) -> None:
    """actorder="group", which LLM Compressor wrote until 2026: `weight_g_idx`."""
    stored, config = packed
    plain = find_matrices(config, Memory(stored)).matrices["a.weight"].read()
    assert isinstance(plain, Codes)
    trivial = torch.arange(256) // 32
    same = find_matrices(config, Memory(stored | {"a.weight_g_idx": trivial})).matrices["a.weight"]
    assert same.scheme == plain.scheme
    order = torch.randperm(256)
    stored["a.weight_g_idx"] = trivial[order].int()
    found = find_matrices(config, Memory(stored))
    matrix = found.matrices["a.weight"]
    assert matrix.scheme is None
    assert any("actorder" in text for text in found.notices)
    of = trivial[order]
    assert plain.zero is not None
    want = (plain.values.float() - plain.zero.float()[:, of]) * plain.scale[:, of]
    assert torch.equal(matrix.read(), want)  # type: ignore[arg-type]
    stored["a.weight_g_idx"] = of + 1
    with pytest.raises(WeightsError, match="names groups 1 … 8, but 256 columns have 8"):
        find_matrices(config, Memory(stored))


def test_scales_of_the_cache_are_said_to_be_unused(
    packed: tuple[dict[str, Tensor], dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored, config = packed
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.tensor([0.1]) for x in "kv"}
    write_checkpoint(tmp_path, {}, (stored | scales).items())
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with caplog.at_level(logging.WARNING, "penstock"):
        assert open_source(tmp_path).names() == ["a.weight"]
    assert "choose it by kv_cache_dtype" in caplog.text


def test_exponents_of_mxfp4() -> None:
    """Every byte but 255 is a power of two, down to 2^-127."""
    codes = random_codes("mxfp4", 255, 32)
    stored, config = compress(*THEIRS["mxfp4"], (255, 32))
    stored["a.weight_scale"] = torch.arange(255, dtype=torch.uint8)[:, None]
    read = find_matrices(config, Memory(stored)).matrices["a.weight"].read()
    assert isinstance(read, Codes)
    assert read.scale.flatten().tolist() == [2.0 ** (e - 127) for e in range(255)]
    stored["a.weight_scale"][7] = 255
    with pytest.raises(WeightsError, match=r"1 of the 255 scales in a\.weight_scale are NaN"):
        find_matrices(config, Memory(stored)).matrices["a.weight"].read()
    codes.scale[:, 0] = torch.tensor([2.0 ** (e - 127) for e in range(255)])
    from penstock.quant.files.floats import exponents

    assert exponents("a", codes).flatten().tolist() == list(range(255))
