"""Every method draws from the target's distribution: chi-square against a closed form.

The target says a token's successor about every second time, so that whoever knows successors is
often right, and as often wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.engine.request import Sequence
from penstock.speculate import Draft
from tests.models.heads.made import written

from .eagle_reference import write
from .rounds import SHAPE, D, V, after, successor, sure_head

Fractions = np.ndarray
"""[V, V, V]: of each three tokens."""

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    # by longer matches, most of what is found in outputs so short is at their end
    "suffix": {"method": "suffix", "suffix_decoding_max_tree_depth": 1,
               "suffix_decoding_max_spec_factor": 3.0, "suffix_decoding_min_token_prob": 0.01},
    "draft_model": {"method": "draft_model"},
    "self": {"method": "self", "draft_layers": 1},
    "medusa": {"method": "medusa", "tree_tokens": 6, "tree_width": 3},
    "eagle": {"method": "eagle", "tree_tokens": 6, "tree_width": 3},
    "eagle3": {"method": "eagle3", "tree_tokens": 6, "tree_width": 3},
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4,
}  # fmt: skip


def prompt() -> list[int]:
    """Each token with its successor behind it: whatever comes has stood there before."""
    found, left = list[int](), set(range(V))
    while left:
        token = min(left)
        while token in left:
            left.remove(token)
            found.append(token)
            token = int(successor(torch.tensor(token)))
        found.append(token)
    return found


def target(folder: Path, seed: int, sure: float = 1.4) -> Path:
    """A model that mostly says each token's successor; seed: of what else it says."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=3, max_position_embeddings=256, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.normal_(0, 0.1)
            layer.self_attn.o_proj.weight.normal_(0, 0.05)
            layer.mlp.down_proj.weight.normal_(0, 0.05)
        model.model.embed_tokens.weight.copy_(torch.eye(V, D))
        model.lm_head.weight.copy_(projection(sure, 0.1, seed))
    model.save_pretrained(folder)
    return folder


def projection(sure: float, noise: float, seed: int, steps: int = 1) -> torch.Tensor:
    """[V, D]: from a token to what comes so many later, and to any other, some likelier."""
    source = torch.Generator().manual_seed(seed)
    return sure * after(steps)[:V] + noise * torch.randn(V, D, generator=source)


def medusa_heads(folder: Path) -> Path:
    """Of what comes two, three and four later."""
    tensors = {}
    for k in range(3):
        tensors |= {f"{k}.0.linear.weight": torch.zeros(D, D),
                    f"{k}.0.linear.bias": torch.zeros(D),
                    f"{k}.1.weight": projection(1.2, 0.1, 10 + k, k + 2)}  # fmt: skip
    return written(folder, tensors, {"medusa_num_heads": 3})


def eagle3_head(folder: Path) -> Path:
    """Its layer sees the token alone, and makes of it the place where its own head looks."""
    source = torch.Generator().manual_seed(4)

    def some(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=source)

    none, alike = torch.zeros(D, D), torch.ones(D, D)
    own = "midlayer.self_attn"
    tensors = {
        "fc.weight": some(D, 3 * D),
        # of two positions' keys the query's own is the likest, whatever the tokens
        f"{own}.q_proj.weight": torch.cat((alike, none), 1),
        f"{own}.k_proj.weight": torch.cat((alike, none), 1),
        f"{own}.v_proj.weight": torch.cat((torch.eye(D), some(D, D)), 1),
        f"{own}.o_proj.weight": torch.eye(D),
        "midlayer.mlp.gate_proj.weight": some(48, D),
        "midlayer.mlp.up_proj.weight": some(48, D),
        "midlayer.mlp.down_proj.weight": some(D, 48),
        **{f"midlayer.{x}.weight": torch.ones(D)
           for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm.weight": torch.ones(D),
        "lm_head.weight": projection(1.2, 0.1, 20),
        "d2t": torch.zeros(V, dtype=torch.int64),
        "t2d": torch.ones(V, dtype=torch.bool),
    }  # fmt: skip
    changes = {**SHAPE, "num_key_value_heads": 2}
    return write(
        folder, tensors, **changes, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    )


MADE: dict[str, Callable[[Path], Path]] = {
    "draft_model": lambda folder: target(folder, 2),
    "medusa": medusa_heads,
    "eagle": lambda folder: sure_head(folder, 0.003),
    "eagle3": eagle3_head,
}
"""Who guesses, where that is in a folder."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("target"), 1)


@pytest.fixture(scope="module")
def chances(model: Path) -> Fractions:
    return triples(model, prompt(), OPTIONS)


@pytest.mark.parametrize("count", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_three_tokens_come_as_often_as_they_should(
    method: str, count: int, model: Path, chances: Fractions, tmp_path: Path
) -> None:
    """All triples against their probabilities, with top_p and penalties.

    The first token is drawn after the prompt; the draft behind it guesses at the other two.
    """
    stats = pytest.importorskip("scipy.stats")
    who = {"model": MADE[method](tmp_path / method)} if method in MADE else {}
    llm = LLM(
        model, skip_tokenizer_init=True, max_model_len=96, max_num_seqs=64,
        speculative_config={
            **METHODS[method], **who, "num_speculative_tokens": 3, "adaptive": False
        },
    )  # fmt: skip
    deep, right = watched(llm)
    seen, asked = np.zeros_like(chances), prompt()
    first = list(METHODS).index(method) * 100_000
    for start in range(first, first + count, 4_000):
        params = [
            SamplingParams(**OPTIONS, seed=seed, max_tokens=5, ignore_eos=True, detokenize=False)
            for seed in range(start, start + 4_000)
        ]
        for output in llm.generate([asked] * len(params), params):
            seen[tuple(output.outputs[0].token_ids[:3])] += 1
    assert deep.total() > count / 2
    assert right[0] > count / 5 and right[1] > count / 50
    assert seen.sum() == count and not seen[chances == 0].any()
    often = chances * count >= 5
    observed = np.append(seen[often], seen[~often].sum())
    expected = np.append(chances[often], chances[~often].sum()) * count
    assert stats.chisquare(observed, expected).pvalue > 0.01


def watched(llm: LLM) -> tuple[Counter[int], Counter[int]]:
    """Of drafts behind a first token: how many are two deep or more, by depth; and how often a
    guess of theirs is right, by its place.
    """
    deep, right = Counter[int](), Counter[int]()

    def see(sequence: Sequence, draft: Draft, found: list[int], drawn: Any) -> None:
        if sequence.num_output > 1:
            return
        deep[draft.depth] += draft.depth > 1
        right.update(range(len(found)))

    assert llm.engine.speculation is not None
    llm.engine.speculation.on_verified = see
    return deep, right


def triples(target: Path, prompt: list[int], options: dict[str, Any]) -> Fractions:
    """The probability of each three tokens, [V, V, V], by transformers in float64."""
    transformers = pytest.importorskip("transformers")

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    found = np.zeros((V, V, V))
    firsts = following(model, [prompt], prompt, options)[0]
    for i in np.flatnonzero(firsts):
        seconds = following(model, [[*prompt, i]], prompt, options)[0]
        some = np.flatnonzero(seconds)
        thirds = following(model, [[*prompt, i, j] for j in some], prompt, options)
        for j, row in zip(some, thirds, strict=True):
            found[i, j] = firsts[i] * seconds[j] * row
    return found


def following(model: Any, rows: list[list[int]], prompt: list[int], options: Any) -> np.ndarray:
    """The distribution after each of some texts of one length, [R, V]: penalties, then cuts."""
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
