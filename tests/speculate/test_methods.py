"""Every method, on a trained model and on random ones: the tokens of plain decoding, by `==`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.runtime import load_runtime
from penstock.speculate.suffix import SuffixProposer
from tests.models.heads.made import Made

from .eagle_reference import make_tensors, write
from .rounds import STORIES

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model"},
    "self": {"method": "self", "draft_layers": 1},
    "medusa": {"method": "medusa", "tree_tokens": 12},
    "eagle": {"method": "eagle", "tree_tokens": 12},
    "eagle3": {"method": "eagle3", "tree_tokens": 12},
}

Folder = Callable[[int], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Tiny checkpoints with 50 tokens, by their seed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(seed: int) -> Path:
        where = tmp_path_factory.mktemp(f"random{seed}")
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            max_position_embeddings=256, initializer_range=0.3, bos_token_id=None,
            eos_token_id=None, tie_word_embeddings=False,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(where)
        return Path(where)

    return make


HEADS: dict[tuple[str, str], Path] = {}
"""Heads of random weights by method, for the embedded model and for the random ones."""


@pytest.fixture(scope="module", autouse=True)
def _heads(tmp_path_factory: pytest.TempPathFactory) -> None:
    for target, hidden, vocab in (("stories", *STORIES), ("random", 32, 50)):
        where = tmp_path_factory.mktemp(f"heads-{target}")
        HEADS["medusa", target] = Made(hidden, vocab, dtype=torch.bfloat16).write(where)
        for method in ("eagle", "eagle3"):
            tensors = make_tensors(method == "eagle3", hidden=hidden, vocab=vocab)
            changes: dict[str, Any] = {
                "hidden_size": hidden,
                "vocab_size": vocab,
                "head_dim": 16,
            }
            if method == "eagle3":
                changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            HEADS[method, target] = write(
                tmp_path_factory.mktemp(f"{method}-{target}"), tensors, **changes
            )


def speculating(method: str, target: str | Path, draft: str | Path, **more: Any) -> LLM:
    chosen = dict(METHODS[method])
    if method == "draft_model":
        chosen["model"] = str(draft)
    if method in ("medusa", "eagle", "eagle3"):
        chosen["model"] = HEADS[method, "stories" if target == "stories" else "random"]
    return LLM(target, speculative_config={**chosen, **more.pop("speculative", {})}, **more)


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Some begin alike, and many repeat themselves."""
    rng = random.Random(count)
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    found = []
    for _ in range(count):
        phrase = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 8))]
        found.append(rng.choice([[], shared[:33], shared]) + phrase * rng.randint(1, 5))
    return found


def texts(llm: LLM, asked: list[list[int]], params: SamplingParams) -> list[Any]:
    outputs = llm.generate(asked, params)
    assert llm.stats()["used_blocks"] == 0
    return [[s.token_ids for s in output.outputs] for output in outputs]


CROWDED = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "num_blocks": 9, "max_model_len": 128}
"""Chunks, prefixes that are found, and too few blocks for all."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_greedy_tokens_are_those_of_plain_decoding(
    method: str, count: int, adaptive: bool, folder: Folder
) -> None:
    """On the embedded model and a random one, one at a time and 16, in want of blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    gave_way = 0
    for target, draft, vocab in (("stories", "stories", 500), (folder(0), folder(1), 50)):
        tokenizer = {} if vocab == 500 else {"skip_tokenizer_init": True}
        asked = prompts(count, vocab)
        want = texts(LLM(target, max_model_len=128, **tokenizer), asked, params)
        for more in ({"max_num_seqs": 1, "max_model_len": 128}, CROWDED):
            llm = speculating(
                method, target, draft, speculative={"adaptive": adaptive}, **more, **tokenizer
            )
            chosen = asked if count > 24 or more is CROWDED else asked[:8]
            assert texts(llm, chosen, params) == want[: len(chosen)]
            stats = llm.stats()
            assert stats["spec_decode_num_drafts"] or adaptive
            if more is CROWDED:
                gave_way += stats["preemptions"]
                assert stats["prefix_hit_rate"] > 0
    assert gave_way > 0


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_are_those_of_plain_decoding(method: str, folder: Folder) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, seed=3, n=2, repetition_penalty=1.2, presence_penalty=0.2,
        max_tokens=20, ignore_eos=True, logprobs=2,
    )  # fmt: skip
    target, asked = folder(0), prompts(10, 50)
    plain = LLM(target, skip_tokenizer_init=True, max_model_len=128)
    llm = speculating(
        method, target, folder(1), speculative={"adaptive": False},
        skip_tokenizer_init=True, max_model_len=128,
    )  # fmt: skip
    want, got = plain.generate(asked, params), llm.generate(asked, params)
    for a, b in zip(want, got, strict=True):
        assert [s.token_ids for s in a.outputs] == [s.token_ids for s in b.outputs]
        assert [s.logprobs for s in a.outputs] == [s.logprobs for s in b.outputs]


