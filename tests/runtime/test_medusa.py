"""Medusa heads beside their target: loaded, counted, refused, and right in what they guess."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.bench.reader import window_step
from penstock.bench.speculate.floors import draft_floor, memory_of
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from penstock.hardware import Hardware, Peaks
from penstock.kernels import native
from penstock.models import hub, load_model
from penstock.models.hub import resolve
from penstock.nn import KeptStates
from penstock.nn.medusa import MedusaHeads, MedusaSpec
from penstock.nn.norm import Norm
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.vocabulary import reduce_vocabulary
from penstock.roofline import Cost, StepSize
from penstock.runtime import Runtime, device, load_runtime
from penstock.runtime.beside import Target, keep_states
from penstock.runtime.drafting import draft_proposer
from penstock.runtime.engine_folder import EngineFolder
from penstock.runtime.medusa import Medusa
from penstock.sampling import SequenceSampling
from penstock.speculate import Computed, Wish
from tests.models.heads.made import Made, written
from tests.models.tiny import make_tiny
from tests.speculate.rounds import STORIES, D, V, successor, sure_heads, target

exact = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add nothing: after each token its successor, and nearly nothing else."""
    return target(tmp_path_factory.mktemp("rounds"), 0.0, 4.0, num_layers=2)


def loaded(model: str | Path, heads: Path, **kwargs: Any) -> tuple[EngineConfig, Runtime]:
    speculative = {"method": "medusa", "model": heads, **kwargs.pop("speculative", {})}
    kwargs = {"num_blocks": 16, "max_num_seqs": 4, "skip_tokenizer_init": True, **kwargs}
    config = EngineConfig.of(model=model, speculative_config=speculative, **kwargs)
    runtime = load_runtime(config)
    return runtime.settle(config), runtime


def test_a_target_that_scales_its_logits_is_refused(rounds: Path) -> None:
    decoder = load_model(rounds).model
    norm, formats = Norm(D, decoder.spec.norm, 0.5), decoder.formats
    spec = MedusaSpec(D, V, 2, 1)
    with pytest.raises(UnsupportedModelError, match=r"scales its logits \(by 0\.5\)"):
        MedusaHeads(spec, norm, decoder.head, formats, decoder.dtype, 4)


def kept_of(runtime: Runtime) -> Tensor:
    kept = runtime.model.model.kept
    assert kept is not None
    return kept.store


def draft_after(config: EngineConfig, runtime: Runtime, tokens: list[int]) -> Any:
    """After tokens of which the target computes all but the last."""
    proposer = draft_proposer(config, runtime)
    assert proposer is not None
    runtime.runner.forward(window_step(runtime, tokens[:-1], 1))
    rows = list(range(len(tokens) - 1))
    proposer.saw([Computed(tokens, tokens, [], 0, rows)])  # type: ignore[attr-defined]
    state = SequenceSampling(GREEDY, tokens, runtime.vocab_size, 0, frozenset())
    [draft] = proposer.propose([Wish(tokens, tokens, state, [], 4)])
    return draft


# ── what is guessed ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["each", "target"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("eager", [False, True])
def test_heads_that_know(kind: str, dtype: str, eager: bool, rounds: Path, tmp_path: Path) -> None:
    heads = sure_heads(tmp_path, kind)
    for width in (1, 3):
        config, runtime = loaded(
            rounds, heads, dtype=dtype, enforce_eager=eager, speculative={"tree_width": width}
        )
        for tokens in ([3, 4, 5, 41], [9, int(successor(torch.tensor(9)))]):
            draft = draft_after(config, runtime, tokens)
            best = max(draft.ways, key=len)
            want, token = [], torch.tensor(tokens[-2])
            for _ in range(5):
                token = successor(token)
                want.append(int(token))
            assert [draft.tokens[at] for at in best] == want[1:]  # after the one that came


