"""One thing that a checkup found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["bug", "fault", "mismatch", "hint"]
"""`bug`: of Penstock, to be reported. `fault`: it doesn't work now. `mismatch`: of what was given.
`hint`: worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is the matter, with the numbers, and the way out."""

    check: str
    level: Level
    text: str