def test_a_draft_like_the_target_is_always_right() -> None:
    for params in (
        SamplingParams(temperature=0.0, max_tokens=64),
        SamplingParams(temperature=1.0, seed=1, max_tokens=64, min_p=0.05, frequency_penalty=0.3),
    ):
        llm = speculating("draft_model", "stories", "stories", speculative={"adaptive": False})
        llm.generate(["Once upon a time", "The dog", "Lily"], params)
        stats = llm.stats()
        assert (
            stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 99
        )


SAMPLES = 100_000


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_three_tokens_come_as_often_as_they_should(method: str, folder: Folder) -> None:
    """Chi-square of all triples against their probabilities, with top_p and penalties."""
    stats = pytest.importorskip("scipy.stats")
    target = folder(0)
    # whatever comes has stood there before, and samples write to blocks of their own at once
    prompt = [*range(50), *range(14)]
    options: dict[str, Any] = {
        "temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4,
    }  # fmt: skip
    chances = triples(target, prompt, options)
    llm = speculating(
        method, target, folder(1), speculative={"adaptive": False, "num_speculative_tokens": 3},
        skip_tokenizer_init=True, max_model_len=96, max_num_seqs=64,
    )  # fmt: skip
    seen = np.zeros_like(chances)
    params = SamplingParams(**options, n=50, max_tokens=3, ignore_eos=True, detokenize=False)
    for _ in range(SAMPLES // 5000):
        for output in llm.generate([prompt] * 100, params):
            for sample in output.outputs:
                seen[tuple(sample.token_ids)] += 1
    assert llm.stats()["spec_decode_num_draft_tokens"] > 1000
    expected = chances.ravel() * SAMPLES
    often = expected >= 5
    observed = np.append(seen.ravel()[often], seen.ravel()[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    if expected[-1] < 5:
        assert observed[-1] <= 15
        observed, expected = observed[:-1], expected[:-1] * (observed[:-1].sum() / SAMPLES)
        expected *= observed.sum() / expected.sum()
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 0.01


def triples(target: Path, prompt: list[int], options: dict[str, Any]) -> np.ndarray:
    """The probability of each three tokens, [50, 50, 50], by transformers in float64."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    found = np.zeros((50, 50, 50))
    firsts = after(model, [prompt], prompt, options)[0]
    for i in np.flatnonzero(firsts):
        seconds = after(model, [[*prompt, i]], prompt, options)[0]
        some = np.flatnonzero(seconds)
        thirds = after(model, [[*prompt, i, j] for j in some], prompt, options)
        for j, row in zip(some, thirds, strict=True):
            found[i, j] = firsts[i] * seconds[j] * row
    return found


def after(model: Any, rows: list[list[int]], prompt: list[int], options: Any) -> np.ndarray:
    """The distribution after each of some texts of one length, [R, 50]: penalties, then cuts."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor(np.array(rows))).logits[:, -1].numpy().copy()
    for row, text in zip(logits, rows, strict=True):
        for token in set(map(int, text)):
            factor = options["repetition_penalty"]
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in set(map(int, text[len(prompt) :])):
            row[token] -= options["presence_penalty"]
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / options["temperature"])
    weights /= weights.sum(-1, keepdims=True)
    for row in weights:
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= options["top_p"]]] = 0.0
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("ngram", "must be a dictionary, not str"),
        ({"method": "lookahead"}, "isn't one of ngram"),
        ({}, "needs a method"),
        ({"method": "ngram", "num_speculative_token": 3}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be a positive integer"),
        ({"method": "ngram", "model": "stories"}, "no use for model"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "above"),
        ({"method": "ngram", "prompt_lookup_max": 10**21}, "must be 1,024 at most"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 10**9}, "must be 1,024 at most"),
        ({"method": "suffix", "suffix_decoding_max_cached_tokens": 10**13}, "100,000,000 at"),
        ({"method": "ngram", "num_speculative_tokens": 10**9}, "must be 1,024 at most"),
        ({"model": 5}, "model must be a folder"),
        ({"model": "stories", "quantization": 5}, "quantization must be a name"),
        ({"method": "self", "draft_layers": 99}, "draft_layers=99"),
        ({"method": "self", "tree_width": 2}, "no use for tree_width=2"),
        ({"method": "medusa", "tree_width": 65}, "tree_width must be 64 at most"),
        ({"method": "medusa", "tree_tokens": 0}, "must be a positive integer"),
        ({"method": "self", "adaptive": 1}, "must be True or False"),
        ({"method": "ngram", "max_model_len": 64}, "no use for max_model_len"),
        ({"model": "stories", "max_model_len": 0}, "must be a positive integer"),
        ({"method": "self", "disable_by_batch_size": 0}, "must be a positive integer"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "a model runs in one process"),
        ({"method": "ngram", "suffix_decoding_max_spec_factor": 2}, "no use for suffix_decoding"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "no guess have a token"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0.04}, "at least 0.0417"),
        ({"model": "stories", "max_model_len": 1}, "has 2 tokens at least"),
        ({"method": "medusa", "tree_width": 9, "tree_tokens": 8}, "tree_width=9 is more than"),
        ({"method": "eagle", "tree_width": 11}, "which are 10 unless tree_tokens is given"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "1"}, "a number of at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, "at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1e9}, "must be 1,024 at most"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "must be 1 at most"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 1.5}, "an integer of"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "at least 0, not -1"),
    ],
)
def test_what_cannot_be_is_refused(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(speculative_config=config)


def test_what_fits_just_so_is_taken() -> None:
    """The neighbours of what is refused guess."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    some = {"method": "ngram", "adaptive": False, "prompt_lookup_max": 1024}
    with pytest.raises(ConfigError, match="repeats 29 tokens at most"):
        LLM(max_model_len=32, speculative_config={**some, "prompt_lookup_min": 30})
    for length, asked in (
        (30, {**some, "prompt_lookup_min": 29}),
        (25, {"method": "suffix", "adaptive": False, "suffix_decoding_max_spec_factor": 0.042}),
    ):
        llm = LLM(max_model_len=32, speculative_config=asked)
        assert llm.engine.speculation is not None
        likes = SamplingParams(max_tokens=None, logit_bias={5: 100.0}, ignore_eos=True)
        llm.generate([[5] * (length - 1)], likes)
        assert llm.stats()["spec_decode_num_drafts"] > 0, asked
    llm = LLM(speculative_config={"model": "stories", "max_model_len": 2, "adaptive": False})
    llm.generate([[5]], params)
    assert llm.stats()["spec_decode_num_drafts"] == 1
    LLM(speculative_config={"method": "eagle", "tree_width": 10})


def test_a_draft_for_more_positions_than_its_model_has(folder: Folder) -> None:
    draft = {"model": str(folder(1)), "max_model_len": 300}
    with pytest.raises(ConfigError, match="max_model_len=300 is more than the 256 positions"):
        LLM(folder(0), skip_tokenizer_init=True, speculative_config=draft)


def test_a_draft_for_the_beginning_only() -> None:
    """As many as plain decoding gives, and no guess behind position 40."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    draft = {"model": "stories", "num_speculative_tokens": 4, "adaptive": False}
    counts = []
    for limited in ({}, {"max_model_len": 40}):
        llm = LLM(max_model_len=128, speculative_config={**draft, **limited})
        (output,) = llm.generate([list(range(5, 25))], params)
        counts.append(llm.stats()["spec_decode_num_draft_tokens"])
        assert list(output.outputs[0].token_ids) == plain_tokens(params)
    assert counts[0] >= 44 and 0 < counts[1] <= 20  # positions 20 to 39 are guessed


def plain_tokens(params: SamplingParams) -> list[int]:
    (output,) = LLM(max_model_len=128).generate([list(range(5, 25))], params)
    return list(output.outputs[0].token_ids)


def test_no_drafts_beside_more_sequences() -> None:
    """Two at once have none; the one that goes on alone does."""
    asked = {"method": "self", "adaptive": False, "disable_by_batch_size": 1}
    llm = LLM(max_model_len=128, speculative_config={**asked, "num_speculative_tokens": 2})
    short, longer = (
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 30)
    )
    llm.generate([[5, 6, 7], [8, 9, 10]], [short, short])
    assert llm.stats()["spec_decode_num_drafts"] == 0
    llm.generate([[5, 6, 7], [8, 9, 10]], [short, longer])
    assert 0 < llm.stats()["spec_decode_num_drafts"] <= 18


