"""A run's next-token distributions on disk, for later runs to be held against.

A folder with `run.json` (texts, sizes), `targets.npy` [T] and `logprobs.npy` [T, V] in float16:
what another process, machine, engine or version of a model can be compared with.
"""

from __future__ import annotations

import json
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
        self._texts: dict[str, int] = {}
        self._at = 0

    def add(self, text: str, logprobs: Tensor, targets: Tensor) -> None:
        """The next positions [T, V] of `text`, and the tokens [T] that came."""
        end = self._at + len(targets)
        self._logprobs[self._at : end] = logprobs.clamp(min=LEAST_LOGPROB).half().numpy()
        self._targets[self._at : end] = targets.numpy()
        self._texts[text] = self._texts.get(text, 0) + len(targets)
        self._at = end

    def close(self) -> None:
        """Write what names the run."""
        self._logprobs.flush()  # type: ignore[attr-defined]
        np.save(self._folder / "targets.npy", self._targets)
        about = {"format": FORMAT, "texts": self._texts, **self._about}
        text = json.dumps(about, indent=2, default=str) + "\n"
        (self._folder / "run.json").write_text(text, encoding="utf-8")


class ReferenceRun:
    """A run that was kept, read in the order in which it was written."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for what isn't a complete run."""
        try:
            self.about: dict[str, Any] = json.loads((folder / "run.json").read_text("utf-8"))
            self._targets = np.load(folder / "targets.npy")
            self._logprobs = np.load(folder / "logprobs.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder} isn't a complete run of `penstock eval`: {error}"
            ) from error
        if self.about.get("format") != FORMAT:
            raise ConfigError(f"{folder} is of format {self.about.get('format')!r}, not {FORMAT}.")
        self._folder = folder
        self._at = 0

    def check(self, window: int, stride: int, vocab_size: int) -> None:
        """Raises ConfigError unless this run read as another one is about to."""
        mine = [self.about.get("window"), self.about.get("stride"), self._logprobs.shape[1]]
        if mine != [window, stride, vocab_size]:
            raise ConfigError(
                f"The run in {self._folder} had a window of {mine[0]} tokens, a stride of "
                f"{mine[1]} and a vocabulary of {mine[2]}; this one {window}, {stride} and "
                f"{vocab_size}."
            )

    def next(self, text: str, targets: Tensor) -> Tensor:
        """Log-probabilities [T, V] float32 of the next positions, whose tokens are `targets`.

        float16 has rounded their sums a little away from 1.
        """
        end = self._at + len(targets)
        if not np.array_equal(self._targets[self._at : end], targets.numpy()):
            raise ConfigError(
                f"{text} isn't what the run in {self._folder} read from its position {self._at:,} "
                f"on. It had the texts {', '.join(self.about['texts'])} in this order: give the "
                "same, with the same tokenizer."
            )
        found = torch.from_numpy(self._logprobs[self._at : end].astype(np.float32))
        self._at = end
        return found
