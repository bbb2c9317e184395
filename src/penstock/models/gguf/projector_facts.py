"""What the files of projectors (`mmproj`) say of their towers, as llama.cpp writes them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import WeightsError
from penstock.models.gguf.container import Container
from penstock.models.gguf.cursor import shortest
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import Config


@dataclass(frozen=True, slots=True)
class Facts:
    """What a projector's file says; methods raise UnsupportedModelError or WeightsError."""

    m: Metadata
    c: Container

    def integer(self, key: str, default: int | None = None) -> int:
        """Of `clip.vision.`."""
        return self.m.integer(f"clip.vision.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that there must be."""
        if name not in self.c.tensors:
            raise WeightsError(f"{self.c.path} lacks {name}, which this kind of projector needs.")
        return self.c.tensors[name].shape

    @property
    def epsilon(self) -> float:
        """Of the tower's norms."""
        return self.m.number("clip.vision.attention.layer_norm_epsilon")

    @property
    def layers(self) -> int:
        """Of the tower, each of which has tensors."""
        key, most = "clip.vision.block_count", len(self.c.tensors)
        count = self.m.integer(key)
        if count > most:
            raise self.m.fail(key, count, f"at most {most}, the tensors that the file has")
        return count

    @property
    def inner(self) -> int:
        """Of the tower's feed-forward blocks, by a matrix: the key that says it has a wrong number
        of Qwen2-VL, and 0 in first files.
        """
        self.integer("feed_forward_length", 0)
        shape = self.shape("v.blk.0.ffn_up.weight")
        hidden = self.integer("embedding_length")
        return shape[0] if shape[-1] == hidden else shape[-1]

    def activation(self, gelu: str) -> str:
        """Of the tower's feed-forward blocks; gelu: which GELU this kind of tower has."""
        is_gelu, is_silu = (self.m.flag(f"clip.use_{x}", False) for x in ("gelu", "silu"))
        if is_gelu and is_silu:
            raise self.m.fail("clip.use_silu", True, "false beside clip.use_gelu")
        return gelu if is_gelu else "silu" if is_silu else "quick_gelu"

    def colours(self) -> Config:
        """Means and deviations of three channels, as a processor's file has them."""
        found: Config = {}
        for name in ("image_mean", "image_std"):
            values = self.m.get(f"clip.vision.{name}")
            numbers = isinstance(values, list) and all(type(x) is float for x in values)
            if not numbers or len(values) != 3:
                raise self.m.fail(f"clip.vision.{name}", values, "three numbers")
            found[name] = [shortest(value) for value in values]
        return found

    def sizes(self) -> Config:
        """What all towers have, in the usual names."""
        return {
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.integer("attention.head_count"),
            "patch_size": self.integer("patch_size"),
            "layer_norm_eps": self.epsilon,
        }
