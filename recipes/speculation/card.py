"""The model card of what was trained: what guesses, for whom, from what, and how well."""

from collections.abc import Mapping
from typing import Any

from recipes.sources import LICENCES, SHARE_ALIKE

ABOUT = {
    "draft": "A small model that learnt {target}'s distributions",
    "medusa": "Medusa heads for {target}: each guesses another of the next tokens, all at once",
    "eagle": "An EAGLE head for {target}: a layer that guesses the next feature",
    "eagle3": "An EAGLE-3 head for {target}: a layer over features of three layers",
}
TEXTS = {
    "greedy": "what the target says, greedily",
    "sampled": "what it says at {sampled_at}",
    "text": "the held-out texts themselves",
}
_SOURCES = (*tuple(LICENCES)[:1], *tuple(LICENCES)[4:8])  # of the default text


def card(name: str, target: str, report: Mapping[str, Any], text: str | None) -> str:
    """README.md of what `report` (acceptance.json) tells of. text: the user's own, by name."""
    method = report["method"]
    words = ABOUT[method].format(target=f"`{target}`")
    depth = len(report["acceptance"]["greedy"]["right"])
    lines = [
        "---",
        *([] if text else ["license: other", "language: en"]),
        f"tags: [speculative-decoding, {method}]",
        "---",
        f"# {name}",
        "",
        f"{words}; {report['weights']:,} parameters. What is generated doesn't depend on them, "
        "only how fast.",
        "",
        f"Trained by `recipes/speculation`: {report['steps']:,} steps, "
        f"{report['tokens'] / 1e6:.2f} M tokens of "
        + (f"{text} and of what the target wrote." if text else "the sources below, and of what")
        + ("" if text else " the target wrote. docs/speculation/training.md has the command."),
        "",
        "The share of drafts whose first guesses are all right, and the tokens that a step brings:",
        "",
        f"| along | {' | '.join(map(str, range(1, depth + 1)))} | tokens a step |",
        "|---" * (depth + 2) + "|",
    ]
    for key, along in TEXTS.items():
        chain = report["acceptance"][key]["chains"]["1"]
        shares = " | ".join(f"{share:.2f}" for share in chain)
        along = along.format(sampled_at=report["sampled_at"])
        lines.append(f"| {along} | {shares} | {1 + sum(chain):.2f} |")
    if text is None:
        lines += ["", "## Sources", "", "| source | licence |", "|---|---|"]
        lines += [f"| {source} | {LICENCES[source]} |" for source in _SOURCES]
        lines += ["", SHARE_ALIKE]
    return "\n".join(lines) + "\n"
