"""Requests with pictures: a sequence's tokens are its own, and its pictures', whatever runs beside.

In float32 over tiny random models, whose own logits `tests/models/test_seeing.py` has checked.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, AsyncLLM, SamplingParams, ops
from penstock.config import EngineConfig
from penstock.engine import RequestOptions
from penstock.errors import ConfigError, InvalidPromptError, InvalidSamplingError
from penstock.runtime import vision
from penstock.sampling import BeamSearchParams
from tests.models.seeing import (
    IMAGE,
    SeeingModel,
    make_idefics3,
    make_lfm2,
    make_llava,
    make_llava_next,
    make_mistral3,
    make_qwen,
    make_qwen3,
    picture,
)

LENGTH = 12


def greedy(**more: Any) -> SamplingParams:
    params = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 2} | more
    return SamplingParams(**params)


def asked(seed: int, text: str = "Tell me of <image>, please.") -> dict[str, Any]:
    size = [(60, 60), (100, 50), (170, 90)][seed % 3]
    return {"prompt": text, "multi_modal_data": {"image": picture(*size, seed)}}


def found(output: Any) -> Any:
    """What must be equal, to the last bit with the native kernels."""
    exact = ops.has_native("linear")
    return [
        (s.token_ids, [{t: p.logprob for t, p in at.items()} for at in s.logprobs] * exact)
        for s in output.outputs
    ]


MAKERS = {
    "tiles": make_idefics3,
    "grid": make_qwen,
    "deep": make_qwen3,
    "pieces": make_lfm2,
    "lines": make_mistral3,
    "any shape": make_llava_next,
}


@pytest.fixture(scope="module", params=MAKERS.values(), ids=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tiles; of a grid by which tokens turn; with rows for the decoder's first layers; of pieces
    of several sizes, before layers with states; in lines between marks; without its margins.
    """
    made: SeeingModel = request.param(tmp_path_factory.mktemp("seeing"))
    return made.folder


def load(folder: Path, **more: Any) -> LLM:
    return LLM(str(folder), **({"dtype": "float32"} | more))


TWO = [picture(9, 9), picture(60, 9)]
PROMPTS = [asked(i) for i in range(6)] + [
    {"prompt": "No picture at all."},
    {
        "prompt": "Two: <image><image>",
        "multi_modal_data": {"image": [picture(9, 9), picture(60, 9)]},
    },
    asked(0, "<image>"),
    asked(1, "Before that a rather long text, longer than a block of the cache has tokens <image>"),
]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    llm = load(folder, max_num_seqs=1, enable_prefix_caching=False)
    return [found(llm.generate(prompt, greedy())[0]) for prompt in PROMPTS]


def test_pictures_differ(alone: list[Any]) -> None:
    firsts = {tuple(one[0][0]) for one in alone[:6]}
    assert len(firsts) == 6


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_batched_tokens": 64},
        {"num_gpu_blocks_override": 17},  # some give way
        {"num_gpu_blocks_override": 17, "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram"}},
    ],
)
def test_in_any_batch(how: dict[str, Any], folder: Path, alone: list[Any]) -> None:
    """Beside others, chunked, after giving way, and again from what the cache has."""
    if "num_gpu_blocks_override" in how:
        how = how | {"max_model_len": 512}
    llm = load(folder, **how)
    for _ in range(2):
        assert [found(x) for x in llm.generate(PROMPTS, greedy())] == alone
        assert llm.stats()["used_blocks"] == 0
    if how.get("enable_prefix_caching", True) and "num_gpu_blocks_override" not in how:
        assert llm.stats()["prefix_hit_rate"] > 0.15
    sight = llm.runtime.sight
    assert sight is not None and not sight.placed.wanted.any()
    assert not any(deep.any() for deep in sight.placed.deep)


@pytest.mark.parametrize("threads", [1, 3])
def test_on_any_number_of_threads(threads: int, folder: Path, alone: list[Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = [found(x) for x in load(folder).generate(PROMPTS, greedy())]
    finally:
        torch.set_num_threads(before)
    assert got == alone


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"quantization": "w4a8"}])
def test_in_other_formats(how: dict[str, Any], folder: Path) -> None:
    own = {"dtype": "auto"} | how
    one = load(folder, max_num_seqs=1, enable_prefix_caching=False, **own)
    want = [found(one.generate(prompt, greedy())[0]) for prompt in PROMPTS]
    many = load(folder, max_num_batched_tokens=50, max_num_seqs=9, **own)
    assert [found(x) for x in many.generate(PROMPTS, greedy())] == want


