"""Drift: nothing from itself, little from 8 bits, more from 4, and the arithmetic of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from penstock.bench import drift as module
from penstock.bench.drift import Drift, Variant, drift, load, logits_of, measure_drift, windows
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.models.hub import resolve
from penstock.runtime import Runtime, load_runtime
from penstock.tokenizer import Tokenizer

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her "
    "dog, Max. One day, Lily and Max saw a big red ball under a tree. Lily wanted to play with it. "
    '"Can we take the ball?" she asked her mom. Her mom smiled and said, "No, Lily. The ball is '
    'not ours. We must find who lost it." Lily was sad, but she looked around. She saw a boy who '
    "was crying. She gave him the ball. The boy was very happy, and they all played together. "
)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return Tokenizer.from_folder(resolve("stories")).encode(STORY * 2)


@pytest.fixture(scope="module")
def found(tokens: list[int]) -> dict[str, Drift]:
    names = [None, "w8a16", "w8a8", "w4a16-g32", "w4a8-g32"]
    rows = drift("stories", tokens, 128, [Variant(name) for name in names])
    return {v.name: d for v, d in rows if isinstance(d, Drift)}


def test_bfloat16_has_no_drift_from_itself(tokens: list[int], found: dict[str, Drift]) -> None:
    same = found["bfloat16"]
    assert (same.kl, same.kl_p99, same.agreement) == (0.0, 0.0, 1.0)
    assert same.perplexity == same.reference_perplexity
    assert same.positions == len(tokens) > 200


def test_eight_bits_drift_little_and_four_more(found: dict[str, Drift]) -> None:
    assert 0 < found["w8a16"].kl < found["w8a8"].kl < 0.002
    assert found["w8a8"].kl < found["w4a16-g32"].kl < 0.1
    assert found["w8a8"].kl < found["w4a8-g32"].kl < 0.1
    assert found["w8a8"].agreement > 0.95
    for one in found.values():
        assert one.kl_p99 >= one.kl
        assert one.perplexity == pytest.approx(one.reference_perplexity, rel=0.1)


def test_keys_by_channel_drift_less_than_by_token(tokens: list[int]) -> None:
    """At the same bytes of codes, KIVI's beats plain int4, with its window and without."""
    window = len(tokens)
    variants = [Variant(None, name) for name in ("int4", "kivi")]
    kl = {v.kv_cache_dtype: d.kl for v, d in drift("stories", tokens, window, variants)}  # type: ignore[union-attr]
    config = EngineConfig.of(
        model="stories", dtype="bfloat16", kv_cache_dtype="kivi", kv_recent_window=1,
        max_model_len=window, max_num_seqs=1, max_num_batched_tokens=window,
    )  # fmt: skip
    coded, reference = load_runtime(config), load("stories", Variant(), window)
    kl["codes"] = measure_drift(reference, coded, tokens, window).kl
    assert 0 < kl["kivi"] < kl["codes"] < kl["int4"] < 0.03
    layouts = [load("stories", v, window).layout for v in variants]
    assert layouts[0].bytes_per_block == layouts[1].bytes_per_block


@pytest.fixture(scope="module")
def plain() -> Runtime:
    return load("stories", Variant(), 32)


def test_the_figures_follow_from_the_logits(
    plain: Runtime, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's own divergence and loss, a window at a time."""
    other = load("stories", Variant("w4a8-g128"), 32)
    monkeypatch.setattr(module, "DRIFT_ROWS", 7)
    part = tokens[:50]
    got = measure_drift(plain, other, part, 32)
    kl, nats = 0.0, 0.0
    for piece in (part[:32], part[32:]):
        p, q = (logits_of(r, piece).double().log_softmax(-1) for r in (plain, other))
        kl += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
        target = torch.tensor(piece[1:])
        nats += float(torch.nn.functional.nll_loss(q[:-1], target, reduction="sum"))
    assert got.positions == 50
    assert got.kl == pytest.approx(kl / 50, rel=1e-9)
    assert got.perplexity == pytest.approx(math.exp(nats / 48), rel=1e-9)


def test_windows_cover_the_text() -> None:
    assert list(windows([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4]]  # nothing follows the fifth
    assert list(windows([1, 2, 3, 4, 5], 3)) == [[1, 2, 3], [4, 5]]
    assert list(windows([1, 2], 512)) == [[1, 2]]


def test_what_cannot_be_loaded_says_why(tokens: list[int]) -> None:
    ((variant, why),) = drift("stories", tokens[:8], 8, [Variant("w5a8")])
    assert (variant.name, isinstance(why, str)) == ("w5a8", True)
    assert "quantization='w5a8' isn't one of" in str(why)


def test_a_window_beyond_the_cache_is_refused(plain: Runtime) -> None:
    with pytest.raises(ConfigError, match="needs"):
        logits_of(plain, [1] * (plain.num_blocks * plain.layout.block_size + 1))


@pytest.mark.parametrize(("text", "window"), [([1], 8), ([1, 2, 3], 1)])
def test_too_little_to_compare(text: list[int], window: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two are the least"):
        next(drift(tmp_path, text, window))


def test_names_and_sizes() -> None:
    assert Variant("w8a8", "int8").name == "w8a8, int8 cache"
    sizes = {name: Variant(name).bytes_per_weight for name in ("w8a8", "w4a8-g32", "w4a8-g128")}
    assert sizes == {
        "w8a8": 1 + 4 / 4096, "w4a8-g32": 0.5 + 2 / 32, "w4a8-g128": 0.5 + 2 / 128
    }  # fmt: skip
    assert Variant().bytes_per_weight == 2.0
