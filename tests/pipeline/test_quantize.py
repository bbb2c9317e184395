"""The driver: every tensor once, the same after a kill, better than rounding, and its refusals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.models.registry import read_spec
from penstock.models.sources import open_source
from penstock.models.weights import load_weights, stored_formats
from penstock.nn import Decoder
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import METHODS, QuantizeConfig
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.quantize import LayerReport, quantize_model
from penstock.quant import Codes, parse_scheme
from penstock.quant.methods import rtn
from tests.models.tiny import Sequence, Tiny

Result = dict[str, Tensor | Codes]
W4 = parse_scheme("w4a16-g32")


def run(
    folder: Path, config: QuantizeConfig, text: CalibrationSet | None = None, **more: Path
) -> Result:
    found: Result = {}
    for name, value in quantize_model(folder, config, text, **more):
        assert name not in found
        found[name] = value
    return found


def same(a: Result, b: Result) -> bool:
    if a.keys() != b.keys():
        return False
    for name, x in a.items():
        y = b[name]
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype):
                return False
            if not torch.equal(x, y):
                return False
            continue
        parts = [(x.values, y.values), (x.scale, y.scale), (x.zero, y.zero), (x.outer, y.outer)]
        if x.scheme != y.scheme or x.input_scale != y.input_scale:
            return False
        for left, right in parts:
            if left is None or right is None:
                if left is not right:
                    return False
            elif not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
                return False
    return True


def logits_of(folder: Path, tensors: Result, tokens: Tensor) -> Tensor:
    """Of the model as the engine would load it, in bfloat16."""
    source, spec = Overlay(open_source(folder), tensors.items()), read_spec(folder)
    decoder = Decoder(
        spec.decoder, stored_formats(spec, source, torch.bfloat16), torch.bfloat16, 160
    )
    load_weights(decoder, spec, source)
    return Sequence(decoder).feed(tokens)


@pytest.mark.parametrize(
    "family", ["llama", "llama3-rope", "gemma2", "phi3", "olmo2", "granite", "cohere2", "glm4"]
)
def test_round_to_nearest_is_that_of_each_tensor(family: str, tiny: Callable[[str], Tiny]) -> None:
    folder = tiny(family).folder
    found, source = run(folder, QuantizeConfig(W4)), open_source(folder)
    spec = read_spec(folder).decoder
    head = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    assert found.keys() | {"lm_head.weight"} == set(source.names()) | {"lm_head.weight"}
    for name, value in found.items():
        stored = source.read(name)
        assert isinstance(stored, Tensor)
        if "proj" in name and name.endswith("weight"):
            assert isinstance(value, Codes)
            assert value.scheme == W4
            assert torch.equal(value.dequantize(), rtn.quantize(stored, W4).dequantize())
        elif name == head:
            assert isinstance(value, Codes)
            assert value.scheme == parse_scheme("w8a16")
        else:
            assert isinstance(value, Tensor)
            assert torch.equal(value, stored)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-static", "fp8-w8a8-tensor-static", "nvfp4"])
def test_every_method_gives_a_model_that_runs(
    method: str, scheme: str, tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    checkpoint = tiny("llama3-rope")
    config = QuantizeConfig(parse_scheme(scheme), method)
    reports: list[LayerReport] = []
    found = dict(quantize_model(checkpoint.folder, config, calibration, progress=reports.append))
    logits = logits_of(checkpoint.folder, found, checkpoint.prompt)
    want = checkpoint.expect(checkpoint.prompt)
    # 4 bits on random weights: the direction of the logits, not their digits
    assert torch.nn.functional.cosine_similarity(logits, want, dim=-1).mean() > 0.88
    assert [report.layer for report in reports] == [0, 1, 2]
    if method != "rtn" or scheme.endswith("-static"):
        assert all(0 < error < 0.05 for r in reports for error in r.errors.values())
    codes = found["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(codes, Codes)
    assert (codes.input_scale is not None) == scheme.endswith("static")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_products_err_less_than_rounded_to_nearest(
    method: str, tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    folder = tiny("llama3-rope").folder

    def errors(config: QuantizeConfig) -> list[float]:
        found: list[float] = []
        for _ in quantize_model(
            folder, config, calibration, progress=lambda r: found.extend(r.errors.values())
        ):
            pass
        return found

    static = QuantizeConfig(replace(W4, activations="int8_static"))  # measured though to nearest
    assert sum(errors(QuantizeConfig(W4, method))) < 0.9 * sum(errors(static))


def test_the_head_and_single_matrices_take_what_they_are_given(
    tiny: Callable[[str], Tiny],
) -> None:
    folder = tiny("llama").folder
    special = {"layers.1.mlp.up": parse_scheme("w8a16"), "layers.2.attention.qkv": None}
    found = run(folder, QuantizeConfig(W4, special=special, head=None))
    assert isinstance(found["lm_head.weight"], Tensor)
    assert isinstance(found["model.layers.2.self_attn.v_proj.weight"], Tensor)
    for part in ("gate", "up"):
        codes = found[f"model.layers.1.mlp.{part}_proj.weight"]
        assert isinstance(codes, Codes) and codes.scheme.name == "w8a16"
    found = run(folder, QuantizeConfig(W4, head=parse_scheme("w4a16-g64")))
    head = found["lm_head.weight"]
    assert isinstance(head, Codes) and head.scheme.name == "w4a16-g64"


_KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.quantize import quantize_model
from penstock.quant import parse_scheme

def stop(report):
    if report.layer == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

text = CalibrationSet("random", eval(sys.argv[3]))
config = QuantizeConfig(parse_scheme("w4a16-g32"), "awq+gptq")
for _ in quantize_model(Path(sys.argv[1]), config, text, work=Path(sys.argv[2]), progress=stop):
    pass
"""


