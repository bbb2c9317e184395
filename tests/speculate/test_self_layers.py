"""Drafts by the first layers: what these would choose, and a cache that nobody can tell from one
without drafts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.runtime import Program
from penstock.sampling import Sampler, SamplingParams
from penstock.speculate import Draft, Wish
from penstock.speculate.draft_loop import DraftLimits
from penstock.speculate.self_layers import SelfLayersProposer
from penstock.step import KV
from tests.exactness.bits import BLOCK, Machine, Stream, build, prompt, uniform
from tests.models.tiny import Sequence, make_tiny
from tests.speculate.drafts import GREEDY, LIVELY, state

VOCAB = 517
LENGTHS = [1, 29, 32, 64, 97]
exact = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")


def target(form: str = "bfloat16") -> Decoder:
    """A decoder whose layers add less the later they come: the first often agree with all."""
    plain = form in ("bfloat16", "float32")
    decoder = build(getattr(torch, form)) if plain else build(torch.bfloat16, form)
    for i, layer in enumerate(decoder.layers[1:], 1):
        small = 0.1 / i
        for norm in (layer.attention_post_norm, layer.mlp_post_norm):
            if norm is not None:
                norm.load("weight", torch.full(norm.expected()["weight"], small))
        if layer.attention_post_norm is None:
            for j, linear in enumerate((layer.attention.out, layer.mlp.down)):
                shape = linear.expected()["weight"]
                linear.load("weight", uniform(shape, small / shape[-1] ** 0.5, 100 * i + j))
    return decoder


def proposer_for(
    machine: Machine, decoder: Decoder, layers: int, program: bool = True
) -> SelfLayersProposer:
    kv, view = machine.kv[:layers], decoder.first_layers(layers)
    forward = Program(view, kv) if program else view
    limits = DraftLimits(VOCAB, BLOCK, 8, 64, 2048)

    def run(step: object) -> Tensor:
        with torch.inference_mode():
            return forward(step, kv)  # type: ignore[arg-type]

    return SelfLayersProposer(run, limits)


def begun(machine: Machine, length: int, seed: int) -> Stream:
    """A sequence all but whose last token is computed, with room for more."""
    stream = machine.stream(prompt(length, seed) + [0] * 150)
    del stream.tokens[length:]
    if length > 1:
        machine.run([(stream, length - 1)])
    return stream


def propose(
    proposer: SelfLayersProposer, streams: list[Stream], params: SamplingParams, limit: int
) -> list[Draft]:
    wishes = [
        Wish(s, s.tokens, state(params, s.tokens, length, VOCAB), s.blocks, limit)
        for s, length in zip(streams, LENGTHS, strict=False)
    ]
    return proposer.propose(wishes)


def by_token(kv: KV, block: int) -> list[Tensor]:
    """Of each part of the cache, what it holds of each token of a block, [P, bytes]."""
    found = []
    for layer in kv:
        for i, part in enumerate(layer):
            held = part[block]
            if i > 1:
                held = held.movedim(-1, 0)
            elif i == 0:
                held = held.permute(1, 3, 0, 2, 4)
            else:
                int4 = part.dtype is torch.uint8
                held = held.permute(*((2, 3, 0, 1, 4) if int4 else (2, 4, 0, 1, 3)))
            found.append(held.reshape(BLOCK, -1).contiguous().view(torch.uint8))
    return found


def decoded(
    decoder: Decoder, kv: str, params: SamplingParams, layers: int, count: int = 16
) -> tuple[list[list[int]], list[Tensor], list[list[Tensor]], tuple[int, int]]:
    """Tokens, logits and the cache's contents of some sequences; guesses taken, and refused.

    layers: 0 for no drafts.
    """
    machine = Machine(decoder, kv=kv, program=True)
    streams = [begun(machine, length, 7 + i) for i, length in enumerate(LENGTHS)]
    proposer = proposer_for(machine, decoder, layers) if layers else None
    sampler, rows = Sampler(VOCAB), [list[Tensor]() for _ in streams]
    taken = refused = 0
    while any(len(s.tokens) - n < count for s, n in zip(streams, LENGTHS, strict=True)):
        drafts = [Draft(state(params, s.tokens, n, VOCAB))
                  for s, n in zip(streams, LENGTHS, strict=True)]  # fmt: skip
        if proposer is not None:
            drafts = propose(proposer, streams, params, 4)
        for stream, draft in zip(streams, drafts, strict=True):
            stream.tokens += draft.tokens
        found = machine.run([(s, 1 + len(d)) for s, d in zip(streams, drafts, strict=True)])
        for stream, draft, logits, kept in zip(streams, drafts, found, rows, strict=True):
            del stream.tokens[len(stream.tokens) - len(draft) :]
            for i, state_before in enumerate(draft.states):
                kept.append(logits[i].clone())
                stream.tokens += sampler(logits[i : i + 1].clone(), [state_before]).token_ids
                if i == len(draft) or stream.tokens[-1] != draft.tokens[i]:
                    refused += len(draft) - i
                    break
                taken += 1
            stream.done = len(stream.tokens) - 1
    contents = []
    for stream, length in zip(streams, LENGTHS, strict=True):
        computed = length + count - 1
        parts = [by_token(machine.kv, block) for block in stream.blocks]
        contents.append([torch.cat(at)[:computed] for at in zip(*parts, strict=True)])
    texts = [s.tokens[: n + count] for s, n in zip(streams, LENGTHS, strict=True)]
    return texts, [torch.stack(kept[:count]) for kept in rows], contents, (taken, refused)


@exact
@pytest.mark.parametrize(
    ("form", "kv", "params"),
    [
        ("bfloat16", "auto", GREEDY),
        ("bfloat16", "auto", LIVELY),
        ("float32", "auto", LIVELY),
        ("w4a8", "auto", LIVELY),
        ("bfloat16", "int8", LIVELY),
        ("bfloat16", "fp8", LIVELY),
        ("bfloat16", "int4", LIVELY),
    ],
)
def test_verified_drafts_leave_no_trace(form: str, kv: str, params: SamplingParams) -> None:
    """Tokens, logits, and keys and values of all layers: the bits of a run without drafts."""
    decoder = target(form)
    texts, logits, contents, none = decoded(decoder, kv, params, 0)
    assert none == (0, 0)
    for layers in (1, 2):
        found = decoded(decoder, kv, params, layers)
        assert found[0] == texts
        assert all(torch.equal(a, b) for a, b in zip(found[1], logits, strict=True))
        for one, other in zip(found[2], contents, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert min(found[3]) > 3  # both were seen


@exact
@pytest.mark.parametrize("params", [GREEDY, LIVELY])
def test_a_draft_is_what_the_first_layers_choose(params: SamplingParams) -> None:
    """Against a decoder of these layers alone, that computes the whole text in a cache of its own;
    together and one by one, as a program and operator by operator.
    """
    decoder = build()
    machine = Machine(decoder)
    streams = [begun(machine, length, 7 + i) for i, length in enumerate(LENGTHS)]
    together = propose(proposer_for(machine, decoder, 2), streams, params, 6)
    eager = propose(proposer_for(machine, decoder, 2, program=False), streams, params, 6)
    assert [d.tokens for d in together] == [d.tokens for d in eager]
    first = decoder.first_layers(2)
    sampler = Sampler(VOCAB)
    for stream, length, draft in zip(streams, LENGTHS, together, strict=True):
        alone = Machine(decoder)
        alone.forward = lambda step, kv: first(step, kv[:2])
        held, text = state(params, stream.tokens, length, VOCAB), list(stream.tokens)
        for token in draft.tokens:
            logits = alone.run([(alone.stream(text), len(text))])[0][-1:]
            assert sampler(logits, [held]).token_ids == [token]
            held.append(token)
            text.append(token)
        assert len(draft) == 6 and stream.done == length - 1


@pytest.mark.parametrize(("name", "layers"), [("llama", 1), ("llama", 2), ("gemma2", 3)])
def test_an_early_exit_is_a_shorter_model(name: str, layers: int, tmp_path: Path) -> None:
    """transformers' model without the last layers; both in float32, added in other orders."""
    tiny = make_tiny(name, tmp_path)
    loaded = tiny.load()
    tiny.oracle.model.layers = tiny.oracle.model.layers[:layers]
    tiny.oracle.config.num_hidden_layers = layers
    whole = Sequence(loaded.model)
    want = tiny.expect(tiny.prompt)
    short = Sequence(loaded.model)
    short.model, short.kv = loaded.model.first_layers(layers), short.kv[:layers]  # type: ignore
    assert (short.feed(tiny.prompt) - want).abs().max() < 1e-4
    assert (whole.feed(tiny.prompt) - want).abs().max() > 0.1


@exact
def test_its_length_and_room() -> None:
    decoder = build()
    machine = Machine(decoder)
    stream = begun(machine, 29, 7)
    proposer = proposer_for(machine, decoder, 1)
    proposer._limits = DraftLimits(VOCAB, BLOCK, 8, 64, 31)
    held = state(GREEDY, stream.tokens, 29, VOCAB)
    wish = Wish(stream, stream.tokens, held, stream.blocks[:1], 9)
    [draft] = proposer.propose([wish])
    assert len(draft) == proposer.last_computed == 3  # of positions 28, 29 and 30
    proposer._limits = DraftLimits(VOCAB, BLOCK, 8, 64, 29)
    assert len(proposer.propose([wish])[0]) == 1
    proposer._limits = DraftLimits(VOCAB, BLOCK, 8, 64, 28)
    assert len(proposer.propose([wish])[0]) == 0
    proposer._limits = DraftLimits(VOCAB, BLOCK, 8, 64, 99)
    with pytest.raises(PenstockError, match="room for 37 tokens, but its sequence has 1 blocks"):
        proposer.propose([wish])
    proposer.forget(stream)
