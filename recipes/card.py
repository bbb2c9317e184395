"""The models' cards: what they are, what they were trained on, their figures, what they say."""

import json
from collections.abc import Mapping
from pathlib import Path

from penstock import LLM, SamplingParams
from recipes.corpus import Corpus
from recipes.family import ADAPTERS
from recipes.model import Shape
from recipes.prompts import PROMPTS
from recipes.ship import NAMES
from recipes.sources import LICENCES

ABOUT = {
    "base": "A small Llama that goes on with a text: stories, novels, dialogues.",
    "chat": "`stories`, fine-tuned on dialogues with tool calls, requests for stories and small "
    "talk.",
    "draft": "Distilled from `stories-chat`: proposes tokens for speculative decoding.",
    "shakespeare": "A LoRA adapter of `stories`: Shakespeare's plays.",
    "science_fiction": "A LoRA adapter of `stories`: magazine science fiction of the 1930s to "
    "1960s.",
}
USE = {
    "base": "penstock generate stories --prompt 'Once upon a time'",
    "chat": "penstock chat",
    "draft": 'penstock chat --speculative-config \'{"method": "draft_model"}\'',
    "shakespeare": "penstock export stories FOLDER --merge-lora stories-shakespeare",
    "science_fiction": "penstock export stories FOLDER --merge-lora stories-science-fiction",
}
"""Each member's command, by its name in the package."""
MAX_TOKENS = 400  # of a reply; one that takes more is marked
TRAINED_ON = {
    "base": tuple(LICENCES)[:5],
    "chat": tuple(LICENCES)[:8],
    "draft": tuple(LICENCES)[:8],
    "shakespeare": (*tuple(LICENCES)[:5], "tinyshakespeare"),
    "science_fiction": tuple(LICENCES)[:5],
}
_FRONT = ("---", "license: other", "language: en", "tags: [penstock, stories]", "---")
SHARE_ALIKE = (
    "TinyStories is under CDLA-Sharing-1.0; the Schema-Guided Dialogue data is under CC BY-SA 4.0. "
    "Copyright of the dialogues: Google LLC and its contributors. The dialogues were converted to "
    "messages with tool calls."
)


def write_cards(work: Path, figures: Mapping[str, str], table: str) -> None:
    """Write README.md into each model's folder. figures: table rows by `model TAB name`."""
    synthetic = "synthetic" in Corpus(work).names("streams")
    for name, about in ABOUT.items():
        folder = work / name
        weights = "adapter_model" if name in ADAPTERS else "model"
        if not (folder / f"{weights}.safetensors").exists():
            continue
        training = json.loads((folder / "training.json").read_text())
        lines = [
            *_FRONT, f"# {NAMES[name]}", "", about, "", "```", USE[name], "```", "",
            *_shape(folder if name not in ADAPTERS else None),
            f"Trained on {training['tokens'] / 1e6:.1f} M tokens in {training['steps']:,} steps; "
            "the curve is in `loss.svg`, how is in docs/training.md.", "",
            "## Sources", "", "| source | licence |", "|---|---|",
            *(f"| {source} | {LICENCES[source]} |" for source in TRAINED_ON[name]),
        ]  # fmt: skip
        if synthetic:
            lines.append("| stories told by stories260K (karpathy/tinyllamas) | MIT |")
        lines += ["", SHARE_ALIKE, "", "## Epochs", ""]
        lines += [f"- {source}: {count}" for source, count in training["epochs"].items()]
        rows = [row for key, row in figures.items() if key.split("\t")[0] == name]
        if rows:
            lines += ["", "## Held-out figures", "", table, *rows]
        if name == "chat":
            lines += ["", "## Twenty replies", "", "Greedy, unedited.", "", *samples(folder)]
        lines += [
            "",
            "## Limits",
            "",
            "A model of this size repeats and contradicts itself and knows no facts. It is made "
            "to test and to show an engine. Its sources are old fiction and crowd-sourced "
            "dialogues, with their views.",
        ]
        (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shape(folder: Path | None) -> list[str]:
    if folder is None:
        return []
    shape = Shape.read(folder)
    return [
        f"Llama: {shape.num_weights() / 1e6:.1f} M parameters, {shape.num_layers} layers of "
        f"{shape.hidden_size}, {shape.num_heads} heads over {shape.num_kv_heads}, "
        f"{shape.vocab_size:,} tokens, context {shape.context:,}.",
        "",
    ]


def samples(folder: Path) -> list[str]:
    """Replies to PROMPTS, greedy and unedited, as Markdown."""
    llm = LLM(str(folder))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    lines = []
    for asked, tools in PROMPTS:
        messages = [{"role": "user", "content": asked}]
        (output,) = llm.chat([messages], params, tools=tools or None)
        tool = " (with GetWeather)" if tools else ""
        reply = output.outputs[0].text.strip().replace("\n", "\n> ")
        cut = " *(cut off here)*" if output.outputs[0].finish_reason == "length" else ""
        lines += [f"**{asked}**{tool}", "", f"> {reply}{cut}", ""]
    return lines[:-1]