def test_a_run_that_was_killed_goes_on_with_the_same_bytes(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet, tmp_path: Path
) -> None:
    folder, work = tiny("llama").folder, tmp_path / "work"
    config = QuantizeConfig(W4, "awq+gptq")
    whole = run(folder, config, calibration)
    for layer in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(folder), str(work), str(calibration.windows),
             layer],
            check=False, capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
    (work / "layer-00002.partial").write_bytes(b"cut off")
    resumed: list[bool] = []
    again = dict(
        quantize_model(
            folder, config, calibration, work=work, progress=lambda r: resumed.append(r.resumed)
        )
    )
    assert resumed == [True, True, False]
    assert same(again, whole)
    assert same(run(folder, config, calibration, work=work), whole)  # all from the folder
    with pytest.raises(ConfigError, match=r"layers of another run: choices differ"):
        run(folder, replace(config, alpha=0.6), calibration, work=work)
    with pytest.raises(ConfigError, match=r"layers of another run: calibration differ"):
        run(folder, config, calibration.first(2), work=work)
    (work / "layer-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"layer-00001.safetensors can't be read"):
        run(folder, config, calibration, work=work)


def test_every_kind_of_codes_survives_the_work_folder(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet, tmp_path: Path
) -> None:
    folder = tiny("llama").folder
    for name in ("w8a8-asym-static", "fp8", "fp8-w8a8-static", "nvfp4", "nf4", "w4a16-g64-asym"):
        config = QuantizeConfig(parse_scheme(name))
        first = run(folder, config, calibration, work=tmp_path / name)
        assert same(run(folder, config, calibration, work=tmp_path / name), first)


def test_layers_are_fitted_to_quantized_ones_unless_asked_not_to(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet
) -> None:
    folder = tiny("llama").folder
    config = QuantizeConfig(W4, "gptq")
    one, other = (
        run(folder, replace(config, from_quantized=use), calibration) for use in (True, False)
    )
    first, last = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 2))
    assert same({first: one[first]}, {first: other[first]})  # the embedding isn't tied
    assert not same({last: one[last]}, {last: other[last]})


