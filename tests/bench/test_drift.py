"""Drift: nothing from itself, little from 8 bits, more from 4, and the arithmetic of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.bench import drift as module
from penstock.bench.drift import (
    Drift,
    DriftSum,
    Place,
    check_finite,
    measure_drift,
)
from penstock.bench.reader import About, LocalReader, Reader, Reading, open_reader
from penstock.bench.texts import Text, Window
from penstock.bench.variant import Variant
from penstock.bench.vocabularies import (
    Shared,
    check_encodings,
    check_vocabularies,
    encode_for_both,
)
from penstock.errors import ConfigError, ModelError
from penstock.models.hub import resolve

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her "
    "dog, Max. One day, Lily and Max saw a big red ball under a tree. Lily wanted to play with it. "
    '"Can we take the ball?" she asked her mom. Her mom smiled and said, "No, Lily. The ball is '
    'not ours. We must find who lost it." Lily was sad, but she looked around. She saw a boy who '
    "was crying. She gave him the ball. The boy was very happy, and they all played together. "
)


@pytest.fixture(scope="module")
def plain() -> Iterator[Reader]:
    with open_reader(Variant(), 128) as reader:
        yield reader


@pytest.fixture(scope="module")
def text(plain: Reader) -> Text:
    return Text("story", plain.encode([STORY * 2, STORY]))


@pytest.fixture(scope="module")
def found(plain: Reader, text: Text) -> dict[str, Drift]:
    drifts = {}
    for words in ("", "w8a16", "w8a8", "w4a16-g32", "w4a8-g32"):
        with open_reader(Variant().with_options(words), 128) as reader:
            drifts[words] = measure_drift(plain, reader, [text], 128, 64, worst=3, layers=True)
    return drifts


def test_a_model_has_no_drift_from_itself(text: Text, found: dict[str, Drift]) -> None:
    same = found[""]
    assert same.equal and same.agreement == 1.0
    assert (same.kl, same.kl_p99, same.kl_max) == (0.0, 0.0, 0.0)
    assert same.perplexity == same.reference_perplexity
    assert same.positions == sum(len(ids) - 1 for ids in text.documents) > 200
    assert same.worst == () and len(same.layers) == 9
    assert {layer.largest for layer in same.layers} == {0.0}


def test_eight_bits_drift_little_and_four_more(found: dict[str, Drift]) -> None:
    assert 0 < found["w8a16"].kl < found["w8a8"].kl < 0.004
    assert found["w8a8"].kl < found["w4a16-g32"].kl < 0.1
    assert found["w8a8"].kl < found["w4a8-g32"].kl < 0.1
    assert found["w8a8"].agreement > 0.95
    for words in ("w8a16", "w8a8", "w4a16-g32", "w4a8-g32"):
        one = found[words]
        assert not one.equal and one.kl_max >= one.kl_p99 >= one.kl
        assert one.perplexity == pytest.approx(one.reference_perplexity, rel=0.1)
        assert [w.kl for w in one.worst] == one.each.topk(3).values.tolist()
        assert len(one.layers) == 9 and 0 < one.layers[1].mean < one.layers[-1].mean
    for layer, coarser in zip(found["w8a8"].layers, found["w4a8-g32"].layers, strict=True):
        assert layer.mean <= coarser.mean


def with_large_channels(folder: Path) -> Path:
    """The embedded model, equal in theory, with two channels of every key 16 times as large."""
    source = resolve("stories")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    dim, heads = config["head_dim"], config["num_attention_heads"]
    scale = torch.ones(dim)
    scale[[3, 3 + dim // 2]] = 16.0  # that rotary embedding turns into each other
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("k_proj.weight"):
            tensor *= scale.repeat(config["num_key_value_heads"])[:, None]
        if name.endswith("q_proj.weight"):
            tensor /= scale.repeat(heads)[:, None]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_keys_by_channel_drift_less_than_by_token(plain: Reader, tmp_path: Path) -> None:
    """Where some channels are large, as in large models; at the same bytes of codes.

    KIVI's, most of whose tokens lie behind its window.
    """
    text = Text("story", plain.encode([STORY * 4]))
    size = len(text.documents[0])
    assert size > 2 * 128
    variant = Variant(model=str(with_large_channels(tmp_path / "large")))
    kl = {}
    with open_reader(variant, size) as whole:
        for words in ("kv=int8", "kv=int4", "kv=kivi"):
            with open_reader(variant.with_options(words), size) as reader:
                found = measure_drift(whole, reader, [text], size, size - 1, layers=True)
            kl[words] = found.kl
            assert 0 < found.layers[-1].mean < 0.5
    assert 0 < 5 * kl["kv=kivi"] < kl["kv=int8"] < kl["kv=int4"] < 0.5


@pytest.mark.parametrize(
    "words",
    ["graph", "w4a8,graph", "kv=kivi,graph", pytest.param("compiled", marks=pytest.mark.slow)],
)
def test_a_graph_has_the_bits_of_its_model(text: Text, words: str) -> None:
    other = ",".join(w for w in words.split(",") if w not in ("graph", "compiled"))
    with (
        open_reader(Variant().with_options(other), 128) as a,
        open_reader(Variant().with_options(words), 128) as b,
    ):
        found = measure_drift(a, b, [text], 128, 64, layers=True)
    assert found.equal and found.layers == ()
    assert any("layer" in remark for remark in found.remarks)


def test_the_figures_follow_from_the_logits(
    plain: Reader, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's own divergence and loss, a window at a time."""
    monkeypatch.setattr(module, "DRIFT_ROWS", 7)
    ids = text.documents[0][:50]
    kl, nats = 0.0, 0.0
    with open_reader(Variant(quantization="w4a8-g128"), 32) as other:
        got = measure_drift(plain, other, [Text("x", [ids])], 32, 18)
        for piece, first in ((ids[:32], 1), (ids[18:], 14)):
            p, q = (r.read(piece, first).logits.double().log_softmax(-1) for r in (plain, other))
            kl += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
            target = torch.tensor(piece[first:])
            nats += float(torch.nn.functional.nll_loss(q, target, reduction="sum"))
    assert got.positions == 49
    assert got.kl == pytest.approx(kl / 49, rel=1e-9)
    assert got.perplexity == pytest.approx(math.exp(nats / 49), rel=1e-9)


