from collections import Counter

import numpy as np
import pytest
import torch
from recipes.batches import Batch, Mixture, PackedExamples, Windows, best_fit
from recipes.corpus import Examples, Stream
from recipes.family import PRETRAIN, paces_with

from penstock.errors import ConfigError


def stream(tokens: int, first: int = 0) -> Stream:
    return Stream(np.arange(first, first + tokens, dtype=np.uint16), tokens)


def examples(lengths: list[int]) -> Examples:
    """Example i holds 100 i, 100 i + 1, …; the second half of each is the assistant's."""
    tokens = np.concatenate([np.arange(100 * i, 100 * i + n) for i, n in enumerate(lengths)])
    mask = np.concatenate([np.arange(n) >= n // 2 for n in lengths])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Examples(tokens.astype(np.uint16), mask, offsets)


def test_paces_that_are_chosen() -> None:
    paces = paces_with(PRETRAIN, ["novels=2:0", "tools=0:1.5"])
    assert paces["novels"] == (2.0, 0.0)
    assert paces["tools"] == (0.0, 1.5)
    assert {k: v for k, v in paces.items() if k not in ("novels", "tools")} == {
        k: v for k, v in PRETRAIN.items() if k not in ("novels", "tools")
    }


def test_what_another_model_wrote_has_a_pace_where_it_is_given_one() -> None:
    assert paces_with(PRETRAIN, ["synthetic=2:1"])["synthetic"] == (2.0, 1.0)
    assert "synthetic" not in paces_with(PRETRAIN, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("novels", "like novels=1:0.5; got 'novels'"),
        ("novels=1", "SOURCE=START:END"),
        ("novels=1:2:3", "SOURCE=START:END"),
        ("novels=a:b", "SOURCE=START:END"),
        ("novels=-1:2", "numbers from 0 up"),
        ("novels=nan:2", "numbers from 0 up"),
        ("novel=1:2", "one of novels, requests, science_fiction"),
    ],
)
def test_paces_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        paces_with(PRETRAIN, [text])


def test_every_item_has_one_place_and_no_row_overflows() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = best_fit(lengths, 128)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 128
    assert len(rows) <= 1.05 * lengths.sum() / 128  # nearly no room is lost


def test_rows_are_cut_into_shorter_ones_that_predict_the_same_tokens() -> None:
    tokens = torch.arange(18).view(2, 9)
    weights = torch.rand(2, 8)
    whole = Batch(tokens, weights, torch.arange(16).view(2, 8) // 3)
    cut = whole.cut(4)
    assert cut.tokens.tolist() == [
        [0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [9, 10, 11, 12, 13], [13, 14, 15, 16, 17]
    ]  # fmt: skip
    assert cut.weights.equal(weights.view(4, 4))
    assert cut.documents is not None and cut.documents.tolist()[1] == [1, 1, 2, 2]
    assert whole.cut(8).tokens.equal(tokens)


def test_an_item_longer_than_a_row_takes_one_alone() -> None:
    assert best_fit([300, 5], 128) == [[0], [1]]


def test_an_epoch_of_windows_covers_the_stream_once() -> None:
    windows = Windows(stream(1000), 10)
    predicted = [t for i in range(len(windows)) for t in windows.row(i, 0.0)[0][1:]]
    assert predicted == list(range(1, 10 * len(windows) + 1))
    assert 1000 - len(predicted) <= 20
    assert windows.row(len(windows) - 1, 0.999)[0].shape == (11,)


def test_a_stream_shorter_than_a_row_is_repeated() -> None:
    windows = Windows(stream(7), 10)
    assert len(windows) >= 1
    tokens, _, _ = windows.row(0, 0.5)
    assert tokens.tolist() == [(5 + i) % 7 for i in range(11)]


def test_conversations_of_a_row_are_kept_apart() -> None:
    packed = PackedExamples(examples([8, 6]), 15)
    assert len(packed) == 1
    tokens, weights, documents = packed.row(0, 0.0)
    assert tokens.tolist() == [*range(8), *range(100, 106), 0, 0]
    assert documents.tolist() == [0] * 8 + [1] * 6 + [-1]
    # weights belong to the predicted token: 4…7 and 103…105
    assert weights.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]


def test_all_tokens_count_but_the_first_of_each_and_the_padding() -> None:
    _, weights, _ = PackedExamples(examples([8, 6]), 15, all_tokens=True).row(0, 0.0)
    assert weights.tolist() == [1] * 7 + [0] + [1] * 5 + [0, 0]


def mixture(seed: int = 0) -> Mixture:
    sources = {"a": Windows(stream(500), 10), "b": Windows(stream(5000, 10_000), 10)}
    return Mixture(sources, {"a": (2.0, 4.0), "b": (1.0, 1.0)}, 20, seed, isolate=False)


@pytest.mark.parametrize(("progress", "pace"), [(0.0, 2.0), (0.5, 3.0), (1.0, 4.0)])
def test_sources_are_read_at_their_paces(progress: float, pace: float) -> None:
    mix = mixture()
    for _ in range(50):
        mix.batch(progress)
    epochs = mix.epochs()
    assert epochs["a"] == pytest.approx(pace * epochs["b"], rel=0.03)
    assert sum(mix.drawn.values()) == 1000


def test_no_row_comes_twice_in_an_epoch() -> None:
    mix = mixture()
    starts: Counter[int] = Counter()
    while mix.drawn["b"] < len(mix.sources["b"]):
        starts.update(int(row[0]) for row in mix.batch(0.0).tokens if row[0] >= 10_000)
    assert max(starts.values()) == 1 or mix.drawn["b"] > len(mix.sources["b"])


def test_a_restored_mixture_goes_on_with_the_rows_it_would_have_had() -> None:
    whole = mixture()
    for i in range(30):
        whole.batch(i / 60)
    resumed = mixture()
    resumed.restore(whole.state())
    for i in range(30, 60):
        assert whole.batch(i / 60).tokens.equal(resumed.batch(i / 60).tokens)


def test_another_seed_gives_other_rows() -> None:
    assert not mixture(0).batch(0.0).tokens.equal(mixture(1).batch(0.0).tokens)


def test_a_source_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"names c, but the sources are a"):
        Mixture({"a": Windows(stream(500), 10)}, {"c": (1, 1)}, 4, 0, isolate=False)
