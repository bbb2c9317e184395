"""An export that was cut off goes on where it was, with the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError
from penstock.models.checkpoint import Checkpoint
from penstock.models.lora import WEIGHTS
from penstock.models.registry import ADAPTER
from penstock.models.sources import open_source
from penstock.pipeline import qat, sensitivity
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.qat import QatOptions, train
from penstock.pipeline.quantize import quantize_model
from penstock.pipeline.store import Store, source_digest
from penstock.quant import parse_scheme
from tests.models.stories import STORIES, shallow
from tests.models.tiny import Tiny
from tests.pipeline.test_quantize import same

KILLED = Path(__file__).with_name("killed_export.py")
LAYERS, MATRICES = 2, 8  # of the model that is exported
SCHEMES = [parse_scheme(name) for name in ("w4a16-g32", "w8a16")]


class CutOffError(Exception):
    """What ends a run in the middle."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and an adapter for the embedded model, and a model of its first layers."""
    folder = tmp_path_factory.mktemp("given")
    llm = LLM(max_model_len=256)
    starts = ["Once upon a time", "One day, a little girl", "Tom and his dog", "The old tree"]
    params = SamplingParams(seed=1, max_tokens=120, ignore_eos=True)
    written = llm.generate(starts, params)
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(o.outputs[0].text for o in written))
    shallow(folder / "model", LAYERS)
    (folder / "adapter").mkdir()
    module, base = "model.layers.0.self_attn.q_proj", Checkpoint(STORIES)
    n, k = base.shape(f"{module}.weight")
    random = torch.Generator().manual_seed(3)
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.randn(4, k, generator=random),
        f"base_model.model.{module}.lora_B.weight": torch.randn(n, 4, generator=random),
    }
    save_file(tensors, folder / "adapter" / WEIGHTS)
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 2}
    (folder / "adapter" / ADAPTER).write_text(json.dumps(about))
    return folder


