"""How far one variant of a model drifts from another: next-token distributions all over a text.

KL(p_A ‖ p_B) of every position, how often both find the same token likeliest, both perplexities,
and how far the residual stream has moved after each layer.
Source of the measures: Dutta et al. 2024, arXiv:2407.09141 (accuracy hides flips, KL shows them).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.bench.precision import remark
from penstock.bench.reader import Reader, Reading
from penstock.bench.texts import Text, Window, check_window, windows_of
from penstock.bench.vocabularies import Shared
from penstock.errors import ModelError

DRIFT_ROWS = 64
"""Distributions that are compared at once: in float64, a large vocabulary takes a MB each."""

CONTEXT_TOKENS = 16
"""That are kept before each of the worst."""


@dataclass(frozen=True, slots=True)
class Worst:
    """A position where the distributions lie far apart."""

    kl: float
    text: str
    document: int  # from 0
    position: int  # of the token that came, in its document
    context: tuple[int, ...]  # the tokens before it
    token: int  # that came
    probability: tuple[float, float]  # of it, in A and in B
    likeliest: tuple[int, int]  # in A and in B
    likeliest_probability: tuple[float, float]  # of A's own in A, of B's own in B


@dataclass(frozen=True, slots=True)
class LayerError:
    """‖r_B − r_A‖ / ‖r_A‖ of a position's residual stream, over all positions."""

    mean: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Outside:
    """What a variant gives to tokens that the other lacks, over all positions."""

    tokens: int
    mean: float  # probability
    largest: float


@dataclass(frozen=True, slots=True)
class Drift:
    """Of B from A, over all positions.

    Where one lacks tokens, `equal` and KL are of those that both have (`bench.vocabularies`), and
    the others of each variant's own distribution.
    """

    positions: int
    equal: bool  # every logit is the same, by ==
    kl: float  # mean KL(p_A ‖ p_B) in nats
    kl_p99: float  # one position in a hundred is worse
    kl_max: float
    agreement: float  # share of positions where the likeliest token is the same
    perplexity: float  # B's, of the text
    reference_perplexity: float  # A's
    each: Tensor  # [positions] float64, KL of each position in the order of the text
    worst: tuple[Worst, ...] = ()  # the worst first
    layers: tuple[LayerError, ...] = ()  # after the embedding, then after each layer
    remarks: tuple[str, ...] = ()
    shared_tokens: int | None = None  # that both have; None: all
    outside: tuple[Outside, Outside] | None = None  # of A's and of B's, where one lacks some

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON; the tokens of `worst` are the caller's to write."""
        found: dict[str, Any] = {
            "positions": self.positions,
            "equal": self.equal,
            "kl": self.kl,
            "kl_p99": self.kl_p99,
            "kl_max": self.kl_max,
            "same_likeliest_token": self.agreement,
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
        }
        if self.outside is not None:
            found["shared_tokens"] = self.shared_tokens
            found["outside"] = [asdict(one) for one in self.outside]
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where a window's rows stand."""

    text: str
    document: int
    window: Window


@dataclass(slots=True)
class _Layers:
    """Errors of one layer's rows, chunk after chunk."""

    parts: list[Tensor] = field(default_factory=list)

    def result(self) -> LayerError:
        each = torch.cat(self.parts)
        return LayerError(float(each.mean()), _p99(each), float(each.max()))


