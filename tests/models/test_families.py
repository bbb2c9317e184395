"""Every family against transformers, on tiny random checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny import CASES, CHUNK, FAMILIES, NEW, Make, Sequence
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import ops
from penstock.kernels import native
from penstock.models import Checkpoint, load_weights, read_spec
from penstock.models.load import load_model
from penstock.nn import Decoder, DecoderSpec, LayerSpec
from penstock.nn.decoder import has_states
from penstock.quant import formats_of
from penstock.runtime import Program


class _Dispatched(TorchDispatchMode):
    """The operators that went through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "penstock":
            self.names.add(func.name().split("::")[1])
        return func(*args, **kwargs or {})


def test_both_kinds_of_kernels_run(tiny: Make, kernels: str) -> None:
    case = tiny("gemma2")
    with _Dispatched() as dispatched:
        Sequence(case.load().model).feed(case.prompt)
    used = {"embedding", "rms_norm", "linear", "rotary_cache", "paged_attention"}
    used |= {"add_", "softcap_"}
    assert dispatched.names == (used if kernels == "native" else set())
    if kernels == "native":
        assert all(ops.has_native(name) for name in used)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("kernels")
def test_logits_of_a_prompt(tiny: Make, name: str) -> None:
    case = tiny(name)
    got = Sequence(case.load().model).feed(case.prompt)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, case.expect(case.prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
def test_every_family_runs_as_one_program(tiny: Make, name: str) -> None:
    case = tiny(name)
    model = case.load().model
    eager, whole = Sequence(model), Sequence(model)
    program = Program(model, whole.kv)
    whole.model = program  # type: ignore[assignment]
    for part in (case.prompt[:5], case.prompt[5:6], case.prompt[6:]):
        assert torch.equal(whole.feed(part), eager.feed(part))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")
def test_every_family_in_four_bits(tiny: Make, name: str) -> None:
    case = tiny(name)
    model = load_model(case.folder, max_model_len=case.case.max_len, quantization="w4a8").model
    eager, whole = Sequence(model), Sequence(model)
    whole.model = Program(model, whole.kv)  # type: ignore[assignment]
    got = whole.feed(case.prompt)
    assert got.isfinite().all() and torch.equal(got, eager.feed(case.prompt))
    near = case.expect(case.prompt).log_softmax(-1)
    drift = (near.exp() * (near - got.log_softmax(-1))).sum(-1).mean()
    assert drift < (1.5 if has_states(model.spec.layers) else 0.5)  # of eight bits up to 0.2 there


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("kernels")
def test_greedy_tokens_through_the_paged_cache(tiny: Make, name: str) -> None:
    """If transformers' best token after every prefix is ours, its greedy tokens are ours."""
    case = tiny(name)
    sequence = Sequence(case.load().model)
    tokens = case.prompt[:CHUNK]
    steps = [sequence.feed(tokens)[-1:]]
    for _ in range(NEW - 1):
        tokens = torch.cat((tokens, steps[-1].argmax(-1)))
        steps.append(sequence.feed(tokens[-1:]))
    logits = torch.cat(steps)
    want = case.expect(tokens)[CHUNK - 1 :]
    best, second = want.topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-3, "choose another prompt_seed: two tokens are as good"
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)
    assert logits.argmax(-1).tolist() == want.argmax(-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("kernels")
def test_bfloat16_drifts_little(tiny: Make, name: str) -> None:
    """Mean KL divergence from float32, whose best token has a tenth to a half of the mass."""
    case = tiny(name)
    want = case.expect(case.prompt).log_softmax(-1)
    assert 0.05 < want.exp().amax(-1).mean() < 0.9
    got = Sequence(case.load("bfloat16").model).feed(case.prompt).log_softmax(-1)
    drift = (want.exp() * (want - got)).sum(-1)
    layers = case.load("bfloat16").spec.decoder.layers
    mixed = any(layer.mlp.experts for layer in layers)
    # a token between two experts may take the other, and those after it see it
    found = drift.median() if mixed else drift.mean()
    if has_states(layers):  # states add up what rounding has done: as much in transformers
        theirs = copy.deepcopy(case.oracle).bfloat16()(case.prompt[None]).logits[0].float()
        drift = (want.exp() * (want - theirs.log_softmax(-1))).sum(-1)
        assert found < 3 * (drift.median() if mixed else drift.mean())
    else:
        assert found < 1e-3


def _each(change: Callable[[LayerSpec], LayerSpec]) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda d: replace(d, layers=tuple(change(layer) for layer in d.layers))


def _attend(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return _each(lambda layer: replace(layer, attention=replace(layer.attention, **changes)))


def _choose(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        if layer.mlp.experts is None:
            return layer
        return replace(layer, mlp=replace(layer.mlp, experts=replace(layer.mlp.experts, **changes)))

    return _each(change)


def _turn(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        a = layer.attention
        rope = None if a.rope is None else replace(a.rope, **changes)
        return replace(layer, attention=replace(a, rope=rope))

    return _each(change)


def _remember(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        a = layer.attention
        mamba = None if a.mamba is None else replace(a.mamba, **changes)
        delta = None if a.delta is None else replace(a.delta, **changes)
        return replace(layer, attention=replace(a, mamba=mamba, delta=delta))

    return _each(change)


def _like_layer(i: int, name: str) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda d: _attend(**{name: getattr(d.layers[i].attention, name)})(d)


WITHOUT: list[tuple[str, str, Callable[[DecoderSpec], DecoderSpec]]] = [
    ("llama3-rope", "scaled rope", _turn(kind="default")),
    ("mistral", "window", _attend(window=0)),
    ("mistral", "exact window", _attend(window=20)),
    ("qwen2", "yarn's frequencies", _turn(kind="default")),
    ("qwen2", "yarn's attention factor", _turn(attention_factor=1.0)),
    ("qwen2-window", "layers without window", _attend(window=17)),
    ("gemma2", "window", _attend(window=0)),
    ("gemma2", "layers without window", _attend(window=16)),
    ("gemma2", "cap on scores", _attend(softcap=0.0)),
    ("gemma2", "cap on logits", lambda d: replace(d, final_softcap=0.0)),
    ("gemma2", "scale of scores", _attend(scale=24**-0.5)),
    ("gemma3", "rope of global layers", _like_layer(0, "rope")),
    ("gemma3", "rope of local layers", _like_layer(2, "rope")),
    ("gemma3", "linear scaling", _turn(factor=1.0)),
    ("gemma3", "window", _attend(window=0)),
    ("phi3", "window", _attend(window=0)),
    ("phi3-long", "long factors", _turn(original_max_position=256)),
    ("phi3-short", "attention factor", _turn(attention_factor=1.0)),
    ("smollm3", "layers without rope", _like_layer(0, "rope")),
    ("smollm3-window", "window", _attend(window=0)),
    ("olmo3", "window", _attend(window=0)),
    ("olmo3", "layers without window", _attend(window=19)),
    ("olmo3", "rope of global layers", _like_layer(0, "rope")),
    ("olmo3", "rope of local layers", _like_layer(3, "rope")),
    ("granite", "scale of scores", _attend(scale=0.25)),
    ("granite", "scale of embeddings", lambda d: replace(d, embed_scale=3.0)),
    ("granite", "scale of logits", lambda d: replace(d, logit_scale=1.0)),
    ("granite", "epsilon", lambda d: replace(d, norm=replace(d.norm, eps=0.05))),
    ("gemma", "scale of embeddings", lambda d: replace(d, embed_scale=1.0)),
    ("cohere", "scale of logits", lambda d: replace(d, logit_scale=1.0)),
    ("cohere", "neighbouring pairs", _turn(interleaved=False)),
    ("cohere2", "window", _attend(window=0)),
    ("cohere2", "layers without rope", _like_layer(0, "rope")),
    ("glm", "neighbouring pairs", _turn(interleaved=False)),
    ("glm", "share that turns", _turn(rotary_dim=24)),
    ("glm4", "share that turns", _turn(rotary_dim=24)),
    ("starcoder2", "window", _attend(window=0)),
    ("exaone4", "layers without rope", _like_layer(0, "rope")),
    ("exaone4", "window", _attend(window=0)),
    ("ernie4_5", "neighbouring pairs", _turn(interleaved=False)),
    ("ministral", "window", _attend(window=0)),
    ("ministral3", "yarn's frequencies", _turn(kind="default")),
    ("hunyuan", "norms after the rotation", _attend(qk_norm="head")),
    ("phi", "share that turns", _turn(rotary_dim=16)),
    ("stablelm", "share that turns", _turn(rotary_dim=16)),
    ("nemotron", "share that turns", _turn(rotary_dim=24)),
    ("nemotron", "1 that is added to norms", lambda d: replace(d, norm=replace(d.norm, offset=0))),
    ("ernie4_5-moe", "neighbouring pairs", _turn(interleaved=False)),
    ("dots1", "window", _attend(window=0)),
    ("minimax-m2", "share that turns", _turn(rotary_dim=24)),
    ("hunyuan-moe", "norms after the rotation", _attend(qk_norm="head")),
    ("exaone-moe", "layers without rope", _like_layer(0, "rope")),
    ("exaone-moe", "window", _attend(window=0)),
    ("helium", "neighbouring pairs", _turn(interleaved=False)),
    ("cwm", "window", _attend(window=0)),
    ("solar-open", "scaled rope", _turn(kind="default")),
    ("granite-swa", "window", _attend(window=0)),
    ("granite-swa", "layers without rope", _like_layer(1, "rope")),
    ("granite-swa", "a rotation of its own", _turn(theta=10_000.0)),
    ("cohere2-moe", "rope of a dense layer", _like_layer(4, "rope")),
    ("cohere2-moe", "mean with the shared block", _choose(scale=1.0)),
    ("afmoe", "window", _attend(window=0)),
    ("afmoe", "layers without rope", _like_layer(0, "rope")),
    ("afmoe", "scale of embeddings", lambda d: replace(d, embed_scale=1.0)),
    ("afmoe", "scale of experts", _choose(scale=1.0)),
    ("mellum", "rope of global layers", _like_layer(0, "rope")),
    ("mellum", "window", _attend(window=0)),
    ("vaultgemma", "cap on scores", _attend(softcap=0.0)),
    ("vaultgemma", "window", _attend(window=0)),
    ("nanochat", "cap on logits", lambda d: replace(d, final_softcap=0.0)),
    ("nanochat", "norms of heads", _attend(qk_norm="none")),
    ("gptj", "neighbouring pairs", _turn(interleaved=False)),
    ("codegen", "share that turns", _turn(rotary_dim=16)),
    ("falcon-serial", "blocks one after the other", _each(lambda x: replace(x, parallel=True))),
    ("gpt2", "scale by layer", _attend(scale=0.25)),
    ("falcon-h1", "what reads the same", _each(lambda layer: replace(layer, waits=False))),
    ("falcon-h1", "scale of scores", _attend(scale=24**-0.5)),
    ("falcon-h1", "scale of logits", lambda d: replace(d, logit_scale=1.0)),
    ("falcon-h1", "scale of states", _remember(out_scale=1.0)),
    ("olmo-hybrid", "strength", _remember(strength=1.0)),
    ("gpt-neox", "parallel blocks", _each(lambda layer: replace(layer, parallel=False))),
]


@pytest.mark.parametrize(
    ("name", "change"), [pytest.param(n, c, id=f"{n}: {what}") for n, what, c in WITHOUT]
)
def test_these_checkpoints_feel_what_is_special(
    tiny: Make, name: str, change: Callable[[DecoderSpec], DecoderSpec]
) -> None:
    """Parity above would notice if this part of a family were missing."""
    case = tiny(name)
    spec = read_spec(case.folder)
    spec = replace(spec, decoder=change(spec.decoder))
    model = Decoder(spec.decoder, formats_of(None, torch.float32), torch.float32, case.case.max_len)
    load_weights(model, spec, Checkpoint(case.folder))
    difference = Sequence(model).feed(case.prompt) - case.expect(case.prompt)
    assert difference.abs().max() > 1e-2


def test_gemma_scales_embeddings_in_their_own_precision(tiny: Make) -> None:
    """As transformers: √72 is 8.5 in bfloat16."""
    case = tiny("gemma3")
    tokens = torch.arange(320)
    model = transformers.Gemma3ForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16)
    got = case.load("bfloat16").model.embed(tokens.int())
    assert torch.equal(got, model.model.embed_tokens(tokens))
