"""`Projector`: an `mmproj` file, a tower and what fits its rows to a language model."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.models.gguf.container import TensorInfo, read_container
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import Config
from penstock.models.gguf.projector_facts import Facts
from penstock.models.gguf.projector_types import PROJECTORS, ProjectorType, deep_layers

Parts = dict[str, tuple[TensorInfo, ...]]
"""Tensors by their names in a checkpoint, each as one or several of a file's."""

ARCHITECTURE = "clip"
"""`general.architecture` of projectors, whatever their towers are."""

_LAYER = re.compile(r"v\.(?P<of>blk|deepstack)\.(?P<i>\d+)\.(?P<stem>.+)\.(?P<p>weight|bias)")
_OUTER = re.compile(r"(?P<stem>.+?)(?:\.(?P<p>weight|bias))?")
_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""Of a matrix that multiplies a patch of two pictures, one part each."""
_BARE = (
    "embeddings.cls_token", "embeddings.position_embeddings", ".lambda_1", ".lambda_2",
    "mm_input_projection_weight",
)  # fmt: skip
"""Ends of checkpoints' names that aren't followed by `.weight`."""
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_OF_TEXTS = ("has_text_encoder", "has_llava_projector")


class Projector:
    """One file, mapped: tensors by their names in a checkpoint of the family, read when asked for.

    Quantized ones come as their values in float32: a tower keeps none as they are.
    Raises UnsupportedModelError for a type that isn't built, WeightsError for what is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._container = read_container(path)
        m = Metadata(self._container.metadata, str(path))
        if m.architecture != ARCHITECTURE:
            raise UnsupportedModelError(
                f"{path} holds a model of the architecture {m.architecture!r}, no projector of "
                f"pictures ({ARCHITECTURE}). Give the mmproj-*.gguf that was published beside it."
            )
        self._facts = Facts(m, self._container)
        self.kind = _kind(m, path)
        self.type: ProjectorType = PROJECTORS[self.kind]
        for name in _OF_TEXTS:
            m.get(f"clip.{name}")
        m.get("clip.vision.projection_dim")  # shows in the last matrix; of some files CLIP's own
        self.config: Config = self.type.read_config(self._facts)
        self.processor: Config = self.type.processor(self._facts)
        self._deep = deep_layers(self._facts)
        self.config |= m.unread()
        self._where = self._translated()

    @property
    def files(self) -> tuple[Path, ...]:
        """All parts."""
        return self._container.files

    @property
    def width(self) -> int:
        """Of the rows that it gives."""
        return self._facts.shape(f"{self.type.last}.weight")[-1 if self.type.turned else 0]

    @property
    def deep(self) -> list[int]:
        """Layers of the tower whose rows go to a language model's first layers, too."""
        return list(self._deep)

    def names(self) -> list[str]:
        """Every tensor's name in a checkpoint."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        if name in self.type.changed:
            return tuple(self.read(name).shape)
        parts = self._where[name]
        (first, *rest), last = parts[0].shape, parts[-1]
        if last.name == _FRAMES[1]:
            return first, rest[0], len(parts), *rest[1:]
        return sum(part.shape[0] for part in parts), *rest

    def read(self, name: str) -> Tensor:
        """Its values, as a view of the file or in float32."""
        parts = self._where[name]
        values = [part.block.tensor(part.data, part.shape) for part in parts]
        if len({part.dtype for part in values}) > 1:
            values = [part.float() for part in values]
        if parts[-1].name == _FRAMES[1]:
            return torch.stack(values, 2)
        whole = values[0] if len(values) == 1 else torch.cat(values)
        change = self.type.changed.get(name)
        try:
            return whole if change is None else change(whole)
        except RuntimeError as error:
            raise WeightsError(
                f"{self.path}: {parts[0].name} has the shape {list(parts[0].shape)}, which isn't "
                f"that of {name}: {error}"
            ) from error

    def stored_as(self, name: str) -> str:
        """The names of a tensor's block types."""
        return " and ".join(dict.fromkeys(part.block.name for part in self._where[name]))

    def is_widened(self, name: str) -> bool:
        """Whether it is quantized: its values are read."""
        return any(part.block.plain is None for part in self._where[name])

    def _translated(self) -> Parts:
        tensors = dict(self._container.tensors)
        found: Parts = {}
        if all(name in tensors for name in _FRAMES):
            parts = tuple(tensors.pop(name) for name in _FRAMES)
            if len(parts[0].shape) != 4 or parts[0].shape != parts[1].shape:
                raise WeightsError(
                    f"{self.path}: {' and '.join(_FRAMES)} have the shapes {list(parts[0].shape)} "
                    f"and {list(parts[1].shape)}, which aren't two of the same [D, 3, p, p]."
                )
            found[f"{self.type.names['v.patch_embd']}.weight"] = parts
        elif _FRAMES[0] in tensors and "blk.attn_qkv" in self.type.names:
            raise WeightsError(f"{self.path} has {_FRAMES[0]}, but lacks {_FRAMES[1]}.")
        swaps = self._is_swapped()
        for name, tensor in tensors.items():
            there = self._name(name, swaps)
            if there in found:
                raise WeightsError(f"{self.path}: two tensors are {there}; {name} is one of them.")
            found[there] = (tensor,)
        return self._joined(found)

    def _joined(self, found: Parts) -> Parts:
        """With queries, keys and values in one matrix, where a checkpoint has them so."""
        if "blk.attn_qkv" not in self.type.names:
            return found
        for name in [name for name in found if re.search(r"\.attn\.q\.(weight|bias)$", name)]:
            each = [name.replace(".attn.q.", f".attn.{x}.") for x in "qkv"]
            lacks = [part for part in each if part not in found]
            if lacks:
                there = found[name][0].name
                raise WeightsError(
                    f"{self.path} has {there}, but not the keys' and the values' beside it."
                )
            parts = tuple(found.pop(part)[0] for part in each)
            if len({part.shape[1:] for part in parts}) > 1:
                raise WeightsError(
                    f"{self.path}: {parts[0].name} and those of keys and values have the shapes "
                    f"{', '.join(str(list(part.shape)) for part in parts)}."
                )
            found[name.replace(".attn.q.", ".attn.qkv.")] = parts
        return found

    def _is_swapped(self) -> bool:
        """Whether `up` and `down` have each other's names, as first converters wrote them."""
        hidden = self._facts.integer("embedding_length")
        tensors = self._container.tensors
        up, down = (tensors.get(f"v.blk.0.{stem}.weight") for stem in _SWAPPED)
        if up is None or down is None or not len(up.shape) == len(down.shape) == 2:
            return False
        return down.shape[1] == hidden and up.shape[1] != hidden

    def _name(self, name: str, swaps: bool) -> str:
        """Of a tensor in a checkpoint; what the type hasn't keeps its own."""
        match = _LAYER.fullmatch(name)
        if match is None:
            match = _OUTER.fullmatch(name)
            assert match is not None  # whatever it is called
            stem, layer = match["stem"], ""
        else:
            stem = _SWAPPED.get(match["stem"], match["stem"]) if swaps else match["stem"]
            stem, layer = f"{match['of']}.{stem}", match["i"]
            if match["of"] == "deepstack":  # by the tower's layers here, one after another there
                if int(layer) not in self._deep:
                    return name
                layer = str(self._deep.index(int(layer)))
        there = self.type.names.get(stem)
        if there is None:
            return name
        there, part = there.replace("{i}", layer), match["p"]
        return there if part is None or there.endswith(_BARE) else f"{there}.{part}"


def _kind(m: Metadata, path: Path) -> str:
    """The type of a projector that sees and does nothing else."""
    found = m.text("clip.projector_type", "") or m.text("clip.vision.projector_type", "")
    heard = m.text("clip.audio.projector_type", "")
    hears = m.flag("clip.has_audio_encoder", False)
    sees = m.flag("clip.has_vision_encoder", not hears)
    built = f"Built: {', '.join(PROJECTORS)}. Or give the model's safetensors, if it is built."
    if hears or not sees:
        does = "hears as well" if hears and sees else "hears" if hears else "sees nothing"
        raise UnsupportedModelError(
            f"{path} is a projector ({found or heard or 'of no type'}) that {does}, which isn't "
            f"built: pictures alone are. {built}"
        )
    if not found:
        raise UnsupportedModelError(
            f"{path} doesn't say which type of projector it is (clip.projector_type): an early "
            f"converter wrote it. Convert it again. {built}"
        )
    if found not in PROJECTORS:
        raise UnsupportedModelError(
            f"{path} is a projector of the type {found!r}, which isn't built. {built}"
        )
    return found
