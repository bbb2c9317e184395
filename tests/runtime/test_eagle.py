"""EAGLE heads beside their target: in the engine, in what is loaded, and with other targets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.bench.reader import window_step
from penstock.bench.speculate.floors import draft_floor, memory_of
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, ModelNotFoundError
from penstock.hardware import Peaks
from penstock.kernels import native
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.vocabulary import reduce_vocabulary
from penstock.roofline import StepSize, floor_s
from penstock.runtime import Runtime, load_runtime
from penstock.runtime.drafting import draft_proposer
from penstock.runtime.eagle import PlacedEagle
from penstock.sampling import SequenceSampling
from penstock.speculate import Computed, Wish
from penstock.speculate.eagle import EagleProposer
from tests.speculate.eagle_reference import make_tensors, write
from tests.speculate.rounds import STORIES, D, V, successor, sure_head, target

exact = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LIVELY = SamplingParams(
    temperature=0.9, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True, repetition_penalty=1.05
)
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After each token its successor, and nearly nothing else."""
    return target(tmp_path_factory.mktemp("rounds"), 0.0, 4.0)


@pytest.fixture(scope="module")
def wavering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Often the successor, and often what the text before makes of it."""
    return target(tmp_path_factory.mktemp("wavering"), 0.08, 0.6)


def made(folder: Path, fuses: bool, hidden: int = D, vocab: int = V) -> Path:
    """A head of random weights, of a target's sizes."""
    tensors = make_tensors(fuses, hidden=hidden, vocab=vocab)
    chosen = {AUX: [0, 1, 3]} if fuses else {}
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "head_dim": 16}
    return write(folder, tensors, **sizes, **chosen)


def llm_of(model: Path | str, head: Path | None, method: str = "eagle", **kwargs: Any) -> LLM:
    asked = {"method": method, "model": head, "adaptive": False, **kwargs.pop("speculative", {})}
    options = {"num_gpu_blocks_override": 40, "max_num_seqs": 4, **kwargs}
    return LLM(model, speculative_config=None if head is None else asked, **options)


def loaded(model: Path | str, head: Path, **kwargs: Any) -> tuple[EngineConfig, Runtime]:
    speculative = {"method": "eagle", "model": head, **kwargs.pop("speculative", {})}
    kwargs = {"num_blocks": 16, "max_num_seqs": 4, "skip_tokenizer_init": True, **kwargs}
    config = EngineConfig.of(model=model, speculative_config=speculative, **kwargs)
    runtime = load_runtime(config)
    return runtime.settle(config), runtime


def answers(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> list[list[int]]:
    found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    assert llm.engine.speculation is None or llm.engine.speculation.broken is None
    return found


# ── in the engine ────────────────────────────────────────────────────────────────────────────────


@exact
@pytest.mark.parametrize("params", [GREEDY, replace(LIVELY, repetition_penalty=1.0)])
@pytest.mark.parametrize(
    "speculative",
    [{"tree_width": 1}, {"tree_width": 3}, {"tree_width": 2, "quantization": "w8a8"}],
)
def test_all_that_a_sure_head_guesses_is_accepted(
    params: SamplingParams, speculative: dict[str, Any], rounds: Path, tmp_path: Path
) -> None:
    """Chunks of a prompt, several sequences, each token of every longest way."""
    head = sure_head(tmp_path / "head")
    speculative = {"num_speculative_tokens": 4, **speculative}
    llm = llm_of(
        rounds, head, skip_tokenizer_init=True, max_num_batched_tokens=32, speculative=speculative
    )
    prompts = [[1, 2, 3], list(range(40)), [5], [7, 7, 7, 7]]
    for got, prompt in zip(answers(llm, prompts, params), prompts, strict=True):
        token, want = torch.tensor(prompt[-1]), []
        for _ in range(40):
            token = successor(token)
            want.append(int(token))
        assert got == want
    stats = llm.stats()
    # 39 tokens after the first, in steps of five: only a text's last draft is shorter
    assert stats["spec_decode_num_drafts"] == 4 * 8
    assert stats["spec_decode_num_accepted_tokens"] == 4 * (39 - 8)


@exact
@pytest.mark.parametrize("params", [GREEDY, LIVELY])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 9, "max_model_len": 128},  # too few: some are preempted
        {"kv_cache_dtype": "int8", "max_num_batched_tokens": 30},
        {"enable_prefix_caching": True, "max_num_seqs": 2},
    ],
)
def test_the_output_is_that_of_plain_decoding(
    params: SamplingParams, width: int, options: dict[str, Any], wavering: Path, tmp_path: Path
) -> None:
    """Where some guesses are right and some aren't: other ways than the first are gone on with."""
    head = sure_head(tmp_path / "head", noise=0.008)
    options = {"skip_tokenizer_init": True, **options}
    prompts = [[1, 2, 3], list(range(40)), [5], [9, 8, 7] * 15, list(range(40))]
    plain = llm_of(wavering, None, **options)
    llm = llm_of(wavering, head, speculative={"tree_width": width}, **options)
    assert answers(llm, prompts, params) == answers(plain, prompts, params)
    assert answers(llm, prompts[::-1], params) == answers(plain, prompts[::-1], params)
    stats = llm.stats()
    tried, came = (stats[f"spec_decode_num_{x}_tokens"] for x in ("draft", "accepted"))
    assert 0.05 * tried < came < 0.95 * tried


