"""Every method, on a trained model and on random ones: the tokens of plain decoding, by `==`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.runtime import load_runtime
from penstock.speculate.suffix import SuffixProposer
from tests.models.heads.made import Made

from .eagle_reference import make_tensors, write
from .rounds import STORIES
from .test_distributions import MADE
from .test_distributions import target as successors

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
"""Heads of random weights by method, for the embedded model and for the random ones; for the first
only where none come along."""


@pytest.fixture(scope="module", autouse=True)
def _heads(tmp_path_factory: pytest.TempPathFactory) -> None:
    HEADS["medusa", "random"] = Made(32, 50, dtype=torch.bfloat16).write(
        tmp_path_factory.mktemp("medusa-random")
    )
    for method, target in (("eagle", "random"), ("eagle3", "random"), ("eagle3", "stories")):
        hidden, vocab = STORIES if target == "stories" else (32, 50)
        tensors = make_tensors(method == "eagle3", hidden=hidden, vocab=vocab)
        changes: dict[str, Any] = {"hidden_size": hidden, "vocab_size": vocab, "head_dim": 16}
        if method == "eagle3":
            changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        HEADS[method, target] = write(
            tmp_path_factory.mktemp(f"{method}-{target}"), tensors, **changes
        )


def speculating(method: str, target: str | Path, guesser: str | Path | None, **more: Any) -> LLM:
    """guesser: a draft model; or heads, where None says those of random weights, or those that
    come along.
    """
    chosen = dict(METHODS[method])
    kind = "stories" if target == "stories" else "random"
    if method not in ("ngram", "suffix", "self"):
        guesser = guesser or HEADS.get((method, kind))
        if guesser is not None:
            chosen["model"] = str(guesser)
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


@dataclass(frozen=True)
class Case:
    """A target, who guesses for it, and whether two guesses in a row are right now and then."""

    target: str | Path
    guesser: str | Path | None
    asked: list[list[int]]
    is_known: bool

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.target == "stories" else {"skip_tokenizer_init": True}


def cases(method: str, count: int, folder: Folder, where: Path) -> list[Case]:
    """The embedded model, a random one, and one that mostly says each token's successor."""
    drafts = method == "draft_model"
    encode = LLM("stories").get_tokenizer().encode
    read = [encode(text + end) for text in BEGINNINGS for end in ("", " She", " It was")]
    told, any_tokens = prompts(count, 500), prompts(count, 50)
    told[::3] = (read * count)[: len(told[::3])]
    known = successors(where / "known", 1, sure=0.8)
    like = MADE[method](where / "guesser") if method in MADE else None
    return [
        Case("stories", "stories-draft" if drafts else None, told, method != "eagle3"),
        Case(folder(0), folder(1) if drafts else None, any_tokens, False),
        Case(known, like, any_tokens, True),
    ]


BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily. She loved to play",
    "One day, Tom and his mom went to the park.",
    "The dog was very happy. He ran to the",
    "Once upon a time there was a",
    "Tim had a big red ball. He",
    '"Thank you," said the',
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_greedy_tokens_are_those_of_plain_decoding(
    method: str, count: int, adaptive: bool, folder: Folder, tmp_path: Path
) -> None:
    """One at a time and 16, in want of blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    gave_way = 0
    for case in cases(method, count, folder, tmp_path):
        want = texts(LLM(case.target, max_model_len=128, **case.options), case.asked, params)
        seconds = 0
        for more in ({"max_num_seqs": 1, "max_model_len": 128}, CROWDED):
            llm = speculating(
                method, case.target, case.guesser, speculative={"adaptive": adaptive}, **more,
                **case.options,
            )  # fmt: skip
            chosen = case.asked if count > 24 or more is CROWDED else case.asked[:8]
            assert texts(llm, chosen, params) == want[: len(chosen)]
            stats = llm.stats()
            assert stats["spec_decode_num_drafts"] or adaptive
            seconds += sum(stats["spec_decode_num_accepted_tokens_per_pos"][1:2])
            if more is CROWDED:
                gave_way += stats["preemptions"]
                assert stats["prefix_hit_rate"] > 0
        assert seconds > 9 or adaptive or not case.is_known
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
        method, target, folder(1) if method == "draft_model" else None,
        speculative={"adaptive": False}, skip_tokenizer_init=True, max_model_len=128,
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
        ({"method": "eagle", "model": " "}, "model=' ' names nothing"),
        ({"method": "eagle", "revision": "main"}, "revision='main' is of no model"),
        ({"model": "stories-draft", "revision": 5}, "revision must be a name, not 5"),
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


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_vllms_old_names_of_n_grams(model: str) -> None:
    asked = SpeculativeConfig.of({"model": model, "prompt_lookup_max": 4})
    assert asked is not None
    assert (asked.method, asked.model, asked.prompt_lookup_max) == ("ngram", None, 4)


@pytest.mark.parametrize(("depth", "most"), [(5, 10), (128, 256), (200, 256), (300, 300)])
def test_trees_are_as_large_by_themselves_as_they_may_be(depth: int, most: int) -> None:
    assert SpeculativeConfig("eagle", num_speculative_tokens=depth).most_tokens == most


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