def test_known_distributions() -> None:
    """KL of (1/2, 1/2) from (1/4, 3/4) is ln(4/3) / 2; positions of equal ones add nothing."""
    even, odd = torch.tensor([0.0, 0.0]), torch.tensor([0.0, math.log(3.0)])
    total = DriftSum()
    total.add(torch.stack([even, odd]), torch.stack([odd, odd]), torch.tensor([0, 1]))
    got = total.result()
    assert got.each.tolist() == pytest.approx([math.log(4 / 3) / 2, 0.0], abs=1e-7)
    assert got.perplexity == pytest.approx(math.exp((math.log(4) + math.log(4 / 3)) / 2))
    assert got.reference_perplexity == pytest.approx(math.exp((math.log(2) + math.log(4 / 3)) / 2))
    assert got.agreement == 0.5 and not got.equal


def test_the_bound_of_99_in_100_is_numpys() -> None:
    draw = torch.Generator().manual_seed(1)
    for count in (1, 2, 99, 100, 101, 1234):
        each = torch.rand(count, generator=draw, dtype=torch.float64)
        assert module._p99(each) == pytest.approx(float(np.percentile(each.numpy(), 99)), rel=1e-12)


def test_the_worst_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRIFT_ROWS", 4)
    draw = torch.Generator().manual_seed(2)
    reference = torch.randn(30, 10, generator=draw)
    other = reference.clone()
    moved = {3: 2.0, 17: 5.0, 18: 4.0, 29: 3.0}
    for row, by in moved.items():
        other[row, int(reference[row].argmin())] += by
    total = DriftSum(worst=3)
    for start in (0, 15):  # two windows of a document: 20 tokens, of which the first 5 are context
        window = Window(list(range(start, start + 20)), 5, start)
        rows = slice(start, start + 15)
        targets = torch.tensor(window.ids[5:]) % 10
        place = Place("x", 0, replace(window, ids=[i % 10 for i in window.ids]))
        total.add(reference[rows], other[rows], targets, place)
    got = total.result()
    assert [w.kl for w in got.worst] == got.each.topk(3).values.tolist()
    assert {w.position - 5 for w in got.worst} <= set(moved) and len(got.worst) == 3
    for w in got.worst:
        row = w.position - 5
        p, q = reference[row].double().softmax(-1), other[row].double().softmax(-1)
        assert w.token == w.position % 10
        assert w.context == tuple(i % 10 for i in range(w.position - len(w.context), w.position))
        assert w.likeliest == (int(p.argmax()), int(q.argmax()))
        assert w.probability == pytest.approx((float(p[w.token]), float(q[w.token])))


