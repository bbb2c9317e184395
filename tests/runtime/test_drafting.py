"""Draft models beside their targets: loaded, counted, compared, and right in what they guess."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.bench.reader import window_step
from penstock.cache import PagedLayout
from penstock.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.errors import ConfigError, EngineFolderError, OutOfCacheError, TokenizerError
from penstock.hardware import Hardware
from penstock.kernels import native
from penstock.models.hub import resolve
from penstock.pipeline.build import BuildOptions, build
from penstock.pipeline.vocabulary import reduce_vocabulary
from penstock.runtime import Runtime, device, load_runtime, plan_blocks, plan_swap
from penstock.runtime.draft_model import FittedLogits
from penstock.runtime.drafting import draft_proposer
from penstock.sampling import SequenceSampling
from penstock.speculate import Proposer, Wish
from penstock.speculate.draft_model import DraftModelProposer

STORIES = resolve("stories")
SPEC = json.loads((STORIES / "config.json").read_text())
LAYERS, IDS, LENGTH = (
    SPEC[key] for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings")
)
HEAD = SPEC["head_dim"]
BLOCK = 2 * 32 * LAYERS * SPEC["num_key_value_heads"] * HEAD * 2  # bytes in bfloat16
DRAFTED = {"method": "draft_model", "model": "stories"}
EARLY = {"method": "self"}
ALL_BUT_ONE = {**EARLY, "draft_layers": LAYERS - 1}
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1, seed=7,
    max_tokens=40, ignore_eos=True,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = ["Once upon a time", "A dog", "The little girl went to the park with her mother. " * 4]
exact = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")


def loaded(speculative: dict[str, Any], **kwargs: Any) -> tuple[EngineConfig, Runtime]:
    kwargs = {"num_blocks": 64, "max_num_seqs": 4, **kwargs}
    config = EngineConfig.of(speculative_config=speculative, **kwargs)
    runtime = load_runtime(config)
    return runtime.settle(config), runtime


def made(speculative: dict[str, Any], **kwargs: Any) -> tuple[Runtime, Proposer]:
    config, runtime = loaded(speculative, **kwargs)
    proposer = draft_proposer(config, runtime)
    assert proposer is not None and proposer.name == speculative["method"]
    return runtime, proposer


def accepted(
    runtime: Runtime, proposer: Proposer, llm: LLM, params: SamplingParams
) -> tuple[int, int]:
    """How many guesses are what `llm` says, and how many there are: sequences go on by what is
    right, and one token.
    """
    outputs = llm.generate(PROMPTS, params)
    texts = [list(output.prompt_token_ids) for output in outputs]
    goals = [[*t, *o.outputs[0].token_ids] for t, o in zip(texts, outputs, strict=True)]
    ids, seed = runtime.vocab_size, params.seed or 0
    states = [SequenceSampling(params, text, ids, seed, frozenset()) for text in texts]
    right = guesses = 0
    while all(len(t) < len(goal) - 5 for t, goal in zip(texts, goals, strict=True)):
        for text, goal, state, draft in zip(
            texts, goals, states, drafts(runtime, proposer, texts, states), strict=True
        ):
            guesses += len(draft)
            for token in [*draft, -1]:
                right += token == goal[len(text)]
                text.append(goal[len(text)])
                state.append(text[-1])
                if token != text[-1]:
                    break
    return right, guesses


def drafts(
    runtime: Runtime, proposer: Proposer, texts: list[list[int]], states: list[SequenceSampling]
) -> list[list[int]]:
    """By a model all at once, in blocks of their own; by the first layers one after the other, each
    after the target has computed it.
    """
    wishes = [
        Wish(texts[i], texts[i], state, list(range(20 * i, 20 * i + 20)), 5)
        for i, state in enumerate(states)
    ]
    if proposer.name == "draft_model":
        return [draft.tokens for draft in proposer.propose(wishes)]
    found = []
    for wish in wishes:
        runtime.runner.forward(window_step(runtime, wish.tokens, 1))
        [draft] = proposer.propose([replace(wish, blocks=list(range(20)))])
        found.append(draft.tokens)
    return found


# ── what is guessed ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM("stories", max_num_seqs=4, num_gpu_blocks_override=64)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stories, whose last layer does little."""
    return altered(tmp_path_factory.mktemp("calm") / "model", last=0.1)


