"""Pictures on their way into a step: rows of the tower, kept for those that come again."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import ConfigError, ModelNotFoundError
from penstock.models.spec import ModelSpec, PicturesSpec
from penstock.models.vision.cutters import GridCutter, LineCutter, PieceCutter
from penstock.models.vision.pictures import Picture, Pictures
from penstock.models.vision.processor import open_pictures
from penstock.nn import Decoder
from penstock.nn.decoder import PlacedRows
from penstock.nn.grid import GridTower
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import DecoderSpec, GridSpec, VisionSpec
from penstock.nn.vision import VisionTower
from penstock.quant import Dense
from penstock.roofline.tower import TowerCost, grid_cost, tile_cost
from penstock.runtime.device import Device
from penstock.runtime.projector import projector_of
from penstock.tokenizer import Tokenizer

logger = logging.getLogger("penstock")
Ints = NDArray[np.int64]

KEPT_BYTES = 256 << 20
"""Of rows of pictures that are kept for requests that bring them again."""


MOST_TOKENS = 1280
"""Of a picture of any size, for predictions: what Qwen2-VL's processors make of a large one."""


def sight_bytes(spec: DecoderSpec, itemsize: int, tokens: int, picture: int) -> int:
    """What a seeing model's tower takes beside its weights, for steps of so many tokens; rows that
    are kept for later come on top. 0 where there is no tower.

    picture: tokens of the largest, where they have any size.
    """
    tower = spec.vision
    if tower is None:
        return 0
    rows = tower.rows if isinstance(tower, VisionSpec) else picture * tower.projector.fold**2
    layer = tower.layers[0]
    wide = layer.attention.num_heads * layer.attention.head_dim
    each = tower.hidden + 4 * wide + layer.mlp.intermediate  # a layer's values, and
    each += 2 * wide  # keys and values, as the cache has them
    stores = 1 if isinstance(tower, VisionSpec) else 1 + len(tower.deep)
    return itemsize * (rows * each + stores * tokens * spec.hidden)


def largest_picture(
    folder: Path, spec: ModelSpec, chosen: Mapping[str, Any] | None, max_model_len: int
) -> int:
    """Tokens of the largest picture, or piece of one, that goes through a model's tower; 0 where it
    sees none.

    A folder that has no processor stands for one that has a usual one.
    """
    if spec.pictures is None or spec.decoder.vision is None:
        return 0
    try:
        cutter = open_pictures(folder, spec.pictures, spec.decoder.vision, "", chosen).cutter
    except ModelNotFoundError:
        return min(MOST_TOKENS, max_model_len)
    of_any_size = GridCutter | PieceCutter | LineCutter
    most = cutter.most_tokens if isinstance(cutter, of_any_size) else MOST_TOKENS
    return min(most, max_model_len)


def tokens_together(spec: ModelSpec) -> int:
    """Tokens of a picture that see each other both ways, so that one step computes them; 0: none
    do.
    """
    tower = spec.decoder.vision
    if spec.pictures is None or not spec.pictures.both_ways or not isinstance(tower, VisionSpec):
        return 0
    return tower.tokens


def pictures_of(
    folder: Path,
    spec: PicturesSpec,
    tower: VisionSpec | GridSpec,
    tokenizer: Tokenizer | None,
    chosen: Mapping[str, Any] | None,
) -> Pictures:
    """What a model's folder, or its projector, says of pictures, in the tokenizer's words."""

    def name(token_id: int) -> str:
        found = None if tokenizer is None else tokenizer.id_to_token(token_id)
        return found or "<image>"

    marks = ("", "") if spec.marks is None else (name(spec.marks[0]), name(spec.marks[1]))
    pictures = open_pictures(folder, spec, tower, name(spec.token_id), chosen, marks)
    cutter = pictures.cutter
    if isinstance(cutter, GridCutter | LineCutter) and cutter.most_tokens > MOST_TOKENS:
        logger.info(
            "A picture may have %d tokens. Its tower runs in one step, for which other requests "
            "wait; mm_processor_kwargs %s makes large pictures smaller.",
            cutter.most_tokens, "max_pixels" if isinstance(cutter, GridCutter) else "size",
        )  # fmt: skip
    return pictures


