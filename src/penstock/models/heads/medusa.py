"""Checkpoints of Medusa heads, in the layouts that are about.

FasterDecoding's, which is the authors' (medusa_lm_head.safetensors or .pt): `{k}.{i}.linear.weight`
and `.bias` of block i of head k, and `{k}.{L}.weight`, the projection after its L blocks; without
any projection the target's own head is meant (text-generation-inference's second form, or
`"medusa_shared_lm_head": true` in config.json). vLLM's (model.safetensors):
`blocks.{k}.layers.{i}.weight`, with `.bias` where medusa_fc_bias is set, `lm_heads.{k}.weight`, one
`lm_head.weight` for all where original_lm_head is, and `token_map`, the ids of the projections'
rows where these are fewer. Either may begin with `medusa_heads.` or `medusa_head.`.
The weights say how many heads and blocks there are; config.json mustn't say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError, ModelNotFoundError, WeightsError
from penstock.models.config_reader import ConfigReader
from penstock.models.heads.source import (
    STORED,
    Ids,
    as_ids,
    check_finite,
    check_ids,
    read_tensors,
)
from penstock.models.registry import read_json
from penstock.nn.linear import Linear
from penstock.nn.medusa import MedusaHeads, MedusaSpec
from penstock.tokenizer.vocab_map import VocabMap

_OWN_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
FILES = (*_OWN_FILES, "model.safetensors", "pytorch_model.bin")
"""Where the weights may be, the first that is there."""

_PREFIXES = ("medusa_heads.", "medusa_head.")
_BLOCK = (
    re.compile(r"(?P<k>\d+)\.(?P<i>\d+)\.linear\.(?P<p>weight|bias)"),
    re.compile(r"blocks\.(?P<k>\d+)\.layers\.(?P<i>\d+)\.(?P<p>weight|bias)"),
)
_LAST = re.compile(r"(?P<k>\d+)\.(?P<i>\d+)\.weight")
_PROJECTION = re.compile(r"lm_heads\.(?P<k>\d+)\.weight")

_NOTED = (
    "base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len", "medusa_fc_bias",
    "truncated_vocab_size",
)  # fmt: skip
"""Keys of config.json that say nothing which the weights don't."""


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Heads on a disk, found to fit their target."""

    file: Path
    spec: MedusaSpec  # of all heads that there are
    blocks: dict[tuple[int, int, str], Tensor]  # (head, block, weight or bias)
    projections: list[Tensor]  # of all heads, one for all, or none: the target's
    rows: Tensor | None  # of the projections, those that are used; None: all
    ids: Ids | None  # what the rows of logits stand for; None: their own numbers

    def of(self, num_heads: int) -> MedusaSpec:
        """The spec of the first heads. Raises ConfigError for more than there are."""
        if num_heads > self.spec.num_heads:
            raise ConfigError(
                f"num_speculative_tokens={num_heads}, but {self.file.parent} has "
                f"{self.spec.num_heads} heads, of which each guesses one token. Ask for up to "
                f"{self.spec.num_heads}, or leave it out."
            )
        return replace(self.spec, num_heads=num_heads)

    def fill(self, heads: MedusaHeads) -> None:
        """Give `heads`, of a spec of this checkpoint, its weights."""
        modules = dict(heads.named_modules())
        for (k, i, part), tensor in self.blocks.items():
            layer = modules.get(f"heads.{k}.layers.{i}")  # none: a head that isn't wanted
            if isinstance(layer, Linear):
                layer.load(part, tensor)
        for projection, held in zip(heads.projections, self.projections, strict=False):
            assert isinstance(projection, Linear)
            projection.load("weight", held if self.rows is None else held[self.rows])


def open_medusa_checkpoint(
    folder: Path, hidden: int, vocab_size: int, reduced: VocabMap | None = None
) -> MedusaCheckpoint:
    """The heads in `folder`, for a target of that hidden size and so many rows of logits.

    reduced: of a target with a reduced vocabulary; heads may be of that or of the whole one.
    Raises an error for heads that don't fit, or aren't whole.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"There is no folder {folder} with Medusa heads.")
    config = ConfigReader(read_json(folder / "config.json"), str(folder / "config.json"))
    config.refuse_unbuilt()
    file, tensors = read_tensors(folder, FILES)
    parts = _Parts.of(file, tensors)
    spec = _spec(config, parts, hidden)
    whole = vocab_size if reduced is None else reduced.original_size
    for key, fits in (("hidden_size", (hidden,)), ("vocab_size", (vocab_size, whole))):
        if config.has(key) and config.integer(key) not in fits:
            _wrong(file, f"a {key}", config.integer(key), fits[-1])
    _check_shapes(parts, hidden)
    check_finite(file, tensors)
    projections = [parts.projections[k] for k in sorted(parts.projections)]
    rows, ids = _vocabulary(file, projections, parts.token_map, vocab_size, reduced)
    for key in _NOTED:
        config.has(key)
    config.finish(strict=False)
    num_rows = vocab_size if not projections else len(projections[0] if rows is None else rows)
    spec = replace(spec, num_rows=num_rows)
    return MedusaCheckpoint(file, spec, parts.blocks, projections, rows, ids)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A file's tensors, by what they are."""

    file: Path
    blocks: dict[tuple[int, int, str], Tensor]
    projections: dict[int, Tensor]  # by head; one for all is 0
    one_for_all: bool
    token_map: Tensor | None

    @classmethod
    def of(cls, file: Path, tensors: dict[str, Tensor]) -> _Parts:
        """Raises WeightsError for a name of no known layout, and for values that aren't plain."""
        blocks: dict[tuple[int, int, str], Tensor] = {}
        last: dict[int, tuple[int, Tensor]] = {}
        projections: dict[int, Tensor] = {}
        token_map, one_for_all = None, False
        unknown = []
        for name, tensor in tensors.items():
            short = _short(name)
            if short == "token_map":
                token_map = tensor
                continue
            if tensor.dtype not in STORED:
                raise WeightsError(
                    f"{name!r} in {file} is {tensor.dtype}; float32, bfloat16 and float16 load."
                )
            match = _matched(short)
            numbers = () if match is None else _numbers(file, name, match, len(tensors))
            if match is not None and match.re in _BLOCK:
                k, i = numbers
                blocks[k, i, match["p"]] = tensor
            elif match is not None and match.re is _LAST:
                k, i = numbers
                last[k] = i, tensor
            elif match is not None:
                projections[numbers[0]] = tensor
            elif short == "lm_head.weight":
                projections[0], one_for_all = tensor, True
            else:
                unknown.append(name)
        if unknown:
            raise WeightsError(
                f"{file} has {len(unknown)} tensors that no layout of Medusa heads has: "
                f"{', '.join(sorted(unknown)[:5])}. It is of something else."
            )
        found = cls(file, blocks, projections, one_for_all, token_map)
        for k, (i, tensor) in last.items():
            if i != found.num_layers:
                raise WeightsError(
                    f"{file}: {k}.{i}.weight should be a projection, but its head's blocks are "
                    f"{found.num_layers}, and that one's would be {k}.{found.num_layers}.weight."
                )
            projections[k] = tensor
        return found

    @property
    def num_layers(self) -> int:
        return max((i + 1 for _, i, _ in self.blocks), default=0)

    @property
    def num_heads(self) -> int:
        found = {k for k, _, _ in self.blocks} | (
            set() if self.one_for_all else {*self.projections}
        )
        return max(found, default=-1) + 1