def test_what_vllm_says_beside_is_taken() -> None:
    asked = {"method": "suffix", "draft_tensor_parallel_size": 1, "disable_by_batch_size": 32,
             "suffix_decoding_max_cached_requests": 100, "suffix_decoding_max_spec_factor": 2.0,
             "suffix_decoding_min_token_prob": 0.2}  # fmt: skip
    llm = LLM(speculative_config=asked)
    assert llm.engine.speculation is not None
    proposer = llm.engine.speculation.proposer
    assert isinstance(proposer, SuffixProposer)
    assert (proposer._factor, proposer._least, proposer.past._outputs) == (2.0, 0.2, 25)


def test_one_of_two_lengths_moves_the_others_default() -> None:
    for config in ({"prompt_lookup_max": 1}, {"prompt_lookup_min": 20}):
        llm = LLM(speculative_config={"method": "ngram", "adaptive": False, **config})
        llm.generate("the cat the cat the cat the", SamplingParams(temperature=0.0, max_tokens=4))
        assert llm.engine.speculation is not None and llm.engine.speculation.broken is None


def test_a_loaded_draft_model_is_not_taken_for_another() -> None:
    runtime = load_runtime(EngineConfig.of(speculative_config={"model": "stories"}))
    for other in ({"model": "elsewhere"}, {"model": "stories", "quantization": "w8a8"}):
        with pytest.raises(ConfigError, match="was loaded with method='draft_model' and"):
            Engine(EngineConfig.of(speculative_config=other), runtime)


def test_a_window_is_made_for_guesses_of_a_length() -> None:
    """An engine that takes over a cache with a window guesses no further, and leaves no trace."""
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    kivi: dict[str, Any] = {"kv_cache_dtype": "kivi", "kv_recent_window": 32, **limits}
    guess = {"method": "ngram", "num_speculative_tokens": 60}
    runtime = load_runtime(EngineConfig.of(**kivi, speculative_config=guess))
    assert runtime.runner.recent is not None
    Engine(EngineConfig.of(**limits, speculative_config=guess), runtime)
    assert runtime.runner.recent.unsure == 60
    Engine(EngineConfig.of(**limits), runtime)
    assert runtime.runner.recent.unsure == 0
    further = EngineConfig.of(**limits, speculative_config={**guess, "num_speculative_tokens": 200})
    with pytest.raises(ConfigError, match="needs 66 places for recent blocks"):
        Engine(further, runtime)
