"""The packed corpus: token streams, conversations with their loss masks, held-out texts.

A pack is a zip file of xz-compressed members, the same bytes whenever it is made from the same
data. There are two: `pretrain.zip` has the large streams, `finetune.zip` everything else, so that
fine-tuning can be moved to another machine without the novels.
"""

import io
import json
import lzma
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

PACKS = ("pretrain.zip", "finetune.zip")
# Two-byte tokens: positions and literals are told apart by parity.
FILTER = {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}
MAX_DICTIONARY = 1 << 27  # bytes
DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents one after another, each opened by <|endoftext|>."""

    tokens: NDArray[np.uint16]  # [N]
    bytes: int  # of the text


@dataclass(frozen=True, slots=True)
class Examples:
    """Conversations: example i is tokens[offsets[i]:offsets[i + 1]]; loss counts where mask is."""

    tokens: NDArray[np.uint16]  # [N]
    mask: NDArray[np.bool_]  # [N]: tokens that the assistant says
    offsets: NDArray[np.int64]  # [examples + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1


class PackWriter:
    """Adds members to a new pack; nothing stands under its name before `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = path.with_suffix(".partial")
        self._zip = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_STORED)

    def add(self, name: str, data: bytes) -> None:
        dictionary = min(MAX_DICTIONARY, max(4096, len(data)))
        filters = [FILTER | {"dict_size": dictionary}]
        packed = lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters)
        self._zip.writestr(zipfile.ZipInfo(name + ".xz", DATE), packed)

    def add_text(self, name: str, text: str) -> None:
        self.add(name, text.encode())

    def add_stream(self, name: str, stream: Stream) -> None:
        self.add(f"streams/{name}.tokens", stream.tokens.astype("<u2").tobytes())
        self.add_text(f"streams/{name}.json", json.dumps({"bytes": stream.bytes}))

    def add_examples(self, name: str, examples: Examples) -> None:
        self.add(f"examples/{name}.tokens", examples.tokens.astype("<u2").tobytes())
        self.add(f"examples/{name}.mask", np.packbits(examples.mask).tobytes())
        self.add(f"examples/{name}.lengths", np.diff(examples.offsets).astype("<u4").tobytes())

    def close(self) -> int:
        """Give the pack its name; returns its bytes."""
        self._zip.close()
        self._partial.replace(self.path)
        return self.path.stat().st_size


class Corpus:
    """What the packs in a folder hold. Members are decompressed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home: dict[str, Path] = {}
        for name in PACKS:
            if (folder / name).exists():
                try:
                    with zipfile.ZipFile(folder / name) as pack:
                        members = [item.removesuffix(".xz") for item in pack.namelist()]
                except zipfile.BadZipFile as error:
                    raise ConfigError(
                        f"{folder / name} is no pack ({error}). Make it anew: "
                        "python -m recipes prepare."
                    ) from error
                self._home |= dict.fromkeys(members, folder / name)
        if not self._home:
            raise ConfigError(
                f"{folder} has neither {' nor '.join(PACKS)}. Make them: python -m recipes prepare."
            )

    def names(self, kind: str) -> list[str]:
        """Names of the members below `kind/`, without their endings."""
        found = {n.split("/")[1].rsplit(".", 1)[0] for n in self._home if n.startswith(kind + "/")}
        return sorted(found)

    def read(self, name: str) -> bytes:
        """A member's bytes. Raises ConfigError, naming those that there are."""
        if name not in self._home:
            raise ConfigError(
                f"{name} isn't in the packs of {self.folder}, which have: "
                f"{', '.join(sorted(self._home))}. Is one of {', '.join(PACKS)} missing?"
            )
        with zipfile.ZipFile(self._home[name]) as pack:
            return lzma.decompress(pack.read(name + ".xz"))

    def text(self, name: str) -> str:
        return self.read(name).decode()

    def json(self, name: str) -> Any:
        return json.loads(self.text(name))

    def stream(self, name: str) -> Stream:
        tokens = np.frombuffer(self.read(f"streams/{name}.tokens"), "<u2")
        return Stream(tokens, self.json(f"streams/{name}.json")["bytes"])

    def examples(self, name: str) -> Examples:
        tokens = np.frombuffer(self.read(f"examples/{name}.tokens"), "<u2")
        lengths = np.frombuffer(self.read(f"examples/{name}.lengths"), "<u4")
        bits = np.frombuffer(self.read(f"examples/{name}.mask"), np.uint8)
        mask = np.unpackbits(bits, count=len(tokens)).astype(bool)
        return Examples(tokens, mask, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def held_out(self, out: Path) -> dict[str, Path]:
        """Write the held-out files to `out`; returns them by name."""
        out.mkdir(parents=True, exist_ok=True)
        files = {}
        for name in sorted(n for n in self._home if n.startswith("held_out/")):
            file = out / name.split("/")[1]
            file.write_bytes(self.read(name))
            files[file.name] = file
        return files


def describe(sizes: Mapping[str, tuple[int, int]], packs: Mapping[str, int]) -> str:
    """A table of what was packed: (tokens, bytes of text) by name, and the packs' own bytes."""
    out = io.StringIO()
    for name, (tokens, size) in sizes.items():
        per_token = size / max(1, tokens)
        print(
            f"{name:<18}{tokens:>12,} tokens {size:>13,} bytes {per_token:6.2f} a token", file=out
        )
    for name, size in packs.items():
        print(f"{name:<18}{size / 1e6:>12.1f} MB", file=out)
    return out.getvalue().rstrip()
