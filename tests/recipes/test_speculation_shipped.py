"""What ships for the embedded model: small, in the public layouts, and as good as is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipes.speculation.acceptance import measure
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
KINDS = {"stories-draft": "draft", "stories-eagle": "eagle", "stories-medusa": "medusa"}
PROMPTS = [
    "Once upon a time",
    "One day, a little fox",
    'Lily looked at the big box and said, "',
    "<|im_start|>user\nTell me a story about a frog.<|im_end|>\n<|im_start|>assistant\n",
]


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ASSETS / name / "acceptance.json").read_text())
    return found


@pytest.fixture(scope="module")
def embedded() -> Target:
    return Target(ASSETS / "stories")


@pytest.fixture(scope="module")
def texts(embedded: Target) -> list[Row]:
    """What the embedded model says, greedily."""
    starts = [encode(embedded.tokenizer, prompt) for prompt in PROMPTS]
    outputs = LLM().generate(
        [{"prompt_token_ids": start} for start in starts],
        SamplingParams(temperature=0, max_tokens=120),
    )
    return [
        Row([*start, *output.outputs[0].token_ids], len(start))
        for start, output in zip(starts, outputs, strict=True)
    ]


def test_all_of_it_is_small() -> None:
    files = [file for name in KINDS for file in (ASSETS / name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "np") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    assert weights.get_slice(name).get_dtype() == "BF16", name


def test_a_guess_is_much_cheaper_than_the_target(embedded: Target) -> None:
    table = embedded.embedding.numel()
    of_layers = embedded.num_weights() - table
    draft, eagle, medusa = (load_guesser(ASSETS / name, embedded) for name in KINDS)
    assert draft.num_weights() < 0.2 * embedded.num_weights()
    assert eagle.num_weights() < 0.2 * of_layers  # the target's own head comes on top
    assert medusa.num_weights() < 0.15 * of_layers


@pytest.mark.parametrize("name", KINDS)
def test_guesses_are_accepted(embedded: Target, texts: list[Row], name: str) -> None:
    said = report(name)
    assert said["method"] == KINDS[name]
    stored = load_guesser(ASSETS / name, embedded)
    assert stored.num_weights() == said["weights"]
    chain = said["acceptance"]["greedy"]["chains"]["1"]
    found = measure(stored, embedded, texts, len(chain))
    # other texts, and few of them: about as many are right
    assert found.places > 200
    assert found.chains[1][0] == pytest.approx(chain[0], abs=0.15)
    assert found.tokens() > 0.7 * (1 + sum(chain))


@pytest.mark.parametrize("name", KINDS)
def test_the_docs_state_what_was_measured(name: str) -> None:
    page = (ROOT / "docs" / "speculation" / "training.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    stated = [row[1:] for row in rows if len(row) == 8 and row[0] == f"`{KINDS[name]}`"]
    expected = []
    for text in ("greedy", "sampled", "text"):
        chain = report(name)["acceptance"][text]["chains"]["1"]
        shares = [f"{share:.2f}" for share in chain] + [""] * (6 - len(chain))
        expected.append([*shares, f"{1 + sum(chain):.2f}"])
    assert stated == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_stated_acceptance_is_measured_again(name: str, tmp_path: Path) -> None:
    if not (TEXTS / "tinystories").exists():
        pytest.skip(f"the recipe's texts are not in {TEXTS}")
    said = report(name)["acceptance"]
    depth = len(said["greedy"]["right"])
    settings = Settings("stories", None, TEXTS, ASSETS / name, tmp_path, depth=depth)
    for text, found in measure_again(ASSETS / name, settings, seed=0).items():
        assert found.right == pytest.approx(said[text]["right"], abs=0.01)
        for width, chain in found.chains.items():
            assert chain == pytest.approx(said[text]["chains"][str(width)], abs=0.01)
