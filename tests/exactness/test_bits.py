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
    "bfloat16": "c2783803bd40d70b1858bd9ae521e3689af95b9df610729370df73f98331098a",
    "float32": "61f066403234f539c0f54e5638443e5d18bafc756e44788f2adc00246a47eebb",
    "w8a16": "66865a52a5a4d05b5a1b240c751d28551f4b1ea1f37c2ce8b332c4a4ceb3650d",
    "w8a8": "128741622ef918554f32e61e5cac4bed2dc48db4792bb5dfd8f6a24449792df8",
    "w4a16": "e7f64a17d48cb46601116913b4046e256b5414e553924dba1b65ae4775d44c35",
    "w4a8": "70525e4bff572f6637f449a27571b93322ec8032c8b292e8c0dc92dbf01d84bb",
    "w4a8-blocks": "09ebf8b96a19bca123f41e151e23548f3381263117458b84308d4c484ea57caf",
    "bfloat16 of experts": "df874e5fb98e0b566916a6dbda7b868db8843e5f1464a219b610c72a22e3208d",
    "w8a8 of experts": "00c28db2388839971a00c00c8215ee35158461ee3c773a59d245eaa95e1a369e",
    "w4a8 of experts": "34f6e54fe1d5578a528bfb68d65df97b3315d31ac7e1f5ea7dbf9051e53ca91b",
    "bfloat16 over latents": "0db33bdc732ca889f26a29d9732a6bf71d3bddf3870d2b0e722afc3aed1f162b",
    "float32 over latents": "0eb5f43c7fa23eef22de56162c8667c2dc6cde1eb9001cf2e358590fc593097d",
    "w8a8 over latents": "6d94f3caa7620f3d8f2224508200babb3025613a0d84f995fcd895b192cfb8b4",
    "bfloat16 of low rank": "af33c2b732eeef32a6db1171c4f558ed465509e816fb4ea8f2b52a8a57e39eda",
    "float32 of low rank": "9944434346efd22ce8f866e39d75fa536847b6d5d48ccd31496ee72a6d634f09",
    "bfloat16 with states": "357874cb79d84f3a0752972dcad807f057f0a36ccf06a5402979475c138eefc3",
    "float32 with states": "b3d2fd76128e4bac647f189e9959bc4e3c801e16b6bca9c1b3e40e5bbf5e5349",
    "w8a8 with states": "0332e4b3701cced4f37e9f28c8c89140b16f893480b6966e73112402a7634dcc",
    "bfloat16 of convolutions": "f55600e13c612b19222dd5ce2a86c54fc23696fcc995b207f3e9f20f36d94b85",
    "float32 of convolutions": "b88f01f8181c406b83ea4c3937342463d081f97f2605b75938c6b3d9a709aebd",
    "w8a8 of convolutions": "b3cd2edb762176dfb7991aec79fe17785a49c48f1d738d7885e72ab5c8f8975c",
    "bfloat16 of Mamba": "a16f35861d1dda94ddba2627705ccf968eed327dfde1c87d4de61b1e72a90544",
    "float32 of Mamba": "96de75ebe974ed35e89b0209cc24712ac5d5908e565a02575106e34f75db9750",
    "w8a8 of Mamba": "3776e55dbbe769378cce8d43ded63fc55ccf435f66efc02eb410a222ea9afdb1",
    "bfloat16 of Mamba beside attention": (
        "3679aa41159563565ea95dcb5ee861765f72e703ef2437a5d02b00f9dcb77f5e"
    ),
    "float32 of Mamba beside attention": (
        "047a32d0c74d1db0cf46e917b913a2016733df0b2b0fd509b4f14d97366feba9"
    ),
    "w8a8 of Mamba beside attention": (
        "b24d7e78a08e62c9716ba6390c4b7aa88ab2b7e75ef19f02a527f46146c90109"
    ),
    "w4a8-g128-asym": "915588197a374bf0d05a2c254e9694b79f34b467b56c263806a748dc3fb44ec4",
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
    "w8a16-g64-asym": "014e8e82fc60d48f52a318deb7b381e0e31e61173a70ad114267f3784311cfc9",
    "w8a8-g64-asym": "8e7c0fb9bf68eb654790706efbcbeccb0deff47cce704d8b694b116d0025dca4",
    "w8a8-static": "d94457ba9c50b08545296f4a17f4cf175af88a86b13f49f95c82eabed68f364f",
    "w4a8-channel": "f074e4ab73531ee600e65d775710ca08fae12bfc6fad85feec844186e7098a4d",
    "fp8": "710cfe552ad57c9ddd1801dc591e70b03b7288ca80f312a8c6d62ba0a181021d",
    "fp8-block": "00bd196aa4440dbb714d1b317728d32e34e396c3c4623be1efcae998e0e06176",
    "fp8-e5m2": "78dd8e1a7b05619dfeee91f11fac23e18043f2b0266cf9f572b0dff98b1a95e4",
    "fp8-w8a8": "aa90dc2a3c396827f23300bfdfe1f118155587c7e0b7dfc7f3caa33ed6d88997",
    "fp8-w8a8-block": "7b72f512044f587475c7d050a251b90912d7e04bb19434c281de5874f48da15e",
    "fp8-w8a8-tensor-static": "6468b3f1cb3de531d7d5e78bb450d88a2cc965a224a77adaee8d4d38ca063a87",
    "nf4": "558abd775bdf0b5458846aa1de1e926d68c1e799b33bd550c2b3660145bf6a92",
    "mxfp4": "89b95eec49fa1aaf9fa06007ad9f458dadbed009d4c635165daec1c49100034a",
    "nvfp4": "607d8c2474f74d7dc60500e2a5f240135f3cde5bd8f2089fa040483787b5af3a",
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
    "int8": "de5604df423b973b3adb7d632270d1494f217e3f8b9a6622e97d678e438edd38",
    "fp8": "0087e2b9e260aa435679c2624a4f092794d8a54908ed9a6bc1a126e8f62cf9dd",
    "int4": "e0f74ccacd3fb5d41da2f1377461c7e1f10a1142b53330497e38140adbdf5497",
    "kivi": "6031958c8af3672286054dc0fbf96f629150ae580545425a3f2865ca53df82d1",
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
