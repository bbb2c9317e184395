"""Exports of models whose layers have states: rounded to nearest, and what isn't built for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, SamplingParams
from penstock.errors import UnsupportedModelError
from penstock.models.sources import open_source
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.export import export_model
from penstock.pipeline.new_weights import NewWeights
from penstock.pipeline.parts import Parts
from penstock.pipeline.prune.prune import PruneOptions, _check
from penstock.pipeline.qat import QatOptions, train
from penstock.pipeline.quantize import quantize_model
from penstock.pipeline.sensitivity import measure
from penstock.quant import parse_scheme
from tests.models.tiny import Tiny, make_tiny

from .conftest import needs_native

TEXT = CalibrationSet("text", (tuple(range(3, 40)),) * 2)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("lfm2", tmp_path_factory.mktemp("lfm2"))


@needs_native
def test_rounded_to_nearest_as_loading_rounds(lfm2: Tiny, tmp_path: Path) -> None:
    export_model(lfm2.folder, tmp_path / "e", weights=NewWeights(quant="w8a8"))
    conv = "model.layers.0.conv.conv.weight"
    whole = load_file(lfm2.folder / "model.safetensors")
    rounded = load_file(tmp_path / "e" / "model.safetensors")
    assert rounded[conv].equal(whole[conv])
    steps = {name: step for name, step in rounded.items() if name.endswith(".weight_scale")}
    assert steps
    for name, step in steps.items():
        weight = name.removesuffix("_scale")
        left = whole[weight].float() - rounded[weight].float() * step.float()
        assert (left.abs() <= step.float() * 0.501).all(), name
    prompt = {"prompt_token_ids": lfm2.prompt.tolist()}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for folder, form in ((tmp_path / "e", None), (lfm2.folder, "w8a8"), (lfm2.folder, None)):
        made = LLM(
            folder, skip_tokenizer_init=True, max_model_len=128, num_blocks=8, quantization=form
        ).generate([prompt], params)[0]
        assert made.prompt_logprobs is not None
        said = [next(iter(one.values())).logprob for one in made.prompt_logprobs if one]
        found.append(torch.tensor(said))
    exported, loaded, plain = found
    # loading also rotates what `down` reads, so bits differ
    assert 0 < (exported - plain).square().mean().sqrt() < 0.5
    assert (exported - loaded).square().mean().sqrt() < 0.5


@pytest.mark.parametrize("name", ["granite-hybrid", "bamba", "nemotron-h"])
def test_projections_that_also_say_how_far_steps_go(name: str, tmp_path: Path) -> None:
    """Those rows are rounded by no format, and lie in one matrix with others."""
    make_tiny(name, tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"\.in_proj\.weight.*rounded as they are"):
        export_model(tmp_path / "m", tmp_path / "e", weights=NewWeights(quant="w8a8"))


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_methods_that_read_a_text(lfm2: Tiny, method: str) -> None:
    scheme = parse_scheme("w8a8" if method == "smoothquant" else "w4a16-g32")
    with pytest.raises(UnsupportedModelError, match=f"states, which {method} isn't built for"):
        list(quantize_model(lfm2.folder, QuantizeConfig(scheme, method), TEXT))


def test_what_else_isnt_built(lfm2: Tiny) -> None:
    scheme, source = parse_scheme("w4a16-g32"), open_source(lfm2.folder)
    with pytest.raises(UnsupportedModelError, match="states, which a budget isn't built for"):
        measure(lfm2.folder, [scheme], TEXT)
    with pytest.raises(UnsupportedModelError, match="has layers with states, which training"):
        list(train(source, QuantizeConfig(scheme, "rtn"), TEXT, QatOptions(steps=1)))
    with pytest.raises(UnsupportedModelError, match="has layers with states, which pruning"):
        _check(Parts.of(source), PruneOptions((Path("text.txt"),), layers=1))
