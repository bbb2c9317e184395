"""Promise 2: a sequence's logits are the same bits however it is run."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import native
from penstock.nn import Decoder

from .bits import (
    CONVOLVED,
    LATENT,
    RANKED,
    SCANNED,
    STATED,
    Machine,
    alone,
    build,
    digest,
    prompt,
)

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

GOLDEN = {
    "bfloat16": "c7d9ff94dec420fdbbbcafad4d359c00b17d0948584057e9c99fcea1e55304fe",
    "float32": "b803793e0c1079fd2b8346c4ede8af6afb18b75ae38e053ae03a91fdbecd8712",
    "w8a16": "42c7e1c5fbf3c28f6fc9c3ab53c77252ac1c92611bed617d9b5b15af75b1539e",
    "w8a8": "2f748025f7e5ed43bc795727a611f1cb0fc29f725cee5d7a72c3f29eb59236d1",
    "w4a16": "ddb244a6c57a2e2a1822938fa65ffda90037aea57cca364ddd5de4c33d539d27",
    "w4a8": "3f1454678d14e90a826eff59de22422993fb75ab3e5e09d8f70d2452b3610c1e",
    "w4a8-blocks": "72bd1ac15ea3ba48f918e96da8fbac6fe53a90664a043798182d5c0fcd12ce86",
    "bfloat16 of experts": "3c3f5ab2102f7549daa17adcd05f105baa5adffb3948ed98058810df0c1db9bd",
    "w8a8 of experts": "5649446f2793c3eb3669c9755d60fe21f007f6f7c1f0928ac2de5080372172ce",
    "w4a8 of experts": "0a8d5c5863b4938af536fb07c8bff7e60553b2732e0b32a3783ccd5c3c8a8e9f",
    "bfloat16 over latents": "b1de2f338f9750027b068d20d0c2844a0967c576934ddc475153889398ca292d",
    "float32 over latents": "6d53fa125f8fce69112e438818a823f412102f14ae9fa3b8bdcbe5cb68472aba",
    "w8a8 over latents": "e16ca19cf32ca1e11be3e0e6bbcca7ace6653d3f79ecba26713e1f3008e0ed4b",
    "bfloat16 of low rank": "673129591e44178e9978f1dfe2fb7a6f4eaa1dec67ffc429a8452f7f83fdfb79",
    "float32 of low rank": "3ce68df069e82044392de13a2fe385990ef1fc2eda5c5f649c5ad5ddc22f8f0f",
    "bfloat16 with states": "270864b3f28d50f58b035614b29816c3b966f0618325b55d37d9e032509cee3c",
    "float32 with states": "b681a196bb8a65d1e300fe38de1cb9e127fea77b6790cb6a0a10280642323416",
    "w8a8 with states": "cf035de8e3e4f8af95f9d4ebd7793eb796b5b177624da4666c1b172a613f1075",
    "bfloat16 of convolutions": "6c62c761c08283c6bda33fe0b5cd4a658109efd5bbde5ee258fcb92801ecddb5",
    "float32 of convolutions": "5d7077e1f427fb857b18883a35b88f31f393efb89ecfef02595993ccc9899edd",
    "w8a8 of convolutions": "88b53cccf750887e9533b8840a4bafb6d8c035042705483f755176484c6c361f",
    "bfloat16 of Mamba": "5392cb84ab6f7c6d2447b720f0b88382b70a532cf35222f99f82a4baf6e7a895",
    "float32 of Mamba": "8edd95bd44e30c4aba489aa023b3b9fcc488b5cff107809330ea7cef84ce5271",
    "w8a8 of Mamba": "2d1203143712baaf483b496bed2ad30c938da835bd8e97472630f608d530bfb4",
    "w4a8-g128-asym": "8436f56a28ab2c3d244613215f3488049fc3405b9b120d674fe68b19cc2c96dd",
}
"""sha256 of the logits of `prompt(300, 7)`: every machine and instruction set gives these."""


@pytest.fixture(scope="module", params=GOLDEN)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(form: str) -> Decoder:
    if form in ("bfloat16", "float32"):
        return build(getattr(torch, form))
    if form in [f"float32{kind}" for kind in (LATENT, RANKED, STATED, CONVOLVED, SCANNED)]:
        return build(torch.float32, form.replace("float32", "bfloat16"))
    return build(torch.bfloat16, form)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(model: Decoder, chunk: int) -> None:
    tokens = prompt(300, 7)
    assert torch.equal(alone(model, tokens, chunk), alone(model, tokens))


@pytest.mark.parametrize("program", [False, True])
def test_in_a_batch_of_17(model: Decoder, program: bool) -> None:
    """Prompts of all lengths, in chunks of all sizes, prefill and decode mixed in every step."""
    machine = Machine(model, program=program)
    lengths = [300, 1, 2, 3, 31, 32, 33, 64, 65, 100, 255, 256, 257, 270, 17, 16, 15]
    streams = [machine.stream(prompt(n, 7 + i)) for i, n in enumerate(lengths)]
    got: list[list[torch.Tensor]] = [[] for _ in streams]
    sizes = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    turn = 0
    while any(s.done < len(s.tokens) for s in streams):
        batch = []
        for i, s in enumerate(streams):
            left = len(s.tokens) - s.done
            if left:
                batch.append((i, min(left, sizes[(turn + i) % len(sizes)])))
        logits = machine.run([(streams[i], n) for i, n in batch])
        for (i, _), rows in zip(batch, logits, strict=True):
            got[i].append(rows)
        turn += 1
    for s, parts in zip(streams, got, strict=True):
        assert torch.equal(torch.cat(parts), alone(model, s.tokens))


def test_one_row_and_a_thousand(model: Decoder) -> None:
    machine = Machine(model)
    streams = [machine.stream(prompt(40, 100 + i)) for i in range(25)]
    many = machine.run([(s, 40) for s in streams])
    for s, rows in zip(streams, many, strict=True):
        assert torch.equal(rows, alone(model, s.tokens, 1))


def test_prefix_hit(model: Decoder) -> None:
    tokens = prompt(300, 7)
    machine = Machine(model)
    first = machine.stream(tokens)
    machine.run([(first, 300)])
    second = machine.stream(tokens, shared=first, hit=256)
    (rows,) = machine.run([(second, 44)])
    assert torch.equal(rows, alone(model, tokens)[256:])


def test_recomputed_after_preemption(model: Decoder) -> None:
    """The blocks are lost, others write there, and the sequence starts over elsewhere."""
    tokens = prompt(200, 7)
    machine = Machine(model, blocks=40)
    victim = machine.stream(tokens)
    machine.run([(victim, 150)])
    machine.free += victim.blocks
    other = machine.stream(prompt(200, 8))
    machine.run([(other, 200)])
    again = machine.stream(tokens)
    rows = machine.run([(again, 150)]) + machine.run(
        [
            (again, 50),
        ]
    )
    assert torch.equal(torch.cat(rows), alone(model, tokens))


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads(model: Decoder, threads: int) -> None:
    tokens = prompt(300, 7)
    torch.set_num_threads(2)
    want = alone(model, tokens, 64)
    torch.set_num_threads(threads)
    assert torch.equal(alone(model, tokens, 64), want)
    assert torch.equal(alone(model, tokens[:40], 1), want[:40])


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_gives_the_golden_bits(model: Decoder, form: str, isa: str) -> None:
    native.select_isa(isa)
    whole = alone(model, prompt(300, 7))
    assert whole.isfinite().all()
    assert digest(whole) == GOLDEN[form]
    assert torch.equal(alone(model, prompt(300, 7), 5), whole)


GOLDEN_MORE = {
    "w8a16-g64-asym": "1e1938ce66acb4f042515400958616081c5cf1aaf75081f255b48d556fe53373",
    "w8a8-g64-asym": "04b9ea814304529228298a7e03b24c929c4dfaed987e0dacc210de38e97f8ea7",
    "w8a8-static": "a0e327408aece9c0e33416d70f05aab761c6f9f7bb48d726230dc0fdbc5bf00c",
    "w4a8-channel": "4a631346234499e3c7cc1a54d996dc592124ba3ddb98916b133e93f091a3f9d7",
    "fp8": "39c9d608aef53afee72594a8a0302bbbc0e82c3a493fcea7ed7b6b26f4e453cb",
    "fp8-block": "6d5b321e6b39358af0e3adc7e21697c687bbcb9ca4106891fe42c6c3905153b8",
    "fp8-e5m2": "e273b6f79e9d0f654dade9f23899c4a4291f095b9293b6a6c087a135a7df6c4e",
    "fp8-w8a8": "518701be8c0be394399c6e57422c9d2d5b7ed78ee9691c71b8a34d20d3915c2b",
    "fp8-w8a8-block": "b2bc3e72887fdc85e587b7d069dde3229f45549d6144580b1a4a7a9dcc23c3a9",
    "fp8-w8a8-tensor-static": "aebf84c6915a711f4278342b2aa7ac6022f78fed290b2f05440c5534d7fc2812",
    "nf4": "5e707165e9d63ed5809041f2c44fdb0240f7bb915074568cb728fbe833a74ff8",
    "mxfp4": "ab45b589687fdacfcd22c84a86972230effcac96d7e143e0ad8ebaba9af6e315",
    "nvfp4": "962210e0c1b46fe49547455cd9b31d1a133ec38ae37396eed11c689fb291b4ce",
}
"""The same prompt in the other formats."""


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("name", GOLDEN_MORE)
def test_every_other_format(name: str) -> None:
    """On each instruction set, in chunks, with other threads, and as a program in a batch."""
    model, tokens = build(torch.bfloat16, name), prompt(300, 7)
    whole = alone(model, tokens)
    assert whole.isfinite().all()
    assert digest(whole) == GOLDEN_MORE[name]
    for isa in native.available_isas():
        native.select_isa(isa)
        torch.set_num_threads(2)
        assert torch.equal(alone(model, tokens), whole)
        torch.set_num_threads(3)
        assert torch.equal(alone(model, tokens, 5), whole)
    machine = Machine(model, program=True)
    streams = [machine.stream(tokens[:n]) for n in (300, 1, 17, 40)]
    rows = machine.run([(s, len(s.tokens)) for s in streams])
    assert all(torch.equal(got, whole[: len(got)]) for got in rows)


@pytest.fixture(scope="module", params=["int8", "fp8", "int4", "kivi"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


GOLDEN_KV = {
    "int8": "b311cc9d01844c36955a1f56a0384bc2ad5d0dc6838b8abe9380ed0bb76cd78a",
    "fp8": "0e21eccafdee16a4efb99eacb38e818d43cd86b28179ffd380c067a1a936de46",
    "int4": "843a10ab279a1c8bcfb33a3b228e03605384175bfa777a65bd6d0fe6109e5418",
    "kivi": "0d13db17bc33c628eba6cf20164d84ebd0d2111508d37a90f98985f65b33535f",
}
"""The same prompt in bfloat16 over a cache of one byte or less."""


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("isa", native.available_isas())
def test_a_cache_of_one_byte_or_less(kv: str, isa: str) -> None:
    native.select_isa(isa)
    model, tokens = build(torch.bfloat16), prompt(300, 7)
    whole = alone(model, tokens, kv=kv)
    assert digest(whole) == GOLDEN_KV[kv]
    assert torch.equal(alone(model, tokens, 5, kv=kv), whole)
    torch.set_num_threads(1)
    assert torch.equal(alone(model, tokens[:100], 1, kv=kv), whole[:100])
    drift = (whole - alone(model, tokens)).abs().mean()
    assert 0 < drift < {"int8": 0.05, "fp8": 0.15, "int4": 0.05, "kivi": 0.05}[kv]


def test_batches_over_a_cache_of_one_byte_or_less(kv: str) -> None:
    model = build(torch.bfloat16)
    machine = Machine(model, kv=kv)
    streams = [machine.stream(prompt(n, 7 + n)) for n in (300, 33, 256, 1, 70)]
    machine.run([(s, min(40, len(s.tokens))) for s in streams])
    rows = machine.run([(s, len(s.tokens) - s.done) for s in streams if s.done < len(s.tokens)])
    for stream, logits in zip([s for s in streams if len(s.tokens) > 40], rows, strict=True):
        assert torch.equal(logits, alone(model, stream.tokens, kv=kv)[40:])


@pytest.mark.usefixtures("restore")
def test_low_rank_in_a_cache_of_one_byte_or_less(kv: str) -> None:
    """In any chunks, on every instruction set, and as a program."""
    model, tokens = build(torch.bfloat16, f"bfloat16{RANKED}"), prompt(200, 7)
    whole = alone(model, tokens, kv=kv)
    assert not torch.equal(whole, alone(model, tokens))
    for isa in native.available_isas():
        native.select_isa(isa)
        assert torch.equal(alone(model, tokens, 5, kv=kv), whole)
    machine = Machine(model, kv=kv, program=True)
    assert torch.equal(machine.run([(machine.stream(tokens), 200)])[0], whole)


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("program", [False, True])
def test_a_window_in_any_chunks_and_batches(isa: str, program: bool) -> None:
    """What a query sees as codes is decided by its position: chunks begin and end anywhere in a
    group of 32, in and out of the window."""
    native.select_isa(isa)
    model = build(torch.bfloat16)
    machine = Machine(model, kv="kivi", program=program)
    lengths = [300, 31, 32, 33, 48, 49, 79, 80, 81, 111, 112, 113, 256]
    streams = [machine.stream(prompt(n, 7 + i)) for i, n in enumerate(lengths)]
    got: list[list[torch.Tensor]] = [[] for _ in streams]
    sizes = [1, 31, 2, 33, 5, 64, 13, 97, 3]
    for turn in range(200):
        batch = [
            (i, min(len(s.tokens) - s.done, sizes[(turn + i) % len(sizes)]))
            for i, s in enumerate(streams)
            if s.done < len(s.tokens)
        ]
        if not batch:
            break
        for (i, _), rows in zip(
            batch, machine.run([(streams[i], n) for i, n in batch]), strict=True
        ):
            got[i].append(rows)
    for s, parts in zip(streams, got, strict=True):
        assert torch.equal(torch.cat(parts), alone(model, s.tokens, kv="kivi"))


def test_poison_stays_in_its_own_sequence(model: Decoder) -> None:
    """A NaN in one sequence's cache reaches no other, not even through recycled blocks."""
    machine = Machine(model, blocks=20)
    tokens = prompt(70, 7)
    sick, well = machine.stream(prompt(70, 8)), machine.stream(tokens)
    for layer in machine.kv:
        for part in layer:
            part[sick.blocks[0]] = float("nan")
    sick.done = 40
    bad, good = machine.run([(sick, 30), (well, 70)])
    assert bad.isnan().any()
    assert torch.equal(good, alone(model, tokens))
