"""Keys and values in fewer dimensions: transformers says the same of the same bases."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.pipeline import qat
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.parts import Parts
from penstock.pipeline.probe import Probe
from penstock.pipeline.prune import PruneOptions, prune_model
from penstock.pipeline.prune.bases import LayerBases, Ranked, _nearest, choose_bases
from penstock.pipeline.prune.pruned import Pruned
from penstock.runtime.device import Device
from penstock.runtime.footprint import footprint
from tests.engine.test_ranks import said
from tests.models.tiny import Make, makes_once

from .test_prune import TEXT, likelihoods, ours, parts_of, text, without, written

__all__ = ["text"]  # a fixture

RANK = 16
GPU = Device(torch.device("cuda"), by_triton=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return makes_once(tmp_path_factory)


def nothing(*_: Any) -> None:
    pass


def chosen(parts: Parts, rank: int = RANK) -> list[LayerBases]:
    return choose_bases(parts, Probe(parts, TEXT), rank, nothing)


def projected(
    model: Any, bases: list[LayerBases], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Tensor]:
    """transformers' model with A·Bᵀ·k in the place of every key, the same of values: heads of all
    their dimensions, which lie in a space of fewer.
    """
    modeling = sys.modules[type(model).__module__]
    plain = modeling.eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> Any:
        own = bases[module.layer_idx]
        key, value = (
            torch.einsum("gde,bgte->bgtd", a @ b.mT, x)
            for a, b, x in ((own.queries, own.keys, key), (own.read, own.values, value))
        )
        return plain(module, query, key, value, *rest, **_)

    monkeypatch.setattr(modeling, "eager_attention_forward", attend)
    return lambda: likelihoods(model)


Sides = tuple[Tensor, Tensor]
"""x [G, D, N] and y [G, D, M] float64, whose products xᵀ·y are to be kept."""


def products(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sides, Sides]]:
    """Of each layer, on the text: queries and keys; what reads heads and what those saw."""
    modeling = sys.modules[type(model).__module__]
    plain = modeling.eager_attention_forward
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in model.model.layers]

    def attend(module: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        seen, weights = plain(module, query, key, *rest, **named)
        found[module.layer_idx].append((query[0], key[0], seen[0].transpose(0, 1)))
        return seen, weights

    def grouped(heads: Tensor, count: int) -> Tensor:  # [H, N, D] → [count, D, H / count · N]
        return heads.double().unflatten(0, (count, -1)).flatten(1, 2).mT

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(modeling, "eager_attention_forward", attend)
        for window in TEXT.windows:
            model(torch.tensor([window]), use_cache=False)
    sides = []
    for layer, own in zip(model.model.layers, found, strict=True):
        queries, keys, seen = (torch.cat(each, 1) for each in zip(*own, strict=True))
        readers = layer.self_attn.o_proj.weight.detach().unflatten(1, (len(queries), -1))
        x, y, u, v = (grouped(z, len(keys)) for z in (queries, keys, readers.transpose(0, 1), seen))
        sides.append(((x, y), (u, v)))
    return sides


def lost(sides: Sides, a: Tensor, b: Tensor) -> Tensor:
    """Squared error of xᵀ·A·Bᵀ·y, [G]."""
    x, y = sides
    eye = torch.eye(x.shape[1], dtype=torch.float64)
    return (x.mT @ (eye - a.double() @ b.double().mT) @ y).square().sum((1, 2))


def least(sides: Sides) -> Tensor:
    """That of any A and B of so many columns, as Eckart and Young say."""
    x, y = sides
    return torch.linalg.svdvals(x.mT @ y)[:, RANK:].square().sum(1)


def best_of(one: Tensor) -> Tensor:
    """The directions that it has the most of, whatever it is multiplied by."""
    return torch.linalg.svd(one, full_matrices=False)[0][..., :RANK]


@pytest.mark.parametrize(
    "name",
    [
        "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "phi3", "olmo2",
        "granite", "olmo3", "gemma", "cohere", "cohere2", "glm4", "starcoder2", "exaone4",
        "ernie4_5",
    ],
)  # fmt: skip
def test_as_transformers_says(
    name: str, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny(name)
    parts = parts_of(made)
    bases = chosen(parts)
    folder = written(Ranked(parts, bases), tmp_path / "ranked")
    got = ours(folder)
    whole = likelihoods(made.oracle)
    want = projected(made.oracle, bases, monkeypatch)()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    all_of_them = parts.spec.decoder.layers[0].attention.head_dim == RANK
    assert ((want - whole).abs().max() < 1e-4) == all_of_them


def test_beside_layers_that_go(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, layers = tiny("llama"), [0, 2]
    left = Parts.of(Pruned(parts_of(made), layers))
    bases = chosen(left)
    folder = written(Ranked(left, bases), tmp_path / "ranked")
    model = without(made, layers)
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = at
    want = projected(model, bases, monkeypatch)()
    torch.testing.assert_close(ours(folder), want, rtol=1e-3, atol=1e-3)


def test_all_dimensions_lose_nothing() -> None:
    """Of `stories`, whose heads have 64."""
    from penstock.models.hub import resolve
    from penstock.models.sources import open_source

    parts = Parts.of(open_source(resolve("stories")))
    probe = Probe(parts, TEXT)
    probe.remember()
    losses = []
    for rank in (64, 48, 32, 16):
        ranked = Ranked(parts, chosen(parts, rank))
        losses.append(probe.compare(Probe(Parts.of(ranked), TEXT)))
    assert losses[0] < 1e-3 < losses[1] < losses[2] < losses[3]


def test_no_bases_are_nearer() -> None:
    """What is lost is what Eckart and Young say; the keys' own best bases lose more."""
    random = torch.Generator().manual_seed(4)
    x, y = (torch.randn(3, 24, 24, generator=random, dtype=torch.float64) for _ in range(2))
    y = y * torch.logspace(0, -2, 24, dtype=torch.float64)  # keys of few dimensions
    a, b = (found.double() for found in _nearest(x @ x.mT, y @ y.mT, RANK))

    torch.testing.assert_close(lost((x, y), a, b), least((x, y)), rtol=1e-3, atol=0)
    own = best_of(y)
    assert (lost((x, y), own, own) > 1.2 * least((x, y))).all()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bases_of_a_model_are_the_nearest(
    name: str, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transformers' scores, and of its heads with the weights that read them: no other bases of
    so many columns lose less, and those of either side alone, or exchanged, lose more.
    """
    made = tiny(name)
    bases = chosen(parts_of(made))
    for own, (scores, heads) in zip(bases, products(made.oracle, monkeypatch), strict=True):
        for sides, a, b in ((scores, own.queries, own.keys), (heads, own.read, own.values)):
            fewest = least(sides)
            torch.testing.assert_close(lost(sides, a, b), fewest, rtol=1e-3, atol=0)
            others = [(one, one) for one in map(best_of, sides)]
            for other in (*others, (b, a)):
                assert (lost(sides, *other) > 1.1 * fewest).all()


def test_training_brings_it_nearer(tiny: Make) -> None:
    whole = parts_of(tiny("llama"))
    ranked = Ranked(whole, chosen(whole))
    probe = Probe(whole, TEXT)
    probe.remember()
    before = probe.compare(Probe(Parts.of(ranked), TEXT))
    losses: list[float] = []
    options = qat.QatOptions(steps=30, batch=3, learning_rate=1e-3)
    trained = qat.distil(Parts.of(ranked), whole, TEXT, options, lambda *now: losses.append(now[2]))
    after = probe.compare(Probe(Parts.of(Overlay(ranked, trained)), TEXT))
    assert losses[0] == pytest.approx(before, rel=0.3)  # as the engine computes it
    assert after < 0.5 * before


# ── the command, and what reads what it writes ───────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranked") / "stories-48"
    short = ["--num-samples", "8", "--window", "64", "--held-out", "2", "--trial-windows", "4"]
    asked = ["prune", "stories", "-o", str(found), "--calib", str(text), *short]
    done = CliRunner().invoke(app, [*asked, "--kv-rank", "48", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert (told["kv_rank"], told["head_dim"], told["neurons"]) == (48, 64, None)
    assert (told["kv_values"], told["kv_values_before"]) == (8 * 2 * 2 * 48, 8 * 2 * 2 * 64)
    assert told["weights"] < told["weights_before"] and 0 < told["divergence"] < 1
    assert json.loads((found / "config.json").read_text())["kv_rank"] == 48
    return found


def test_layers_of_such_a_model_can_go(folder: Path, text: Path, tmp_path: Path) -> None:
    short = PruneOptions(
        calib=(text,), layers=2, num_samples=8, window=64, held_out=2, trial_windows=2
    )
    found = prune_model(folder, tmp_path / "x", short)
    gone = {one.layer for one in found.layers}
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "x" / "model.safetensors")
    left = [i for i in range(8) if i not in gone]
    for new, old in enumerate(left):
        assert torch.equal(after[f"kv_bases.{new}"], before[f"kv_bases.{old}"])
    assert f"kv_bases.{len(left)}" not in after
    assert LLM(tmp_path / "x").generate("Once", SamplingParams(max_tokens=4))


PROMPTS = ["Once upon a time", "A dog and a cat went to the", "The"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize(
    "engine",
    [{}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "kivi"}, {"quantization": "w8a8"}],
    ids=str,
)
def test_an_engine(engine: dict[str, Any], folder: Path) -> None:
    """Alone, together and in chunks: the same bits. The cache has three quarters."""
    llm = LLM(folder, **engine)
    together = said(llm.generate(PROMPTS, GREEDY))
    assert together == [said(llm.generate(p, GREEDY))[0] for p in PROMPTS]
    small = LLM(folder, **engine, max_num_batched_tokens=16, max_num_seqs=2)
    assert said(small.generate(PROMPTS, GREEDY)) == together
    whole = LLM("stories", **engine).runtime.layout.bytes_per_block
    stored = engine.get("kv_cache_dtype", "")  # scales: one of a token, two of 32 dimensions
    expected = {"int8": (48 + 2) / (64 + 2), "kivi": 31 / 40}.get(stored, 0.75)
    assert llm.runtime.layout.bytes_per_block / whole == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_several_processes(ranks: dict[str, int], folder: Path) -> None:
    assert said(LLM(folder, **ranks).generate(PROMPTS, GREEDY)) == said(
        LLM(folder).generate(PROMPTS, GREEDY)
    )


def test_an_engine_folder(folder: Path, tmp_path: Path) -> None:
    built = tmp_path / "engine"
    done = CliRunner().invoke(app, ["build", str(folder), "-o", str(built)])
    assert done.exit_code == 0, done.output
    want = said(LLM(folder).generate(PROMPTS, GREEDY))
    assert said(LLM(built).generate(PROMPTS, GREEDY)) == want


def test_rounded_weights_that_were_saved(folder: Path, text: Path, tmp_path: Path) -> None:
    """By a method that reads a text, which scales values' rows by what reads them."""
    saved = tmp_path / "awq"
    asked = ["export", str(folder), "-o", str(saved), "--quant", "w4a16", "--method", "awq"]
    done = CliRunner().invoke(app, [*asked, "--calib", str(text), "--num-samples", "4"])
    assert done.exit_code == 0, done.output
    assert LLM(saved).generate("Once", GREEDY)[0].outputs[0].text


def changed(folder: Path, tmp_path: Path, **config: Any) -> Path:
    other = tmp_path / "changed"
    other.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (other / file.name).symlink_to(file)
    now = json.loads((folder / "config.json").read_text()) | config
    (other / "config.json").write_text(json.dumps(now))
    return other


@pytest.mark.parametrize("rank", [40, 80, 0, -16, "48", 1.5])
def test_a_config_json_that_cannot_be(rank: object, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="kv_rank"):
        LLM(changed(folder, tmp_path, kv_rank=rank))


def test_tensors_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"\[2, 2, 64, 32\]|v_proj|shape"):
        LLM(changed(folder, tmp_path, kv_rank=32))
    (tmp_path / "other").mkdir()
    with pytest.raises(WeightsError, match="kv_bases"):
        LLM(changed(folder, tmp_path / "other", kv_rank=None))


@pytest.mark.parametrize(
    ("rank", "why"),
    [(64, "leaves them all"), (40, "a multiple of 16"), (80, "of 64 dimensions"), (-1, "below 0")],
)
def test_refusals(rank: int, why: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        prune_model("stories", tmp_path / "x", PruneOptions(calib=(text,), kv_rank=rank))
    assert not (tmp_path / "x").exists()


def test_once_is_enough(folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in 48 dimensions already"):
        prune_model(folder, tmp_path / "x", PruneOptions(calib=(text,), kv_rank=32))


def test_where_it_is_not_built(folder: Path, tmp_path: Path) -> None:
    asked = ["export", str(folder), "-o", str(tmp_path / "out"), "--onnx", str(tmp_path / "x.onnx")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and "48 dimensions (kv_rank), which --onnx" in done.output
    with pytest.raises(UnsupportedModelError, match=r"kv_rank.*CPUs only: choose device='cpu'"):
        footprint(EngineConfig.of(model=folder, max_num_seqs=4), GPU)