@exact
@pytest.mark.parametrize("width", [1, 3])
def test_what_comes_is_what_the_controller_cares_for(
    width: int, wavering: Path, tmp_path: Path
) -> None:
    """Adaptive: drafts now and then, of the lengths that pay; the output doesn't know."""
    head = sure_head(tmp_path / "head")
    llm = llm_of(
        wavering, head, skip_tokenizer_init=True,
        speculative={"tree_width": width, "adaptive": True},
    )  # fmt: skip
    plain = llm_of(wavering, None, skip_tokenizer_init=True)
    params = replace(LIVELY, max_tokens=120)
    prompts = [[1, 2, 3], [4] * 30]
    assert answers(llm, prompts, params) == answers(plain, prompts, params)
    assert llm.stats()["spec_decode_num_drafts"] > 0


@exact
def test_several_samples_of_a_prompt(wavering: Path, tmp_path: Path) -> None:
    head = sure_head(tmp_path / "head")
    params = replace(LIVELY, n=3)
    found = []
    for one in (head, None):
        llm = llm_of(wavering, one, skip_tokenizer_init=True)
        [output] = llm.generate([list(range(37))], params)
        found.append([list(sample.token_ids) for sample in output.outputs])
    assert found[0] == found[1]


# ── what is loaded ───────────────────────────────────────────────────────────────────────────────