def are_of_medusa(folder: Path, names: Iterable[str]) -> bool:
    """Whether a folder with tensors of these names has heads in one of the layouts."""
    return any((folder / name).is_file() for name in _OWN_FILES) or any(
        match is not None and match.re is not _LAST
        for match in (_matched(_short(name)) for name in names)
    )


def _short(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _matched(short: str) -> re.Match[str] | None:
    return next((m for p in (*_BLOCK, _LAST, _PROJECTION) if (m := p.fullmatch(short))), None)


def _numbers(file: Path, name: str, match: re.Match[str], count: int) -> tuple[int, ...]:
    """Which head's, and block's, a tensor is: all are there, so none goes beyond the tensors."""
    found = [match[part] for part in ("k", "i") if part in match.re.groupindex]
    for digits in found:
        if len(digits) > 9 or int(digits) >= count:  # more digits may be beyond what int reads
            raise WeightsError(
                f"{file} has {count} tensors, too few for one that is named {name[:80]!r}: numbers "
                "of heads and blocks begin at 0, and none is left out."
            )
    return tuple(map(int, found))


def _spec(config: ConfigReader, parts: _Parts, hidden: int) -> MedusaSpec:
    """What the file has, found whole, and as config.json says; num_rows is 0 as yet."""
    heads, layers = parts.num_heads, parts.num_layers
    for what, held in (("heads", heads), ("layers", layers)):
        for key in (f"medusa_num_{what}", "num_heads" if what == "heads" else "num_hidden_layers"):
            if config.has(key) and config.get(key) != held:
                raise WeightsError(
                    f"{parts.file} has {held} {what}, but config.json says {key}="
                    f"{config.get(key)!r}. The file is of other heads, or tensors are missing."
                )
    shared = config.flag("medusa_shared_lm_head", not parts.projections)
    if shared and parts.projections:
        raise WeightsError(
            f"{parts.file} has {len(parts.projections)} projections, but config.json says "
            "medusa_shared_lm_head: that they are the target's head. One of the two is wrong."
        )
    one = config.flag("original_lm_head", parts.one_for_all)
    bias = any(part == "bias" for _, _, part in parts.blocks)
    _check_complete(parts, set() if shared else {0} if one else set(range(heads)), bias)
    if one:
        for k in [k for k in parts.projections if k]:  # copies of the first
            del parts.projections[k]
    return MedusaSpec(
        hidden, 0, heads, layers, bias, "target" if shared else "one" if one else "each"
    )


def _check_complete(parts: _Parts, projections: set[int], bias: bool) -> None:
    """Raises WeightsError where a block or a projection is missing."""
    heads, layers = parts.num_heads, parts.num_layers
    names = ("bias", "weight") if bias else ("weight",)
    wanted = product(range(heads), range(layers), names)  # may be many more than there are
    absent = (key for key in wanted if key not in parts.blocks)
    missing = [f"{part} of block {i} of head {k}" for k, i, part in islice(absent, 5)]
    without = sorted(projections - parts.projections.keys())
    missing += [f"projection of head {k}" for k in without]
    count = heads * layers * len(names) - len(parts.blocks) + len(without)
    if not parts.blocks and not parts.projections:
        raise WeightsError(f"{parts.file} has no tensors of Medusa heads.")
    if missing:
        raise WeightsError(
            f"{parts.file} lacks {count} of the tensors of its {heads} heads with {layers} blocks "
            f"each: {', '.join(missing[:5])}."
        )


def _check_shapes(parts: _Parts, hidden: int) -> None:
    """All are of the target's hidden size, and the projections alike."""
    held = (*parts.blocks.values(), *parts.projections.values())
    sizes = {tensor.shape[-1] for tensor in held if tensor.dim()}
    for size in sorted(sizes - {hidden}):
        _wrong(parts.file, "a hidden_size", size, hidden)
    for (k, i, part), tensor in parts.blocks.items():
        shape = (hidden, hidden) if part == "weight" else (hidden,)
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{parts.file}: the {part} of block {i} of head {k} is {list(tensor.shape)}, not "
                f"{list(shape)}."
            )
    shapes = {tuple(t.shape) for t in parts.projections.values()}
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        raise WeightsError(f"{parts.file}: projections are {sorted(shapes)}, not of one shape.")


