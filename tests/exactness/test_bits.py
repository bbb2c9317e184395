"""Promise 2: a sequence's logits are the same bits however it is run."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import native
from penstock.nn import Decoder

from .bits import (
    BESIDE,
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
    "bfloat16": "0b22856249d23364f012a09f4a6df73061300eff81e095d9f8a8fdc19ce1cb51",
    "float32": "a2b441e1ec31796b64166f22c2d5ce14d144a28f8c88fe35e0a50b0554f18174",
    "w8a16": "5a86f2e164dc607210318d023b773d0469d36e94ee32f08fc974623399d8146b",
    "w8a8": "91ac908a6bf77e41084e2e286f56eb1c3013c80fe095c8d046bf7333f80f2e57",
    "w4a16": "4a9ba350192564ea6278abecbfed1ab7fc05eb8bbc840216880c71add80eda09",
    "w4a8": "76bdcb6700daaff3075ef2ca71ddfd3c8a54a1b695d7a82e4024ba2cb6a0e51b",
    "w4a8-blocks": "6986bfd4d859b6e3bcf6cd9f3d7f3c8933d158fc82c2aa33cb18c2df60c6a4e5",
    "bfloat16 of experts": "54cb92c31769980ba6879d49a5eefc4665fc76359e9f7ba9aa0b4207c4d3e37d",
    "w8a8 of experts": "2bafd67afb168073cadaafac8ecad074e86241cdbba344ec686ecbf14c4b88c6",
    "w4a8 of experts": "0a8d5c5863b4938af536fb07c8bff7e60553b2732e0b32a3783ccd5c3c8a8e9f",
    "bfloat16 over latents": "5e213bc2e2a82e95f96eddc29a35b5163353295cf961fb05156005744fecf67f",
    "float32 over latents": "d5b19e7b6352a280536629d83ba9f3fa74f175f68b696a2177845ec2e21f0696",
    "w8a8 over latents": "2e1db4169fd69cef9870d371807a87073e43ac46a5de3d4d0d70c077c95612ca",
    "bfloat16 of low rank": "8c679b0a49b88deb3bb662a01ab816192a463c86b6ebf6a995836a135c240566",
    "float32 of low rank": "b22e7a2eb583e0e5573a409f772a58a29fa41479c852472e9755d7b56cd92591",
    "bfloat16 with states": "632c5aa47b6f51cd5f512938525e85c098d1d22e4a4d3e9c5c233881c560a6cf",
    "float32 with states": "2d241a094691ae72f324c510232b79fc3d0378ef5ab1376192a191f44b345e1c",
    "w8a8 with states": "c737a706bed172c5c2074107db8da5e89681e980c0aac8c256f03a5b3d1f41c9",
    "bfloat16 of convolutions": "6c62c761c08283c6bda33fe0b5cd4a658109efd5bbde5ee258fcb92801ecddb5",
    "float32 of convolutions": "69a9e5467edfa535b488f1092a536076373fa263085a50866f38abf2a9f19f27",
    "w8a8 of convolutions": "ba0fb0459654b83c324f21741d365b0ada621352de30add41cb8b2f721dda8d7",
    "bfloat16 of Mamba": "f9755d2bce8fb961deabe6e7f3001e8c8aa537092856fe5c58217a8822677386",
    "float32 of Mamba": "07cc226f983326ef4ad451076ea2d8d57acf875fa57ca17ac2dcc3050cacb443",
    "w8a8 of Mamba": "2d1203143712baaf483b496bed2ad30c938da835bd8e97472630f608d530bfb4",
    "bfloat16 of Mamba beside attention": (
        "46b62767cbeebf6dec80d2d160fa04c557f96094e7c20998e2972fcdd84d0d19"
    ),
    "float32 of Mamba beside attention": (
        "27bb4a24ecfaf692f62317c54b80a9a593fd7aa6a1d465098359fccfe8efba51"
    ),
    "w8a8 of Mamba beside attention": (
        "323697af682db71f2f6134e5e6774526efbdecd3c08b01dab01f499d57369e54"
    ),
    "w4a8-g128-asym": "0f1d1558866838c40e42fd057a448110a3562ed4d94d5f2ccc4dadeeb872f0cb",
}
"""sha256 of the logits of `prompt(300, 7)`: every machine and instruction set gives these."""


MAMBAS = (CONVOLVED, SCANNED, BESIDE)


@pytest.fixture(scope="module", params=GOLDEN)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(form: str) -> Decoder:
    if form in ("bfloat16", "float32"):
        return build(getattr(torch, form))
    if form in [f"float32{kind}" for kind in (LATENT, RANKED, STATED, *MAMBAS)]:
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
    "w8a16-g64-asym": "d5a35f0f57ceb3ffb1b766f3d6e6f87effff28779a6706bc62896a4f792cdf5b",
    "w8a8-g64-asym": "04b9ea814304529228298a7e03b24c929c4dfaed987e0dacc210de38e97f8ea7",
    "w8a8-static": "a0e327408aece9c0e33416d70f05aab761c6f9f7bb48d726230dc0fdbc5bf00c",
    "w4a8-channel": "7f5ce1162fab02465bfe2036373c1603ac039c075e2951861f6f6b2c263acf28",
    "fp8": "db1be7da0908a25d372ce3b70213ecc35b5a4bf4d04c2e83449c2ca0cd835aab",
    "fp8-block": "f3e7968590f3c7cfa8dd3420b40ef54ba9e62ce2724c0aebb166f0dd1e3757b0",
    "fp8-e5m2": "e18e376b1f816dd83aed06a64598fc00fb1a0305c16e698a149fdace73967c34",
    "fp8-w8a8": "518701be8c0be394399c6e57422c9d2d5b7ed78ee9691c71b8a34d20d3915c2b",
    "fp8-w8a8-block": "b2bc3e72887fdc85e587b7d069dde3229f45549d6144580b1a4a7a9dcc23c3a9",
    "fp8-w8a8-tensor-static": "aebf84c6915a711f4278342b2aa7ac6022f78fed290b2f05440c5534d7fc2812",
    "nf4": "2732243121be6a8690cbe507ef84cf50018fc431e6af43d9238aced604842297",
    "mxfp4": "910456c4ff354e0cb9e7e6952fa7ce8ff0371c68e22ca3a9afdd5a8ff12b880a",
    "nvfp4": "3598e7ee5d278fdc29d1f74262e0a5b5ce741811bbccc1ecd37293a1ec586262",
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
    "int8": "b5d8c9bcc955c7323e4eb3bd9e5fd9299d3d6d1e90ebfccc49fd7a1b355dda06",
    "fp8": "4c351e57b36cea71f42a5a141b4afaa17211fd19f225abecbf6b1f0d78d878ee",
    "int4": "1c12450f6cf672fd509b448fd887fa48f25ce465a428bad47d8a26aac168c856",
    "kivi": "6a6d6781629202faa92780f1113771dff4536a91e35c8b94e23a217ab4819935",
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
