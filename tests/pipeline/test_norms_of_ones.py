"""Models whose norms have no weights: rounded to nearest, and what isn't built for them."""

from __future__ import annotations

from pathlib import Path

import pytest
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
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("olmo", tmp_path_factory.mktemp("olmo"))


@needs_native
def test_rounded_to_nearest_as_loading_rounds(olmo: Tiny, tmp_path: Path) -> None:
    export_model(olmo.folder, tmp_path / "e", weights=NewWeights(quant="w8a8"))
    assert not any("norm" in name for name in load_file(tmp_path / "e" / "model.safetensors"))
    prompt = {"prompt_token_ids": olmo.prompt.tolist()}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = [
        LLM(folder, skip_tokenizer_init=True, max_model_len=128, num_blocks=8, quantization=form)
        .generate([prompt], params)[0]
        .outputs[0]
        .token_ids
        for folder, form in ((tmp_path / "e", None), (olmo.folder, "w8a8"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_methods_that_read_a_text(olmo: Tiny, method: str) -> None:
    scheme = parse_scheme("w8a8" if method == "smoothquant" else "w4a16-g32")
    with pytest.raises(UnsupportedModelError, match=f"norms without weights, which {method} isn't"):
        list(quantize_model(olmo.folder, QuantizeConfig(scheme, method), TEXT))


def test_what_else_isnt_built(olmo: Tiny) -> None:
    scheme, source = parse_scheme("w4a16-g32"), open_source(olmo.folder)
    with pytest.raises(UnsupportedModelError, match="norms without weights, which a budget isn't"):
        measure(olmo.folder, [scheme], TEXT)
    with pytest.raises(UnsupportedModelError, match="layer norms, which training isn't"):
        list(train(source, QuantizeConfig(scheme, "rtn"), TEXT, QatOptions(steps=1)))
    with pytest.raises(UnsupportedModelError, match="norms without weights, which pruning"):
        _check(Parts.of(source), PruneOptions((Path("text.txt"),), layers=1))