@exact
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("eager", [False, True])
def test_the_target_as_its_own_draft(params: SamplingParams, eager: bool, stories: LLM) -> None:
    """Every guess is right: same logits, same penalties, same random numbers."""
    runtime, proposer = made(DRAFTED, enforce_eager=eager)
    right, guesses = accepted(runtime, proposer, stories, params)
    assert right == guesses > 60


@exact
@pytest.mark.parametrize(
    ("speculative", "kwargs"),
    [
        ({**DRAFTED, "quantization": "w4a8"}, {}),
        (DRAFTED, {"kv_cache_dtype": "int4"}),
        (ALL_BUT_ONE, {}),
        (ALL_BUT_ONE, {"enforce_eager": True}),
        (ALL_BUT_ONE, {"kv_cache_dtype": "int8"}),
    ],
)
def test_a_draft_that_is_nearly_the_target(
    speculative: dict[str, Any], kwargs: dict[str, Any], stories: LLM, calm: Path
) -> None:
    """Most guesses are right, and not all. `self` reads what only the target writes: the prompt."""
    if speculative["method"] == "self":
        runtime, proposer = made(speculative, model=calm, **kwargs)
        target = LLM(calm, num_gpu_blocks_override=64, max_num_seqs=4, **kwargs)
    else:
        (runtime, proposer), target = made(speculative, **kwargs), stories
    right, guesses = accepted(runtime, proposer, target, SAMPLED)
    assert guesses * 0.2 < right < guesses


