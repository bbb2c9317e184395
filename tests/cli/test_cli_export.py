"""`penstock export`: what it writes, what it says, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.test_cli_main import refused
from tests.models.stories import VOCAB
from typer.testing import Result

from penstock.models.exported import verify_exported

Run = Callable[..., Result]


def test_a_folder_that_runs_as_the_model_did(
    penstock: Run, chat_model: Path, tmp_path: Path
) -> None:
    done = penstock("export", chat_model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    count = sum(1 for _ in (tmp_path / "out").iterdir())
    assert first.startswith(f"{tmp_path / 'out'}: {count} files, ")
    assert "graph of" in second and "cache auto, blocks of 32 tokens" in second
    greedy = ("-p", "abcd", "--temperature", 0, "--max-tokens", 8)
    outputs = [penstock("generate", f, *greedy).stdout for f in (chat_model, tmp_path / "out")]
    assert outputs[0] == outputs[1] and len(outputs[0]) > 4


def test_the_manifest_as_json(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    options = ("--kv-cache-dtype", "int8", "--max-model-len", 64, "--json")
    done = penstock("export", base_model, "-o", tmp_path / "out", *options)
    said = json.loads(done.stdout)
    assert said["choices"] == {"kv_cache_dtype": "int8", "max_model_len": 64, "weights": {}}
    assert said["files"] == verify_exported(tmp_path / "out").files


def test_a_folder_that_is_taken(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused(penstock("export", base_model, "-o", tmp_path), 1, "files that Penstock didn't write")
    assert penstock("export", base_model, "-o", tmp_path / "out").exit_code == 0
    refused(penstock("export", base_model, "-o", tmp_path / "out"), 1, "exists", "--force")
    assert penstock("export", base_model, "-o", tmp_path / "out", "--force").exit_code == 0


def test_into_the_model_itself(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "models" / "one"
    shutil.copytree(base_model, model)
    before = sorted(tmp_path.rglob("*"))
    for output, words in (
        (model, "is the model itself"),
        (model / "out", "lies inside the model's own folder"),
        (tmp_path / "models", "which would be replaced"),
    ):
        for command in (("export",), ("export", "--quant", "w8a8", "--force"), ("build",)):
            refused(penstock(*command, model, "-o", output), 1, words)
    assert sorted(tmp_path.rglob("*")) == before


def test_onnx_alone(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    done = penstock("export", base_model, "--onnx", tmp_path / "model.onnx")
    assert done.exit_code == 0, done.output
    size = (tmp_path / "model.onnx").stat().st_size
    assert done.stdout == f"{tmp_path / 'model.onnx'}: ONNX, float32, {size / 1e6:,.1f} MB\n"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_what_could_not_take_effect(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    refused(penstock("export", base_model), 1, "Nothing to write", "-o DIR", "--onnx")
    onnx = ("--onnx", tmp_path / "model.onnx")
    for option in (("--kv-cache-dtype", "fp8"), ("--json",)):
        refused(penstock("export", base_model, *onnx, *option), 1, option[0], "-o DIR")
    inside = ("-o", tmp_path, "--onnx", tmp_path / "deep" / "model.onnx")
    refused(penstock("export", base_model, *inside, "--force"), 1, "written whole, by itself")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 20)
    return file


def test_what_a_method_is_told_is_in_the_manifest(
    penstock: Run, base_model: Path, tmp_path: Path, text: Path
) -> None:
    options = (
        "--quant", "w8a8-static", "--method", "smoothquant+gptq", "--calib", text, "--window", 64,
        "--num-samples", 4, "--alpha", 0.8, "--no-act-order", "--damp-percent", 0.05,
        "--calibrator", "percentile", "--percentile", 99.5, "--no-from-quantized",
        "--special", "layers.0.*=none",
    )  # fmt: skip
    done = penstock("export", base_model, "-o", tmp_path / "out", *options, "--json")
    assert done.exit_code == 0, done.output
    chosen = json.loads(done.stdout)["choices"]["weights"]
    assert chosen["options"] == {
        "act_order": False, "block_size": 128, "damp_percent": 0.05, "clip": False, "alpha": 0.8,
        "calibrator": "percentile", "percentile": 99.5, "from_quantized": False,
    }  # fmt: skip
    assert chosen["method"] == "smoothquant+gptq" and chosen["layout"] == "compressed-tensors"
    assert set(chosen["special"].values()) == {None}


def test_training(penstock: Run, base_model: Path, tmp_path: Path, text: Path) -> None:
    options = ("--quant", "w4a16", "--method", "qat", "--calib", text, "--window", 32)
    told = ("--steps", 2, "--batch-size", 2, "--learning-rate", 1e-3, "--json")
    done = penstock("export", base_model, "-o", tmp_path / "out", *options, *told)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["choices"]["weights"]["options"]
    assert found["steps"] == 2 and found["learning_rate"] == 1e-3 and found["seed"] == 0


def test_a_text_may_be_of_the_vocabulary_alone(penstock: Run, tmp_path: Path, text: Path) -> None:
    options = ("--quant", "nf4", "--method", "rtn", "--reduce-vocab", 600, "--calib", text)
    done = penstock("export", "stories", "-o", tmp_path / "out", *options, "--json")
    assert done.exit_code == 0, done.output
    chosen = json.loads(done.stdout)["choices"]["weights"]
    assert chosen["reduce_vocab"] == {"tokens": 600, "of": VOCAB, "by": ["text.txt"]}
    assert chosen["method"] == "rtn" and chosen["calibration"] is None


def test_the_layout_is_said(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    done = penstock("export", base_model, "-o", tmp_path / "out", "--quant", "nf4-g32")
    assert "weights in nf4-g32 by rtn, layout bitsandbytes" in done.stdout, done.output


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--quant", "w8a8", "--alpha", 0.5), 1, "--alpha 0.5 is for SmoothQuant"),
        (("--quant", "w4a16", "--calib", "TEXT", "--n-grid", 5), 1, "--n-grid 5 is for AWQ"),
        (("--quant", "w4a16", "--calib", "TEXT", "--percentile", 99), 1, "--percentile 99.0"),
        (("--quant", "w4a16", "--no-act-order"), 1, "--no-act-order is for GPTQ"),
        (("--act-order",), 1, "--act-order has nothing to act on without --quant"),
        (("--quant", "w8a16", "--special", "layers.0"), 1, "isn't MATRIX=SCHEME"),
        (("--quant", "w8a16", "--special", "x=w8a16"), 1, "none of this model's"),
        (("--quant", "w8a16", "--special", "*=w9a16"), 1, "w9a16"),
        (("--quant", "w8a16", "--mixture", "w8a16"), 1, "--mixture is of a budget"),
        (("--budget", "5bpw", "--calib", "TEXT", "--mixture", "w8a16,nf4"), 1, "No layout holds"),
        (("--quant", "nf4", "--layout", "awq"), 1, "can't express nf4-g64"),
        (("--quant", "w4a16", "--calib", "TEXT", "--block-size", 0), 2, "block-size"),
        (("--quant", "w4a16", "--calib", "TEXT", "--damp-percent", "much"), 2, "damp-percent"),
    ],
)
def test_what_a_method_has_no_use_for(
    penstock: Run, base_model: Path, tmp_path: Path, text: Path, options: tuple[object, ...],
    code: int, words: str,
) -> None:  # fmt: skip
    given = [text if option == "TEXT" else option for option in options]
    refused(penstock("export", base_model, "-o", tmp_path / "out", *given), code, words)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_what_was_given_as_its_default_is_refused_too(
    penstock: Run, base_model: Path, tmp_path: Path
) -> None:
    onnx = ("--onnx", tmp_path / "model.onnx")
    for option in (("--layout", "auto"), ("--window", 512), ("--kv-cache-dtype", "auto")):
        refused(penstock("export", base_model, *onnx, *option), 1, option[0], "-o DIR")


def test_a_cache_that_no_engine_knows(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    wrong = penstock("export", base_model, "-o", tmp_path / "out", "--kv-cache-dtype", "int7")
    refused(wrong, 1, "kv_cache_dtype='int7' isn't one of", "Did you mean 'int8'?")
    assert list(tmp_path.iterdir()) == []
