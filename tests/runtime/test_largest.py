"""Each row's largest logit, found while logits are made: what argmax finds in them, by `==`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams, ops
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.quant import formats_of
from penstock.runtime import Program, Runner
from penstock.sampling import NO_TOKEN, Sampler
from penstock.sampling.pending import MASKED, NOT_FINITE
from tests.exactness import bits
from tests.runtime.test_program import prefill

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

FORMATS = ["float32", "bfloat16", "w8a8", "w8a16", "w4a8-g32", "w4a16-g32", "nf4"]
ROWS = [0, 1, 2, 3, 5, 17, 64, 300]


def model(form: str, capped: bool = True, vocab: int = 517) -> Decoder:
    """The decoder of the exactness tests, with a head of `vocab` columns."""
    quantized = form not in ("float32", "bfloat16")
    dtype = torch.bfloat16 if quantized else getattr(torch, form)
    cap = 25.0 if capped else 0.0
    spec = replace(bits.decoder_spec(), vocab_size=vocab, final_softcap=cap)
    formats = formats_of(form if quantized else None, dtype)
    return bits.fill(Decoder(spec, formats, dtype))


def same(got: tuple[Tensor, Tensor], logits: Tensor) -> None:
    ids, values = ops.argmax(logits)
    assert torch.equal(got[0], ids)
    torch.testing.assert_close(got[1], values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("isa", native.available_isas())
def test_it_is_what_argmax_finds(form: str, isa: str) -> None:
    """On every instruction set, for few rows and many, with a soft cap and without."""
    native.select_isa(isa)
    for capped in (True, False):
        decoder = model(form, capped)
        kv = bits.Machine(decoder).kv
        program = Program(decoder, kv)
        assert program.finds_largest
        for rows in ROWS:
            step = prefill(300, rows)
            same(program.largest(step, kv), program(step, kv))


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("threads", [1, 2])
def test_parts_of_a_large_head_are_compared_in_their_order(threads: int) -> None:
    """Columns that are equal lie in parts of different threads; the first of them counts."""
    torch.set_num_threads(threads)
    decoder = model("bfloat16", vocab=20_011)
    panels = decoder.head.packed["weight"]
    kv = bits.Machine(decoder).kv
    program = Program(decoder, kv)
    for rows in (1, 40):
        step = prefill(300, rows)
        first = int(program.largest(step, kv)[0][0])
        for panel in (first // 16 + 1, panels.shape[0] - 2):  # right behind it, and far away
            panels[panel] = panels[first // 16]
        found = program.largest(step, kv)
        same(found, program(step, kv))
        assert int(found[0][0]) == first


def plant(decoder: Decoder, value: float, column: int) -> None:
    """Make the logits of a column NaN or infinite: it isn't those of any other."""
    weight: Tensor = decoder.head.packed["weight"]
    weight[column // 16, 0, column % 16, 0] = value


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("columns", [[0], [516], [200, 40], [15, 16, 17]])
def test_broken_logits(isa: str, value: float, columns: list[int]) -> None:
    """A NaN is before all, the first of several; what isn't finite can be told by the value."""
    native.select_isa(isa)
    decoder = model("bfloat16", capped=False)
    for column in columns:
        plant(decoder, value, column)
    kv = bits.Machine(decoder).kv
    program = Program(decoder, kv)
    for rows in (1, 20):
        step = prefill(60, rows)
        logits = program(step, kv)
        assert not logits.isfinite().all()
        same(program.largest(step, kv), logits)


def test_hidden_states_have_no_largest() -> None:
    """What a norm leaves is looked through by nobody."""
    decoder = model("float32")
    kv = bits.Machine(decoder).kv
    program = Program(decoder.last_hidden_state(), kv)
    assert not program.finds_largest
    with pytest.raises(RuntimeError, match="aren't a product's"):
        program.largest(prefill(20, 20), kv)


def asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step's largest logits were asked for, from now on."""
    seen: list[int] = []
    largest = Runner.largest

    def noted(self: Runner, step: bits.Step) -> tuple[Tensor, Tensor]:
        seen.append(len(step.sample_at))
        return largest(self, step)

    monkeypatch.setattr(Runner, "largest", noted)
    return seen


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories", max_model_len=256)


PROMPTS = ["Once upon a time", "The little dog", "Tom and Lily", "A big red ball was"]


def test_the_engine_says_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    seen = asked(llm, monkeypatch)
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    assert sum(seen) == sum(len(tokens) for tokens in got)
    monkeypatch.setattr(Runner, "finds_largest", property(lambda _: False))
    want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    assert got == want
    assert sum(seen) == sum(len(tokens) for tokens in got)


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 3},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 3.0}},
        {"min_tokens": 4},
        {"allowed_token_ids": [300, 301]},
        {"temperature": 0.7, "seed": 3},
        {"logits_processors": [lambda rows, logits: logits]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_whoever_asks_for_more_gets_logits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    """Also where only one request of several does."""
    seen = asked(llm, monkeypatch)
    plain = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    each = [SamplingParams(**plain), SamplingParams(**{**plain, **more})]
    together = llm.generate(PROMPTS[:2], each)
    decoding = [rows for rows in seen if rows > 1]
    assert decoding == [] or "prompt_logprobs" in more
    monkeypatch.setattr(Runner, "finds_largest", property(lambda _: False))
    for found, want in zip(together, llm.generate(PROMPTS[:2], each), strict=True):
        assert found.outputs[0].token_ids == want.outputs[0].token_ids


def test_a_row_that_is_not_finite_has_an_error() -> None:
    """The others have their tokens; where every token is masked, that is said."""
    values = torch.tensor([1.5, float("nan"), float("inf"), float("-inf"), -2.0])
    found = Sampler(9).of_largest(torch.tensor([3, 4, 5, 0, 8]), values)
    assert found.token_ids == [3, NO_TOKEN, NO_TOKEN, NO_TOKEN, 8]
    assert sorted(found.errors) == [1, 2, 3]
    assert found.errors[1].startswith(NOT_FINITE) and found.errors[2].startswith(NOT_FINITE)
    assert found.errors[3].startswith(MASKED)
