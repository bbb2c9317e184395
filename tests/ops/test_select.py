"""argmax, top_k and the draws: equal to their references, and the same bits on any thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native
from penstock.ops.draw import BEYOND, doubled, nucleus_floor

inf, nan = torch.inf, torch.nan


@pytest.fixture(params=native.available_isas() or ["reference"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa
    if before is not None:
        native.select_isa(request.param)
    yield request.param
    if before is not None:
        native.select_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def fractions(rows: int) -> Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def awkward(size: int) -> Tensor:
    """Rows of every kind: plain, ties, zeros of both signs, sorted, infinities, NaN."""
    plain = randn(1, size)[0]
    ties = plain.round()
    flat = torch.full((size,), -1.5)
    zeros = torch.where(plain > 0, 0.0, -0.0)
    falling, rising = plain.sort(descending=True).values, plain.sort().values
    masked = torch.where(plain > 1.0, plain, -inf)
    nothing = torch.full((size,), -inf)
    tiny = plain * 1e-40  # denormals are numbers here: they keep their order
    rows = [plain, ties, flat, zeros, falling, rising, masked, nothing, tiny]
    for value in (inf, nan, -nan):
        broken = plain.clone()
        broken[[size // 2, size - 1]] = value
        rows += [broken, torch.where(masked == -inf, -inf, broken)]
    return torch.stack(rows)


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 4096, 32_001]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("isa")
def test_argmax_equals_its_reference(size: int) -> None:
    logits = awkward(size)
    for got, want in zip(ops.argmax(logits), ops.op("argmax").reference(logits), strict=True):
        same(got, want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 2, 50, 128, 1000])
@pytest.mark.usefixtures("isa")
def test_top_k_equals_its_reference(size: int, k: int) -> None:
    logits = awkward(size)
    values, ids = ops.top_k(logits, k)
    assert values.shape == (len(logits), min(k, size))
    for got, want in zip((values, ids), ops.op("top_k").reference(logits, k), strict=True):
        same(got, want)
    temperature = torch.full((len(logits), 1), 0.7)
    again = ops.softmax_top_k(logits, temperature, k)
    want = ops.op("softmax_top_k").reference(logits, temperature, k)
    same(again[0], values)
    same(again[1], ids)
    torch.testing.assert_close(again[2], want[2], rtol=2e-5, atol=1e-30)


@pytest.mark.usefixtures("isa")
def test_no_rows_and_strided_rows() -> None:
    empty, wide = torch.empty(0, 700), randn(9, 2000)
    part = wide[::2, 300:1000]
    u, one = fractions(5), torch.ones(5, 1)
    assert [t.shape for t in ops.argmax(empty)] == [(0,), (0,)]
    assert [t.shape for t in ops.top_k(empty, 5)] == [(0, 5), (0, 5)]
    assert [t.shape for t in ops.draw_plain(empty, one[:0], u[:0])] == [(0,), (0,)]
    assert ops.draw_from(torch.empty(0, 3, dtype=torch.int64), empty[:, :3], u[:0]).shape == (0,)
    nothing = ops.draw_nucleus(empty, one[:0], one[:0], u[:0], 5, 9)
    assert [t.shape for t in nothing] == [(0,), (0,)]
    for name, args in (
        ("argmax", ()),
        ("top_k", (20,)),
        ("softmax_top_k", (one, 20)),
        ("scaled_top_k", (one, torch.full((5,), 9), -one, 20)),
        ("draw_nucleus", (one, one / 3, u, 20, 300)),
        ("draw_plain", (one, u)),
    ):
        call = ops.op(name).call
        for got, want in zip(call(part, *args), call(part.contiguous(), *args), strict=True):
            same(got, want)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 40_001])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.usefixtures("isa")
def test_a_mask_of_bits_makes_others_impossible(size: int, share: float) -> None:
    rows, words = torch.tensor([4, 0, 3]), -(-size // 32)
    allowed = torch.rand(3, size, generator=torch.manual_seed(size)) < share
    padded = torch.ones(3, words * 32, dtype=torch.bool)  # what is beyond the vocabulary is ignored
    padded[:, :size] = allowed
    packed = np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32)
    wide = randn(5, size + 7)
    want = wide.clone()
    for at, row in enumerate(rows.tolist()):
        want[row, :size][~allowed[at]] = -inf
    for call in ops.implementations("mask_").values():
        got = wide.clone()
        call(got[:, :size], rows, torch.from_numpy(packed.copy()))
        same(got, want)


@pytest.mark.parametrize("size", [1, 17, 300, 5000, 32_001])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 30.0])
@pytest.mark.usefixtures("isa")
def test_draws_follow_the_distribution_function(size: int, temperature: float) -> None:
    """Each token lies where a float64 distribution function puts u, up to a margin."""
    logits, u = randn(200, size), fractions(200)
    logits[:, ::7] = -inf
    logits[:, size // 2] = 1.0
    ids, peaks = ops.draw_plain(logits, torch.full((200,), temperature), u)
    same(peaks, logits.amax(-1))
    weights = (logits.double() / temperature).softmax(-1)
    upper = weights.cumsum(-1).gather(1, ids[:, None])[:, 0]
    own = weights.gather(1, ids[:, None])[:, 0]
    assert (own > 0).all()
    assert (u < upper + 1e-6).all()
    assert (u > upper - own - 1e-6).all()


@pytest.mark.usefixtures("isa")
def test_a_draw_from_candidates_goes_by_id() -> None:
    ids = torch.tensor([[9, 3, 7, 5]] * 7)
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.0]] * 6 + [[0.0] * 4])
    weights[5, 1] = nan
    u = torch.tensor([0.0, 0.49, 0.51, 0.76, 1.0, 0.5, 0.5], dtype=torch.float64)
    for call in ops.implementations("draw_from").values():
        assert call(ids, weights, u).tolist() == [3, 3, 7, 9, 9, -1, -1]


def peaked(size: int) -> Tensor:
    """Rows whose nucleus is one token, a few, about 128, about 1024, and nearly all."""
    place = torch.arange(size).roll(size // 3)
    sure = torch.where(place == 0, 30.0, -place.float())
    rows = [sure, *(-place / width for width in (3.0, 40.0, 120.0, 350.0, 1e6))]
    return torch.stack([*rows, (-place / 60.0).round(), -1.5 * (place + 1).log()])


@pytest.mark.parametrize("size", [1, 2, 16, 127, 129, 300, 1025, 4096, 32_001])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.usefixtures("isa")
def test_a_draw_from_a_nucleus_equals_its_parts(size: int, top_p: float) -> None:
    """Token for token, whatever is looked at first; it says so where the nucleus is wider."""
    logits = torch.cat((awkward(size), peaked(size)))
    rows = len(logits)
    u, p = fractions(rows), torch.full((rows, 1), top_p)
    for temperature in (0.05, 0.8, 3.0):
        t = torch.full((rows, 1), temperature)
        for narrow, wide in ((128, 1024), (1, 1024), (1024, 1024), (16, 40), (4, 5)):
            call = (logits, t, p, u, narrow, wide)
            ids, peaks = ops.draw_nucleus(*call)
            want, largest = ops.op("draw_nucleus").reference(*call)
            same(ids, want)
            same(peaks, largest)
            same(peaks, ops.argmax(logits)[1])
            assert (ids == -1).equal(~peaks.isfinite())
            if wide >= size:
                assert BEYOND not in ids.tolist()
            elif top_p == 1.0:
                assert (ids == BEYOND).equal(peaks.isfinite())


@pytest.mark.parametrize("size", [1, 2, 16, 127, 129, 300, 4096])
@pytest.mark.usefixtures("isa")
def test_scaled_and_cut_leaders_equal_their_reference(size: int) -> None:
    logits = torch.cat((awkward(size), peaked(size)))
    rows = len(logits)
    u, p = fractions(rows), torch.full((rows, 1), 0.8)
    for temperature, top_k, min_p in ((0.7, 40, 0.0), (1.3, size, 0.05), (3.0, 3, 0.5), (1, 1, 0)):
        t = torch.full((rows, 1), float(temperature))
        k = torch.full((rows, 1), min(top_k, size))
        least = torch.full((rows, 1), min_p).log()
        call = (logits, t, k, least, 128)
        found = ops.scaled_top_k(*call)
        for got, want in zip(found, ops.op("scaled_top_k").reference(*call), strict=True):
            same(got, want)
        scaled, ids, peaks, _ = found
        same(peaks, ops.argmax(logits)[1])
        weights = scaled.softmax(-1)
        cut = weights.masked_fill(weights < nucleus_floor(weights, p), 0.0)
        whole = peaks.isfinite()
        same(ops.draw_from(ids, weights, u, p)[whole], ops.draw_from(ids, cut, u)[whole])
        reference = ops.op("draw_from").reference(ids, weights, u, p)
        same(ops.draw_from(ids, weights, u, p)[whole], reference[whole])


def test_a_nucleus_ends_where_the_mass_before_a_token_reaches_p() -> None:
    """By hand: quarters are exact, equal ones stay or go together, and 1 keeps what rounds away."""
    weights = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25] * 4, [1.0, 1e-30, 1e-30, 0.0]])
    for p, want in ((0.5, [0.5, 0.25, 1.0]), (0.51, [0.25, 0.25, 1.0]), (0.8, [0.125, 0.25, 1.0])):
        assert nucleus_floor(weights, torch.full((3, 1), p))[:, 0].tolist() == want
    assert nucleus_floor(weights, torch.ones(3, 1)).count_nonzero() == 0
    ids, u = torch.tensor([[4, 3, 2, 1]] * 3), torch.zeros(3, dtype=torch.float64)
    for call in ops.implementations("draw_from").values():
        assert call(ids, weights, u, torch.full((3, 1), 0.6)).tolist() == [3, 1, 4]
        assert call(ids, weights, u, torch.full((3, 1), 0.9)).tolist() == [1, 1, 4]


@pytest.mark.parametrize("size", [1, 130, 2000])
@pytest.mark.parametrize("given", [(1.0, 2000, 0.0), (0.8, 2000, 0.0), (0.9, 40, 0.01)])
def test_what_lies_beyond_is_drawn_where_the_cuts_leave_it(
    size: int, given: tuple[float, int, float]
) -> None:
    """By a distribution function in float64 of what thresholds keep; other tokens stay."""
    p, k, min_p = given
    logits = torch.cat((randn(60, size), awkward(size)))
    rows, u = len(logits), fractions(len(logits))
    tokens = torch.full((rows,), BEYOND)
    tokens[::3] = 5
    one = torch.ones(rows, 1)
    most, least = torch.full((rows, 1), min(k, size)), (one * min_p).log()
    found = ops.draw_beyond(tokens, logits, one * 0.9, most, one * p, least, u)
    for i in range(rows):
        row = logits[i].double()
        if i % 3 == 0:
            assert found[i] == 5
        elif not row.max().isfinite():
            assert found[i] == -1
        else:
            scaled = (row - row.max()) / 0.9
            kept = (row >= row.sort(descending=True).values[min(k, size) - 1]) & (
                scaled >= (np.log(min_p) if min_p else -inf)
            )
            weights = scaled.masked_fill(~kept, -inf).softmax(-1)
            above = (weights * (weights > weights[found[i]])).sum()
            assert above < p + 1e-6  # the mass of the tokens before it is short of p
            ordered = weights.sort(descending=True).values
            floor = ordered[int((ordered.cumsum(-1) < p - 1e-7).sum().clamp(max=size - 1))]
            left = torch.where(weights >= floor * (1 - 1e-6), weights, 0.0)
            upper = left.cumsum(-1) / left.sum()
            assert weights[found[i]] > 0
            assert upper[found[i]] > u[i] - 1e-5
            assert upper[found[i]] - left[found[i]] / left.sum() < u[i] + 1e-5


def test_a_gpus_running_sums_are_those_of_one_row() -> None:
    """Where a device isn't a CPU: on a GPU torch's own order hangs on the number of rows."""
    for size in (1, 2, 3, 100, 1025):
        weights = randn(5, size).softmax(-1)
        found = doubled(weights)
        torch.testing.assert_close(found, weights.double().cumsum(-1), rtol=1e-14, atol=0)
        same(found, torch.cat([doubled(row[None]) for row in weights]))
        assert (found.diff() >= 0).all()


def test_random_numbers_are_those_of_the_reference() -> None:
    """Which is held to published vectors by tests/sampling/test_sampling_philox.py."""
    rng = np.random.default_rng(2)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 400))
    samples = torch.from_numpy(rng.integers(0, 2**32, 400))
    places = torch.from_numpy(rng.integers(0, 2**62, 400))
    for use in (0, 1, 2**32 - 1):
        want = ops.op("uniforms").reference(seeds, samples, places, use)
        same(ops.uniforms(seeds, samples, places, use), want)
    assert ops.uniforms(seeds[:0], samples[:0], places[:0], 0).shape == (0,)


@pytest.mark.usefixtures("isa")
def test_broken_rows_give_no_token() -> None:
    logits = awkward(1000)
    u, one = fractions(len(logits)), torch.ones(len(logits))
    ids, peaks = ops.draw_plain(logits, one, u)
    same(peaks, ops.argmax(logits)[1])
    assert (ids == -1).equal(~peaks.isfinite())
    weights = ops.softmax_top_k(logits, one, 10)[2]
    assert (weights == 0).all(-1).equal(~peaks.isfinite())


@pytest.mark.skipif(native.handle is None, reason="no native kernels")
@pytest.mark.usefixtures("threads")
def test_the_same_bits_on_any_number_of_threads_and_instruction_set() -> None:
    logits, before = randn(17, 40_000), native.isa
    u, temperature = fractions(17), torch.linspace(0.1, 2.0, 17)
    found = []
    for isa in native.available_isas():
        native.select_isa(isa)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                [
                    *ops.argmax(logits),
                    *ops.softmax_top_k(logits, temperature, 200),
                    *ops.draw_plain(logits, temperature, u),
                    *ops.softmax_top_k(logits[:2], temperature[:2], 200),
                    *ops.draw_nucleus(logits, temperature, temperature / 3, u, 128, 1024),
                    *ops.draw_nucleus(logits[5:6], temperature[:1], temperature[5:6], u[:1], 9, 99),
                ]
            )
            alone = ops.softmax_top_k(logits[3:4], temperature[3:4], 200)
            assert torch.equal(alone[2], found[0][4][3:4])
    native.select_isa(before)
    for one in found:
        assert all(torch.equal(got, want) for got, want in zip(one, found[0], strict=True))


@pytest.mark.skipif(native.handle is None, reason="no native kernels")
def test_bad_arguments_are_refused() -> None:
    logits, u = randn(2, 40), fractions(2)
    with pytest.raises(RuntimeError, match="must be float32"):
        ops.argmax(logits.double())
    with pytest.raises(RuntimeError, match="dim 1"):
        ops.argmax(logits[0])
    with pytest.raises(RuntimeError, match="contiguous rows"):
        ops.top_k(logits.t(), 3)
    with pytest.raises(RuntimeError, match="has 0 columns"):
        ops.argmax(logits[:, :0])
    with pytest.raises(RuntimeError, match="at least 1, is 0"):
        ops.top_k(logits, 0)
    with pytest.raises(RuntimeError, match="temperature must be 2 contiguous float32, has 3"):
        ops.softmax_top_k(logits, torch.ones(3), 4)
    with pytest.raises(RuntimeError, match="u must be 2 contiguous float64, has 2"):
        ops.draw_plain(logits, torch.ones(2), u.float())
    bits = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="row 2 isn't one of 2"):
        ops.mask_(logits, torch.tensor([2]), bits)
    with pytest.raises(RuntimeError, match=r"bits must be contiguous int32 \[1, 2\]"):
        ops.mask_(logits, torch.tensor([0]), bits[:, :1])
    with pytest.raises(RuntimeError, match=r"weights must be \[2, 3\]"):
        ops.draw_from(torch.zeros(2, 3, dtype=torch.int64), logits, u)
    one, whole = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="narrow is 5, above wide, 4"):
        ops.draw_nucleus(logits, one, one, u, 5, 4)
    with pytest.raises(RuntimeError, match="top_k must be 2 contiguous int64, has 2"):
        ops.scaled_top_k(logits, one, one, one, 4)
    with pytest.raises(RuntimeError, match="samples must be 2 contiguous int64, has 1"):
        ops.uniforms(whole, whole[:1], whole, 0)
    with pytest.raises(RuntimeError, match="32 bits, is -1"):
        ops.uniforms(whole, whole, whole, -1)