@exact
def test_how_many_layers_guess(caplog: pytest.LogCaptureFixture) -> None:
    for chosen, used in ((None, max(1, LAYERS // 4)), (3, 3)):
        with caplog.at_level(logging.INFO, "penstock"):
            made({**EARLY, "draft_layers": chosen})
        assert f"A draft by {used} layers is one native call of {6 * used + 3} op" in caplog.text
    for wrong in (LAYERS, 40):
        config, runtime = loaded({**EARLY, "draft_layers": wrong})
        said = rf"draft_layers={wrong}, .* has {LAYERS} layers.* 1 to {LAYERS - 1}\."
        with pytest.raises(ConfigError, match=said):
            draft_proposer(config, runtime)


def test_a_window_cannot_be_guessed_over() -> None:
    config, runtime = loaded(EARLY, kv_cache_dtype="kivi")
    with pytest.raises(ConfigError, match="method='self' can't go with kv_cache_dtype='kivi'"):
        draft_proposer(config, runtime)


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_heads_are_no_draft_model(method: str, tmp_path: Path) -> None:
    """vLLM finds out by itself; here an error says which method it is."""
    heads = resolve(f"stories-{method.rstrip('3')}")
    if method == "eagle3":
        shutil.copytree(heads, tmp_path / "heads")
        heads = tmp_path / "heads"
        tensors = load_file(heads / "model.safetensors")
        save_file(tensors | {"d2t": torch.zeros(8)}, heads / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"no draft model: set method='{method}'\."):
        loaded({"model": str(heads)})


@pytest.mark.parametrize(("asked", "holds"), [("medusa", "eagle"), ("eagle", "medusa")])
def test_heads_of_the_other_kind(asked: str, holds: str) -> None:
    with pytest.raises(ConfigError, match=rf"holds .* set method='{holds}'\."):
        loaded({"method": asked, "model": f"stories-{holds}"})


def test_a_revision_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(resolve("stories-draft"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config, runtime = loaded({"model": "org/draft", "revision": "v2"})
    assert asked == [("org/draft", "v2")] and runtime.draft is not None
    draft_proposer(config, runtime)
    other = EngineConfig.of(speculative_config={"model": "org/draft", "revision": "v3"})
    with pytest.raises(ConfigError, match="revision='v2', not 'v3'"):
        draft_proposer(other, runtime)
    with pytest.raises(ConfigError, match="is of the hub, but"):
        loaded({"model": str(STORIES), "revision": "v2"})


def test_other_methods_and_none() -> None:
    config, runtime = loaded({"method": "ngram"})
    assert draft_proposer(config, runtime) is None and runtime.draft is None
    assert draft_proposer(EngineConfig(), runtime) is None
    late = EngineConfig.of(speculative_config=DRAFTED)
    with pytest.raises(ConfigError, match="loaded with this speculative_config"):
        draft_proposer(late, runtime)


# ── the cache of both ────────────────────────────────────────────────────────────────────────────


def test_both_models_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Hardware("a small one", 1, (), 1 << 40, available_bytes=30 * BLOCK)
    monkeypatch.setattr(device, "detect", lambda: machine)
    one = loaded({"method": "ngram"}, num_blocks=None, max_model_len=512)[1]
    assert one.num_blocks == int(30 * 0.9) and one.layouts == (one.layout,)
    assert one.cache_bytes == 27 * BLOCK
    with caplog.at_level(logging.INFO, "penstock"):
        _, both = loaded(DRAFTED, num_blocks=None, kv_cache_dtype="int8", max_model_len=256)
    assert both.draft is not None and both.draft.layout.dtype is torch.int8  # as the target's
    assert "; drafts by llama, bfloat16, whose part of each block is in int8 (" in caplog.text
    block = BLOCK * (HEAD + 2) // (2 * HEAD)  # a byte each, and a scale of two
    assert [layout.bytes_per_block for layout in both.layouts] == [block] * 2
    assert both.num_blocks == 27 * BLOCK // (2 * block)
    assert both.cache_bytes == both.num_blocks * 2 * block
    assert both.draft.runner.kv[0][0].shape[0] == both.num_blocks
    with pytest.raises(OutOfCacheError, match=r"Lower max_model_len to 416\."):  # 13 blocks
        loaded(DRAFTED, num_blocks=None)
    with pytest.raises(OutOfCacheError, match=r"num_blocks=16 need .* At most 15 fit"):
        loaded(DRAFTED, num_blocks=16, max_model_len=512)


def test_a_plan_for_several_caches() -> None:
    target = PagedLayout(((4, 64),), torch.bfloat16, 32)  # 32 KiB a block
    draft = PagedLayout(((1, 64),), torch.bfloat16, 32)  # 8 KiB
    kivi = PagedLayout(((4, 64),), torch.uint8, 32, 128, 20)
    for layout in (target, kivi):
        for available in (1 << 20, 12345678, 3 << 20):
            found = plan_blocks(layout, CacheConfig(), 64, 1000, available, (draft,))
            budget = int(available * 0.9)
            assert layout.nbytes(found) + draft.nbytes(found) <= budget
            assert layout.nbytes(found + 1) + draft.nbytes(found + 1) > budget
            alone = plan_blocks(layout, CacheConfig(), 64, 1000, available)
            assert alone == layout.blocks_in(budget) > found
    limits = SchedulerConfig(swap_space=1)
    assert plan_swap(target, limits, 1 << 40) == (1 << 30) // (32 << 10)
    assert plan_swap(target, limits, 1 << 40, (draft,)) == (1 << 30) // (40 << 10)


def test_the_drafts_part_of_a_block_moves_with_the_targets() -> None:
    config, runtime = loaded(DRAFTED, num_blocks=20, max_model_len=512)
    proposer = draft_proposer(config, runtime)
    assert runtime.draft is not None and isinstance(proposer, DraftModelProposer)
    parts = [part for kv in (runtime.runner.kv, runtime.draft.runner.kv) for x in kv for part in x]
    for part in parts:
        part.copy_(torch.randn(part.shape))
    held = [part.clone() for part in parts]
    for block in range(20):
        proposer.stamps.set(block, 100 + block)
    runtime.runner.copy([(3, 9), (4, 10)])
    runtime.runner.swap_out([(5, 0), (6, 1)])
    runtime.runner.swap_in([(1, 5), (0, 6)])
    source = list(range(20))
    source[9], source[10], source[5], source[6] = 3, 4, 6, 5
    assert all(torch.equal(part, was[source]) for part, was in zip(parts, held, strict=True))
    assert proposer.stamps.of(range(20)) == [100 + block for block in source]


def test_each_engine_begins_anew() -> None:
    config, runtime = loaded(DRAFTED)
    assert runtime.draft is not None
    first, second = draft_proposer(config, runtime), draft_proposer(config, runtime)
    assert isinstance(first, DraftModelProposer) and isinstance(second, DraftModelProposer)
    assert runtime.draft.companion.stamps is second.stamps is not first.stamps


# ── which models go together ─────────────────────────────────────────────────────────────────────


def altered(folder: Path, rows: int = IDS, last: float = 1.0, **config: Any) -> Path:
    """The stories with so many rows of the embedding, and other entries in config.json.

    last: what the last layer's share of the residual is multiplied with.
    """
    shutil.copytree(STORIES, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    padding = torch.zeros(max(rows - IDS, 0), SPEC["hidden_size"], dtype=torch.bfloat16)
    tensors[name] = torch.cat([tensors[name][:rows], padding])
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.{LAYERS - 1}.{part}.weight"] *= last
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": rows, **config}))
    return folder


@exact
@pytest.mark.parametrize("bigger", ["draft", "target"])
def test_padding_rows_may_differ(bigger: str, tmp_path: Path, stories: LLM) -> None:
    padded = altered(tmp_path / "padded", IDS + 32)
    models = {"draft": padded} if bigger == "draft" else {"target": padded}
    draft, target = models.get("draft", "stories"), models.get("target", "stories")
    runtime, proposer = made({**DRAFTED, "model": draft}, model=target)
    assert runtime.draft is not None
    right, guesses = accepted(runtime, proposer, stories, GREEDY)
    assert right == guesses > 60
    fitted = FittedLogits(runtime.draft.runner, runtime.draft.num_ids, runtime.vocab_size)
    for rows in (1, 3, 2):
        step = window_step(runtime, list(range(5, 6 + rows)), 1)
        logits = fitted(step).clone()
        own = runtime.draft.runner.forward(step)
        assert logits.shape == (rows, runtime.vocab_size)
        assert torch.equal(logits[:, :IDS], own[:, :IDS])
        assert (logits[:, IDS:] == -torch.inf).all()  # of the target's own padding: no guess
        with torch.inference_mode():
            fitted(step).fill_(9.0)  # as a caller's processor may


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    other = altered(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    vocab = json.loads(text)
    pieces = vocab["model"]["vocab"]
    names = {number: piece for piece, number in pieces.items()}
    pieces[names[1000]], pieces[names[1001]] = 1001, 1000
    (other / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(
        ConfigError, match=rf"id 1000 is .* \(vocabularies of {IDS:,} and {IDS:,}\)"
    ):
        loaded({**DRAFTED, "model": other})
    loaded({**DRAFTED, "model": other}, skip_tokenizer_init=True)  # whoever skips it knows
    padded = altered(tmp_path / "padded", IDS + 32)
    said = f"of {IDS + 32:,} ids and its target one of {IDS:,}, and no tok"
    with pytest.raises(ConfigError, match=said):
        loaded({**DRAFTED, "model": padded}, skip_tokenizer_init=True)
    with pytest.raises(TokenizerError, match=f"the model's vocabulary has {IDS - 96} ids"):
        loaded({**DRAFTED, "model": altered(tmp_path / "cut", IDS - 96)})
    for file in padded.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="no tokenizers say whether that is padding"):
        loaded({**DRAFTED, "model": padded})


@exact
def test_reduced_vocabularies(tmp_path: Path, calm: Path) -> None:
    """Both models' or none's; the first layers of a reduced one need nothing."""
    folder = tmp_path / "reduced"
    reduce_vocabulary(calm, folder, size=700, texts=PROMPTS)
    for draft, target in ((folder, "stories"), ("stories", folder)):
        with pytest.raises(ConfigError, match=rf"700 of {IDS:,}.* Reduce both to the same ids, or"):
            loaded({**DRAFTED, "model": draft}, model=target)
    llm = LLM(folder, num_gpu_blocks_override=64, max_num_seqs=4)
    right, guesses = accepted(*made({**DRAFTED, "model": folder}, model=folder), llm, SAMPLED)
    assert right == guesses > 60
    right, guesses = accepted(*made(ALL_BUT_ONE, model=folder), llm, SAMPLED)
    assert guesses * 0.2 < right < guesses


def test_a_shorter_draft_model(tmp_path: Path) -> None:
    short = altered(tmp_path / "short", max_position_embeddings=64)
    runtime, proposer = made({**DRAFTED, "model": short})
    assert runtime.draft is not None
    assert (runtime.model.max_model_len, runtime.draft.model.max_model_len) == (LENGTH, 64)
    state = SequenceSampling(GREEDY, [5], runtime.vocab_size, 0, frozenset())
    for length, count in ((58, 5), (62, 3), (64, 1), (65, 0)):
        wish = Wish(object(), list(range(9, 9 + length)), state, list(range(20)), 5)
        assert [len(draft) for draft in proposer.propose([wish])] == [count]


def test_its_weights_and_dtype_are_its_own() -> None:
    _, runtime = loaded({**DRAFTED, "quantization": "w8a8"}, dtype="float32")
    assert runtime.draft is not None and runtime.draft.model.model.formats.name == "w8a8"
    assert runtime.model.model.formats.name == "float32"
    assert [layout.dtype for layout in runtime.layouts] == [torch.float32, torch.bfloat16]


@exact
def test_engine_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stories: LLM) -> None:
    """As a target whose first layers guess, and as a draft, whose weights are mapped."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.pipeline.tuning.waited_s", lambda: 0.0)
    monkeypatch.setattr("penstock.pipeline.tuning._ENOUGH_S", 0.0)
    monkeypatch.setattr("penstock.pipeline.tuning._MOST_RUNS", 2)
    folder = tmp_path / "engine"
    build(BuildOptions("stories", folder, profile=(1, 8, 128), max_num_seqs=4))
    right, guesses = accepted(*made({**DRAFTED, "model": folder}), stories, SAMPLED)
    assert right == guesses > 60
    runtime, proposer = made(ALL_BUT_ONE, model=folder)
    of_folder = accepted(runtime, proposer, stories, SAMPLED)
    assert of_folder == accepted(*made(ALL_BUT_ONE), stories, SAMPLED)
    runtime, proposer = made({**DRAFTED, "model": folder}, model=folder)
    right, guesses = accepted(runtime, proposer, stories, GREEDY)
    assert right == guesses > 20  # what is caught up in a call depends on what was timed
    with pytest.raises(ConfigError, match="quantization='w8a8', but the engine"):
        loaded({**DRAFTED, "model": folder, "quantization": "w8a8"})
    free = (folder / "weights.bin").stat().st_size + 40 * BLOCK  # mapped pages count as free
    machine = Hardware("a small one", 1, (), 1 << 40, available_bytes=free)
    monkeypatch.setattr(device, "detect", lambda: machine)
    _, runtime = loaded({**DRAFTED, "model": folder}, num_blocks=None, max_model_len=512)
    assert runtime.num_blocks == 18 == int(40 * 0.9) // 2
    (folder / "weights.bin").unlink()
    with pytest.raises(EngineFolderError, match="Build it again"):
        loaded({**DRAFTED, "model": folder})