class DriftSum:
    """Adds up how far distributions lie from their references."""

    def __init__(self, worst: int = 0, shared: Shared | None = None) -> None:
        """worst: how many of the worst positions are kept. shared: the tokens that both have, where
        one lacks some.
        """
        self._shared = shared
        self._outside: list[Tensor] = []  # [2, T], of A and of B
        self._kl: list[Tensor] = []
        self._same = 0
        self._equal = True
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._keep = worst
        self._worst: list[tuple[float, int, Worst]] = []  # a heap, the least first
        self._layers: list[_Layers] = []

    def add(
        self,
        reference: Tensor,
        other: Tensor,
        targets: Tensor,
        place: Place | None = None,
        *,
        likeliest: Tensor | None = None,
    ) -> None:
        """Log-probabilities or logits [T, V] of both, −∞ of tokens that one lacks, and the tokens
        that came: [T].

        place: where they stand; without it none of them is kept among the worst. likeliest: the
        reference's likeliest tokens [T], where its own are rounded.
        """
        if likeliest is None:
            likeliest = reference.argmax(-1)
        self._same += int((likeliest == other.argmax(-1)).sum())
        self._equal = self._equal and torch.equal(self._common(reference), self._common(other))
        for row in range(0, len(reference), DRIFT_ROWS):
            rows = slice(row, row + DRIFT_ROWS)
            p, q = (x[rows].double().log_softmax(-1) for x in (reference, other))
            if self._shared is None:
                kl = _divergence(p, q)
            else:
                only = zip((p, q), self._shared.only, strict=True)
                self._outside.append(torch.stack([x[:, ids].exp().sum(-1) for x, ids in only]))
                both = (self._common(x[rows]).double() for x in (reference, other))
                kl = _divergence(*(x.log_softmax(-1) for x in both))  # 0 of equal logits
            self._kl.append(kl)
            self._loss -= torch.stack([x.gather(1, targets[rows, None]).sum() for x in (p, q)])
            if place is not None and self._keep:
                self._remember(kl, p, q, place, row)

    def _common(self, logits: Tensor) -> Tensor:
        """Of the tokens that both have."""
        return logits if self._shared is None else logits.index_select(-1, self._shared.ids)

    def _lacking(self) -> tuple[Outside, Outside] | None:
        if self._shared is None:
            return None
        a, b = (
            Outside(len(ids), float(each.mean()), float(each.max()))
            for ids, each in zip(self._shared.only, torch.cat(self._outside, 1), strict=True)
        )
        return a, b

    def add_residuals(self, reference: Tensor, other: Tensor) -> None:
        """The streams [L + 1, T, D] of both."""
        if not self._layers:
            self._layers = [_Layers() for _ in reference]
        for layer, a, b in zip(self._layers, reference, other, strict=True):
            size = torch.linalg.vector_norm(a.double(), dim=-1)
            moved = torch.linalg.vector_norm(b.double() - a.double(), dim=-1)
            layer.parts.append(torch.where(moved == 0, 0.0, moved / size))

    def result(self, remarks: Sequence[str] = ()) -> Drift:
        """Of all that was added."""
        each = torch.cat(self._kl)
        before, after = (_exp(nats / len(each)) for nats in self._loss.tolist())
        return Drift(
            positions=len(each),
            equal=self._equal,
            kl=float(each.mean()),
            kl_p99=_p99(each),
            kl_max=float(each.max()),
            agreement=self._same / len(each),
            perplexity=after,
            reference_perplexity=before,
            each=each,
            worst=tuple(w for _, _, w in sorted(self._worst, key=lambda x: (-x[0], -x[1]))),
            layers=tuple(layer.result() for layer in self._layers),
            remarks=tuple(remarks),
            shared_tokens=None if self._shared is None else len(self._shared.ids),
            outside=self._lacking(),
        )

    def _remember(self, kl: Tensor, p: Tensor, q: Tensor, place: Place, row: int) -> None:
        ids, first = place.window.ids, place.window.first
        values, order = kl.topk(min(self._keep, len(kl)))
        for value, i in zip(values.tolist(), order.tolist(), strict=True):
            full = len(self._worst) == self._keep
            if value == 0 or (full and value <= self._worst[0][0]):
                return
            at = first + row + i
            likeliest = int(p[i].argmax()), int(q[i].argmax())
            found = Worst(
                kl=value,
                text=place.text,
                document=place.document,
                position=place.window.start + at,
                context=tuple(ids[max(0, at - CONTEXT_TOKENS) : at]),
                token=ids[at],
                probability=(_exp(p[i, ids[at]]), _exp(q[i, ids[at]])),
                likeliest=likeliest,
                likeliest_probability=(_exp(p[i, likeliest[0]]), _exp(q[i, likeliest[1]])),
            )
            # of equal ones the earlier stays: a number that falls
            entry = value, -sum(map(len, self._kl)) - i, found
            (heapq.heapreplace if full else heapq.heappush)(self._worst, entry)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of each position, from log-probabilities [T, V]."""
    kl: Tensor = (p.exp() * (p - q)).sum(-1)
    return kl.clamp_min(0.0)  # below it only by rounding


def _exp(nats: float | Tensor) -> float:
    try:
        return math.exp(float(nats))
    except OverflowError:
        return math.inf


def _p99(each: Tensor) -> float:
    """What 99 in 100 don't exceed, between two of them where it falls there."""
    ordered = each.sort().values  # torch.quantile takes 16 million at most
    at = 0.99 * (len(each) - 1)
    low = math.floor(at)
    high = min(low + 1, len(each) - 1)
    return float(ordered[low] + (at - low) * (ordered[high] - ordered[low]))