def test_a_picture_in_the_cache_is_found_by_what_it_shows(folder: Path) -> None:
    """The same tokens with another picture share the blocks before it, and no more."""
    llm = load(folder)
    text = "x" * 40 + "<image>" + "y" * 40
    first = llm.generate(asked(2, text), greedy())[0]
    again = llm.generate(asked(2, text), greedy())[0]
    other = llm.generate(asked(5, text), greedy())[0]
    assert first.prompt_token_ids == other.prompt_token_ids
    assert first.metrics.cached_tokens == 0
    assert again.metrics.cached_tokens == (len(first.prompt_token_ids) - 1) // 32 * 32
    left = llm.runtime.layout.states is None  # or none were left so early in the prompt
    assert other.metrics.cached_tokens == 32 * left
    assert found(first) == found(again) != found(other)


def test_a_picture_goes_through_the_tower_once(folder: Path) -> None:
    llm = load(folder, enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=4)
    outputs = [llm.generate(asked(1), greedy())[0] for _ in range(3)]
    stats = llm.stats()
    assert (stats["pictures"], stats["picture_hits"]) == (3, 2)
    assert stats["picture_tiles"] == len(_cut(llm, asked(1)).tiles)
    assert found(outputs[0]) == found(outputs[1]) == found(outputs[2])


def _cut(llm: LLM, prompt: dict[str, Any]) -> Any:
    sight = llm.runtime.sight
    assert sight is not None
    return sight.pictures.cutter.cut(prompt["multi_modal_data"]["image"])


def test_rows_that_had_to_go_are_made_anew(
    folder: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision.Sight, "_keep", lambda self, key, rows: None)
    llm = load(folder, max_num_batched_tokens=3, max_num_seqs=3)
    assert [found(x) for x in llm.generate(PROMPTS, greedy())] == alone
    assert llm.stats()["picture_tiles"] > 12


def test_samples_and_searches(folder: Path) -> None:
    llm = load(folder)
    one = llm.generate(asked(4), greedy(n=1, temperature=0.9, seed=3))[0]
    three = llm.generate(asked(4), greedy(n=3, temperature=0.9, seed=3))[0]
    assert found(three)[0] == found(one)[0] and len({tuple(s.token_ids) for s in three.outputs}) > 1
    beams = [
        llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=6))[0].sequences
        for prompt in (asked(4), asked(1))
    ]
    assert beams[0][0].tokens != beams[1][0].tokens
    assert beams[0][0].tokens[-6:] != beams[0][1].tokens[-6:]


def test_embeddings(folder: Path) -> None:
    llm = load(folder)
    prompts = [asked(0), asked(3), asked(0)]
    one, other, again = (x.outputs.embedding for x in llm.embed(prompts))
    assert one == again != other