def _vocabulary(
    file: Path,
    projections: list[Tensor],
    token_map: Tensor | None,
    vocab_size: int,
    reduced: VocabMap | None,
) -> tuple[Tensor | None, Ids | None]:
    """Which rows of the projections are used, and which ids they stand for."""
    kept = None if reduced is None else reduced.kept.astype(np.int64)
    if not projections:
        return None, kept
    held = len(projections[0])
    whole = vocab_size if reduced is None else reduced.original_size
    if token_map is None:
        if held == vocab_size:
            return None, kept
        if kept is not None and held == whole:
            return torch.from_numpy(kept), kept
        _wrong(file, "a vocab_size", held, whole)
    named = as_ids(file, "token_map", token_map)
    check_ids(file, "token_map", named, whole)
    ids = torch.from_numpy(named)
    if not len(ids) or held not in (len(ids), whole):
        raise WeightsError(
            f"{file}: token_map names {len(ids):,} ids, but its projections have {held:,} rows."
        )
    places = torch.arange(len(ids)) if held == len(ids) else ids
    if kept is not None:  # only what the target has
        there = torch.from_numpy(np.isin(ids.numpy(), kept))
        ids, places = ids[there], places[there]
    return places, ids.numpy()


def _wrong(file: Path, what: str, held: int, wanted: int) -> NoReturn:
    raise ConfigError(
        f"The heads in {file.parent} were made for {what} of {held:,}, and the target has one of "
        f"{wanted:,}. Choose heads that were trained for this model."
    )
