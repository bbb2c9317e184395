"""`max_attention_window`: of a text of any length, the first and the latest tokens are seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.runtime import Horizon
from tests.engine.test_ranks import TEXTS, said
from tests.models.tiny import Make, Tiny, make_tiny, makes_once

GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return makes_once(tmp_path_factory)


def by_the_paper(
    model: Any, first: int, latest: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Tensor], Tensor]:
    """transformers' model as Xiao et al. 2023 describe it: of each token's cache the first and the
    latest keys are left, and all are turned by their places in it, as is the query.
    """
    modeling = sys.modules[type(model).__module__]
    angles: dict[str, Any] = {}  # of the layer that computes, where it has some
    names = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")

    def unturned(turn: Any) -> Any:
        def keep(q: Tensor, k: Tensor, *by: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            angles.update(turn=turn, by=by, dim=q.shape[-1])
            return q, k

        return keep

    for name in names:
        if hasattr(modeling, name):
            monkeypatch.setattr(modeling, name, unturned(getattr(modeling, name)))

    def turned(x: Tensor, first: int, last: int) -> Tensor:
        """Of the last dimensions, as at these places."""
        still, moved = x[..., : -angles["dim"]], x[..., -angles["dim"] :]
        by = [one[:, first:last] for one in angles["by"]]
        return torch.cat((still, angles["turn"](moved, moved, *by)[0]), dim=-1)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        scale = module.scaling if scaling is None else scaling
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        out = query.new_zeros((*query.shape[:3], value.shape[3]))
        for at in range(query.shape[2]):
            kept = list(range(at + 1))
            if sliding_window and sliding_window <= first + latest:
                kept = kept[-sliding_window:]
            elif len(kept) > first + latest:
                kept = kept[:first] + kept[-latest:]
            q, k, v = query[:, :, at : at + 1], key[:, :, kept], value[:, :, kept]
            if angles:  # of places in the cache
                q, k = turned(q, len(kept) - 1, len(kept)), turned(k, 0, len(kept))
            scores = q @ k.transpose(2, 3) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if s_aux is not None:
                more = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, more), dim=-1)
            out[:, :, at : at + 1] = torch.softmax(scores, dim=-1)[..., : len(kept)] @ v
        angles.clear()
        return out.transpose(1, 2), None

    monkeypatch.setattr(modeling, "eager_attention_forward", attend)

    def logits(tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(tokens[None], use_cache=False).logits[0]
        return found.float()

    return logits


NAMES = [
    "llama", "llama3-rope", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "smollm3-window",
    "olmo2", "phi3-long", "gpt-neox", "gpt-oss", "qwen3-moe", "deepseek-v2", "deepseek-v3",
    "granite", "olmo3", "gemma", "cohere", "cohere2", "glm", "glm4", "starcoder2-full", "exaone4",
    "ernie4_5",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tokens", "first"),
    [*((name, 40, 4) for name in NAMES), ("llama", 24, 0), ("gemma2", 33, 32)],
)
def test_as_the_paper_says(
    name: str, tokens: int, first: int, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every family, over several windows and beyond the positions that it was made for."""
    made: Tiny = tiny(name)
    length = 300
    text = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(1))
    want = torch.log_softmax(by_the_paper(made.oracle, first, tokens - first, monkeypatch)(text), 1)
    llm = LLM(
        made.folder,
        dtype="float32",
        max_attention_window=tokens,
        sink_token_length=first,
        max_model_len=length + 20,
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": text.tolist()}], params)
    assert output.prompt_logprobs is not None
    got = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
    expected = want[:-1].gather(1, text[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-3, atol=1e-3)


def prompt(length: int, step: int = 7) -> dict[str, Any]:
    return {"prompt_token_ids": [5 + (i * i * step) % 999 for i in range(length)]}


LONG = [prompt(700), prompt(130, 3), prompt(3), prompt(699, 7), prompt(257, 11)]
WINDOWED = {"max_attention_window": 200, "max_model_len": 2000}


@pytest.fixture(scope="module")
def whole() -> Any:
    """Alone, and computed at once."""
    llm = LLM(max_num_batched_tokens=2048, enable_prefix_caching=False, **WINDOWED)
    return [said(llm.generate([one], GREEDY)) for one in LONG]


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3},
        {"num_blocks": 24, "max_num_batched_tokens": 64, "max_num_seqs": 4},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "self", "draft_layers": 2}},
        {"enforce_eager": True, "max_num_batched_tokens": 100, "max_num_seqs": 8},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 300},
    ],
)
def test_one_text_in_any_company(engine: dict[str, Any], whole: Any) -> None:
    llm = LLM(**WINDOWED, **engine)
    for _ in range(2):  # the second time with prefixes found
        assert [said([one]) for one in llm.generate(LONG, GREEDY)] == whole
    assert llm.stats()["used_blocks"] == 0


@pytest.mark.parametrize("cache", ["int8", "int4", "fp8"])
def test_caches_in_fewer_bits(cache: str) -> None:
    one = LLM(kv_cache_dtype=cache, enable_prefix_caching=False, **WINDOWED)
    want = [said(one.generate([text], GREEDY)) for text in LONG]
    many = LLM(kv_cache_dtype=cache, max_num_batched_tokens=64, num_blocks=30, **WINDOWED)
    assert [said([x]) for x in many.generate(LONG, GREEDY)] == want