def test_prompt_logprobs_are_of_all_tokens(folder: Path) -> None:
    llm = load(folder)
    output = llm.generate(asked(0), greedy(prompt_logprobs=1))[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    whole = load(folder, max_num_batched_tokens=11, max_num_seqs=11)
    same = whole.generate(asked(0), greedy(prompt_logprobs=1))[0]
    if ops.has_native("linear"):
        assert same.prompt_logprobs == output.prompt_logprobs


def test_as_tokens(folder: Path) -> None:
    """One placeholder's id for each picture, or as many as its rows."""
    llm = load(folder)
    want = llm.generate(asked(2, "ab<image>c"), greedy())[0]
    image = {"image": [asked(2)["multi_modal_data"]["image"]]}
    tokenizer = llm.get_tokenizer()
    for ids in (tokenizer.encode("ab<image>c"), want.prompt_token_ids):
        given = {"prompt_token_ids": ids, "multi_modal_data": image}
        output = llm.generate(given, greedy())[0]
        assert output.prompt_token_ids == want.prompt_token_ids
        assert found(output) == found(want)


IMAGE_9 = {"image": picture(9, 9)}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("What is <image>?", "1 tokens 257.*its 0 pictures have 0"),
        ({"prompt": "None", "multi_modal_data": IMAGE_9}, "0 × <image> for 1 pictures"),
        ({"prompt": "<image><image>", "multi_modal_data": IMAGE_9}, "2 × <image> for 1 pictures"),
        (
            {"prompt_token_ids": [1, IMAGE, IMAGE], "multi_modal_data": IMAGE_9},
            "2 tokens 257.*1 pictures have ",
        ),
        ({"prompt": "<image>", "multi_modal_data": {"video": 1}}, "must be {'image': …}"),
        ({"prompt": "<image>", "multi_modal_data": [1]}, "not list"),
        ({"prompt": "<image>", "multi_modal_data": {"image": 5}}, "not int"),
        ({"multi_modal_data": IMAGE_9}, "takes prompt or prompt_token_ids"),
        ({"prompt": 7, "multi_modal_data": IMAGE_9}, "must be a text, not int"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, said: str, folder: Path) -> None:
    llm = load(folder, max_model_len=64)
    with pytest.raises(InvalidPromptError, match=said):
        llm.generate(prompt, greedy())
    assert llm.stats()["requests"] == 0


def test_what_else_is_refused(folder: Path) -> None:
    llm = load(folder)
    with pytest.raises(InvalidSamplingError, match="token_healing isn't built for prompts with"):
        llm.generate(asked(0), greedy(token_healing=True))
    with pytest.raises(InvalidPromptError, match="must be a tuple of Picture"):
        RequestOptions(pictures=("cat.png",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"which sees no|layers with states"):
        load(folder, speculative_config={"method": "draft_model", "model": str(folder)})
    with pytest.raises(InvalidSamplingError, match=r"negative_prompt is refused: .* stand for"):
        llm.generate("x", greedy(guidance_scale=2.0, negative_prompt="<image>"))
    blind = LLM(dtype="float32")
    with pytest.raises(InvalidPromptError, match="sees no pictures, and 1 are given"):
        blind.generate(asked(0), greedy())
    with pytest.raises(InvalidPromptError, match="This model sees no pictures"):
        blind.generate("x", greedy(), options=RequestOptions(pictures=(_cut(llm, asked(0)),)))


def test_a_tower_that_fails_ends_its_own_request_only(
    folder: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(folder)
    bad = _cut(llm, asked(4)).key
    whole = vision.Sight.rows_of

    def rows_of(self: vision.Sight, seen: Any, begins: bool = True) -> Any:
        if seen.key == bad:
            raise RuntimeError("no light")
        return whole(self, seen, begins)

    monkeypatch.setattr(vision.Sight, "rows_of", rows_of)
    outputs = llm.generate(PROMPTS, greedy())
    assert [str(x.error) for x in outputs if x.error is not None] == ["no light"]
    good = [i for i, x in enumerate(outputs) if x.error is None]
    assert [found(outputs[i]) for i in good] == [alone[i] for i in good]


async def _streamed(llm: AsyncLLM) -> Any:
    async for output in llm.generate(asked(1), greedy()):
        last = output
    return last


def test_a_floor_counts_the_tower(tmp_path: Path) -> None:
    """The tower's products are part of the step that ran it."""
    llm = load(make_llava(tmp_path).folder, enable_prefix_caching=False)
    sizes = []
    llm.engine.ledger.watch = sizes.append
    for _ in range(2):
        llm.generate(asked(0), greedy())
    first, second = (r for r in sizes if r.size.is_prefill)
    spec = llm.runtime.model.spec.decoder.vision
    assert spec is not None
    rows, hidden = spec.rows, spec.hidden
    layer = 2 * rows * (4 * hidden**2 + 2 * hidden * 72) + 4 * rows**2 * hidden
    ends = 2 * 16 * (hidden * 3 * 14**2 + hidden * 64 + 64 * 64)
    assert first.cost.flops - second.cost.flops == len(spec.layers) * layer + ends
    seen = first.size.seen, second.size.seen
    assert seen[0] is not None and seen[1] is not None
    assert (seen[0].flops > 0, seen[1].flops) == (True, 0)


def test_in_the_background(folder: Path, alone: list[Any]) -> None:
    async def run() -> Any:
        llm = AsyncLLM.of(EngineConfig.of(model=str(folder), dtype="float32"))
        try:
            return await _streamed(llm)
        finally:
            llm.shutdown()

    assert found(asyncio.run(run())) == alone[1]