@exact
@pytest.mark.parametrize("speculative", [{}, {"quantization": "w8a8"}, {"tree_width": 1}])
@pytest.mark.parametrize("kind", ["each", "target"])
def test_all_that_they_guess_is_accepted(
    speculative: dict[str, Any], kind: str, rounds: Path, tmp_path: Path
) -> None:
    """By the engine: chunks of a prompt, several sequences, each token of every longest way."""
    heads = sure_heads(tmp_path, kind)
    llm = LLM(
        rounds, skip_tokenizer_init=True, max_num_seqs=3, max_num_batched_tokens=24,
        num_gpu_blocks_override=24,
        speculative_config={
            "method": "medusa", "model": heads, "adaptive": False, **speculative,
        },
    )  # fmt: skip
    prompts = [[1, 2, 3], list(range(40)), [5], [7, 7, 7, 7]]
    for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        token, want = torch.tensor(prompt[-1]), []
        for _ in range(40):
            token = successor(token)
            want.append(int(token))
        assert list(output.outputs[0].token_ids) == want
    stats = llm.stats()
    drafts = stats["spec_decode_num_drafts"]
    assert stats["spec_decode_num_accepted_tokens"] > 3 * drafts > 0
    # 39 tokens after the first, in steps of five: only a text's last draft is shorter
    assert drafts == 4 * 8
    assert stats["spec_decode_num_accepted_tokens"] == 4 * (39 - 8)
    assert llm.engine.speculation is not None and llm.engine.speculation.broken is None


@exact
def test_by_programs_as_by_modules(tmp_path: Path) -> None:
    """The same bits, for as many rows as there are, beside the formula in float64."""
    torch.manual_seed(0)
    width, ids = STORIES
    states = torch.randn(70, width).to(torch.bfloat16)
    for number, projections in enumerate((True, False)):
        made = Made(width, ids, heads=2, layers=2, dtype=torch.bfloat16)
        tensors = made.first_layout(projections=projections)
        folder = written(tmp_path / str(number), tensors, {})
        found = []
        for eager in (False, True):
            _, runtime = loaded(
                "stories", folder, enforce_eager=eager, max_num_seqs=64, max_model_len=512
            )
            assert isinstance(runtime.draft, Medusa) and runtime.draft.runner is not None
            runner = runtime.draft.runner
            found.append(runner(states).clone())
            for rows in (1, 5, 32, 33, 70):
                assert torch.equal(runner(states[:rows]), found[-1][:rows])
        assert torch.equal(*found)
        decoder = runtime.model.model
        if not projections:
            matrix = decoder.head.weight_format.unpack(decoder.head.packed, ids, width)
            made.projections = [matrix] * 2
        features = (
            states.double()
            / (states.double().square().mean(-1, keepdim=True) + decoder.norm.spec.eps).sqrt()
        )
        want = made.logits(features * decoder.norm.parameter("weight").double())
        assert (found[0].double() - want).abs().max() < 0.03 * want.abs().max()


@exact
def test_another_proposer_sees_what_is_computed(rounds: Path, tmp_path: Path) -> None:
    """As one takes the place of another between a benchmark's rounds."""
    config, runtime = loaded(rounds, sure_heads(tmp_path, "each"), speculative={"adaptive": False})
    engine = Engine(config, runtime)
    assert engine.speculation is not None
    for _ in range(2):
        before = engine.speculation.counts.accepted_tokens
        fresh = draft_proposer(config, runtime)
        assert fresh is not None
        engine.speculation.proposer = fresh
        engine.add_request("a", [1, 2, 3], GREEDY)
        while engine.has_unfinished:
            engine.step()
        assert engine.speculation.counts.accepted_tokens == before + 31


# ── what is loaded ───────────────────────────────────────────────────────────────────────────────


