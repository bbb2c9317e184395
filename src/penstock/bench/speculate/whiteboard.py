"""The tree of one draft as a picture: what was guessed, how likely, and what of it came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.speculate import ROOT, Draft

COLUMN, ROW = 150, 46  # from one depth to the next, from one leaf to the next
BOX, HEIGHT = 108, 30
MARGIN, HEAD = 24, 78
LONGEST = 12  # letters of a token in its box

Point = tuple[float, float]

_STYLE = (
    "text{fill:#24292f;font:13px ui-monospace,monospace}.title{font:600 15px sans-serif}"
    ".dim{fill:#6e7781;font-size:11px}.page{fill:#ffffff}.box{fill:#f6f8fa;stroke:#d0d7de}"
    ".came{fill:#dafbe1;stroke:#1a7f37}.line{stroke:#d0d7de;fill:none}"
    ".way{stroke:#1a7f37;stroke-width:2.5;fill:none}.next{fill:none;stroke:#1a7f37;"
    "stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}.page{fill:#0d1117}"
    ".box{fill:#161b22;stroke:#30363d}.came{fill:#0f2d1a;stroke:#3fb950}.line{stroke:#30363d}"
    ".way{stroke:#3fb950}.next{stroke:#3fb950}}"
)


@dataclass(frozen=True, slots=True)
class Verified:
    """A draft and what became of it."""

    before: list[int]  # the last tokens of its sequence
    tokens: list[int]
    parents: list[int]
    chances: list[float] | None  # that a token and those before it are right, by what guessed it
    right: list[int]  # places of those that came
    then: int  # the token that was drawn after them

    @property
    def worth(self) -> tuple[int, int]:
        """By how much it is worth a look."""
        return len(self.right), len(self.tokens)


class Whiteboard:
    """Keeps the draft of a run that is most worth a look: the one that the most of came true."""

    def __init__(self) -> None:
        self.best: Verified | None = None

    def see(
        self, before: Sequence[int], draft: Draft, right: Sequence[int], drawn: Sequence[int]
    ) -> None:
        """A draft was verified. drawn: after its root, and after each of its tokens."""
        parents = range(ROOT, len(draft) - 1) if draft.parents is None else draft.parents
        last = right[-1] if right else ROOT
        seen = Verified(
            list(before[-8:]),
            list(draft.tokens),
            list(parents),
            None if draft.chances is None else list(draft.chances),
            list(right),
            drawn[last + 1],
        )
        if self.best is None or seen.worth > self.best.worth:
            self.best = seen


def draw(one: Verified, text_of: Callable[[Sequence[int]], str]) -> str:
    """The picture, as SVG: time runs to the right, what came is green, what follows is dashed."""
    came, count = set(one.right), len(one.tokens)
    parents = [*one.parents, one.right[-1] if one.right else ROOT]  # and what was drawn after
    places = _places(parents)
    boxes = [_box(places[ROOT], _shown(text_of(one.before)[-LONGEST:]), "came", "so far")]
    lines = []
    for place, token in enumerate([*one.tokens, one.then]):
        follows = place in came or place == count
        note = "drawn after" if place == count else ""
        if place < count and one.chances is not None:
            note = f"{one.chances[place]:.0%}"
        kind = "next" if place == count else "came" if follows else "box"
        lines.append(_line(places[parents[place]], places[place], "way" if follows else "line"))
        boxes.append(_box(places[place], _shown(text_of([token])), kind, note))
    title = f"{count} guesses verified in one step: {len(came)} came, {len(came) + 1} tokens"
    width = max(x for x, _ in places.values()) + BOX + MARGIN
    height = max(y for _, y in places.values()) + ROW + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"><style>{_STYLE}</style>'
        f'<rect class="page" width="100%" height="100%"/>'
        f'<text class="title" x="{MARGIN}" y="32">{escape(title)}</text>'
        f'<text class="dim" x="{MARGIN}" y="54">under a guess: the chance that was given to it '
        f"and those before it</text>{''.join(lines)}{''.join(boxes)}</svg>\n"
    )


def _places(parents: Sequence[int]) -> dict[int, Point]:
    """Where the root and each token lie: as deep as it is, in the middle of what follows it."""
    below: dict[int, list[int]] = {at: [] for at in range(ROOT, len(parents))}
    depths = {ROOT: 0}
    for place, parent in enumerate(parents):
        depths[place] = depths[parent] + 1
        below[parent].append(place)
    order, stack = [], [ROOT]
    while stack:
        order.append(stack.pop())
        stack += below[order[-1]][::-1]
    leaves = [place for place in order if not below[place]]
    heights = {place: float(height) for height, place in enumerate(leaves)}
    for place in reversed(order):
        if below[place]:
            heights[place] = (heights[below[place][0]] + heights[below[place][-1]]) / 2
    return {at: (MARGIN + depths[at] * COLUMN, HEAD + heights[at] * ROW) for at in order}


def _shown(text: str) -> str:
    """A token's text on one line, its spaces visible."""
    text = text.replace("\n", "⏎").replace(" ", "·")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _line(start: Point, end: Point, kind: str) -> str:
    x, y, to_x, to_y = start[0] + BOX, start[1] + HEIGHT / 2, end[0], end[1] + HEIGHT / 2
    middle = (x + to_x) / 2
    curve = f"M{x:.0f} {y:.0f}C{middle:.0f} {y:.0f} {middle:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path class="{kind}" d="{curve}"/>'


def _box(at: Point, text: str, kind: str, note: str) -> str:
    x, y = at
    middle = f'x="{x + BOX / 2:.0f}" text-anchor="middle"'
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
        f'<text {middle} y="{y + 19:.0f}">{escape(text)}</text>'
        f'<text class="dim" {middle} y="{y + HEIGHT + 11:.0f}">{escape(note)}</text>'
    )