def copied(given: Path, folder: Path) -> Path:
    for file in (p for p in given.rglob("*") if p.is_file()):
        there = folder / file.relative_to(given)
        there.parent.mkdir(exist_ok=True)
        there.write_bytes(file.read_bytes())
    return folder


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "case",
    ["all", *(pytest.param(one, marks=pytest.mark.slow) for one in ("adapter", "training"))],
)
def test_killed_in_every_phase(case: str, given: Path, tmp_path: Path) -> None:
    folder = copied(given, tmp_path)
    command = [sys.executable, str(KILLED), str(folder), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")
    assert "weights 0/0" in said
    earlier = {"training 1/20", f"quantizing 1/{LAYERS}", f"trying 5/{MATRICES}"}
    assert not earlier & set(said)  # done before
    whole, resumed = folder / "whole", folder / "resumed"
    names = sorted(p.name for p in whole.iterdir())
    assert names == sorted(p.name for p in resumed.iterdir())
    for name in names:
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    assert not list(folder.glob("*.work")) and not list(folder.glob("*.partial"))


def test_what_was_measured_is_not_measured_again(
    tiny: Callable[[str], Tiny], calibration: CalibrationSet, tmp_path: Path
) -> None:
    folder, work = tiny("llama").folder, tmp_path / "work"
    whole = sensitivity.measure(folder, SCHEMES, calibration)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise CutOffError

    with pytest.raises(CutOffError):
        sensitivity.measure(folder, SCHEMES, calibration, stop, work=work)
    measured: list[str] = []
    real = sensitivity._Trials.losses

    def losses(self: Any, module: str, schemes: Any) -> list[float]:
        measured.append(module)
        return real(self, module, schemes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity._Trials, "losses", losses)
        assert sensitivity.measure(folder, SCHEMES, calibration, work=work) == whole
        assert measured == list(whole)[5:]
        assert sensitivity.measure(folder, SCHEMES, calibration, work=work) == whole
    assert measured == list(whole)[5:]
    with pytest.raises(ConfigError, match="of another run: calibration differ"):
        sensitivity.measure(folder, SCHEMES, calibration.first(1), work=work)
    other = sensitivity.measure(folder, SCHEMES, calibration.first(1), work=work, replace=True)
    assert other == sensitivity.measure(folder, SCHEMES, calibration.first(1))


@pytest.mark.parametrize("after", [1, 7, 12])
def test_training_goes_on_with_the_same_bits(
    after: int, tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    tokens = torch.randint(3, 320, (8, 32), generator=torch.manual_seed(0))
    text = CalibrationSet("random", tuple(tuple(row.tolist()) for row in tokens))
    folder, config = tiny("llama3-rope").folder, QuantizeConfig(parse_scheme("w4a16-g64"))
    options = QatOptions(steps=12, batch=3, learning_rate=1e-3)
    whole = dict(train(folder, config, text, options))

    def stop(step: int, steps: int, loss: float) -> None:
        if step == after:
            raise CutOffError

    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qat, "time", SimpleNamespace(monotonic=lambda: 0.0))  # keeps every step
        with pytest.raises(CutOffError):
            train(folder, config, text, options, stop, work=tmp_path / "work")
    found = train(
        folder, config, text, options, lambda i, n, loss: steps.append(i), work=tmp_path / "work"
    )
    assert same(dict(found), whole)
    assert steps == list(range(after + 1, 13))


def test_a_snapshot_takes_a_tenth_of_the_time_at_most(
    tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    text = CalibrationSet("one", (tuple(range(3, 35)),) * 4)
    kept: list[int] = []
    clock = iter(range(10_000))
    options = QatOptions(steps=60, batch=1)
    with pytest.MonkeyPatch.context() as patch:
        # the module's own clock: other threads of the process read the real one
        patch.setattr(qat, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
        patch.setattr(Store, "save", lambda self, name, found: kept.append(int(found["0.step"])))
        train(
            tiny("llama3-rope").folder, QuantizeConfig(parse_scheme("w4a16-g64")), text, options,
            work=tmp_path / "work",
        )  # fmt: skip
    # a second of the clock passes in every step, and one while it is kept
    assert kept[0] == 1 and kept[-1] == 60
    assert all(9 <= later - earlier <= 10 for earlier, later in pairwise(kept[:-1]))


def test_a_changed_source_or_adapter_starts_anew(given: Path, tmp_path: Path) -> None:
    """What is kept belongs to the contents of files, whatever their times."""
    folder = copied(given, tmp_path)
    adapter = folder / "adapter"
    config = json.loads((adapter / ADAPTER).read_text())
    weights = NewWeights("w8a16", merge_lora=adapter)

    def fail(_: Store, name: str, __: Any) -> None:
        raise AssertionError(name)

    done: list[int] = []

    def stop(what: str, at: int, _: int) -> None:
        if what.startswith("quantizing") and at:
            done.append(at)
        if done and at == 3:
            raise CutOffError

    def begin() -> list[int]:
        done.clear()
        with pytest.raises(CutOffError):
            export_model("stories", folder / "out", weights=weights, progress=stop)
        return list(done)

    assert begin() == [1, 2, 3]
    (adapter / ADAPTER).write_text(json.dumps(config))  # later, and the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "save", fail)
        with pytest.raises(AssertionError, match="layer-00003"):  # the fourth is the first anew
            export_model("stories", folder / "out", weights=weights)
    (adapter / ADAPTER).write_text(json.dumps(config | {"lora_alpha": 3}))
    assert begin() == [1, 2, 3]
    export_model("stories", folder / "out", weights=weights)
    export_model("stories", folder / "new", weights=weights)
    one, two = (folder / name / "model.safetensors" for name in ("out", "new"))
    assert one.read_bytes() == two.read_bytes()


def test_a_work_folder_over_tensors_in_memory_is_refused(
    tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    source = Overlay(open_source(tiny("llama").folder), [("model.norm.weight", torch.ones(64))])
    with pytest.raises(ConfigError, match=r"1 tensors over .* are in memory alone"):
        quantize_model(source, QuantizeConfig(SCHEMES[0]), work=tmp_path / "work")


def test_digests_are_of_contents(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    folder = tiny("llama").folder
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_bytes((folder / file).read_bytes())
    digests = [source_digest(open_source(tmp_path / name)) for name in ("a", "b")]
    assert digests[0] == digests[1]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "b" / "model.safetensors").write_bytes(data)
    assert source_digest(open_source(tmp_path / "b")) != digests[0]
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert source_digest(open_source(tmp_path / "a")) != digests[0]


def test_ctrl_c_says_how_to_go_on(
    given: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("quantizing") and done == 1:
            raise KeyboardInterrupt

    weights = NewWeights("w4a16-g64", "gptq", calib=(given / "text.txt",), num_samples=4, window=32)
    output = tmp_path / "out"

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "penstock"]

    with caplog.at_level("WARNING", "penstock"), pytest.raises(KeyboardInterrupt):
        export_model(given / "model", output, weights=weights, progress=stop)
    work = f"{output}.work"
    assert said() == [f"{work} keeps what was done; started again, this goes on."]
    caplog.clear()
    with caplog.at_level("WARNING", "penstock"):
        export_model(given / "model", output, weights=weights)
    assert said() == [f"1 of 2 layers are taken from {work}, where an earlier start left them."]
