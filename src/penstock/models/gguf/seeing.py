"""A language model and its projector in two GGUF files, as one checkpoint that sees."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, ModelNotFoundError, PenstockError, UnsupportedModelError
from penstock.models.gguf.container import is_gguf
from penstock.models.gguf.parts import Config
from penstock.models.gguf.projector import Projector
from penstock.models.gguf.source import GgufSource
from penstock.quant import Codes, Scheme

logger = logging.getLogger("penstock")

PATTERN = "mmproj*.gguf"
"""Names of projectors that are found by themselves."""

_SIDE_BY_SIDE = "Qwen2"
"""What the names of families begin with whose heads' pairs turn by time, rows and columns side by
side; in other Qwens they take turns."""


def projector_beside(model: Path, asked: str | Path | bool | None) -> Path | None:
    """The projector's file of the model in `model`, as `ModelConfig.mmproj` asks for it.

    None: the only one in the folder of a GGUF file, where it fits; a warning says where several lie
    there, or one that doesn't. False: none. Raises ConfigError for a model that takes none,
    ModelError for a file that isn't there or doesn't fit.
    """
    if asked is False:
        return None
    if asked is None:
        return _found(model) if is_gguf(model) else None
    path = Path(str(asked)).expanduser()
    if not is_gguf(model):
        raise ConfigError(
            f"mmproj={str(asked)!r} goes with a language model in GGUF, but {model} is none. Leave "
            "it out: a checkpoint that sees has its tower among its tensors."
        )
    if not is_gguf(path):
        raise ModelNotFoundError(f"mmproj={str(asked)!r}: there is no such GGUF file.")
    if path.resolve() == model.resolve():
        raise ConfigError(f"{model} is given as the model and as its mmproj. They are two files.")
    return path


def _found(model: Path) -> Path | None:
    files = [file for file in sorted(model.parent.glob(PATTERN)) if file.is_file()]
    files = [file for file in files if file.name != model.name]
    if len(files) > 1:
        logger.warning(
            "%d projectors of pictures lie beside %s (%s), so none is taken. Choose one by mmproj= "
            "(--mmproj).",
            len(files), model.name, ", ".join(file.name for file in files[:4]),
        )  # fmt: skip
    if len(files) != 1:
        return None
    try:
        SeeingSource(model, files[0])
    except PenstockError as error:
        logger.warning(
            "%s, which lies beside %s, isn't taken, so it sees no pictures: %s mmproj=False "
            "(--no-mmproj) asks for that.",
            files[0].name, model.name, error,
        )  # fmt: skip
        return None
    logger.info(
        "Pictures are read by %s, found beside %s; mmproj=False (--no-mmproj) leaves it out.",
        files[0].name, model.name,
    )  # fmt: skip
    return files[0]


class SeeingSource(GgufSource):
    """Both files' tensors, and the configuration of the family that they are of."""

    def __init__(self, path: Path, mmproj: Path) -> None:
        super().__init__(path)
        self._projector = Projector(mmproj)
        self.config = self._whole(self._container.metadata)

    @property
    def processor(self) -> Config:
        """What a processor's file would say."""
        return self._projector.processor

    def files(self) -> list[Path]:
        """All parts of both."""
        return [*super().files(), *self._projector.files]

    def names(self) -> list[str]:
        """Every tensor's name in a checkpoint of the family, sorted."""
        return sorted([*super().names(), *self._projector.names()])

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._projector.shape(name) if self._sees(name) else super().shape(name)

    def scheme(self, name: str) -> Scheme | None:
        """What holds the matrix as it is quantized; None: its values are read, as a tower's are."""
        return None if self._sees(name) else super().scheme(name)

    def read(self, name: str) -> Tensor | Codes:
        """A tensor's values, or its codes."""
        return self._projector.read(name) if self._sees(name) else super().read(name)

    def stored_as(self, name: str) -> str:
        """The name of a tensor's block type."""
        return self._projector.stored_as(name) if self._sees(name) else super().stored_as(name)

    def is_widened(self, name: str) -> bool:
        """Whether a tensor is quantized in a way that isn't kept: its values are read."""
        return self._projector.is_widened(name) if self._sees(name) else super().is_widened(name)

    def announce(self) -> None:
        """Say once what isn't kept as it is quantized."""
        super().announce()
        tower = self._projector
        kinds = Counter(tower.stored_as(x) for x in tower.names() if tower.is_widened(x))
        if kinds:
            logger.warning(
                "%s: %d tensors (%s) are widened as they are read: a tower computes in the dtype "
                "of activations.",
                tower.path, kinds.total(), ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
            )  # fmt: skip

    def _sees(self, name: str) -> bool:
        return name in self._tower_names

    def _whole(self, language: Mapping[str, Any]) -> Config:
        """The config of both together. Raises UnsupportedModelError for files that don't fit."""
        tower, text = self._projector, self.config
        kind = str(language["general.architecture"])
        self._tower_names = frozenset(tower.names())
        if kind not in tower.type.families:
            raise UnsupportedModelError(
                f"{tower.path} is a projector of the type {tower.kind!r}, for models of "
                f"{', '.join(tower.type.families)}, but {self.path} is of {kind}. They belong to "
                "different models."
            )
        if tower.width != text["hidden_size"]:
            raise UnsupportedModelError(
                f"{tower.path} gives rows of {tower.width} values ({tower.type.last}), but "
                f"{self.path} has an embedding of {text['hidden_size']}. They belong to models of "
                "different sizes."
            )
        tokens = language.get("tokenizer.ggml.tokens")
        tokens = tokens if isinstance(tokens, list) else []
        family = tower.type.families[kind]
        vision = dict(tower.config["vision_config"])
        if family.startswith("Qwen"):
            text = self._turning(text, language, kind, family)
            self._check_deep(language, kind)
        if family.startswith("Qwen3VL"):
            vision["deepstack_visual_indexes"] = tower.deep
        outer = ("bos_token_id", "pad_token_id", "eos_token_id", "tie_word_embeddings", "dtype")
        return {
            **tower.config,
            **{name: text[name] for name in outer},
            "architectures": [family],
            "vision_config": vision,
            "text_config": text,
            "image_token_id": self._token(tokens, *tower.type.tokens),
            **self._marks(tokens),
        }

    def _marks(self, tokens: list[Any]) -> Config:
        """Ids of what stands before a picture's rows and after them, where a family has some."""
        marks = self._projector.type.marks
        if marks is None:
            return {}
        names = "boi_token_index", "eoi_token_index"
        return {name: self._token(tokens, mark) for name, mark in zip(names, marks, strict=True)}

    def _token(self, tokens: list[Any], *names: str) -> int:
        """The id of the first of these tokens that there is."""
        for name in names:
            if name in tokens:
                return tokens.index(name)
        raise UnsupportedModelError(
            f"{self.path} has no token {names[0]!r}, by which pictures stand in prompts of models "
            f"of {self._projector.kind!r}. Give a file that was converted with it, or the model's "
            "safetensors."
        )

    def _turning(self, text: Config, language: Mapping[str, Any], kind: str, family: str) -> Config:
        """The text's config with the pairs that turn by time, rows and columns."""
        key = f"{kind}.rope.dimension_sections"
        sections = language.get(key)
        if not isinstance(sections, list) or len(sections) < 3 or any(sections[3:]):
            raise UnsupportedModelError(
                f"{self.path}: {key} must be three numbers of pairs, by which tokens of pictures "
                f"turn, not {sections!r:.60}."
            )
        scaling = {"rope_type": "default", **text.get("rope_scaling", {})}
        scaling["mrope_section"] = sections[:3]
        if not family.startswith(_SIDE_BY_SIDE):
            scaling["mrope_interleaved"] = True
        return text | {"rope_scaling": scaling}

    def _check_deep(self, language: Mapping[str, Any], kind: str) -> None:
        """Raises UnsupportedModelError where one file has more deep layers than the other."""
        key, deep = f"{kind}.n_deepstack_layers", len(self._projector.deep)
        wanted = language.get(key, deep if kind == "qwen3vl" else 0)
        if wanted != deep:
            raise UnsupportedModelError(
                f"{self._projector.path} gives rows for the first {deep} layers of a model, but "
                f"{self.path} takes them for {wanted!r:.40} ({key}). They belong to different "
                "models."
            )