def test_memory_and_what_is_said(
    rounds: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = sure_head(tmp_path / "head")
    with caplog.at_level(logging.INFO, "penstock"):
        _, runtime = loaded(rounds, head, max_num_batched_tokens=64)
    assert "; drafts by an EAGLE head, bfloat16, whose part of each block is in" in caplog.text
    placed = runtime.draft
    assert isinstance(placed, PlacedEagle)
    matrices = (
        2 * D * D + 128 * D + D * 64 + 2 * 48 * D + D * 64
    )  # of fc two, and 48 columns are 64
    norms, rotary = 4 * D, 4 * 256 * 32
    assert placed.weight_bytes == 2 * matrices + norms + rotary
    own = placed.layout
    assert runtime.layouts == (runtime.layout, own) and own.heads == ((1, 32),)
    assert memory_of(runtime)["draft"]["kv_bytes_per_token"] == 2 * 2 * 32
    assert runtime.runner.companions == (placed.companion,)
    # four ways of four sequences, each in two blocks behind the pool's sixteen
    assert placed.kv[0][0].shape[0] == 16 + 4 * 4 * 2
    plain = loaded(rounds, head, max_num_batched_tokens=64, speculative={"tree_width": 1})
    assert isinstance(plain[1].draft, PlacedEagle) and plain[1].draft.kv[0][0].shape[0] == 16


def test_what_a_draft_costs(rounds: Path, tmp_path: Path) -> None:
    """All matrices are read in each pass, EAGLE-3's fc in the first only; a row for each way."""
    of_layer = 128 * D + D * 64 + 2 * 96 * D + D * 96
    for fuses in (False, True):
        head = made(tmp_path / str(fuses), fuses)
        method = "eagle3" if fuses else "eagle"
        config, runtime = loaded(rounds, head, speculative={"method": method, "tree_width": 3})
        assert isinstance(runtime.draft, PlacedEagle)
        costs = list(runtime.draft.costs([10, 20], 3))
        mixing = [128 * D] * 3 if fuses else [2 * D * D] * 3
        mixing[0] += 3 * D * D if fuses else 0
        rows = len(range(0, V, 3)) if fuses else V
        for cost, own, ways in zip(costs, mixing, (1, 3, 3), strict=True):
            matrices = of_layer + own + rows * D
            assert 2 * matrices <= cost.weight_bytes < 2.3 * matrices  # columns are padded
            multiplied = sum(cost.products.values()) - 2 * 2 * ways * matrices
            seen = {1: 30, 3: 3 * 30}[ways]  # and a few more at later depths
            assert 4 * 64 * seen <= multiplied <= 4 * 64 * (seen + 4 * 2 * ways)
        floor = draft_floor(config, runtime, None)
        size = StepSize([4, 1], [13, 20], 5, drafted=3)
        peaks = Peaks(1e9, 1e9, 1e9, 1, "2026-01-01T00:00:00", 1e9)
        want = sum(floor_s(cost, peaks) for cost in runtime.draft.costs([10], 3))
        assert floor(size, peaks) == want > 0


def test_what_does_not_go_together(rounds: Path, tmp_path: Path) -> None:
    head = sure_head(tmp_path / "head")
    with pytest.raises(ConfigError, match="runs in float32, whose states it reads"):
        loaded(rounds, head, dtype="float32", speculative={"quantization": "w8a8"})
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        loaded(rounds, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="method='eagle' needs a model: a folder"):
        loaded(rounds, head, speculative={"model": None})
    with pytest.raises(ConfigError, match="holds an EAGLE-1 or 2 head: set method='eagle'"):
        loaded(rounds, head, speculative={"method": "eagle3"})
    config, runtime = loaded(rounds, head, speculative={"tree_width": 2})
    asked = replace(config.speculative, tree_width=5)  # type: ignore[type-var]
    wider = replace(config, speculative=asked)
    with pytest.raises(ConfigError, match="5 beside each other, of 4 sequences, need 40 blocks"):
        Engine(wider, runtime)
    many = replace(config, scheduler=replace(config.scheduler, max_num_seqs=300))
    with pytest.raises(ConfigError, match="of 300 sequences, need 1200 blocks and 600 rows"):
        draft_proposer(many, runtime)


# ── other kinds of targets ───────────────────────────────────────────────────────────────────────


@exact
def test_engine_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is recorded anew, over the mapped weights: guesses are those of the checkpoint."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.pipeline.tuning.waited_s", lambda: 0.0)
    monkeypatch.setattr("penstock.pipeline.tuning._ENOUGH_S", 0.0)
    monkeypatch.setattr("penstock.pipeline.tuning._MOST_RUNS", 2)
    build(BuildOptions("stories", tmp_path / "engine", profile=(1, 8, 64), max_num_seqs=4))
    for method in ("eagle", "eagle3"):
        head = made(tmp_path / method, method == "eagle3", *STORIES)
        found = []
        for model in (tmp_path / "engine", "stories"):
            config, runtime = loaded(
                model, head, max_model_len=128, max_num_batched_tokens=64,
                speculative={"method": method, "tree_width": 2},
            )  # fmt: skip
            proposer = draft_proposer(config, runtime)
            assert isinstance(proposer, EagleProposer)
            text = list(range(5, 17))
            blocks = [1, 2]
            runtime.runner.forward(window_step(runtime, text[:-1], 1))
            proposer.saw([Computed(text, text, blocks, 0, list(range(11)))])
            state = SequenceSampling(GREEDY, text, runtime.vocab_size, 0, frozenset())
            [draft] = proposer.propose([Wish(text, text, state, blocks, 4)])
            found.append((draft.tokens, draft.parents, draft.chances))
        assert found[0] == found[1] and len(found[0][0]) == 10


@exact
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_reduced_vocabulary(method: str, tmp_path: Path) -> None:
    """Guesses are the tokenizer's ids, of those that are left; chains and trees."""
    folder = tmp_path / "reduced"
    texts = ["Once upon a time there was a dog.", "The cat sat on the mat."]
    reduce_vocabulary("stories", folder, size=700, texts=texts)
    head = made(tmp_path / "head", method == "eagle3", *STORIES)
    plain = answers(llm_of(folder, None), texts, GREEDY)
    for width in (1, 3):
        llm = llm_of(folder, head, method, speculative={"tree_width": width})
        assert answers(llm, texts, GREEDY) == plain
        assert llm.stats()["spec_decode_num_draft_tokens"] > 100