def test_a_damaged_tensor_is_named(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    folder = tiny("llama").folder
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    message = r"1 of \d+ values of model.layers.1.self_attn.k_proj.weight are NaN or infinite"
    with pytest.raises(WeightsError, match=message):
        run(tmp_path, QuantizeConfig(W4))


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox"])
def test_families_with_values_in_another_order_are_refused(
    family: str, tiny: Callable[[str], Tiny]
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt.*' checkpoints hold .* another order"):
        run(tiny(family).folder, QuantizeConfig(W4))


def test_choices_that_cannot_work(tiny: Callable[[str], Tiny], calibration: CalibrationSet) -> None:
    folder = tiny("llama").folder
    for config, text, message in (
        (QuantizeConfig(W4, "gptq"), None, "gptq in w4a16-g32 is fitted to text"),
        (QuantizeConfig(parse_scheme("w8a8-static")), None, "is fitted to text"),
        (QuantizeConfig(W4, "gptq"), CalibrationSet("none", ()), "'none' is empty"),
        (QuantizeConfig(W4, "gptq"), CalibrationSet("odd", ((5, 320, -1),)),
         r"Window 0 .* has 2 tokens outside the vocabulary of 320: \[320, -1\]"),
        (QuantizeConfig(W4, "gptq"), CalibrationSet("long", ((5,) * 300,)), "Set window=256"),
        (QuantizeConfig(W4, special={"layers.9.mlp.up": None}), None, "special names layers.9"),
        (QuantizeConfig(W4, whole_groups=("int4",)), None,
         r"layers.0.mlp.down \[64, 100\] has no whole number of groups of 32 .* another scheme"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            quantize_model(folder, config, text)  # before the first tensor is asked for
    with pytest.raises(ConfigError, match="method='magic'"):
        QuantizeConfig(W4, "magic")
    with pytest.raises(ConfigError, match="minmax, percentile and mse find a scale"):
        QuantizeConfig(parse_scheme("fp8-w8a8-static"), calibrator="entropy")
    with pytest.raises(ConfigError, match="alpha=2"):
        QuantizeConfig(W4, alpha=2)
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "notes" / "x").write_text("")
    with pytest.raises(ConfigError, match="isn't empty and no work folder"):
        quantize_model(folder, QuantizeConfig(W4), work=folder / "notes")


def changed(folder: Path, into: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint in which `change` has put tensors in others' places."""
    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    return into


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_tied_table_that_is_called_the_head(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet, tmp_path: Path, method: str
) -> None:
    folder = tiny("llama3-rope").folder

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    other = changed(folder, tmp_path / "model", rename)
    for head in (None, parse_scheme("w8a16")):
        config = QuantizeConfig(W4, method, head=head)
        want, found = (run(f, config, calibration.first(2)) for f in (folder, other))
        want["lm_head.weight"] = want.pop("model.embed_tokens.weight")
        assert same(found, want)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_shapes_that_config_json_contradicts(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet, tmp_path: Path, method: str
) -> None:
    folder, config = tiny("llama3-rope").folder, QuantizeConfig(W4, method)
    for name, size, message in (
        ("model.layers.1.mlp.down_proj.weight", (64, 64), r"layers\.1\.mlp\.down\.weight needs "
         r"\[64, 100\], but the checkpoint's has shape \[64, 64\]"),
        ("model.layers.1.input_layernorm.weight", (3,), r"layers.1.attention_norm.weight needs "),
        ("model.embed_tokens.weight", (300, 64), r"embed\.weight needs \[320, 64\]"),
        ("model.layers.0.self_attn.k_proj.weight", (32, 60), "These tensors don't fit together: "),
        ("model.layers.0.mlp.down_proj.bias", (64,), "has no place in the model"),
    ):  # fmt: skip

        def change(
            tensors: dict[str, Tensor], name: str = name, size: tuple[int, ...] = size
        ) -> None:
            tensors[name] = torch.ones(size)

        other = changed(folder, tmp_path / name, change)
        with pytest.raises(WeightsError, match=message):
            run(other, config, calibration.first(2))
