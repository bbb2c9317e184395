"""Layers and neurons that are left out: what stays says what transformers says without them."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.main import app
from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models.load import load_model
from penstock.models.sources import open_source
from penstock.pipeline import qat
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.parts import Parts
from penstock.pipeline.probe import Probe
from penstock.pipeline.prune import PruneOptions, prune_model
from penstock.pipeline.prune.choose import choose_layers, choose_neurons
from penstock.pipeline.prune.prune import stay
from penstock.pipeline.prune.pruned import Pruned
from penstock.quant.files import write_checkpoint
from tests.models.tiny import Make, Tiny, makes_once

TOKENS = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(2))
WINDOWS = tuple(
    tuple(torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(i)).tolist())
    for i in range(6)
)
TEXT = CalibrationSet("random", WINDOWS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return makes_once(tmp_path_factory)


def parts_of(made: Tiny) -> Parts:
    return Parts.of(open_source(made.folder))


def written(source: Any, folder: Path) -> Path:
    write_checkpoint(folder, source.config, ((n, source.read(n)) for n in source.names()))
    return folder


def without(made: Tiny, layers: list[int]) -> Any:
    """transformers' own model with these layers alone."""
    model = copy.deepcopy(made.oracle)
    model.model.layers = nn.ModuleList(model.model.layers[i] for i in layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):  # masks go by it
        model.config.layer_types = [model.config.layer_types[i] for i in layers]
    return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(TOKENS[None], use_cache=False).logits[0]
    return found


def ours(folder: Path) -> Tensor:
    """Of each token but the first: log-probabilities are enough."""
    llm = LLM(folder, dtype="float32", skip_tokenizer_init=True, max_model_len=100)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": TOKENS.tolist()}], params)
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(x.values())).logprob for x in output.prompt_logprobs[1:]])


def likelihoods(model: Any) -> Tensor:
    predicted = logits(model).log_softmax(-1)[:-1]
    return predicted.gather(1, TOKENS[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", [0, 2]),
        ("llama", [1]),
        ("qwen2", [0, 2]),
        ("qwen3", [1, 2]),
        ("mistral", [0, 1]),
        ("gemma2", [0, 2, 3]),
        ("gemma3", [0, 2, 3]),
        ("smollm3", [0, 3]),
        ("phi3-short", [0, 2]),
        ("olmo2", [2]),
        ("granite", [0, 2]),
        ("olmo3", [0, 3]),
        ("cohere2", [1, 3]),
        ("glm4", [0, 2]),
        ("exaone4", [0, 3]),
        ("starcoder2", [1]),
    ],
)
def test_layers_that_stay(name: str, layers: list[int], tiny: Make, tmp_path: Path) -> None:
    """Here, and where transformers reads the new folder."""
    made = tiny(name)
    folder = written(Pruned(parts_of(made), layers), tmp_path / "pruned")
    want = likelihoods(without(made, layers))
    torch.testing.assert_close(ours(folder), want, rtol=1e-4, atol=1e-4)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    torch.testing.assert_close(likelihoods(read.eval().float()), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "olmo2", "granite", "cohere", "ernie4_5"]
)
def test_neurons_that_stay(name: str, tiny: Make, tmp_path: Path) -> None:
    """The others' weights as zeros say the same; layers go, too."""
    made, layers = tiny(name), [0, 2]
    random = torch.Generator().manual_seed(7)
    kept = [torch.randperm(100, generator=random)[:64].sort().values for _ in layers]
    folder = written(Pruned(parts_of(made), layers, kept), tmp_path / "pruned")
    model = without(made, layers)
    with torch.no_grad():
        for layer, own in zip(model.model.layers, kept, strict=True):
            gone = torch.ones(100, dtype=torch.bool)
            gone[own] = False
            layer.mlp.down_proj.weight[:, gone] = 0.0
    torch.testing.assert_close(ours(folder), likelihoods(model), rtol=1e-4, atol=1e-4)
    loaded = load_model(folder).spec.decoder
    assert {layer.mlp.intermediate for layer in loaded.layers} == {64} and len(loaded.layers) == 2


