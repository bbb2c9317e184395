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
from recipes.sources import LICENCES, SHARE_ALIKE

ABOUT = {
    "base": "A small Llama that goes on with a text: stories, novels, dialogues.",
    "chat": "`stories`, fine-tuned on dialogues with tool calls, requests for stories and small "
    "talk.",
    "draft": "Distilled from `stories-chat`: proposes tokens for speculative decoding.",
    "shakespeare": "A LoRA adapter of `stories`: Shakespeare's plays.",
    "verse": "A LoRA adapter of `stories`: verse of Milton, Blake and Whitman.",
}
USE = {
    "base": "penstock generate stories --prompt 'Once upon a time'",
    "chat": "penstock chat",
    "draft": 'penstock chat --speculative-config \'{"method": "draft_model"}\'',
    "shakespeare": "penstock export stories -o FOLDER --merge-lora stories-shakespeare",
    "verse": "penstock export stories -o FOLDER --merge-lora stories-verse",
}
"""Each member's command, by its name in the package."""
MAX_TOKENS = 512  # of a reply; one that takes more is marked
TRAINED_ON = {
    "base": tuple(LICENCES)[:5],
    "chat": tuple(LICENCES)[:8],
    "draft": tuple(LICENCES)[:8],
    "shakespeare": (*tuple(LICENCES)[:5], "tinyshakespeare"),
    "verse": tuple(LICENCES)[:5],
}
_FRONT = ("---", "license: other", "language: en", "tags: [penstock, stories]", "---")


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
        of = {name, *(_others(figures) if name == "base" else ())}
        rows = [row for key, row in figures.items() if key.split("\t")[0] in of]
        if rows:
            lines += ["", "## Held-out figures", "", table, *rows]
        if name == "draft" and (folder / "acceptance.json").exists():
            lines += ["", _acceptance(folder / "acceptance.json")]
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


def _others(figures: Mapping[str, str]) -> set[str]:
    """Models that `base` was compared with."""
    return {key.split("\t")[0] for key in figures} - set(ABOUT)


def _acceptance(file: Path) -> str:
    """What was measured along what the target itself says, stories among it."""
    report = json.loads(file.read_text(encoding="utf-8"))
    first, step = (
        {key: make(found["chains"]["1"]) for key, found in report["acceptance"].items()}
        for make in (lambda chain: chain[0], lambda chain: 1 + sum(chain))
    )
    return (
        f"Along what `stories-chat` itself says after held-out stories, requests and dialogues, "
        f"{first['greedy']:.2f} of first guesses come true greedily ({step['greedy']:.2f} tokens a "
        f"step by drafts of {len(report['acceptance']['greedy']['right'])}) and "
        f"{first['sampled']:.2f} at {report['sampled_at']} ({step['sampled']:.2f}). "
        "docs/speculation/training.md has the rest."
    )


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