def test_memory_and_what_is_said(
    rounds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heads = sure_heads(tmp_path, "each")
    with caplog.at_level(logging.INFO, "penstock"):
        config, runtime = loaded(rounds, heads, max_num_batched_tokens=40)
    assert "; guesses by 4 Medusa heads, bfloat16 (0.1 MiB)." in caplog.text
    assert config.speculative is not None and config.speculative.num_speculative_tokens == 4
    draft = runtime.draft
    assert draft is not None and kept_of(runtime).shape == (40, D)
    blocks = 4 * (2 * D * D + 4 * D)  # weights in bfloat16, biases in float32
    projections = 4 * 2 * 64 * D  # 50 rows in panels of 16
    assert draft.weight_bytes == blocks + projections
    assert runtime.layouts == (runtime.layout,) and runtime.runner.companions == ()
    assert memory_of(runtime)["draft"] == {
        "weight_bytes": blocks + projections, "kv_bytes_per_token": 0, "cache_bytes": 0,
    }  # fmt: skip
    assert isinstance(draft, Medusa) and draft.cost(0) == Cost(0, 0, {})
    flops = 4 * 2 * D * (D + V)
    matrices = blocks + projections - 4 * 4 * D
    assert draft.cost(3) == Cost(matrices, 0, {"bfloat16": 3 * flops})
    size = StepSize([9, 1, 5], [20, 20, 20], 15, drafted=12)  # two drafts, trees or not
    peaks = Peaks(1e9, 1e9, 0.0, 2, "now")
    floor = draft_floor(config, runtime, None)(size, peaks)
    assert floor == max(matrices / 1e9, 2 * flops / 1e9) and floor > 0
    # not committed yet when the cache is sized: states; features and logits of 4 rows, the last
    # head's once more
    later = 2 * 40 * D + 2 * 4 * D + 4 * 4 * 4 * V + 4 * 4 * V
    block = runtime.layout.bytes_per_block
    free = Hardware("a small one", 1, (), 1 << 40, available_bytes=20 * block + later)
    monkeypatch.setattr(device, "detect", lambda: free)
    options: dict[str, Any] = {"num_blocks": None, "max_num_batched_tokens": 40}
    assert loaded(rounds, heads, **options)[1].num_blocks == 18
    free = replace(free, available_bytes=20 * block + later - 1)
    assert loaded(rounds, heads, **options)[1].num_blocks == 17


def test_the_targets_head_in_fewer_bits(rounds: Path, tmp_path: Path) -> None:
    """Heads that are rounded have a copy of it; the target's logits are what they were."""
    heads = sure_heads(tmp_path, "target")
    plain, rounded = (
        loaded(rounds, heads, speculative={"quantization": q})[1] for q in (None, "w8a8")
    )
    assert isinstance(plain.draft, Medusa) and isinstance(rounded.draft, Medusa)
    assert not plain.draft.heads.projections
    [copy] = rounded.draft.heads.projections
    own = rounded.model.model.head
    assert copy is not own and copy.weight_format.name == "w8a8" != own.weight_format.name
    assert [n for m, n in rounded.draft.heads.matrices() if m is copy] == [4]
    step = window_step(plain, [1, 2, 3], 1)
    assert torch.equal(plain.runner.forward(step), rounded.runner.forward(step))


def test_as_many_heads_as_are_wanted(rounds: Path, tmp_path: Path) -> None:
    heads = sure_heads(tmp_path, "each")
    config, runtime = loaded(rounds, heads, speculative={"num_speculative_tokens": 2})
    assert isinstance(runtime.draft, Medusa) and len(runtime.draft.heads.heads) == 2
    assert draft_after(config, runtime, [1, 2, 3]).depth == 2
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=5, .* has 4 heads"):
        loaded(rounds, heads, speculative={"num_speculative_tokens": 5})
    asked = {"method": "medusa", "model": heads, "num_speculative_tokens": 4}
    limits: dict[str, Any] = {"max_num_seqs": 4}
    with pytest.raises(ConfigError, match="the runtime was loaded with 2 Medusa heads"):
        Engine(EngineConfig.of(speculative_config=asked, **limits), runtime)
    del asked["num_speculative_tokens"]
    engine = Engine(EngineConfig.of(speculative_config=asked, **limits), runtime)
    assert engine.config.speculative is not None
    assert engine.config.speculative.num_speculative_tokens == 2
    Engine(EngineConfig.of(**limits), runtime)  # or without


def test_what_does_not_go_together(rounds: Path, tmp_path: Path) -> None:
    heads = sure_heads(tmp_path / "heads", "each")
    other = Made(32, V).write(tmp_path / "other")
    with pytest.raises(ConfigError, match="hidden_size of 32, and the target has one of 64"):
        loaded(rounds, other)
    with pytest.raises(ConfigError, match="in bfloat16, and this one computes in float32"):
        loaded(rounds, heads, dtype="float32", speculative={"quantization": "w8a8"})
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        loaded(rounds, tmp_path / "nowhere")
    config, runtime = loaded(rounds, heads, max_num_batched_tokens=64)
    larger = EngineConfig.of(max_num_batched_tokens=65, max_num_seqs=4)
    with pytest.raises(ConfigError, match=r"=65, .* room for the states of 64 tokens"):
        Engine(larger, runtime)
    for changed in ({"model": other}, {"quantization": "w8a8"}):
        assert config.speculative is not None
        asked = replace(config, speculative=replace(config.speculative, **changed))
        with pytest.raises(ConfigError, match="was loaded with method='medusa' and"):
            draft_proposer(asked, runtime)
    plain = EngineConfig.of(model=rounds, num_blocks=16, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="method='medusa' takes a runtime that was loaded with"):
        draft_proposer(config, load_runtime(plain))


@pytest.mark.parametrize("method", ["medusa", "draft_model"])
def test_what_is_shipped(method: str, rounds: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Without a model: what comes with an embedded one, by its name; others have to be told."""
    without = {"method": method, "model": None}
    with pytest.raises(ConfigError, match=f"method='{method}' needs a model: .* {rounds}"):
        loaded(rounds, rounds, speculative=without)
    monkeypatch.setattr(hub, "_ASSETS", tmp_path)
    (tmp_path / "stories").symlink_to(rounds)
    with pytest.raises(ModelNotFoundError, match=r"'stories-.*' comes with penstock's wheel"):
        loaded("stories", rounds, speculative=without)
    if method == "medusa":
        sure_heads(tmp_path / "stories-medusa", "each")
    else:
        (tmp_path / "stories-draft").symlink_to(rounds)
    _, runtime = loaded("stories", rounds, speculative=without)
    assert runtime.draft is not None and runtime.draft.asked.model is None
    name = {"medusa": "stories-medusa", "draft_model": "stories-draft"}[method]
    assert resolve(name) == tmp_path / name
    _, runtime = loaded(rounds, rounds, speculative={"method": method, "model": name})
    assert runtime.draft is not None


@exact
def test_the_shipped_heads() -> None:
    """Those of the embedded model: what they guess is right often enough to be theirs."""
    prompts = ["Once upon a time", "Lily and Tom went to the park.", "Mom said"]
    plain = LLM("stories", num_gpu_blocks_override=24, max_model_len=512).generate(prompts, GREEDY)
    llm = LLM(
        "stories", num_gpu_blocks_override=24, max_model_len=512,
        speculative_config={"method": "medusa", "adaptive": False},
    )  # fmt: skip
    for one, other in zip(llm.generate(prompts, GREEDY), plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    stats = llm.stats()
    accepted = stats["spec_decode_num_accepted_tokens"] / stats["spec_decode_num_drafts"]
    assert accepted > 0.5  # 0.85 as they were trained


# ── other kinds of targets ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt-neox", "qwen3"])
def test_of_other_families(name: str, eager: bool, tmp_path: Path) -> None:
    """The states are transformers' last hidden states, whatever the norm; heads by the formula."""
    tiny = make_tiny(name, tmp_path / "target")
    config = tiny.oracle.config
    made = Made(config.hidden_size, config.vocab_size, heads=2)
    folder = made.write(tmp_path / "heads")
    _, runtime = loaded(
        tiny.folder, folder, dtype="float32", enforce_eager=eager, max_model_len=128
    )
    tokens = tiny.prompt[:40]
    with torch.inference_mode():
        features = tiny.oracle.base_model(tokens[None]).last_hidden_state[0]
    runtime.runner.forward(window_step(runtime, tokens.tolist(), 1))
    assert isinstance(runtime.draft, Medusa) and runtime.draft.runner is not None
    got = runtime.draft.runner(kept_of(runtime)[:40])
    assert (got.double() - made.logits(features)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads for the stories, whose head is theirs."""
    made = Made(*STORIES, heads=3, dtype=torch.bfloat16)
    return written(tmp_path_factory.mktemp("shared"), made.first_layout(projections=False), {})


@exact
def test_engine_folders(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step is recorded anew, over the mapped weights: bits and states of the checkpoint."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.pipeline.tuning.waited_s", lambda: 0.0)
    monkeypatch.setattr("penstock.pipeline.tuning._ENOUGH_S", 0.0)
    monkeypatch.setattr("penstock.pipeline.tuning._MOST_RUNS", 2)
    folder = tmp_path / "engine"
    build(BuildOptions("stories", folder, profile=(1, 8, 64), max_num_seqs=4))
    tokens = [5, 90, 700, 31, 8, 14]
    found = []
    for model in (folder, "stories"):
        config, runtime = loaded(model, shared, max_model_len=128)
        draft = draft_after(config, runtime, tokens)
        logits = runtime.runner.forward(window_step(runtime, tokens, 1)).clone()
        found.append((logits, kept_of(runtime)[: len(tokens)], draft.tokens, draft.parents))
        assert runtime.runner.program is not None
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert len(found[0][2]) == 6
    # what a compiled package computes inside can't be had
    engine = replace(EngineFolder.open(folder), forward="package")
    target = Target(folder, runtime.model, None, None, engine)
    with pytest.raises(ConfigError, match=r"gives its logits only\. Build the engine with --forw"):
        keep_states(config, target, (6,))
    eager = replace(config, model=replace(config.model, enforce_eager=True))
    assert isinstance(keep_states(eager, target, (6,)), KeptStates)


@exact
def test_a_reduced_vocabulary(shared: Path, tmp_path: Path) -> None:
    """Guesses are the tokenizer's ids, of those that are left; the engine takes them."""
    folder = tmp_path / "reduced"
    texts = ["Once upon a time there was a dog.", "The cat sat on the mat."]
    reduce_vocabulary("stories", folder, size=700, texts=texts)
    whole = Made(*STORIES, heads=3, dtype=torch.bfloat16).write(tmp_path / "whole")
    vocab_map = json.loads((folder / "config.json").read_text())
    assert vocab_map["vocab_size"] == 700
    for heads in (shared, whole):
        config, runtime = loaded(folder, heads, max_model_len=512)
        assert runtime.vocab_map is not None
        draft = draft_after(config, runtime, runtime.vocab_map.kept[:20].tolist())
        assert len(draft) == 6 and set(draft.tokens) <= set(runtime.vocab_map.kept.tolist())
        speculative = {"method": "medusa", "model": heads, "adaptive": False}
        options: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 512}
        llm = LLM(folder, speculative_config=speculative, **options)
        plain = LLM(folder, **options)
        got, want = (
            [output.outputs[0].token_ids for output in one.generate(texts, GREEDY)]
            for one in (llm, plain)
        )
        assert got == want and llm.stats()["spec_decode_num_draft_tokens"] > 100


def test_a_made_checkpoint_is_whole(rounds: Path) -> None:
    """The target of these tests says each token's successor, by transformers too."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(rounds)
    with torch.inference_mode():
        logits = model(torch.arange(V)[None]).logits[0]
    assert logits.argmax(-1).tolist() == successor(torch.arange(V)).tolist()
