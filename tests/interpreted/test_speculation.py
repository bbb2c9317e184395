"""What guesses beside a target runs over Triton's kernels, too, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, RequestOutput, SamplingParams
from penstock.runtime.graphs import GraphForward
from tests.interpreted.guessing import guessing, target

GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, seed=5, max_tokens=5, ignore_eos=True, repetition_penalty=1.05
)
METHODS = ("draft_model", "medusa", "medusa-shared", "eagle", "eagle3")
PROMPTS = ([1, 10, 37], [4, 19, 14, 49, 4, 19])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After each token mostly its successor."""
    return target(tmp_path_factory.mktemp("target"), 0.05, 2.0)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A speculative_config for each method."""
    path = tmp_path_factory.mktemp("heads")
    return {name: guessing(name, path) for name in METHODS}


def run(folder: Path, params: SamplingParams, **options: Any) -> tuple[list[Any], LLM]:
    llm = LLM(
        folder, skip_tokenizer_init=True, num_blocks=24, max_num_seqs=4, max_model_len=96, **options
    )
    items = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    found = [seen(output) for output in llm.generate(items, params)]
    assert llm.stats()["used_blocks"] == 0
    speculation = llm.engine.speculation
    assert speculation is None or speculation.broken is None
    return found, llm


def seen(output: RequestOutput) -> list[Any]:
    return [
        (sample.token_ids, [{t: p.logprob for t, p in at.items()} for at in sample.logprobs or []])
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[Any]]:
    return {"greedy": run(folder, GREEDY)[0], "drawn": run(folder, DRAWN)[0]}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("method", "how"),
    [
        pytest.param("draft_model", "greedy", marks=pytest.mark.slow),
        ("draft_model", "drawn"),
        ("medusa", "greedy"),
        ("medusa-shared", "drawn"),
        ("eagle", "greedy"),
        pytest.param("eagle", "drawn", marks=pytest.mark.slow),
        ("eagle3", "greedy"),
    ],
)
def test_tokens_are_the_targets(
    folder: Path,
    heads: dict[str, dict[str, Any]],
    plain: dict[str, list[Any]],
    method: str,
    how: str,
) -> None:
    params = GREEDY if how == "greedy" else DRAWN
    found, llm = run(folder, params, speculative_config=heads[method])
    assert found == plain[how]
    counts = llm.stats()
    assert counts["spec_decode_num_draft_tokens"] > 0
    if method != "eagle3":  # whose head is of random weights
        assert counts["spec_decode_num_accepted_tokens"] > 0


def test_a_draft_model_has_graphs_of_its_own(
    folder: Path, heads: dict[str, dict[str, Any]]
) -> None:
    _, llm = run(folder, GREEDY, speculative_config=heads["draft_model"])
    draft = llm.runtime.draft.runner.graphs  # type: ignore[union-attr]
    assert isinstance(draft, GraphForward)
    assert draft.counts.replays > 0


@pytest.mark.parametrize("method", ["eagle", pytest.param("medusa-shared", marks=pytest.mark.slow)])
def test_quantized_heads(
    folder: Path, heads: dict[str, dict[str, Any]], plain: dict[str, list[Any]], method: str
) -> None:
    chosen = {**heads[method], "quantization": "w8a16"}
    assert run(folder, GREEDY, speculative_config=chosen)[0] == plain["greedy"]
