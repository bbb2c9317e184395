"""What methods are told: each option changes what its method does, and no other takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.export_options import MethodFlags
from penstock.errors import ConfigError
from penstock.pipeline import qat
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.method_options import MethodOptions
from penstock.pipeline.quantize import quantize_model
from penstock.quant import Codes, parse_scheme
from tests.models.tiny import Tiny

Values = list[torch.Tensor]


def quantized(
    folder: Path, text: CalibrationSet, method: str, name: str, options: MethodOptions
) -> Values:
    """Every tensor that the method gives: codes, scales, scales of inputs, norms."""
    scheme = parse_scheme(name)
    options.check(method, [scheme])
    if method == "qat":
        tensors = qat.train(folder, QuantizeConfig(scheme), text, options.qat())
    else:
        config = QuantizeConfig(scheme, method, **options.for_config(method))
        tensors = quantize_model(folder, config, text)
    found: Values = []
    for _, value in tensors:
        if isinstance(value, Codes):
            found += [value.dequantize(), torch.tensor(value.input_scale or 0.0)]
        else:
            found.append(value)
    return found


@pytest.fixture(scope="module")
def text() -> CalibrationSet:
    """Few windows of one length: a Hessian that damping matters to, and that QAT can read."""
    tokens = torch.randint(3, 320, (4, 24), generator=torch.manual_seed(0))
    return CalibrationSet("random", tuple(tuple(row.tolist()) for row in tokens))


def same(a: Values, b: Values) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("method", "scheme", "option", "value"),
    [
        ("gptq", "w4a16-g32", "act_order", False),
        ("gptq", "w4a16-g32", "damp_percent", 0.5),
        ("gptq", "w4a16-g32", "clip", True),
        ("gptq", "w4a16-g32", "from_quantized", False),
        ("awq", "w4a16-g32", "n_grid", 3),
        ("awq", "w4a16-g32", "search_rows", 2),
        ("awq", "w4a16-g32", "clip", False),
        ("awq+gptq", "w4a16-g32", "damp_percent", 0.5),
        ("awq+gptq", "w4a16-g32", "n_grid", 3),
        ("smoothquant", "w8a8", "alpha", 0.8),
        ("smoothquant+gptq", "w8a8", "alpha", 0.8),
        ("rtn", "w8a8-static", "calibrator", "mse"),
        ("gptq", "w8a8-static", "calibrator", "entropy"),
        ("rtn", "w8a8-static", "from_quantized", False),
        ("qat", "w4a16-g32", "steps", 2),
        ("qat", "w4a16-g32", "batch_size", 2),
        ("qat", "w4a16-g32", "learning_rate", 1e-3),
        ("qat", "w4a16-g32", "weight_decay", 0.5),
        ("qat", "w4a16-g32", "distillation", 0.0),
        ("qat", "w4a16-g32", "seed", 7),
    ],
)
def test_each_changes_what_its_method_does(
    tiny: Callable[[str], Tiny], text: CalibrationSet, method: str, scheme: str, option: str,
    value: Any,
) -> None:  # fmt: skip
    folder = tiny("llama3-rope").folder
    few = {"steps": 1, "batch_size": 1} if method == "qat" else {}
    usual = quantized(folder, text, method, scheme, MethodOptions(**few))
    told = quantized(folder, text, method, scheme, MethodOptions(**{**few, option: value}))
    assert not same(usual, told)


def test_a_percentile_is_its_calibrators(tiny: Callable[[str], Tiny], text: CalibrationSet) -> None:
    folder = tiny("llama3-rope").folder
    found = [
        quantized(
            folder, text, "rtn", "w8a8-static", MethodOptions(calibrator="percentile", percentile=p)
        )
        for p in (90.0, 99.0)
    ]
    assert not same(*found)


def test_the_columns_of_a_block_change_no_more_than_rounding(
    tiny: Callable[[str], Tiny], text: CalibrationSet
) -> None:
    """It is the order of the same additions: some values fall to the other side, few of them."""
    folder = tiny("llama3-rope").folder
    usual, told = (
        quantized(folder, text, "gptq", "w4a16-g32", MethodOptions(block_size=size))
        for size in (128, 8)
    )
    differing = sum(int((a != b).sum()) for a, b in zip(usual, told, strict=True))
    assert differing < 0.05 * sum(value.numel() for value in usual)


@pytest.mark.parametrize(
    ("method", "scheme", "options", "words"),
    [
        ("rtn", "w4a16", {"act_order": True}, "--act-order is for GPTQ"),
        ("awq", "w4a16", {"act_order": False}, "--no-act-order is for GPTQ"),
        ("awq", "w4a16", {"damp_percent": 0.1}, "--damp-percent 0.1 is for GPTQ: .* method awq"),
        ("gptq", "w4a16", {"n_grid": 10}, "--n-grid 10 is for AWQ"),
        ("gptq", "w4a16", {"alpha": 0.5}, "--alpha 0.5 is for SmoothQuant"),
        ("smoothquant", "w8a8", {"clip": True}, "--clip is for GPTQ and AWQ"),
        ("gptq", "nvfp4", {"clip": True}, "free scale: it can't take effect with .* in nvfp4"),
        ("awq", "w4a16-tensor", {"clip": False}, "--no-clip is for"),
        ("gptq", "w8a8", {"calibrator": "mse"}, "--calibrator mse is for static activations"),
        ("rtn", "w8a8-static", {"percentile": 99.0}, "with --calibrator percentile"),
        ("rtn", "w8a8-static", {"calibrator": "percentile", "percentile": 0.0}, "percentile=0.0"),
        ("rtn", "w8a8-static", {"calibrator": "mean"}, "calibrator='mean' isn't one of minmax"),
        ("rtn", "w8a8", {"from_quantized": False}, "--no-from-quantized is for methods that"),
        ("qat", "w4a16", {"from_quantized": True}, "--from-quantized is for methods that"),
        ("gptq", "w4a16", {"steps": 5}, "--steps 5 is for QAT"),
        ("gptq", "w4a16", {"damp_percent": 1.5}, "damping=1.5"),
        ("gptq", "w4a16", {"block_size": 0}, "block=0"),
        ("awq", "w4a16", {"search_rows": 0}, "rows=0"),
        ("smoothquant", "w8a8", {"alpha": 1.1}, "alpha=1.1"),
        ("qat", "w4a16", {"learning_rate": 0.0}, "learning_rate=0.0"),
    ],
)
def test_what_cannot_take_effect_or_be(
    method: str, scheme: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MethodOptions(**options).check(method, [parse_scheme(scheme)])


def test_what_a_manifest_says() -> None:
    """What is in effect, the defaults of what wasn't given among it."""
    w4, static = parse_scheme("w4a16"), parse_scheme("w8a8-static")
    assert MethodOptions().in_effect("rtn", [w4]) == {}
    assert MethodOptions(n_grid=5).in_effect("awq", [w4]) == {
        "n_grid": 5, "search_rows": 512, "clip": True, "from_quantized": True,
    }  # fmt: skip
    assert MethodOptions(alpha=0.7).in_effect("smoothquant", [parse_scheme("w8a8")]) == {
        "alpha": 0.7, "from_quantized": True,
    }  # fmt: skip
    assert MethodOptions(calibrator="percentile").in_effect("rtn", [static]) == {
        "calibrator": "percentile", "percentile": 99.99, "from_quantized": True,
    }  # fmt: skip
    assert MethodOptions(steps=7).in_effect("qat", [w4]) == {
        "steps": 7, "batch_size": 4, "learning_rate": 2e-4, "weight_decay": 0.0,
        "distillation": 1.0, "seed": 0,
    }  # fmt: skip


def test_the_command_has_all_of_them() -> None:
    assert [f.name for f in fields(MethodFlags)] == [f.name for f in fields(MethodOptions)]
    assert asdict(MethodFlags()) == asdict(MethodOptions())
