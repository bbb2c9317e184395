"""EAGLE heads' modules against plain torch: whole and in chunks, by the target's states and their
own, called one by one and as programs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.tiny import Tiny, make_tiny
from tests.speculate.eagle_reference import (
    HEAD_DIM,
    KV_HEADS,
    Reference,
    Tensors,
    make_tensors,
    write,
)
from torch import Tensor

from penstock.cache import PagedLayout
from penstock.errors import UnsupportedModelError
from penstock.kernels import native
from penstock.models.heads.eagle import open_eagle_checkpoint
from penstock.nn import Decoder
from penstock.nn.eagle import EagleHead, FeatureHead, FusingHead
from penstock.quant import formats_of
from penstock.runtime.program import Program
from penstock.step import KV, Step

SIZE = 32
BLOCKS = torch.tensor([5, 2, 7, 1], dtype=torch.int32)
TEXT = torch.arange(3, 43) * 7 % 320


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


def states_of(tiny: Tiny, layers: tuple[int, ...]) -> Tensor:
    """transformers' inputs of layers, side by side; of the last norm's where that is asked for."""
    streams: dict[int, Tensor] = {}
    model = tiny.oracle.model
    hooks = [
        module.register_forward_pre_hook(lambda _, x, i=i: streams.update({i: x[0][0].clone()}))
        for i, module in enumerate([*model.layers, model.norm])
    ]
    with torch.inference_mode():
        tiny.oracle(TEXT[None])
    for hook in hooks:
        hook.remove()
    return torch.cat([streams[layer] for layer in layers], -1)


def opened(tiny: Tiny, folder: Path, fuses: bool) -> tuple[EagleHead, Decoder]:
    target = tiny.load().model
    found = open_eagle_checkpoint(folder, fuses, target, strict=True)
    kind = FusingHead if fuses else FeatureHead
    head = kind(found.spec, target, formats_of(None, torch.float32), 256)
    found.fill(head)
    head.make_room(64)
    return head, target


@pytest.mark.parametrize("fuses", [False, True])
def test_a_target_that_scales_its_logits_is_refused(
    fuses: bool, tiny: Tiny, tmp_path: Path
) -> None:
    write(tmp_path, make_tensors(fuses))
    found = open_eagle_checkpoint(tmp_path, fuses, tiny.load().model, strict=True)
    formats = formats_of(None, torch.float32)
    target = Decoder(replace(tiny.load().spec.decoder, logit_scale=0.5), formats, torch.float32)
    kind = FusingHead if fuses else FeatureHead
    with pytest.raises(UnsupportedModelError, match=r"scales its logits \(by 0\.5\)"):
        kind(found.spec, target, formats, 256)


def step(tokens: Tensor, first: int, sample_at: list[int]) -> Step:
    count = len(tokens)
    at = torch.arange(first, first + count, dtype=torch.int32)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Step(
        tokens.to(torch.int32),
        at,
        BLOCKS[at // SIZE] * SIZE + at % SIZE,
        ints(0, count),
        ints(first + count),
        BLOCKS[None],
        ints(*sample_at),
    )


def reference(tensors: Tensors, tiny: Tiny, fuses: bool, normed: bool = False) -> Reference:
    model = tiny.oracle
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    return Reference(tensors, fuses, embedding.detach(), head.detach(), normed)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("by_program", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_logits_are_those_of_plain_torch(
    tiny: Tiny, tmp_path: Path, fuses: bool, by_program: bool, normed: bool
) -> None:
    if by_program and native.handle is None:
        pytest.skip(f"no native kernels: {native.reason}")
    if normed and not fuses:
        return  # it is EAGLE-3's
    tensors = make_tensors(fuses)
    changes = {"norm_before_residual": True} if normed else {}
    head, _ = opened(tiny, write(tmp_path / "head", tensors, **changes), fuses)
    layout = PagedLayout(((KV_HEADS, HEAD_DIM),), torch.float32, SIZE)
    kv: KV = layout.allocate(8)
    ways = [head.by_states(), head.by_features()]
    by_states, by_features = [Program(x, kv) for x in ways] if by_program else ways
    states = states_of(tiny, head.spec.states)
    want = reference(tensors, tiny, fuses, normed)
    with torch.inference_mode():
        features = states if fuses else tiny.oracle.model.norm(states)
    given, logits = want.rows(
        want.feature(features[:-1]), TEXT[1:], torch.arange(len(TEXT) - 1).float()
    )
    with torch.inference_mode():
        done = 0
        for count in (17, 1, 21):
            head.states[:count] = states[done : done + count]
            tokens = TEXT[done + 1 : done + count + 1]
            got = by_states(step(tokens, done, list(range(count))), kv)
            rows = slice(done, done + count)
            expected = logits[rows][:, logits[0].isfinite()]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(head.given[:count], given[rows], rtol=1e-4, atol=1e-4)
            done += count
        # on from its own
        head.features[0] = head.given[count - 1]
        got = by_features(step(torch.tensor([11]), done, [0]), kv)
    expected = want.after(features[:-1], TEXT.tolist(), [11])
    torch.testing.assert_close(
        got[0].log_softmax(-1), expected[expected.isfinite()], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("fuses", [False, True])
def test_no_rows_may_be_sampled(tiny: Tiny, tmp_path: Path, fuses: bool) -> None:
    """A prompt's states are read without logits."""
    if native.handle is None:
        pytest.skip(f"no native kernels: {native.reason}")
    head, _ = opened(tiny, write(tmp_path / "head", make_tensors(fuses)), fuses)
    kv = PagedLayout(((KV_HEADS, HEAD_DIM),), torch.float32, SIZE).allocate(8)
    assert Program(head.by_states(), kv)(step(TEXT[:4], 0, []), kv).shape[0] == 0