class Sight:
    """A model's tower and what becomes of its rows; one thread's."""

    def __init__(
        self,
        decoder: Decoder,
        pictures: Pictures,
        device: Device,
        block_size: int,
        rows: int,
        together: int = 0,
    ) -> None:
        """rows: tokens of the largest step. together: `tokens_together`. From here on the decoder
        reads what is placed.
        """
        assert decoder.vision is not None
        self.pictures = pictures
        self.together = together
        self.both_ways = decoder if together else None  # what runs steps in which they see so
        self._tower = tower = decoder.vision
        self._dense = Dense(decoder.dtype, decoder.head.weight_format.storage)
        self._device = device.torch
        self._layout = device.layout(tower.spec.layers[:1], decoder.dtype, block_size)
        self._cache = self._layout.allocate(1, device.torch)[0]
        hidden = decoder.spec.hidden
        store = torch.zeros((rows, hidden), dtype=decoder.dtype, device=device.torch)
        wanted = torch.zeros(rows, dtype=torch.int32, device=device.torch)
        deep = tower.spec.deep if isinstance(tower, GridTower) else ()
        self.placed = decoder.placed = PlacedRows(
            store, wanted, tuple(torch.zeros_like(store) for _ in deep)
        )
        self._tables = [m for m in decoder.modules() if isinstance(m, RotaryTable) and m.sections]
        for table in self._tables:
            table.make_room(rows)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._kept_bytes = 0
        self.spent = TowerCost()  # of the tower, since somebody took it
        self.tiles = 0  # that went through the tower
        self.asked = 0  # pictures whose rows were wanted
        self.hits = 0  # those whose rows were kept
        self._is_placed = False

    @property
    def spare(self) -> int:
        """The position whose row the first token of a step turns by, where three numbers say how
        it turns; 0 where none does.
        """
        return self._tables[0].length if self._tables else 0

    def rows_of(self, picture: Picture, begins: bool = True) -> Tensor:
        """What stands in the decoder for a picture, [tokens, D], for some models with more columns
        for its first layers; made where it isn't kept.

        begins: whether it counts as asked for, not as a later part of one that did.
        """
        self.asked += begins
        found = self._kept.get(picture.key)
        if found is not None:
            self._kept.move_to_end(picture.key)
            self.hits += begins
            return found
        with torch.inference_mode():
            found = torch.cat([self._through(tile) for tile in picture.tiles])
            if picture.order is not None:
                found = self._ordered(found, picture.order)
        self._keep(picture.key, found)
        return found

    def _ordered(self, rows: Tensor, order: Tensor) -> Tensor:
        """The rows [n, D] that `Picture.order` names."""
        assert isinstance(self._tower, VisionTower) and self._tower.line_end is not None
        rows = torch.cat((rows, self._tower.line_end.parameter("weight")))
        return rows.index_select(0, order.to(self._device))

    def _through(self, tile: Tensor) -> Tensor:
        """The rows of one tile [3, H, W] uint8."""
        tower, size = self._tower, self._layout.block_size
        pixels = self.pictures.scaling(tile).to(self._device)
        blocks = tower.blocks(pixels, size)
        if blocks > self._cache[0].shape[0]:
            self._cache = self._layout.allocate(blocks, self._device)[0]
        rows: Tensor = tower(pixels, self._cache)
        self.tiles += 1
        if isinstance(tower, GridTower):
            lengths = [len(window) for window in tower.windows(pixels)]
            self.spent.add(grid_cost(tower.spec, self._dense, lengths))
        else:
            self.spent.add(tile_cost(tower.spec, self._dense))
        return rows

    def take_spent(self) -> TowerCost:
        """What the tower has moved and computed since this was asked last."""
        spent, self.spent = self.spent, TowerCost()
        return spent

    def forget(self) -> None:
        """Let go of all rows that are kept."""
        self._kept.clear()
        self._kept_bytes = 0

    def _keep(self, key: int, rows: Tensor) -> None:
        self._kept[key] = rows
        self._kept_bytes += rows.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes

    def place(self, at: Sequence[int], rows: Tensor, turns: Ints | None = None) -> None:
        """Rows [n, D] take the places `at` of the next step's tokens.

        turns: [n, 3], by which they turn.
        """
        index = torch.tensor(at, dtype=torch.int64, device=self._device)
        each = rows.split(self.placed.store.shape[1], dim=1)
        for store, part in zip((self.placed.store, *self.placed.deep), each, strict=True):
            store.index_copy_(0, index, part)
        self.placed.wanted.index_fill_(0, index, 1)
        self._is_placed = True
        if turns is not None:
            places = torch.from_numpy(turns).to(self._device)
            for table in self._tables:
                table.turn_apart(index, places)

    def clear(self) -> None:
        """Let no token of the next step be in a picture's place."""
        if self._is_placed:
            for deep in self.placed.deep:
                deep.masked_fill_(self.placed.wanted.bool()[:, None], 0)
            self.placed.wanted.zero_()
            self._is_placed = False


