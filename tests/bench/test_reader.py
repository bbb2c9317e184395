"""Readers: logits and residuals beside transformers', and the same bits from every process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.stories import LAYERS, POSITIONS, VOCAB
from transformers import AutoModelForCausalLM

from penstock.bench.drift import measure_drift
from penstock.bench.reader import LocalReader, ProcessReader, Reader, open_reader
from penstock.bench.texts import Text
from penstock.bench.variant import Variant
from penstock.errors import ConfigError, KernelError, ModelError, ModelNotFoundError
from penstock.kernels import native
from penstock.models.hub import resolve

STORY = "Once upon a time, there was a little girl named Lily. She loved to play in the park. "

needs_native = pytest.mark.skipif(native.handle is None, reason="there is no native library")


@pytest.fixture(scope="module")
def plain() -> Iterator[Reader]:
    with open_reader(Variant(), 64) as reader:
        yield reader


@pytest.fixture(scope="module")
def ids(plain: Reader) -> list[int]:
    return plain.encode([STORY * 2])[0][:40]


def test_logits_and_residuals_beside_transformers(ids: list[int]) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(resolve("stories"), dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = oracle(torch.tensor([ids]), output_hidden_states=True)
    with open_reader(Variant(dtype="float32"), 64) as reader:
        got = reader.read(ids, 5, layers=True)
    assert torch.allclose(got.logits, theirs.logits[0, 4:-1], atol=2e-3, rtol=1e-4)
    assert got.residuals is not None and len(got.residuals) == LAYERS + 1 and got.as_read
    # the last of theirs has been through the final norm
    for mine, hidden in zip(got.residuals[:-1], theirs.hidden_states[:-1], strict=True):
        assert torch.allclose(mine, hidden[0, 4:-1], atol=1e-3, rtol=1e-4)


def test_rows_are_those_that_predict(plain: Reader, ids: list[int]) -> None:
    whole = plain.read(ids, 1).logits
    assert whole.shape == (39, VOCAB)
    assert torch.equal(plain.read(ids, 30).logits, whole[29:])
    assert plain.read(ids, 30).residuals is None


@needs_native
@pytest.mark.parametrize("words", ["eager", "isa=avx2", "isa=amx-emulated,eager", "kernels=native"])
def test_paths_that_are_equal(plain: Reader, ids: list[int], words: str) -> None:
    """Operators one by one, as one native call, and by every instruction set."""
    asked = words.partition("isa=")[2].partition(",")[0]
    if asked and asked not in native.available_isas():
        pytest.skip(f"this machine can't run {asked}")
    with open_reader(Variant().with_options(words), 64) as other:
        got = measure_drift(plain, other, [Text("x", [ids])], 64, 32, layers=True)
        assert other.about.kernels == (asked or plain.about.kernels)
        assert ("one by one" in other.about.calls) == ("eager" in words)
    assert got.equal and got.kl == 0 and got.remarks == ()
    assert [layer.largest for layer in got.layers] == [0.0] * (LAYERS + 1)


@pytest.fixture(scope="module")
def reference() -> Iterator[ProcessReader]:
    reader = ProcessReader(Variant(kernels="reference"), 64)
    try:
        yield reader
    finally:
        reader.close()
    assert reader._process.returncode is not None


def test_the_reference_is_near(plain: Reader, reference: ProcessReader, ids: list[int]) -> None:
    assert reference.about.kernels == "reference"
    assert reference.encode([STORY]) == plain.encode([STORY])
    assert reference.pieces() == plain.pieces()
    got = measure_drift(plain, reference, [Text("x", [ids])], 64, 32, layers=True)
    assert got.kl < 1e-3 and got.agreement > 0.9
    assert max(layer.mean for layer in got.layers) < 0.02


def test_errors_of_the_other_process(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelNotFoundError, match="There is no folder"),
        open_reader(Variant(tmp_path / "none", kernels="reference"), 64),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=f"more than the {POSITIONS} positions"),
        open_reader(Variant(kernels="reference"), POSITIONS + 1),
    ):
        pass


@pytest.mark.skipif("amx" in native.available_isas(), reason="this CPU has AMX")
@needs_native
def test_an_instruction_set_that_is_not_there() -> None:
    with pytest.raises(KernelError, match="This CPU can't run amx"):
        ProcessReader(Variant(isa="amx"), 64)


def test_a_process_that_dies_is_named(ids: list[int]) -> None:
    reader = ProcessReader(Variant(kernels="reference"), 64)
    os.kill(reader._process.pid, signal.SIGKILL)
    try:
        with pytest.raises(KernelError, match=r"kernels=reference has ended: .*SIGKILL"):
            reader.read(ids, 1)
    finally:
        reader.close()


def test_what_breaks_in_the_other_process_tells_where(reference: ProcessReader) -> None:
    with pytest.raises(RuntimeError, match="AttributeError"):
        reference._ask("sing")
    assert reference.encode(["a"])  # and it goes on


def test_nan_weights_say_where(tmp_path: Path, ids: list[int], plain: Reader) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(resolve("stories"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][7, 3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    text = Text("tale.txt", [ids])
    with (
        open_reader(Variant(folder), 64) as broken,
        pytest.raises(ModelError, match=r"worse gives .* in tale.txt.* so after layer 2"),
    ):
        measure_drift(plain, broken, [text], 64, 32, names=("fine", "worse"), layers=True)


def test_a_window_beyond_the_cache_is_refused(plain: LocalReader) -> None:
    blocks, size = plain._runtime.num_blocks, plain._runtime.layout.block_size
    with pytest.raises(ConfigError, match="needs"):
        plain.read([1] * (blocks * size + 1), 1)
