"""A model as ONNX, run by onnxruntime: the logits of the decoder in float32."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ConfigError, MissingExtraError, UnsupportedModelError
from penstock.models.load import load_model
from penstock.pipeline import onnx as onnx_export
from penstock.pipeline.onnx import export_onnx
from penstock.pipeline.onnx_decoder import DecoderWriter
from tests.exactness.bits import build
from tests.models.tiny import CASES, STATED, Sequence, make_tiny
from tests.models.tiny_later import LATER

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


class Session:
    """An ONNX decoder and the past that it returns."""

    def __init__(self, file: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.run = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.run.get_outputs()]
        self.past: dict[str, NDArray[Any]] = {}
        self.length = 0

    def feed(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the next tokens [B, T]."""
        batch, count = ids.shape
        if not self.past:
            for value in self.run.get_inputs():
                if value.name.startswith("past_key_values."):
                    heads, dim = value.shape[1], value.shape[3]
                    self.past[value.name] = np.zeros((batch, heads, 0, dim), np.float32)
        at = np.arange(self.length, self.length + count)
        self.length += count
        given = {
            "input_ids": ids.numpy().astype(np.int64),
            "attention_mask": np.ones((batch, self.length), np.int64),
            "position_ids": np.broadcast_to(at, (batch, count)).astype(np.int64),
            **self.past,
        }
        found = dict(zip(self.names, self.run.run(None, given), strict=True))
        logits = torch.from_numpy(found.pop("logits"))
        self.past = {k.replace("present", "past_key_values"): v for k, v in found.items()}
        return logits


MIXED = (
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "deepseek",
    "glm4-moe",
    "granite-moe",
    "granite-swa",
    "youtu",
    *(name for name, (_, changes) in LATER.items() if any("experts" in key for key in changes)),
)
MIXED += (*STATED, "gemma4")
DENSE = [name for name in CASES if not name.startswith(MIXED)]


@pytest.mark.parametrize("name", DENSE)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Two sequences: a prompt, a chunk, and then token by token from the cache."""
    tiny = make_tiny(name, tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "model.onnx", max_model_len=tiny.case.max_len)
    session = Session(tmp_path / "model.onnx")
    ids = torch.stack((tiny.prompt, tiny.prompt.flip(0)))
    decoder = tiny.load("float32").model
    eager = [Sequence(decoder) for _ in ids]
    for chunk in ids.split([40, 22, *[1] * 8], dim=1):
        want = torch.stack([s.feed(row) for s, row in zip(eager, chunk, strict=True)])
        got = session.feed(chunk)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_padding_on_the_left(tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "model.onnx")
    session = Session(tmp_path / "model.onnx")
    want = session.feed(tiny.prompt[None, :20])
    padded = torch.cat((torch.zeros(3, dtype=torch.int64), tiny.prompt[:20]))
    given = {
        "input_ids": padded[None].numpy(),
        "attention_mask": np.array([[0] * 3 + [1] * 20]),
        "position_ids": np.array([[0] * 3 + [*range(20)]]),
        **{k: v[:, :, :0] for k, v in session.past.items()},
    }
    (logits, *_) = session.run.run(None, given)
    torch.testing.assert_close(torch.from_numpy(logits)[:, 3:], want, rtol=0, atol=1e-4)


def test_names_are_the_ecosystems(tiny_folder: Path, tmp_path: Path) -> None:
    export_onnx(tiny_folder, tmp_path / "model.onnx")
    session = Session(tmp_path / "model.onnx")
    inputs = {value.name: value.shape for value in session.run.get_inputs()}
    pairs = [f"{i}.{kind}" for i in range(3) for kind in ("key", "value")]
    own = ["input_ids", "attention_mask", "position_ids"]
    assert set(inputs) == {*own, *(f"past_key_values.{pair}" for pair in pairs)}
    assert session.names == ["logits", *(f"present.{pair}" for pair in pairs)]
    assert inputs["input_ids"] == ["batch_size", "sequence_length"]
    assert inputs["past_key_values.0.key"] == ["batch_size", 2, "past_sequence_length", 16]


def test_weights_in_a_second_file(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(3, 20)[None]
    whole = export_onnx(tiny_folder, tmp_path / "whole.onnx")
    want = Session(tmp_path / "whole.onnx").feed(ids)
    monkeypatch.setattr(onnx_export, "INLINE_BYTES", 1000)
    export_onnx(tiny_folder, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < whole / 4
    assert torch.equal(Session(tmp_path / "model.onnx").feed(ids), want)
    names = {"whole.onnx", "model.onnx", "model.onnx_data"}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_a_file_never_lies_over_weights_of_another(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, there is no file that would load the wrong weights."""
    monkeypatch.setattr(onnx_export, "INLINE_BYTES", 1000)
    file = tmp_path / "model.onnx"
    export_onnx(tiny_folder, file)
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target == file:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(tiny_folder, file, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx_data"]


def test_the_table_that_is_tied_is_stored_once(tiny_folder: Path, tmp_path: Path) -> None:
    size = export_onnx(tiny_folder, tmp_path / "model.onnx", max_model_len=16)
    decoder = load_model(tiny_folder, max_model_len=16).model
    values = sum(p.numel() for n, p in decoder.named_parameters())  # panels are padded
    assert size < 4 * values + 60_000


def test_what_cant_be_written() -> None:
    with pytest.raises(UnsupportedModelError, match="Layer 1 has attention sinks"):
        DecoderWriter(build(torch.float32))


def test_a_file_that_is_taken(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"model\.onnx exists"):
        export_onnx(tiny_folder, file)
    assert file.read_bytes() == b"mine"
    export_onnx(tiny_folder, file, force=True)
    assert Session(file).feed(torch.tensor([[5]])).shape == (1, 1, 320)


def test_a_place_that_cant_be_written(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"model\.onnx can't be written: File exists"):
        export_onnx(tiny_folder, tmp_path / "file" / "model.onnx")


def test_without_the_package(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "onnx":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "onnx", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"clone: pip install .*'\.\[onnx\]"):
        export_onnx(tiny_folder, tmp_path / "model.onnx")
