"""Pictures whose tokens see each other both ways: one step computes them, and blocks may part them.

In float32 over a tiny Gemma 3, whose own logits `tests/models/test_seeing.py` has checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, LoRARequest, SamplingParams, ops
from penstock.errors import ConfigError, InvalidPromptError
from penstock.sampling import BeamSearchParams
from tests.engine.test_pictures import asked, found, greedy, load
from tests.lora_files import write_adapter
from tests.models.seeing import IMAGE, make_gemma3, picture

TOGETHER = 16
LONG = "Before that a rather long text, longer than a block of the cache has tokens <image>"
PROMPTS: list[Any] = [
    *(asked(i) for i in range(4)),
    {"prompt": "No picture at all."},
    {
        "prompt": "Two: <image><image>",
        "multi_modal_data": {"image": [picture(9, 9), picture(60, 9)]},
    },
    asked(0, "<image>"),
    asked(1, LONG),
    *(asked(2, "x" * length + "<image>, and then?") for length in (7, 8, 14, 15, 23, 24)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("both-ways")).folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    llm = load(folder, max_num_seqs=1, enable_prefix_caching=False)
    return [found(llm.generate(prompt, greedy())[0]) for prompt in PROMPTS]


def test_pictures_differ(alone: list[Any]) -> None:
    assert len({tuple(one[0][0]) for one in alone[:4]}) == 4


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": TOGETHER + 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": TOGETHER + 7, "max_num_seqs": 7},
        {"block_size": 32, "max_num_batched_tokens": 40, "max_num_seqs": 9},
        {"num_gpu_blocks_override": 17, "max_model_len": 512},  # some give way
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"speculative_config": {"method": "ngram"}},
        {"kv_cache_dtype": "auto", "enable_prefix_caching": False},
    ],
)
def test_in_any_batch(how: dict[str, Any], folder: Path, alone: list[Any]) -> None:
    """Beside others, chunked, after giving way, and again from blocks that part a picture."""
    llm = load(folder, **how)
    for _ in range(2):
        assert [found(x) for x in llm.generate(PROMPTS, greedy())] == alone
        assert llm.stats()["used_blocks"] == 0
    if how.get("enable_prefix_caching", True) and "num_gpu_blocks_override" not in how:
        assert llm.stats()["prefix_hit_rate"] > 0.05


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"quantization": "w4a8"}])
def test_in_other_formats(how: dict[str, Any], folder: Path) -> None:
    own = {"dtype": "auto"} | how
    one = load(folder, max_num_seqs=1, enable_prefix_caching=False, **own)
    want = [found(one.generate(prompt, greedy())[0]) for prompt in PROMPTS]
    many = load(folder, max_num_batched_tokens=30, max_num_seqs=9, **own)
    assert [found(x) for x in many.generate(PROMPTS, greedy())] == want


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_in_other_caches(dtype: str, folder: Path) -> None:
    one = load(folder, dtype="bfloat16", kv_cache_dtype=dtype, max_num_seqs=1)
    want = [found(one.generate(prompt, greedy())[0]) for prompt in PROMPTS]
    how = {"max_num_batched_tokens": 30, "max_num_seqs": 9, "kv_cache_dtype": dtype}
    many = load(folder, dtype="bfloat16", **how)
    assert [found(x) for x in many.generate(PROMPTS, greedy())] == want


@pytest.mark.parametrize("before", range(1, 32, 5))
def test_blocks_that_part_a_picture(before: int, folder: Path) -> None:
    """What is found ends inside it: the rest is computed, and sees what was found."""
    llm = load(folder)
    prompts = [asked(1, "x" * before + "<image> " + rest) for rest in ("Yes?", "No, not at all!")]
    apart = load(folder, enable_prefix_caching=False)
    want = [found(x) for x in apart.generate(prompts, greedy())]
    got = [llm.generate(prompt, greedy())[0] for prompt in prompts]
    assert [found(x) for x in got] == want
    assert got[1].metrics.cached_tokens == (before + 4 + TOGETHER + 4) // 32 * 32


def test_samples_searches_and_guidance(folder: Path) -> None:
    llm = load(folder)
    one = llm.generate(asked(3), greedy(n=1, temperature=0.9, seed=3))[0]
    three = llm.generate(asked(3), greedy(n=3, temperature=0.9, seed=3))[0]
    assert found(three)[0] == found(one)[0]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    beams = [llm.beam_search([prompt], params)[0].sequences for prompt in (asked(3), asked(1))]
    assert beams[0][0].tokens != beams[1][0].tokens
    guided = [load(folder, **how).generate(asked(3), greedy(guidance_scale=2.0)) for how in ({}, {
        "max_num_batched_tokens": TOGETHER + 7, "max_num_seqs": 7,
    })]  # fmt: skip
    assert found(guided[0][0]) == found(guided[1][0])


def test_embeddings_and_prompt_logprobs(folder: Path) -> None:
    llm, few = load(folder), load(folder, max_num_batched_tokens=24, max_num_seqs=6)
    prompts = [asked(0), asked(3), asked(0)]
    one, other, again = (x.outputs.embedding for x in llm.embed(prompts))
    assert one == again != other
    params = greedy(prompt_logprobs=1)
    output, same = (x.generate(asked(0), params)[0] for x in (llm, few))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    if ops.has_native("linear"):
        assert same.prompt_logprobs == output.prompt_logprobs
        assert few.embed(prompts)[1].outputs.embedding == other


def test_as_tokens(folder: Path) -> None:
    """The beginning's id for each picture, or all that stands for it."""
    llm = load(folder)
    want = llm.generate(asked(2, "ab<image>c"), greedy())[0]
    image = {"image": [asked(2)["multi_modal_data"]["image"]]}
    tokenizer = llm.get_tokenizer()
    for ids in (tokenizer.encode("ab<image>c"), want.prompt_token_ids):
        given = {"prompt_token_ids": ids, "multi_modal_data": image}
        output = llm.generate(given, greedy())[0]
        assert output.prompt_token_ids == want.prompt_token_ids
        assert found(output) == found(want)