def test_within_the_window_nothing_changes() -> None:
    plain, windowed = LLM(), LLM(max_attention_window=300, max_model_len=900)
    short = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    assert said(windowed.generate(TEXTS, short)) == said(plain.generate(TEXTS, short))
    long = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    a, b = (llm.generate([TEXTS[0]], long)[0].outputs[0].token_ids for llm in (plain, windowed))
    same = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    assert same > 250


def test_memory_is_flat_at_ten_windows() -> None:
    """Blocks of one text of 5,000 tokens; a cache that holds a window and a step is enough."""
    llm = LLM(
        max_attention_window=256,
        max_model_len=6000,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        num_blocks=13,
    )
    assert llm.runtime.horizon == Horizon(252, 4)
    engine, held = llm.engine, []
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=5000, ignore_eos=True)
    engine.add_request("long", prompt(900)["prompt_token_ids"], params)
    while engine.has_unfinished:
        engine.step()
        held += [engine.pool.filled(one.blocks) for one in engine.scheduler.running]
    assert len(held) > 5000
    assert max(held) <= 1 + 252 // 32 + 2
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_a_chat_that_grows_beyond_the_cache(num_seqs: int) -> None:
    """Its prefix is found, and no more of it held than is seen: or nothing would ever be free."""
    shape = {"max_attention_window": 256, "max_model_len": 6000, "max_num_batched_tokens": 64}
    small = LLM(max_num_seqs=num_seqs, num_blocks=13, **shape)
    large = LLM(max_num_seqs=num_seqs, enable_prefix_caching=False, **shape)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    texts = [prompt(length) for length in (416, 480, 700, 1500, 1564, 3000)]
    want = [said(large.generate([one], params)) for one in texts]
    for one, own in zip(texts, want, strict=True):
        engine, name = small.engine, str(len(one["prompt_token_ids"]))
        engine.add_request(name, one["prompt_token_ids"], params)
        for _ in range(2000):
            done = engine.step()
            if done:
                break
        assert done and said(done) == own
        held = [engine.pool.filled(x.blocks) for x in engine.scheduler.running]
        assert not held and engine.pool.num_used == 0
    together = small.generate(texts[:num_seqs], params)
    assert [said([one]) for one in together] == want[:num_seqs]
    assert small.stats()["prefix"]["hits"] > 0


def test_what_it_chooses() -> None:
    llm = LLM(max_attention_window=100)
    assert llm.runtime.horizon == Horizon(96, 4)
    assert llm.runtime.model.max_model_len == 65_536
    assert LLM(max_attention_window=3).runtime.horizon == Horizon(1, 2)
    cost = llm.engine.ledger.costs
    from penstock.roofline import StepSize

    far, near = cost.cost(StepSize([1], [900], 1)), cost.cost(StepSize([1], [100], 1))
    assert far == near
    assert cost.cost(StepSize([1], [99], 1)).kv_bytes < near.kv_bytes


@pytest.mark.parametrize(
    ("model", "said_of_it"),
    [
        ("gpt2", "has a learned embedding for each position"),
        ("mistral", "changes nothing: this model's layers see 19 tokens at most"),
        ("hunyuan", "weighs keys once they are turned"),
    ],
)
def test_models_that_it_is_not_for(model: str, said_of_it: str, tmp_path: Path) -> None:
    make_tiny(model, tmp_path)
    with pytest.raises(ConfigError, match=said_of_it):
        LLM(tmp_path, max_attention_window=40, skip_tokenizer_init=True)


def test_refusals(tmp_path: Path) -> None:
    for asked, why in (
        ({"max_attention_window": 0}, "max_attention_window must be a positive integer"),
        ({"max_attention_window": 2.5}, "max_attention_window must be a positive integer"),
        ({"sink_token_length": 4}, "has no effect without a max_attention_window"),
        ({"max_attention_window": 40, "sink_token_length": -1}, "from 0 to 256, not -1"),
        ({"max_attention_window": 400, "sink_token_length": 257}, "from 0 to 256, not 257"),
        ({"max_attention_window": 400, "sink_token_length": True}, "from 0 to 256, not True"),
        ({"max_attention_window": 40, "layout": "linear"}, "doesn't go with layout='linear'"),
        ({"max_attention_window": 40, "kv_cache_dtype": "kivi"}, "doesn't go with kv_cache_dtype"),
        (
            {"max_attention_window": 40, "speculative_config": {"method": "eagle"}},
            "doesn't go with guesses by 'eagle'",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            EngineConfig.of(**asked)
    for asked, why in (
        ({"max_attention_window": 40, "sink_token_length": 40}, "leaves nothing of"),
        ({"max_attention_window": 5000, "max_model_len": 9000}, "is more than the 1024 positions"),
        (
            {"max_attention_window": 1024, "max_model_len": 1024},
            "changes nothing where no text is longer",
        ),
        ({"max_attention_window": 400, "max_model_len": 1 << 25}, "more than 16777216. Lower it"),
        ({"max_model_len": 1 << 20}, "Lower it, set a max_attention_window, or scale its rope"),
        ({"max_attention_window": 40, "prefix_cache_dir": tmp_path}, "blocks are let go"),
    ):
        with pytest.raises(ConfigError, match=why):
            LLM(**asked)
