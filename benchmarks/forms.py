"""What a form, and a healed prompt, make of the next token's distribution, drawn.

    python benchmarks/forms.py docs/figures/samplers

Of the embedded model: its probabilities over all tokens (grey), and those that are drawn from
(blue), under the masks of the same grammar and the same prefix that a request gets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from penstock import LLM, SamplingParams, StructuredOutputs
from penstock.grammar import Grammars
from penstock.grammar.healing import Healer
from penstock.sampling import Constraint, num_words

Values = npt.NDArray[np.float64]

PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Max"]}},
    "required": ["name"],
    "additionalProperties": False,
}
WRITTEN = ("", '{"name": "', '{"name": "Lily"')
ENDINGS = ("Once upon a ti", "The little gi", "They played in the pa")

ROWS, PANELS = 9, 3
WIDTH, TOP, ROW, LABEL, GAP = 900, 74, 20, 78, 30
HEIGHT = TOP + ROWS * ROW + 14
_STYLE = (
    "text{fill:#24292f}.dim{fill:#6e7781}.page{fill:#fff}.was{fill:#d0d7de}.is{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#8b949e}"
    ".page{fill:#0d1117}.was{fill:#30363d}.is{fill:#58a6ff}}"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One place in a text: the model's probabilities, and those under a mask."""

    heading: str
    before: Values
    after: Values


class Drawn:
    """The embedded model and what its tokens look like."""

    def __init__(self) -> None:
        self.llm = LLM(dtype="float32")
        self.tokenizer = self.llm.get_tokenizer()
        self.size = self.llm.runtime.vocab_size

    def probabilities(self, tokens: Sequence[int]) -> Values:
        """Of every token after these."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
        (output,) = self.llm.generate([list(tokens)], params)
        found = np.zeros(self.size)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None  # asked for
        for token, entry in logprobs[0].items():
            found[token] = np.exp(entry.logprob)
        return found

    def masked(self, before: Values, constraint: Constraint) -> Values:
        """What is drawn from at temperature 1."""
        bits = np.zeros(num_words(self.size), dtype=np.int32)
        constraint.fill(bits)
        may = np.unpackbits(bits.view(np.uint8), bitorder="little", count=self.size)
        left = before * may
        return left / left.sum()

    def forms(self) -> list[Panel]:
        """Three places of a JSON object."""
        eos = self.llm.runtime.model.eos_token_ids
        grammars = Grammars(self.tokenizer, self.size, eos)
        spec = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
        panels = []
        for text in WRITTEN:
            state = grammars.start(spec)
            tokens = self.tokenizer.encode(PROMPT)
            for byte in text.encode():  # in any tokens: their bytes are what counts
                tokens.append(self._token_of(bytes([byte])))
                state.accept(tokens[-1])
            before = self.probabilities(tokens)
            panels.append(Panel(text or "at the beginning", before, self.masked(before, state)))
        return panels

    def healed(self) -> list[Panel]:
        """Three prompts that end within a word."""
        healer = Healer(self.tokenizer, self.size)
        panels = []
        for text in ENDINGS:
            healed = healer.heal(self.tokenizer.encode(text))
            before = self.probabilities(healed.kept)
            after = self.masked(before, healer.constraint(healed.prefix))
            panels.append(Panel(text, before, after))
        return panels

    def _token_of(self, piece: bytes) -> int:
        return next(i for i in range(self.size) if self.tokenizer.token_bytes(i) == piece)

    def figure(self, said: str, panels: list[Panel]) -> str:
        """All panels side by side."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text x="12" y="22" font-size="15" font-weight="600">{escape(said)}</text>',
            f'<text x="{WIDTH - 12}" y="22" text-anchor="end" class="dim">probability of the next '
            "token: the model's grey, drawn from blue</text>",
        ]
        width = (WIDTH - 24 - (PANELS - 1) * GAP) / PANELS
        for i, panel in enumerate(panels):
            parts += self._panel(panel, 12 + i * (width + GAP), width)
        return "\n".join([*parts, "</svg>", ""])

    def _panel(self, panel: Panel, left: float, width: float) -> list[str]:
        likely = [np.argsort(-one, kind="stable")[:ROWS] for one in (panel.after, panel.before)]
        may = [int(i) for i in likely[0] if panel.after[i] > 0][: ROWS // 2 + 1]
        others = [int(i) for i in likely[1] if i not in may][: ROWS - len(may)]
        shown = sorted([*may, *others], key=lambda i: -panel.before[i])
        parts = [f'<text class="dim" x="{left:.1f}" y="{TOP - 18}">{escape(panel.heading)}</text>']
        room = width - LABEL - 44
        for row, token in enumerate(shown):
            y = TOP + row * ROW
            label = json.dumps(self.tokenizer.token_bytes(token).decode("utf-8", "replace"))
            if token in self.llm.runtime.model.eos_token_ids:
                label = "the end"
            parts.append(
                f'<text x="{left + LABEL - 6:.1f}" y="{y + 11}" text-anchor="end">'
                f"{escape(label)}</text>"
            )
            for values, kind, at in ((panel.before, "was", 0), (panel.after, "is", 7)):
                long = max(0.5, float(values[token]) * room) if values[token] else 0.0
                parts.append(
                    f'<rect class="{kind}" x="{left + LABEL:.1f}" y="{y + at}" '
                    f'width="{long:.1f}" height="6"/>'
                )
            share = panel.after[token]
            parts.append(
                f'<text class="dim" x="{left + width:.1f}" y="{y + 11}" text-anchor="end">'
                f"{f'{share:.1%}' if share else '–'}</text>"
            )
        return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the two SVGs")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    drawn = Drawn()
    forms = drawn.figure('{"name": "Lily" or "Max"}', drawn.forms())
    (folder / "structured_outputs.svg").write_text(forms, encoding="utf-8")
    healed = drawn.figure("token_healing=True", drawn.healed())
    (folder / "token_healing.svg").write_text(healed, encoding="utf-8")


if __name__ == "__main__":
    main()