_BLIND = ("draft_model", "eagle", "eagle3")
"""Methods whose models read the prompt's tokens, and would need the pictures too."""


def check_seeing(config: EngineConfig, rows: int, turns: bool, together: int = 0) -> None:
    """Raises ConfigError for what a model that sees pictures can't be run with.

    rows: tokens of the largest step that there is room for. turns: whether positions of tokens
    aren't those in their sequence. together: `tokens_together`.
    """
    try:
        _check_seeing(config, rows, turns, together)
    except ConfigError as error:
        if projector_of(config.model) is None:
            raise
        way_out = "Or leave its pictures out by mmproj=False (--no-mmproj)."
        raise ConfigError(f"{error} {way_out}") from error


def _check_seeing(config: EngineConfig, rows: int, turns: bool, together: int) -> None:
    if together:
        _check_together(config, together)
    asked = config.speculative
    if asked is not None and asked.method in _BLIND:
        raise ConfigError(
            f"speculative_config method {asked.method!r} guesses by another model, which sees no "
            "pictures. Use ngram, suffix or medusa."
        )
    if asked is not None and asked.method == "self" and turns:
        raise ConfigError(
            "speculative_config method 'self' isn't built for models whose tokens turn by rows and "
            "columns of pictures. Use ngram or suffix."
        )
    if config.scheduler.max_num_batched_tokens > rows:
        raise ConfigError(
            f"max_num_batched_tokens={config.scheduler.max_num_batched_tokens}, but the runtime "
            f"was loaded with room for pictures among {rows} tokens. Lower it, or load the runtime "
            "with it."
        )


_DRAFTS = 8
"""Of a step, one part of so many may be kept for drafts."""


def _check_together(config: EngineConfig, together: int) -> None:
    """The same of tokens that see each other both ways."""
    if config.cache.kv_cache_dtype == "kivi":
        raise ConfigError(
            "kv_cache_dtype='kivi' isn't built for models whose pictures' tokens see each other "
            "both ways. Use int4 or int8."
        )
    if config.model.max_attention_window is not None:
        raise ConfigError(
            "max_attention_window isn't built for models whose pictures' tokens see each other "
            "both ways. Leave it out."
        )
    asked = config.scheduler
    most = asked.max_num_batched_tokens
    left = most - asked.max_num_seqs - (most // _DRAFTS if config.speculative else 0)
    if asked.enable_chunked_prefill and left < together:
        raise ConfigError(
            f"A picture's {together} tokens see each other both ways, so one step computes them: "
            f"beside max_num_seqs={asked.max_num_seqs} that decode, max_num_batched_tokens={most} "
            f"leaves {max(left, 0)}. Raise the second, or lower the first."
        )