def test_the_error_of_a_layer() -> None:
    a = torch.tensor([[[3.0, 4.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 0.0]]])
    b = torch.tensor([[[3.0, 4.0], [0.0, 3.0]], [[1.0, 1.0], [0.0, 0.0]]])
    total = DriftSum()
    total.add_residuals(a, b)
    total.add(torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([0, 1]))
    first, second = total.result().layers
    assert (first.mean, first.largest) == (0.25, 0.5)
    assert (second.mean, second.largest) == (0.5, 1.0)


class _Fixed:
    """A reader of one answer."""

    def __init__(self, logits: Tensor, residuals: Tensor | None = None, **about: int) -> None:
        shape = {"vocab_size": logits.shape[1], "layers": 2, "hidden": 4, **about}
        self.about = About(**shape, weights="x", cache="x", kernels="x", calls="x")
        self._reading = Reading(logits, residuals)
        self.names = [b"a", b"b", b"c"]
        self.has: list[int] | None = None
        self.ids = [0, 1, 2]

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        return [self.ids for _ in documents]

    def kept(self) -> Tensor | None:
        return None if self.has is None else torch.tensor(self.has)

    def pieces(self) -> list[bytes]:
        return self.names

    def read(self, ids: Sequence[int], first: int, layers: bool = False) -> Reading:
        return self._reading if layers else Reading(self._reading.logits)

    def close(self) -> None:
        pass


def test_layers_that_cannot_be_compared() -> None:
    logits, text = torch.zeros(2, 3), Text("x", [[0, 1, 2]])
    one = _Fixed(logits, torch.ones(3, 2, 4))
    for other, words in (
        (_Fixed(logits, layers=3), "A has 2 layers of 4 values, B 3 of 4"),
        (_Fixed(logits, layers=0), "B runs as one program"),
    ):
        got = measure_drift(one, other, [text], 8, 4, layers=True)
        assert got.equal and got.layers == () and words in got.remarks[0]


