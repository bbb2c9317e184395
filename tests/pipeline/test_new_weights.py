"""What an export makes of weights: adapters, fewer tokens, codes; and in which order."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models.checkpoint import Checkpoint
from penstock.models.load import load_model
from penstock.models.lora import WEIGHTS, Merged
from penstock.models.registry import ADAPTER
from penstock.models.sources import open_source
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.export import export_model
from penstock.pipeline.graph import weights_of
from penstock.pipeline.method_options import MethodOptions
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.vocabulary import VocabularyChoice
from penstock.quant.methods import rtn
from tests.models.stories import MATRICES, STORIES, shallow

Q = "model.layers.0.self_attn.q_proj.weight"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x.view(torch.uint8), b[n].view(torch.uint8)) for n, x in a.items()
    )


def greedy(model: Path, prompt: str = "Once upon a time", **chosen: Any) -> list[int]:
    llm = LLM(model, num_gpu_blocks_override=24, max_model_len=256, **chosen)
    (found,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    return found.outputs[0].token_ids


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the embedded model's own, so that it needs no other data."""
    file = tmp_path_factory.mktemp("text") / "stories.txt"
    llm = LLM(max_model_len=256)
    starts = ("Once upon a time", "One day, a little girl", "Tom and his dog", "The old tree")
    written = llm.generate(list(starts), SamplingParams(seed=1, max_tokens=160, ignore_eos=True))
    file.write_text(
        "\n<|endoftext|>\n".join(
            s + o.outputs[0].text for s, o in zip(starts, written, strict=True)
        )
    )
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the embedded model, whose exports take a quarter of the time."""
    return shallow(tmp_path_factory.mktemp("small") / "model")


def test_rounded_to_nearest_it_is_what_loading_rounds_to(small: Path, tmp_path: Path) -> None:
    weights = NewWeights("w8a16", head="w8a16")
    done = export_model(small, tmp_path / "out", weights=weights)
    on_load = load_model(small, quantization="w8a16")
    assert same(weights_of(done.model.model), weights_of(on_load.model))
    assert done.manifest.choices["weights"]["quant"] == "w8a16"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert greedy(tmp_path / "out") == greedy(small, quantization="w8a16")


def test_fitted_to_a_text_that_the_manifest_names(small: Path, tmp_path: Path, text: Path) -> None:
    weights = NewWeights("w4a16-g64", calib=(text,), num_samples=4, window=64)
    said: list[tuple[str, int, int]] = []
    done = export_model(
        small, tmp_path / "out", weights=weights, progress=lambda *what: said.append(what)
    )
    chosen = done.manifest.choices["weights"]
    assert chosen["method"] == "gptq" and chosen["head"] is None
    assert chosen["calibration"]["windows"] == 4 and chosen["calibration"]["tokens"] == 256
    assert chosen["calibration"]["files"][0]["name"] == "stories.txt"
    layers = [line for line in said if "output error" in line[0]]
    assert [(done, total) for _, done, total in layers] == [(i, 2) for i in range(1, 2 + 1)]
    assert chosen["options"] == {
        "act_order": True, "block_size": 128, "damp_percent": 0.01, "clip": False,
        "from_quantized": True,
    }  # fmt: skip
    nearest = export_model(small, tmp_path / "rtn", weights=NewWeights("w4a16-g64"))
    assert not same(weights_of(done.model.model), weights_of(nearest.model.model))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "rtn"]  # no .work, no .partial


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_other_layouts(small: Path, tmp_path: Path, layout: Any) -> None:
    weights = NewWeights("w4a16-g64-asym", layout=layout)
    done = export_model(small, tmp_path / "out", weights=weights)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == layout
    assert done.model.model.formats.matrix.name == "w4a16-g64-asym"


@pytest.mark.parametrize(
    ("quant", "head", "layout"),
    [
        ("w4a16-g64", None, "compressed-tensors"),
        ("w8a8", "w8a16", "compressed-tensors"),
        ("nf4", None, "bitsandbytes"),
        ("fp8-e5m2", "fp8-e5m2", "fp8"),
    ],
)
def test_the_layout_that_can_hold_a_scheme(quant: str, head: str | None, layout: str) -> None:
    assert NewWeights(quant, head=head).stored_layout == layout


def test_an_export_in_a_layout_of_its_own_choice(small: Path, tmp_path: Path) -> None:
    done = export_model(small, tmp_path / "out", weights=NewWeights("nf4"))
    assert done.manifest.choices["weights"]["layout"] == "bitsandbytes"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"


def test_matrices_of_other_schemes(tmp_path: Path) -> None:
    special = {"layers.0.*": "w8a16", "*.mlp.down": None, "layers.5.mlp.down": "w8a16"}
    done = export_model("stories", tmp_path / "out", weights=NewWeights("w4a16", special=special))
    formats = done.model.model.formats
    for module, name in (
        ("layers.0.attention.qkv", "w8a16"),
        ("layers.1.attention.qkv", "w4a16-g32"),
        ("layers.0.mlp.down", "bfloat16"),
        ("layers.5.mlp.down", "w8a16"),
    ):
        assert formats.of(module).name == name
    assert done.manifest.choices["weights"]["special"]["layers.0.mlp.down"] is None
    weights = NewWeights("w4a16", special={"layers.99.*": "w8a16"})
    words = rf"layers\.99\.\* is none of this model's {MATRICES} matrices"
    with pytest.raises(ConfigError, match=words):
        export_model("stories", tmp_path / "none", weights=weights)


def test_fp8_activations_with_calibrated_scales(small: Path, tmp_path: Path, text: Path) -> None:
    """The same in each layout that holds them, and read back as they were written."""
    weights = NewWeights("fp8-w8a8-tensor-static", "rtn", calib=(text,), num_samples=4, window=64)
    folders = []
    for layout in ("compressed-tensors", "fp8"):
        chosen = replace(weights, layout=layout)
        done = export_model(small, tmp_path / layout, weights=chosen)
        assert done.model.model.formats.matrix.name == weights.quant
        config = json.loads((tmp_path / layout / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == layout
        folders.append(weights_of(done.model.model))
    assert same(*folders)
    assert any("input_scale" in name for name in folders[0])
    assert greedy(tmp_path / "fp8") == greedy(tmp_path / "compressed-tensors")


def test_a_mixture_within_a_budget(small: Path, tmp_path: Path, text: Path) -> None:
    mixture = ("w4a16-g64", "w8a16")
    weights = NewWeights(
        budget="6bpw", mixture=mixture, budget_windows=2, calib=(text,), num_samples=4, window=64,
        method="rtn",
    )  # fmt: skip
    done = export_model(small, tmp_path / "out", weights=weights)
    formats = done.model.model.formats
    names = {formats.of(m).name for m in done.manifest.choices["weights"]["special"]}
    assert formats.special and {*names, formats.matrix.name} == set(mixture)
    assert done.manifest.choices["weights"]["mixture"] == list(mixture)
    assert done.manifest.choices["weights"]["budget_windows"] == 2
    assert greedy(tmp_path / "out")


def test_fewer_tokens_then_codes(tmp_path: Path, text: Path) -> None:
    vocabulary = VocabularyChoice.parse("1500", (text,))
    weights = NewWeights("w8a16", calib=(), head="w8a16")
    export_model("stories", tmp_path / "out", weights=weights, reduce_vocab=vocabulary)
    assert not (tmp_path / "out" / "stage").exists()
    export_model("stories", tmp_path / "whole", weights=weights)
    prompt = text.read_text()[:40]
    small, whole = greedy(tmp_path / "out", prompt), greedy(tmp_path / "whole", prompt)
    assert small[:8] == whole[:8]
    fitted = replace(weights, quant="w4a16-g64", calib=(text,), num_samples=4, window=64)
    export_model("stories", tmp_path / "fitted", weights=fitted, reduce_vocab=vocabulary)
    assert greedy(tmp_path / "fitted", prompt)


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


def adapter(folder: Path, **config: Any) -> Path:
    """Of rank 4 on two matrices of the embedded model."""
    folder.mkdir(parents=True)
    base, random = Checkpoint(STORIES), torch.Generator().manual_seed(3)
    tensors = {}
    for name in (Q, Q.replace(".0.", ".1.").replace("q_proj", "v_proj")):
        n, k = base.shape(name)
        module = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, k, generator=random)
        tensors[f"{module}.lora_B.weight"] = torch.randn(n, 4, generator=random)
    save_file(tensors, folder / WEIGHTS)
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, **config}
    (folder / ADAPTER).write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 0.5),
        ({"use_rslora": True}, 1.0),
        ({"alpha_pattern": {"q_proj": 8}, "r": 9, "rank_pattern": {"[qv]_proj": 4}}, 2.0),
    ],
)
def test_an_adapter_is_added(
    small: Path, tmp_path: Path, config: dict[str, Any], scale: float
) -> None:
    folder = adapter(tmp_path / "adapter", **config)
    merged, base, own = (
        Merged(Checkpoint(small), folder),
        Checkpoint(small),
        load_file(folder / WEIGHTS),
    )
    a, b = (own[f"base_model.model.{Q.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
    before = base.read(Q)
    assert torch.equal(merged.read(Q), (before.float() + scale * (b @ a)).to(before.dtype))
    other = Q.replace("q_proj", "k_proj")
    assert torch.equal(merged.read(other), base.read(other))
    export_model(small, tmp_path / "out", weights=NewWeights(merge_lora=folder))
    assert torch.equal(Checkpoint(tmp_path / "out").read(Q), merged.read(Q))
    quantized = NewWeights("w8a16", merge_lora=folder)
    done = export_model(small, tmp_path / "codes", weights=quantized)
    assert done.manifest.choices["weights"]["merge_lora"]["name"] == "adapter"


@pytest.mark.parametrize("way", [None, True, False, "gaussian", "eva", "orthogonal"])
def test_ways_to_begin_that_leave_the_model_alone(tmp_path: Path, way: Any) -> None:
    folder = adapter(tmp_path / "adapter", init_lora_weights=way)
    assert len(Merged(Checkpoint(STORIES), folder).modules) == 2


def about(**config: Any) -> Any:
    return lambda folder: (folder / ADAPTER).write_text(json.dumps({"peft_type": "LORA", **config}))


def holding(*names: str) -> Any:
    return lambda f: save_file({name: torch.ones(4, 4) for name in names}, f / WEIGHTS)


def part(which: str) -> str:
    return f"base_model.model.{Q.removesuffix('.weight')}.lora_{which}.weight"


OF_RANK_0 = {part("A"): torch.ones(0, 128), part("B"): torch.ones(128, 0)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda f: (f / ADAPTER).unlink(), ModelNotFoundError, "is no adapter"),
        (lambda f: (f / WEIGHTS).write_bytes(b"x" * 99), WeightsError, "can't be read"),
        (about(use_dora=True, lora_alpha=1), UnsupportedModelError, "use_dora=True"),
        (about(), UnsupportedModelError, "lora_alpha must be a number"),
        (about(lora_alpha=10**400), UnsupportedModelError, "lora_alpha is too large"),
        (about(lora_alpha=1, alpha_pattern=["q"]), UnsupportedModelError, "must be an object"),
        (about(lora_alpha=1, alpha_pattern={"(": 1}), UnsupportedModelError, "that isn't one"),
        (
            about(lora_alpha=1, alpha_pattern={"q_proj": "x"}),
            UnsupportedModelError,
            "a value of alpha_pattern must be a number: 'x'",
        ),
        (about(lora_alpha=1, r=8), WeightsError, "says rank 8 for .* tensors have 4"),
        (about(lora_alpha=1, r=4, rank_pattern={"v_proj": 2}), WeightsError, "rank 2 for .*v_proj"),
        (about(lora_alpha=1, rank_pattern={"(": 1}), UnsupportedModelError, "that isn't one"),
        *(
            (about(lora_alpha=1, init_lora_weights=way), UnsupportedModelError, f"='{way}': such")
            for way in ("pissa", "pissa_niter_16", "olora", "corda", "loftq")
        ),
        (lambda f: save_file(OF_RANK_0, f / WEIGHTS), WeightsError, r"B \[128, 0\] · A \[0, 128\]"),
        (holding("base_model.model.x.lora_A.weight"), WeightsError, "the model lacks"),
        (holding(part("A")), WeightsError, "only half"),
        (holding(part("A"), part("B")), WeightsError, "don't give that"),
        (holding("something.else"), UnsupportedModelError, "isn't a LoRA matrix"),
    ],
)
def test_what_is_no_adapter_of_the_model(
    tmp_path: Path, change: Any, error: type[Exception], words: str
) -> None:
    folder = adapter(tmp_path / "adapter")
    change(folder)
    with pytest.raises(error, match=words):
        export_model("stories", tmp_path / "out", weights=NewWeights(merge_lora=folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"quant": "w5a8"}, "w5a8"),
        ({"quant": "w8a8", "method": "magic"}, "magic isn't one of rtn, gptq"),
        ({"quant": "w4a16", "method": "awq"}, "give --calib"),
        ({"quant": "w4a16", "method": "rtn", "calib": (Path("x"),)}, "can't take effect"),
        ({"method": "gptq"}, "nothing to act on without --quant"),
        ({"budget": "4.5bpw"}, "give --calib"),
        ({"budget": "4.5bpw", "quant": "w8a8", "calib": (Path("x"),)}, "can't take effect"),
        ({"budget": "many", "calib": (Path("x"),)}, "neither bits a weight"),
        ({"quant": "fp8", "layout": "awq"}, "can't express fp8"),
        ({"quant": "w4a16-g128", "layout": "gguf"}, "isn't one of compressed-tensors"),
        ({"quant": "nf4", "layout": "compressed-tensors"}, "can't express nf4"),
        ({"quant": "w4a8-g32-blocks"}, "w4a8-g32-blocks: no layout of files holds that"),
        ({"quant": "nf4", "head": "w8a16"}, "No layout holds all of the schemes .nf4-g64: bits"),
        ({"quant": "nf4", "special": {"*": "w8a16"}}, "No layout holds all of the schemes"),
        ({"quant": "fp8-w8a8", "head": "fp8-w8a8-tensor", "layout": "fp8"}, "has one scheme"),
        ({"quant": "w8a8-static"}, "a scale of activations that a text gives: give --calib"),
        ({"quant": "w8a16", "mixture": ("w8a16",)}, "--mixture is of a budget"),
        ({"quant": "w8a16", "budget_windows": 2}, "--budget-windows is of a budget"),
        ({"budget": "5bpw", "calib": (Path("x"),), "mixture": ()}, "one of each is the least"),
        ({"budget": "5bpw", "calib": (Path("x"),), "special": {"*": None}}, "so --special"),
        ({"options": MethodOptions(alpha=0.5)}, "--alpha has nothing to act on"),
        ({"special": {"*": "w8a16"}}, "--special has nothing to act on"),
        ({"quant": "w8a16", "options": MethodOptions(damp_percent=0.1)}, "is for GPTQ: it can't"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NewWeights(**chosen)


def test_calibration_that_is_too_short_or_missing(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "empty.txt").write_text(" \n")
    for name, words in (
        ("short.txt", "256 are the least"),
        ("empty.txt", "has 0 tokens, but 256 are the least"),
        ("none.txt", r"none\.txt"),
    ):
        weights = NewWeights("w4a16-g64", calib=(tmp_path / name,))
        with pytest.raises(ConfigError, match=words):
            export_model("stories", tmp_path / "out", weights=weights)
        assert not (tmp_path / "out").exists()


def test_reduced_vocabularies_are_asked_for_rightly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give it by --calib"):
        VocabularyChoice.parse("1000", ())
    with pytest.raises(ConfigError, match="neither a number nor a file"):
        VocabularyChoice.parse(str(tmp_path / "none"), ())


def test_an_export_that_failed_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    whole = tmp_path / "model"
    shutil.copytree(STORIES, whole)
    tensors = load_file(whole / "model.safetensors")
    right = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors[Q.replace(".0.", ".2.")][0, 0] = float("nan")
    save_file(tensors, whole / "model.safetensors")
    with pytest.raises(WeightsError, match="NaN"):
        export_model(whole, tmp_path / "out", weights=NewWeights("w8a8"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    (tmp_path / "out.work").mkdir()  # of a run that was killed, with other choices
    (tmp_path / "out.work" / "manifest.json").write_text('{"version": 0}')
    save_file(right, whole / "model.safetensors")
    export_model(whole, tmp_path / "out", weights=NewWeights("w8a8"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("quant", [None, "w8a8"])
@pytest.mark.parametrize("name", [Q, "model.embed_tokens.weight", "model.norm.weight"])
def test_what_is_not_finite_is_neither_exported_nor_built(
    tmp_path: Path, quant: str | None, name: str
) -> None:
    whole = tmp_path / "model"
    shutil.copytree(STORIES, whole)
    tensors = load_file(whole / "model.safetensors")
    tensors[name].view(-1)[7] = float("inf")
    save_file(tensors, whole / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 of [\d,]+ values of .* NaN or infinite"):
        export_model(whole, tmp_path / "out", weights=NewWeights(quant))
    with pytest.raises(WeightsError, match="NaN or infinite"):
        build(BuildOptions(whole, tmp_path / "engine", quantization=quant))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("quant", "layout", "method"),
    [
        ("w4a16-g128-asym", "awq", None),
        ("w4a16-g128-asym", "gptq", None),
        ("nf4-g128", "auto", None),
        ("w4a16-g128", "gptq", "qat"),
    ],
)
def test_layouts_that_have_no_place_for_a_shorter_group(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: Path,
    quant: str,
    layout: str,
    method: str | None,
) -> None:
    """K = 704 = 5.5 · 128, which is said before anything is rounded or trained."""
    monkeypatch.setattr(rtn, "quantize", None)
    weights = NewWeights(quant, method, calib=(text,) if method else (), layout=layout)
    with pytest.raises(ConfigError, match=r"704.*of 32 or 64, .* --special '\*\.mlp\.down=none'"):
        export_model("stories", tmp_path / "out", weights=weights)
    assert list(tmp_path.iterdir()) == []


def test_what_a_layout_has_no_place_for_may_stay(small: Path, tmp_path: Path) -> None:
    weights = NewWeights("nf4-g128", special={"*.mlp.down": None})
    export_model(small, tmp_path / "out", weights=weights)
    source = open_source(tmp_path / "out")
    up, down = (source.scheme(f"model.layers.0.mlp.{name}_proj.weight") for name in ("up", "down"))
    assert up is not None and up.name == "nf4-g128" and down is None