def test_what_config_json_cannot_say(tiny: Make, tmp_path: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(tiny("qwen2-window").folder, older)
    config = json.loads((older / "config.json").read_text())
    del config["layer_types"]  # as it was written before: by the number of the first
    (older / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="differ by their numbers"):
        Pruned(Parts.of(open_source(older)), [1, 2])  # the first alone sees all
    with pytest.raises(UnsupportedModelError, match="gate and up in one tensor"):
        Pruned(parts_of(tiny("phi3")), [0, 1, 2], [torch.arange(64)] * 3)


def divergence(made: Tiny, layers: list[int]) -> float:
    """Mean KL over the windows, by transformers."""
    other, total, count = without(made, layers), 0.0, 0
    for window in TEXT.tensors():
        with torch.inference_mode():
            want, found = (
                model(window[None].long(), use_cache=False).logits[0].log_softmax(-1)
                for model in (made.oracle, other)
            )
        total += float((want.exp() * (want - found)).sum())
        count += len(window)
    return total / count


def test_the_layer_that_is_needed_the_least_goes_first(tiny: Make) -> None:
    made = tiny("gemma3")
    probe = Probe(parts_of(made), TEXT)
    probe.remember()
    seen: list[tuple[int, int]] = []
    first, second = choose_layers(probe, 2, lambda _, done, total: seen.append((done, total)))
    alone = {i: divergence(made, [j for j in range(4) if j != i]) for i in range(4)}
    assert first.layer == min(alone, key=alone.__getitem__)
    assert first.divergence == pytest.approx(alone[first.layer], rel=1e-3)
    left = [j for j in range(4) if j != first.layer]
    then = {i: divergence(made, [j for j in left if j != i]) for i in left}
    assert second.layer == min(then, key=then.__getitem__)
    assert second.divergence == pytest.approx(then[second.layer], rel=1e-3)
    assert seen[-1] == (7, 7)


def test_neurons_that_do_nothing_go(tiny: Make) -> None:
    parts = parts_of(tiny("llama"))
    idle = [torch.arange(i, 100, 3)[:30] for i in range(3)]
    zeros = []
    for i, own in enumerate(idle):  # by what they give in the last layer, by weights before
        names = ["mlp.down_proj.weight"] if i < 2 else ["mlp.up_proj.weight", "mlp.up_proj.bias"]
        for name in (f"model.layers.{i}.{one}" for one in names):
            tensor = parts.source.read(name)
            assert isinstance(tensor, Tensor)
            tensor = tensor.clone()
            (tensor.t() if i < 2 else tensor)[own] = 0.0
            zeros.append((name, tensor))
    probe = Probe(Parts.of(Overlay(parts.source, zeros)), TEXT)
    kept = choose_neurons(probe, [0, 1, 2], 64, lambda *_: None)
    for own, rest in zip(idle, kept, strict=True):
        assert len(rest) == 64 and not set(own.tolist()) & set(rest.tolist())
        assert torch.equal(rest, rest.sort().values)
    probe.run(0, [0, 1, 2])  # nobody watches any more


def test_how_many_stay() -> None:
    assert (stay(704, 0.25), stay(704, 0.01), stay(100, 0.5), stay(64, 0.99)) == (544, 704, 64, 32)


def test_training_brings_it_nearer(tiny: Make) -> None:
    whole = parts_of(tiny("llama"))
    pruned = Pruned(whole, [0, 2])
    probe = Probe(whole, TEXT)
    probe.remember()
    before = probe.compare(Probe(Parts.of(pruned), TEXT))
    losses: list[float] = []
    options = qat.QatOptions(steps=30, batch=3, learning_rate=3e-3)
    trained = qat.distil(Parts.of(pruned), whole, TEXT, options, lambda *now: losses.append(now[2]))
    after = probe.compare(Probe(Parts.of(Overlay(pruned, trained)), TEXT))
    assert losses[0] == pytest.approx(before, rel=0.3)
    assert len(losses) == 30 and after < 0.5 * before


def test_training_that_diverges_writes_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint of NaN, which nothing loads."""
    loss, steps = qat._loss, iter((1.0, math.inf))
    monkeypatch.setattr(qat, "_loss", lambda *given: loss(*given) * next(steps))
    wild = PruneOptions(
        calib=(text,), layers=1, num_samples=8, window=64, held_out=2, trial_windows=2,
        steps=3, batch=2, learning_rate=1.0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"diverged: after 1 of 3 steps.*rate, which is 1\."):
        prune_model("stories", tmp_path / "x", wild)
    assert not (tmp_path / "x").exists()


# ── the command ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    one = "Once upon a time there was a little girl who had a red ball and a big dog. She was {}. "
    file.write_text("".join(one.format(word) for word in map(str, range(400))))
    return file


def test_the_command(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    short = ["--num-samples", "8", "--window", "64", "--held-out", "2", "--trial-windows", "2"]
    asked = ["prune", "stories", "-o", str(folder), "--calib", str(text), *short]
    done = CliRunner().invoke(app, [*asked, "--layers", "2", "--neurons", "0.25", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    gone = [one["layer"] for one in said["layers"]]
    assert len(set(gone)) == 2 and said["neurons"] == 544 and said["tokens"] == 128
    assert said["weights"] < said["weights_before"] and said["divergence"] > 0
    assert set(said["perplexity"]) == {"whole", "pruned"} and said["recovered"] is None
    kept = json.loads((folder / "pruning.json").read_text())
    assert kept["layers"] == said["layers"] and "model.safetensors" in kept["files"]
    llm = LLM(folder)
    assert len(llm.runtime.model.spec.decoder.layers) == 6
    assert llm.generate("Once", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
    again = CliRunner().invoke(app, [*asked, "--layers", "1"])
    assert again.exit_code == 1 and "--force" in again.output
    trained = CliRunner().invoke(
        app, [*asked, "--layers", "1", "--steps", "3", "--batch-size", "2", "--force"]
    )
    assert trained.exit_code == 0, trained.output
    assert "; trained " in trained.output and "layers gone, in this order: " in trained.output
    assert len(LLM(folder).runtime.model.spec.decoder.layers) == 7
    other = CliRunner().invoke(
        app, [*asked, "--neurons", "0.2", "--held-out-text", str(text), "--force", "--json"]
    )
    assert json.loads(other.output)["tokens"] == 128


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"layers": 0}, "Nothing to leave out"),
        ({"layers": 8}, "the model has 8: one at least stays"),
        ({"neurons": 1.0}, "no share from 0 to below 1"),
        ({"neurons": 0.01}, "of 704 leaves them all"),
        ({"layers": 1, "num_samples": 5}, "fewer than the 12 windows"),
        ({"layers": 1, "window": 1024, "num_samples": 200}, "are tried on or held out"),
        ({"layers": 1, "window": 2000}, "more than the model's 1024 positions"),
        ({"layers": 1, "batch": -3}, "--batch-size is of training: give --steps too"),
        ({"layers": 1, "learning_rate": float("nan")}, "--learning-rate is of training"),
        ({"layers": 1, "steps": -1}, "--steps -1 is below 0"),
        ({"layers": 1, "steps": 2, "learning_rate": 0.0}, "learning_rate=0.0"),
        ({"layers": 1, "calib": ()}, "give --calib"),
    ],
)
def test_refusals(asked: dict[str, Any], why: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        prune_model("stories", tmp_path / "x", PruneOptions(**{"calib": (text,), **asked}))
    assert not (tmp_path / "x").exists()


def test_models_that_it_is_not_for(tiny: Make, text: Path, tmp_path: Path) -> None:
    for name, why in (("mixtral", "experts"), ("deepseek-v2", "experts"), ("gpt2", "pruning")):
        options = PruneOptions(calib=(text,), layers=1)
        with pytest.raises(UnsupportedModelError, match=why):
            prune_model(tiny(name).folder, tmp_path / "x", options)
