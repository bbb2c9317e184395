"""`ModelSpec`: everything the engine needs to know about a checkpoint, as plain data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from penstock.nn.spec import DecoderSpec

Transform = Callable[[Tensor, DecoderSpec], Tensor]


@dataclass(frozen=True, slots=True)
class Rename:
    """One checkpoint tensor becomes one parameter.

    `{i}` stands for a layer's number, `{e}` for an expert's and `{p}` for `weight` or `bias`, on
    both sides.
    """

    source: str
    target: str
    transform: Transform | None = None
    of_rows: bool = False  # `transform` picks whole rows: what it does to codes, too

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True, slots=True)
class Stack:
    """Several checkpoint tensors, one under the other (dimension 0), become one parameter."""

    sources: tuple[str, ...]
    target: str
    transform: Transform | None = None  # of the stacked tensor
    of_rows: bool = False  # `transform` picks whole rows: what it does to codes, too


@dataclass(frozen=True, slots=True)
class Ones(Stack):
    """A stack of nothing, `Ones((), target)`: weights of a norm for which a checkpoint has none."""


@dataclass(frozen=True, slots=True)
class Share(Rename):
    """A part of a tensor that another rule takes as well: what `transform` makes of it."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """Checkpoint tensors that carry nothing: `*` matches anything."""

    source: str

    def matches(self, name: str) -> bool:
        return re.fullmatch(re.escape(self.source).replace(r"\*", ".*"), name) is not None


Rule = Rename | Stack | Ignore


@dataclass(frozen=True, slots=True)
class PicturesSpec:
    """How a family's prompts stand for pictures; how those are cut is in `models.vision`."""

    token_id: int  # of each place that a row of a picture takes
    cut: Literal["tiles", "canvas", "whole", "grid", "pieces", "framed", "lines", "anyres"]  # in
    # squares and a small picture of all; so by the nearest shape of some; as one square; as it is,
    # its sides multiples of a token's; so where it is small, else as "canvas"; as one square
    # between two marks; as "grid", with a mark after each row; as "canvas", with a margin that is
    # left out again
    around: tuple[str, str] = ("", "")  # what templates write before a picture and after it
    marks: tuple[int, int] | None = None  # of "framed": the tokens that begin and end a picture,
    # of which prompts have the first in its place
    both_ways: bool = False  # tokens of a square see those after them in it, too
    shapes: tuple[tuple[int, int], ...] = ()  # of "anyres": height and width in pixels, to choose


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model family's reading of one `config.json`."""

    family: str
    decoder: DecoderSpec
    rules: tuple[Rule, ...]
    dtype: str | None  # of the checkpoint, as config.json says; None: it doesn't
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefixes: tuple[str, ...] = ()  # stripped from checkpoint names where present
    aliases: tuple[tuple[str, str], ...] = ()  # beginnings of names, and what they mean, in turn
    pictures: PicturesSpec | None = None  # of a model that sees some
    unsaid: tuple[tuple[str, int], ...] = field(default=(), compare=False)  # sizes that were taken
    # by default, for errors to name