def test_tokens_of_a_picture_come_one_after_another(folder: Path) -> None:
    llm = load(folder)
    sight = llm.runtime.sight
    assert sight is not None
    soft, image = sight.pictures.token_id, {"image": picture(9, 9)}
    for ids, said in (
        ([1, IMAGE, *[soft] * 8, 2, *[soft] * 8, 3], "must come one after another"),
        ([1, IMAGE, *[soft] * TOGETHER], "the prompt's last token after them"),
        ([1, *[soft] * 9, 1], "has 9 tokens"),
    ):
        with pytest.raises(InvalidPromptError, match=said):
            llm.generate({"prompt_token_ids": ids, "multi_modal_data": image}, greedy())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"max_num_batched_tokens": 20, "max_num_seqs": 5}, "16 tokens .* leaves 15"),
        ({"kv_cache_dtype": "kivi", "dtype": "bfloat16"}, "kivi"),
        ({"max_attention_window": 64, "sink_token_length": 4}, "max_attention_window"),
    ],
)
def test_what_is_refused(how: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load(folder, **how)


def test_with_adapters(folder: Path, tmp_path: Path) -> None:
    at = "language_model.model.layers"
    shapes = [(f"{at}.{i}.self_attn.{x}_proj", (64, 64)) for i in range(3) for x in "qo"]
    write_adapter(tmp_path / "verse", shapes)
    asks = [LoRARequest("verse", 1, str(tmp_path / "verse")), None]
    few = {"max_num_batched_tokens": TOGETHER + 8, "max_num_seqs": 5}
    got = []
    for how in ({}, {"enforce_eager": True}, few):
        llm = load(folder, enable_lora=True, **how)
        got.append([found(x) for x in llm.generate([asked(1)] * 2, greedy(), lora_request=asks)])
    assert got[0] == got[1] == got[2]
    assert got[0][0] != got[0][1] == found(load(folder).generate(asked(1), greedy())[0])


def test_parts_of_a_picture(tmp_path: Path) -> None:
    """Each square's tokens see each other, and those before them."""
    chosen = {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 30,
        "pan_and_scan_max_num_crops": 3,
    }  # fmt: skip
    made = make_gemma3(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=12)
    prompt = {"prompt": "<image> What?", "multi_modal_data": {"image": picture(200, 90, 3)}}
    few = {"max_num_batched_tokens": TOGETHER + 8, "max_num_seqs": 5}
    one, two = (load(tmp_path, mm_processor_kwargs=chosen, **how) for how in ({}, few))
    output = one.generate(prompt, params)[0]
    same = two.generate(prompt, params)[0]
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    inputs = made.processor(
        text=prompt["prompt"], images=[picture(200, 90, 3)], return_tensors="pt",
        images_kwargs=chosen | {"pan_and_scan_min_ratio_to_activate": 1.2},
    )  # fmt: skip
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        wanted = made.reference.generate(
            **inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False
        )[0].tolist()
    assert output.outputs[0].token_ids == wanted[-12:]


def test_text_alone(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = LLM(str(folder), dtype="float32").generate("Hello, you", params)
    assert len(output.outputs[0].token_ids) == 4
