"""Fine-tuning under rounding: the model it trains is transformers', and rounding costs less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models.sources import open_source
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.parts import Parts
from penstock.pipeline.qat import QatOptions, TrainableDecoder, train
from penstock.quant import Codes, parse_scheme
from tests.models.tiny import Tiny

W4 = QuantizeConfig(parse_scheme("w4a16-g64"))


@pytest.fixture(scope="module")
def text() -> CalibrationSet:
    tokens = torch.randint(3, 320, (8, 32), generator=torch.manual_seed(0))
    return CalibrationSet("random", tuple(tuple(row.tolist()) for row in tokens))


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "qwen3", "phi3-short"])
def test_the_model_that_is_trained_is_transformers(
    family: str, tiny: Callable[[str], Tiny], text: CalibrationSet
) -> None:
    checkpoint = tiny(family)
    if family == "phi3-short":  # long rope's factors follow the whole context, not the windows'
        with pytest.raises(UnsupportedModelError, match="long rope"):
            TrainableDecoder(Parts.of(open_source(checkpoint.folder)), 32)
        return
    model = TrainableDecoder(Parts.of(open_source(checkpoint.folder)), 32)
    tokens = torch.stack(text.tensors())
    with torch.inference_mode():
        want = checkpoint.oracle(tokens.long()).logits
    torch.testing.assert_close(model(tokens, lambda _, w: w), want, rtol=1e-3, atol=1e-3)


def test_training_takes_off_what_rounding_costs(
    tiny: Callable[[str], Tiny], text: CalibrationSet
) -> None:
    folder = tiny("llama3-rope").folder
    losses: list[float] = []
    options = QatOptions(steps=30, batch=8, learning_rate=1e-3)
    found = dict(train(folder, W4, text, options, lambda i, n, loss: losses.append(loss)))
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    source = open_source(folder)
    assert found.keys() == set(source.names()) - {"lm_head.weight"}
    codes = found["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(codes, Codes) and codes.scheme == W4.scheme
    head = found["model.embed_tokens.weight"]
    assert isinstance(head, Codes) and head.scheme.name == "w8a16"
    norm = found["model.layers.0.input_layernorm.weight"]
    assert isinstance(norm, torch.Tensor) and not torch.equal(
        norm,
        source.read("model.layers.0.input_layernorm.weight").float(),  # type: ignore[union-attr]
    )


def test_the_last_step_may_diverge_too(
    tiny: Callable[[str], Tiny], text: CalibrationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: torch.optim.AdamW) -> None:
        for group in self.param_groups:
            group["params"][-1].data.fill_(torch.inf)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(ConfigError, match="diverged: after 1 of 1 steps"):
        train(tiny("llama").folder, W4, text, QatOptions(steps=1, batch=2))


def test_what_it_is_not_built_for(tiny: Callable[[str], Tiny], text: CalibrationSet) -> None:
    for family, lacking in (("gemma2", "norms after a block"), ("mistral", "sliding windows")):
        with pytest.raises(UnsupportedModelError, match=lacking):
            train(tiny(family).folder, W4, text)
    folder = tiny("llama").folder
    for name in ("fp8-tensor", "nvfp4", "w8a8-static"):
        with pytest.raises(ConfigError, match=f"in {name}"):
            train(folder, QuantizeConfig(parse_scheme(name)), text)
    with pytest.raises(ConfigError, match="different lengths"):
        train(folder, W4, CalibrationSet("odd", ((5, 6, 7), (5, 6))))
    for wrong, words in (
        ({"distillation": 2.0}, "distillation=2"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": 1e9}, "1 at most"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"seed": -1}, "seed=-1"),
    ):
        with pytest.raises(ConfigError, match=words):
            QatOptions(**wrong)  # type: ignore[arg-type]


def test_a_batch_of_more_windows_than_there_are(
    tiny: Callable[[str], Tiny], text: CalibrationSet
) -> None:
    """They come again: the same windows twice have the mean, and so the step, of them once."""
    two = CalibrationSet("two", text.windows[:2])
    losses: list[float] = []
    for batch in (2, 4):
        options = QatOptions(steps=1, batch=batch)
        train(tiny("llama").folder, W4, two, options, lambda _, __, loss: losses.append(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
