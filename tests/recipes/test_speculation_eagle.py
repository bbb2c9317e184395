"""EAGLE heads that the recipe saves guess in the engine what they guess in the recipe."""

from pathlib import Path

import pytest
import torch
from recipes.speculation.eagle import Eagle
from recipes.speculation.eagle3 import Eagle3
from recipes.speculation.guesser import Guesser
from recipes.speculation.load import load_guesser
from recipes.speculation.target import Target
from tests.speculate.eagle_rig import Rig, Text

from penstock.kernels import native
from penstock.models.hub import resolve

STORIES = resolve("stories")
DEPTH = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(STORIES)


def head(method: str, target: Target) -> Guesser:
    """With matrices that matter, other ones than training begins with."""
    made: Guesser
    if method == "eagle":
        made = Eagle(target, fc_bias=True, intermediate_size=64, save_embedding=True)
    else:
        counts = torch.arange(target.vocab_size).float()
        made = Eagle3(target, counts, draft_vocab_size=900, intermediate_size=64)
    random = torch.Generator().manual_seed(2)
    for weight in made.parameters():
        if weight.dim() == 2 and weight.requires_grad:
            with torch.no_grad():
                weight.normal_(0, weight.shape[1] ** -0.5, generator=random)
    return made


@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_what_is_saved_guesses_the_same(method: str, target: Target, tmp_path: Path) -> None:
    head(method, target).save(tmp_path)
    guesser = load_guesser(tmp_path, target).eval()
    rig = Rig(STORIES, tmp_path, method, num_speculative_tokens=DEPTH, tree_width=1)
    for seed, blocks in enumerate(([1, 2], [3, 4], [5, 6])):
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, 4000, (12 + 9 * seed,), generator=random).tolist()
        text = Text(tokens, blocks)
        rig.step((text, len(tokens) - 1))
        [draft] = rig.drafts(text, limit=DEPTH)
        seen = target.look(torch.tensor([tokens + draft.tokens]), guesser.stream_ids)
        with torch.no_grad():
            said = [
                int(logits[0, len(tokens) - 2].argmax()) for logits in guesser.guesses(seen, DEPTH)
            ]
        assert draft.tokens == said
