"""An engine's logits, hidden states and tokens are its model's, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.pipeline.tuning import make_step
from penstock.runtime import HiddenRunner, Runtime, compile_counter, load_runtime
from penstock.runtime.engine_folder import Limits
from penstock.runtime.mapping import mapped_files
from tests.models.stories import shallow
from tests.models.tiny import each_kind, make_tiny
from tests.pipeline.conftest import Build, needs_native

FORMATS = ["w8a16", "w8a8"]
FORMATS += [f"w4a{a}-g{g}{z}" for a in (8, 16) for g in (32, 64, 128) for z in ("", "-asym")]
LIMITS = Limits(8, 128, (1, 8, 128))


def load(model: str | Path, **options: Any) -> Runtime:
    options = {"max_model_len": 128, "num_blocks": 40, "skip_tokenizer_init": True, **options}
    return load_runtime(EngineConfig.of(model=model, **options))


def logits(runtime: Runtime) -> list[Tensor]:
    """Of a prompt, of eight sequences that decode over what it has written, and hidden states."""
    size = runtime.layout.block_size
    found = []
    for tokens in (100, 8):
        step = make_step(tokens, LIMITS, size, stated=runtime.layout.states is not None)
        step.tokens.copy_(torch.arange(tokens) * 7 % 300 + 3)
        found.append(runtime.runner.forward(step).clone())
    found.append(HiddenRunner(runtime.model.model, runtime.runner).forward(step).clone())
    return found


def assert_same(engine: Path, model: str | Path, **options: Any) -> None:
    plain = load(model, **options)
    before = compile_counter.total()
    built = load(engine)
    got = logits(built)
    assert compile_counter.total() == before
    for a, b in zip(got, logits(plain), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all() and a.std() > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers: a build takes as long for one format as for another."""
    return shallow(tmp_path_factory.mktemp("small") / "model")


def test_the_whole_model(engine_of: Build) -> None:
    assert_same(engine_of(), "stories")


@pytest.mark.parametrize("quantization", FORMATS)
def test_every_format(engine_of: Build, small: Path, quantization: str) -> None:
    assert_same(engine_of(small, quantization=quantization), small, quantization=quantization)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_every_cache(engine_of: Build, kind: str) -> None:
    chosen = {"kv_cache_dtype": kind, "quantization": "w4a8"}
    assert_same(engine_of(**chosen), "stories", **chosen)


@pytest.mark.parametrize("name", each_kind())
def test_families(name: str, engine_of: Build, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path / "model").folder
    engine = engine_of(folder, dtype="float32", max_model_len=128)
    assert_same(engine, folder, dtype="float32")


def test_operators_one_by_one(engine_of: Build) -> None:
    """The decoder over mapped weights is whole: it runs without its plan too."""
    for a, b in zip(
        logits(load(engine_of(), enforce_eager=True)), logits(load("stories")), strict=True
    ):
        assert torch.equal(a, b)


def test_tokens_and_embeddings(engine_of: Build) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    prompts = ["Once upon a time", "The dog"]
    engine, model = LLM(engine_of()), LLM("stories")
    for a, b in zip(engine.generate(prompts, params), model.generate(prompts, params), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].text == b.outputs[0].text
    for a, b in zip(engine.embed(prompts), model.embed(prompts), strict=True):
        assert a.outputs.embedding == b.outputs.embedding


def test_two_contexts_share_the_weights(engine_of: Build) -> None:
    folder = engine_of(quantization="w8a8")
    gc.collect()  # what earlier tests have left
    before = mapped_files()
    one, other = load(folder), load(folder)
    assert mapped_files() == before + 1
    name = "layers.0.mlp.up.weight"
    weights = [dict(r.model.model.named_parameters())[name] for r in (one, other)]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    assert one.runner.kv[0][0].data_ptr() != other.runner.kv[0][0].data_ptr()
    for a, b in zip(logits(one), logits(other), strict=True):
        assert torch.equal(a, b)
    del one, other, weights
    gc.collect()
    assert mapped_files() == before


def test_two_contexts_run_at_once(engine_of: Build) -> None:
    """Each in a thread of its own, with the tokens that it has alone."""
    folder = engine_of(quantization="w8a8")
    contexts = [LLM(folder), LLM(folder)]
    prompts = [f"Once upon a time there was a {word}" for word in ("dog", "tree", "king")]

    def written(i: int) -> list[Sequence[int]]:
        params = SamplingParams(max_tokens=60, seed=i)
        return [o.outputs[0].token_ids for o in contexts[i].generate(prompts, params)]

    alone = [written(0), written(1)]
    with ThreadPoolExecutor(2) as both:
        for _ in range(3):
            assert list(both.map(written, (0, 1))) == alone


@needs_native
def test_the_workspace_does_not_grow(engine_of: Build) -> None:
    llm = LLM(engine_of())
    program = llm.runtime.runner.program
    assert program is not None and llm.runtime.engine is not None
    stated = llm.runtime.engine.manifest["workspace_bytes"]
    assert program.workspace_bytes == stated
    llm.generate(["Once upon a time there was"] * 12, SamplingParams(max_tokens=30, temperature=0))
    llm.generate([[5] * 300], SamplingParams(max_tokens=3, temperature=0))
    assert program.workspace_bytes == stated


@needs_native
def test_a_model_is_recorded_and_counted() -> None:
    before = compile_counter.total()
    load("stories")
    assert compile_counter.total() > before
