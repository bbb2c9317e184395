"""What ships for the embedded model: small, in the public layouts, and as good as is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipes.speculation.acceptance import measure
from recipes.speculation.card import card
from recipes.speculation.load import load_guesser
from recipes.speculation.run import measure_again
from recipes.speculation.settings import Settings
from recipes.speculation.target import Target
from recipes.speculation.text import Row, encode
from safetensors import safe_open

from penstock import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src" / "penstock" / "assets"
TEXTS = ROOT.parent / "shared" / "data" / "text"
KINDS = {
    "stories-draft": ("draft", "stories-chat"),
    "stories-eagle": ("eagle", "stories"),
    "stories-medusa": ("medusa", "stories"),
    "stories-chat-eagle": ("eagle", "stories-chat"),
    "stories-chat-medusa": ("medusa", "stories-chat"),
}
"""The method and the target of each."""
HEADS = [name for name, (method, _) in KINDS.items() if method != "draft"]
PROMPTS = {
    "stories": [
        "Once upon a time",
        "One day, a little fox",
        'Lily looked at the big box and said, "',
        "The captain looked at the sea.",
    ],
    "stories-chat": [
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        for asked in (
            "Tell me a story about a frog.",
            "Tell me a story about a little boat.",
            "Write a short story about Lily.",
            "I need a place to stay in Paris.",
        )
    ],
}


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ASSETS / name / "acceptance.json").read_text())
    return found


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {name: Target(ASSETS / name) for name in PROMPTS}


@pytest.fixture(scope="module")
def texts(targets: dict[str, Target]) -> dict[str, list[Row]]:
    """What the embedded models say, greedily."""
    found = {}
    for name, prompts in PROMPTS.items():
        starts = [encode(targets[name].tokenizer, prompt) for prompt in prompts]
        outputs = LLM(name).generate(
            [{"prompt_token_ids": start} for start in starts],
            SamplingParams(temperature=0, max_tokens=120),
        )
        found[name] = [
            Row([*start, *output.outputs[0].token_ids], len(start))
            for start, output in zip(starts, outputs, strict=True)
        ]
    return found


def test_all_of_it_is_small() -> None:
    assert {p.name for p in ASSETS.iterdir()} >= set(KINDS)
    files = [file for name in KINDS for file in (ASSETS / name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "np") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    assert weights.get_slice(name).get_dtype() == "BF16", name


@pytest.mark.parametrize("name", KINDS)
def test_a_guess_is_much_cheaper_than_the_target(targets: dict[str, Target], name: str) -> None:
    method, of = KINDS[name]
    target = targets[of]
    weights = load_guesser(ASSETS / name, target).num_weights()
    if method == "draft":
        assert weights < 0.2 * target.num_weights()
    else:  # the target's own head comes on top
        assert weights < 0.2 * (target.num_weights() - target.embedding.numel())


@pytest.mark.parametrize("name", KINDS)
def test_guesses_are_accepted(
    targets: dict[str, Target], texts: dict[str, list[Row]], name: str
) -> None:
    said = report(name)
    method, target = KINDS[name]
    assert said["method"] == method
    stored = load_guesser(ASSETS / name, targets[target])
    assert stored.num_weights() == said["weights"]
    chain = said["acceptance"]["greedy"]["chains"]["1"]
    found = measure(stored, targets[target], texts[target], len(chain))
    # other texts, and few of them: about as many are right
    assert found.places > 200
    assert found.chains[1][0] == pytest.approx(chain[0], abs=0.15)
    assert found.tokens() > 0.7 * (1 + sum(chain))


@pytest.mark.parametrize("name", KINDS)
def test_the_docs_state_what_was_measured(name: str) -> None:
    page = (ROOT / "docs" / "speculation" / "training.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    stated = [row[1:] for row in rows if len(row) == 8 and row[0] == f"`{name}`"]
    expected = []
    for text in ("greedy", "sampled", "text"):
        chain = report(name)["acceptance"][text]["chains"]["1"]
        shares = [f"{share:.2f}" for share in chain] + [""] * (6 - len(chain))
        expected.append([*shares, f"{1 + sum(chain):.2f}"])
    assert stated == expected
    trees = [
        f"{1 + sum(report(name)['acceptance'][text]['chains'][width]):.2f}"
        for text in ("greedy", "sampled")
        for width in ("1", "2", "4", "8")
    ]
    assert [row[1:] for row in rows if len(row) == 9 and row[0] == f"`{name}`"] == [trees]
    (size,) = (row for row in rows if len(row) == 7 and row[0] == f"`{name}`")
    (file,) = (ASSETS / name).glob("*.safetensors")
    assert size[2] == f"{report(name)['weights'] / 1e6:.2f} M"
    assert size[3] == f"{file.stat().st_size / 1e6:.2f} MB"


@pytest.mark.parametrize("name", HEADS)
def test_the_cards_state_what_was_measured(name: str) -> None:
    found = (ASSETS / name / "README.md").read_text(encoding="utf-8")
    assert found == card(name, KINDS[name][1], report(name), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_stated_acceptance_is_measured_again(name: str, tmp_path: Path) -> None:
    if not (TEXTS / "tinystories").exists():
        pytest.skip(f"the recipe's texts are not in {TEXTS}")
    said = report(name)["acceptance"]
    depth = len(said["greedy"]["right"])
    settings = Settings(KINDS[name][1], None, TEXTS, ASSETS / name, tmp_path, depth=depth)
    for text, found in measure_again(settings, seed=0).items():
        assert found.right == pytest.approx(said[text]["right"], abs=0.01)
        for width, chain in found.chains.items():
            assert chain == pytest.approx(said[text]["chains"][str(width)], abs=0.01)