def test_residuals_of_another_pass_are_named() -> None:
    one = _Fixed(torch.zeros(2, 3), torch.ones(3, 2, 4))
    one._reading = replace(one._reading, as_read=False)
    got = measure_drift(one, one, [Text("x", [[0, 1, 2]])], 8, 4, layers=True)
    assert "the two don't agree" in got.remarks[0] and "of A are" in got.remarks[0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(broken: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = broken
    place = Place("tale.txt", 1, Window([5, 6, 7, 8], 1, 10))
    with pytest.raises(ModelError, match=r"B gives 1 NaN or infinite logits of 4 in tale.txt, "):
        check_finite(Reading(logits), "B", place)
    stream = torch.zeros(3, 3, 2)
    with pytest.raises(ModelError, match=r"document 2, after token 11, .* the head breaks it"):
        check_finite(Reading(logits, stream), "B", place)
    stream[1:, 1, 0] = math.nan
    with pytest.raises(ModelError, match="so after layer 0"):
        check_finite(Reading(logits, stream), "B", place)
    stream[0, 1, 0] = math.nan
    with pytest.raises(ModelError, match="so after the embedding"):
        check_finite(Reading(logits, stream), "B", place)


def test_vocabularies_and_tokenizers_must_agree() -> None:
    one, other = _Fixed(torch.zeros(2, 3)), _Fixed(torch.zeros(2, 4))
    with pytest.raises(ConfigError, match=r"x and y have vocabularies of 3 and 4 tokens"):
        check_vocabularies(one, other, ("x", "y"))
    other = _Fixed(torch.zeros(2, 3))
    check_vocabularies(one, other, ("x", "y"))
    other.names = [b"a", b"\xff", b"c"]
    with pytest.raises(ConfigError, match=r"token 1 is 'b' in x and '\\\\xff' in y"):
        check_vocabularies(one, other, ("x", "y"))
    check_encodings("t", [[1, 2]], [[1, 2]], ("x", "y"))
    with pytest.raises(ConfigError, match=r"document 2, is 2 tokens in x and 3 in y, .* token 1"):
        check_encodings("t", [[1], [1, 2]], [[1], [1, 3, 4]], ("x", "y"))
    with pytest.raises(ConfigError, match="part at token 1"):
        check_encodings("t", [[1]], [[1, 3]], ("x", "y"))


def lacking(token: int, *values: float) -> Tensor:
    """Logits of probabilities, of which one has none."""
    logits = torch.tensor([values]).log()
    assert logits[0, token] == -math.inf
    return logits


def test_tokens_that_one_lacks_are_a_figure_of_their_own() -> None:
    """p = (1/2, 1/4, 1/4), q = (3/4, 1/4, 0): over both, p is (2/3, 1/3), and a 1/4 is left out."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), lacking(2, 0.75, 0.25, 0.0)
    one, other = _Fixed(p), _Fixed(q)
    other.has = [0, 1]
    shared = Shared.of(one, other)
    assert shared is not None
    assert shared.ids.tolist() == [0, 1] and [x.tolist() for x in shared.only] == [[2], []]
    total = DriftSum(worst=1, shared=shared)
    total.add(p, q, torch.tensor([0]), Place("x", 0, Window([0, 0], 1)))
    got = total.result()
    want = 2 / 3 * math.log((2 / 3) / 0.75) + 1 / 3 * math.log((1 / 3) / 0.25)
    assert got.kl == pytest.approx(want, rel=1e-6)
    assert got.shared_tokens == 2 and got.outside is not None
    assert got.outside[0].tokens == 1 and got.outside[0].mean == pytest.approx(0.25)
    assert (got.outside[1].tokens, got.outside[1].largest) == (0, 0.0)
    assert got.reference_perplexity == pytest.approx(2) and got.perplexity == pytest.approx(4 / 3)
    assert got.worst[0].probability == pytest.approx((0.5, 0.75))
    # the other way round: of q, nothing lies outside of p
    assert Shared.of(other, one) is not None and Shared.of(one, one) is None


def test_what_each_lacks_of_the_other() -> None:
    p, q = lacking(2, 0.5, 0.5, 0.0), lacking(0, 0.0, 0.5, 0.5)
    one, other = _Fixed(p), _Fixed(q)
    one.has, other.has = [0, 1], [1, 2]
    text = Text("x", [[1, 1]])
    got = measure_drift(one, other, [text], 8, 4)
    assert got.equal and got.kl == 0 and got.agreement == 0  # where both have a token
    assert got.outside is not None and [x.mean for x in got.outside] == pytest.approx([0.5, 0.5])
    broken = q.clone()
    broken[0, 1] = math.nan
    with pytest.raises(ModelError, match="B gives 1 NaN or infinite logits of 2"):
        measure_drift(one, _with(broken, [1, 2]), [text], 8, 4)


def _with(logits: Tensor, has: list[int]) -> _Fixed:
    found = _Fixed(logits)
    found.has = has
    return found


def test_a_text_in_the_tokens_of_the_smaller_vocabulary() -> None:
    whole, reduced = _Fixed(torch.zeros(2, 3)), _Fixed(torch.zeros(2, 3))
    whole.names = reduced.names = [b"a", b"b", b"ab"]
    whole.ids, reduced.ids, reduced.has = [2, 0], [0, 1, 0], [0, 1]
    for a, b in ((whole, reduced), (reduced, whole)):
        found, remark = encode_for_both("t", ["aba"], a, b, ("x", "y"))
        assert found == [[0, 1, 0]] and remark.startswith("t is 3 tokens instead of 2")
    whole.ids = [0, 1, 0]
    assert encode_for_both("t", ["aba"], whole, reduced, ("x", "y")) == ([[0, 1, 0]], "")
    whole.ids = [2, 1]
    with pytest.raises(ConfigError, match="is other text in the tokens of x than in those of y"):
        encode_for_both("t", ["aba"], whole, reduced, ("x", "y"))
    whole.ids, whole.has = [2, 0], [0, 2]
    with pytest.raises(ConfigError, match="neither vocabulary holds the other"):
        encode_for_both("t", ["aba"], whole, reduced, ("x", "y"))


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 0), (1, 1)])
def test_wrong_windows(plain: LocalReader, text: Text, window: int, stride: int) -> None:
    with pytest.raises(ConfigError, match=f"window of {window} tokens with a stride of {stride}"):
        measure_drift(plain, plain, [text], window, stride)
