"""A run's next-token distributions on disk, for later runs to be held against.

A folder with `run.json` (texts, sizes), `targets.npy` [T], `likeliest.npy` [T] and `logprobs.npy`
[T, V] in float16: what another process, machine, engine or version of a model can be compared with.
float16 rounds likely tokens to one value, so the likeliest are kept beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ConfigError

FORMAT = "penstock-run-1"
LEAST_LOGPROB = -60_000.0
"""What −∞ and all below becomes: float16 reaches a little further."""


class RunWriter:
    """Writes a run, text by text; complete once `close` has been called."""

    def __init__(
        self, folder: Path, positions: int, vocab_size: int, about: dict[str, Any]
    ) -> None:
        """positions: how many there will be; about: `window`, `stride` and whatever names the run.

        Raises ConfigError where the folder isn't empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} isn't empty; a run is kept in a folder of its own.")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._about = folder, about
        self._logprobs: NDArray[np.float16] = np.lib.format.open_memmap(
            folder / "logprobs.npy", "w+", np.float16, (positions, vocab_size)
        )
        self._targets = np.zeros(positions, dtype=np.int32)
        self._likeliest = np.zeros(positions, dtype=np.int32)
        self._texts: dict[str, int] = {}
        self._at = 0

    def add(self, text: str, logits: Tensor, targets: Tensor) -> None:
        """The next positions [T, V] of `text`, and the tokens [T] that came."""
        end = self._at + len(targets)
        logprobs = logits.log_softmax(-1).clamp(min=LEAST_LOGPROB)
        self._logprobs[self._at : end] = logprobs.half().numpy()
        self._likeliest[self._at : end] = logits.argmax(-1).numpy()
        self._targets[self._at : end] = targets.numpy()
        self._texts[text] = self._texts.get(text, 0) + len(targets)
        self._at = end

    def close(self) -> None:
        """Write what names the run."""
        self._logprobs.flush()  # type: ignore[attr-defined]
        np.save(self._folder / "targets.npy", self._targets)
        np.save(self._folder / "likeliest.npy", self._likeliest)
        about = {"format": FORMAT, "texts": self._texts, **self._about}
        text = json.dumps(about, indent=2, default=str) + "\n"
        (self._folder / "run.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Kept:
    """Positions of a run."""

    logprobs: Tensor  # [T, V] float32; float16 has rounded their sums a little away from 1
    likeliest: Tensor | None  # [T] int64; None in older runs

    def likeliest_beside(self, other: Tensor) -> Tensor:
        """The run's likeliest tokens [T].

        Where they weren't kept: of several that float16 makes equal, the one that is the likeliest
        of `other` [T, V] too.
        """
        if self.likeliest is not None:
            return self.likeliest
        first, theirs = self.logprobs.argmax(-1), other.argmax(-1)
        reached = self.logprobs.gather(1, theirs[:, None])[:, 0] == self.logprobs.amax(-1)
        return torch.where(reached, theirs, first)


class ReferenceRun:
    """A run that was kept, read in the order in which it was written."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for what isn't a complete run."""
        self._folder = folder
        self._at = 0
        self._likeliest: NDArray[np.int32] | None = None
        try:
            self.about = _about(folder)
            self._targets = np.load(folder / "targets.npy")
            self._logprobs = np.load(folder / "logprobs.npy", mmap_mode="r")
            if (folder / "likeliest.npy").exists():  # there are runs from before it was kept
                self._likeliest = np.load(folder / "likeliest.npy")
            self._check_sizes()
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(
                f"{folder} isn't a complete run of `penstock eval`: {error}"
            ) from error

    def _check_sizes(self) -> None:
        """Raises ValueError where arrays don't have a row for each position."""
        whole = self._logprobs.shape[:1]
        likeliest = self._targets if self._likeliest is None else self._likeliest
        if self._logprobs.ndim != 2 or not self._targets.shape == likeliest.shape == whole:
            raise ValueError(
                f"logprobs.npy has shape {self._logprobs.shape}, targets.npy {self._targets.shape} "
                f"and likeliest.npy {likeliest.shape}, where [T, V], [T] and [T] belong"
            )

    def check(self, window: int, stride: int, vocab_size: int) -> None:
        """Raises ConfigError unless this run read as another one is about to."""
        mine = [self.about.get("window"), self.about.get("stride"), self._logprobs.shape[1]]
        if mine != [window, stride, vocab_size]:
            raise ConfigError(
                f"The run in {self._folder} had a window of {mine[0]} tokens, a stride of "
                f"{mine[1]} and a vocabulary of {mine[2]}; this one {window}, {stride} and "
                f"{vocab_size}."
            )

    def next(self, text: str, targets: Tensor) -> Kept:
        """The next positions, whose tokens are `targets` [T].

        Raises ConfigError where the run has others there.
        """
        end = self._at + len(targets)
        if not np.array_equal(self._targets[self._at : end], targets.numpy()):
            raise ConfigError(
                f"{text} isn't what the run in {self._folder} read from its position {self._at:,} "
                f"on. It had the texts {', '.join(self.about['texts'])} in this order: give the "
                "same, with the same tokenizer."
            )
        rows = slice(self._at, end)
        self._at = end
        likeliest = None if self._likeliest is None else self._likeliest[rows].astype(np.int64)
        return Kept(
            torch.from_numpy(self._logprobs[rows].astype(np.float32)),
            None if likeliest is None else torch.from_numpy(likeliest),
        )


def _about(folder: Path) -> dict[str, Any]:
    """What run.json says. Raises ConfigError, or OSError or ValueError where it isn't JSON."""
    try:
        about = json.loads((folder / "run.json").read_text("utf-8"))
    except RecursionError as error:
        raise ValueError("run.json is nested too deeply") from error
    if not isinstance(about, dict) or not isinstance(about.get("texts", {}), dict):
        raise ValueError("run.json isn't an object that names texts")
    if about.get("format") != FORMAT:
        raise ConfigError(f"{folder} is of format {about.get('format')!r}, not {FORMAT}.")
    return {"texts": {}, "weights": "a kept run", **about}