def check_finite(reading: Reading, name: str, place: Place, kept: Tensor | None = None) -> None:
    """Raises ModelError naming the first position, and the first layer, that isn't finite.

    kept: the tokens that it has (`Reader.kept`).
    """
    found = reading.logits if kept is None else reading.logits.index_select(-1, kept)
    broken = ~found.isfinite().all(-1)
    if not broken.any():
        return
    row = int(broken.nonzero()[0])
    logits = found[row]
    words = (
        f"{name} gives {int((~logits.isfinite()).sum()):,} NaN or infinite logits of "
        f"{len(logits):,} in {place.text}, document {place.document + 1}, after token "
        f"{place.window.start + place.window.first + row - 1:,}, the first of "
        f"{int(broken.sum()):,} such positions in its window."
    )
    if reading.residuals is not None:
        sound = reading.residuals[:, row].isfinite().all(-1)
        where = int((~sound).nonzero()[0]) if not sound.all() else None
        if where is None:
            words += " The residual stream is finite after every layer: the head breaks it."
        else:
            stage = "after the embedding" if where == 0 else f"after layer {where - 1}"
            words += f" The residual stream is so {stage}."
    raise ModelError(f"{words} Nothing can be compared with it: check its weights.")


def measure_drift(
    a: Reader,
    b: Reader,
    texts: Sequence[Text],
    window: int,
    stride: int,
    *,
    names: tuple[str, str] = ("A", "B"),
    worst: int = 0,
    layers: bool = False,
) -> Drift:
    """Hold `b` against `a` over `texts`, in windows of `window` tokens of which `stride` are new.

    Whoever calls has seen that a token id means the same to both (`check_vocabularies`), and that
    both have those of the texts (`encode_for_both`).
    Raises ConfigError for a window that can't be, ModelError where one gives NaN.
    """
    check_window(window, stride)
    remarks, layers = _layers_of(a, b, names) if layers else ((), False)
    found = DriftSum(worst, Shared.of(a, b))
    kept = a.kept(), b.kept()
    astray: set[str] = set()
    for text in texts:
        for number, ids in enumerate(text.documents):
            for piece in windows_of(ids, window, stride):
                place = Place(text.name, number, piece)
                readings = []
                for reader, name, has in zip((a, b), names, kept, strict=True):
                    reading = reader.read(piece.ids, piece.first, layers)
                    check_finite(reading, name, place, has)
                    readings.append(reading)
                    if not reading.as_read:
                        astray.add(name)
                one, other = readings
                targets = torch.tensor(piece.ids[piece.first :])
                found.add(one.logits, other.logits, targets, place)
                if one.residuals is not None and other.residuals is not None:
                    found.add_residuals(one.residuals, other.residuals)
    coarse = coarser(a, b, names)
    return found.result((*remarks, *coarse, *map(_strayed, sorted(astray))))


def coarser(a: Reader, b: Reader, names: tuple[str, str]) -> tuple[str, ...]:
    """A remark where A, of the same shape, is the less precise of both; or none."""
    one, other = ((x.about.vocab_size, x.about.hidden) for x in (a, b))
    return remark(a.about.bits, b.about.bits, names) if one == other else ()


def _strayed(name: str) -> str:
    return (
        f"The layers of {name} are of its operators called one by one, which gave other logits "
        "than its native call: the two don't agree."
    )


def _layers_of(a: Reader, b: Reader, names: tuple[str, str]) -> tuple[tuple[str, ...], bool]:
    """Whether the layers can be compared; where not, why."""
    for reader, name in zip((a, b), names, strict=True):
        if not reader.about.layers:
            return (f"No error per layer: {name} runs as one program without layers.",), False
    one, other = ((x.about.layers, x.about.hidden) for x in (a, b))
    if one == other:
        return (), True
    return (
        f"No error per layer: {names[0]} has {one[0]} layers of {one[1]} values, {names[1]} "
        f"{other[0]} of {other[1]}.",
    ), False
