import numpy as np
import pytest

from penstock.sampling.philox import philox4x32, uniforms


# Random123 (D. E. Shaw Research), tests/kat_vectors, the "philox4x32 10" lines:
# counter, key, result.
@pytest.mark.parametrize(
    "line",
    [
        "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
    ],
)
@pytest.mark.parametrize("copies", [1, 5])
def test_published_vectors(line, copies):
    words = np.array([[int(word, 16)] * copies for word in line.split()], dtype=np.uint64)
    np.testing.assert_array_equal(philox4x32(words[:4], words[4:6]), words[6:])


def u(seed, sample=0, position=0):
    return uniforms(
        np.array([seed], dtype=np.uint64),
        np.array([sample], dtype=np.uint64),
        np.array([position], dtype=np.int64),
    )[0]


def test_every_coordinate_counts():
    at = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (2**63, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**32)]
    assert len({u(*one) for one in at}) == len(at)


def test_numbers_do_not_depend_on_their_neighbours():
    seeds = np.array([7, 2**64 - 1, 0, 7], dtype=np.uint64)
    samples = np.array([0, 3, 1, 1], dtype=np.uint64)
    positions = np.array([5, 0, 2**40, 5])
    together = uniforms(seeds, samples, positions)
    alone = [u(int(s), int(k), int(p)) for s, k, p in zip(seeds, samples, positions, strict=True)]
    assert together.tolist() == alone


def test_numbers_are_uniform_and_below_one():
    n = 100_000
    zeros = np.zeros(n, dtype=np.uint64)
    for values in (
        uniforms(zeros + np.uint64(3), zeros, np.arange(n)),
        uniforms(np.arange(n).astype(np.uint64), zeros, np.zeros(n, dtype=np.int64)),
    ):
        assert values.min() >= 0.0
        assert values.max() < 1.0
        counts = np.histogram(values, bins=100, range=(0, 1))[0]
        chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum()
        assert 55 < chi_square < 160  # 99 degrees: mean 99, deviation 14
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015  # 4.7 deviations


def test_few_are_computed_as_many_are():
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 2**64, 500, dtype=np.uint64)
    samples = rng.integers(0, 2**32, 500).astype(np.uint64)
    places = rng.integers(0, 2**62, 500)
    for use in (0, 1, 2**32 - 1):
        many = uniforms(seeds, samples, places, use)
        ones = [
            uniforms(seeds[i : i + 1], samples[i : i + 1], places[i : i + 1], use)
            for i in range(500)
        ]
        assert np.array_equal(np.concatenate(ones), many)
