"""Where magnitudes are cut off, on distributions whose answer is known."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.quant.methods.calibrate import BINS, CALIBRATORS, Histogram, input_scale


def histogram_of(*parts: torch.Tensor) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(part.abs())
    return found


def test_counts_stay_whole_when_the_range_grows() -> None:
    one = torch.rand(5000, generator=torch.manual_seed(0))
    found = histogram_of(one, 10 * one, 3 * one)
    assert int(found.counts.sum()) == 15000
    assert found.largest == float(10 * one.max())
    assert found.width * BINS / 2 < found.largest <= found.width * BINS * (1 + 1e-6)
    edges = torch.arange(BINS + 1) * found.width
    everything = torch.cat((one, 10 * one, 3 * one))
    want = torch.histogram(everything, edges).hist.long()
    assert int((found.counts - want).abs().sum()) <= 30  # values on a border, by rounding


def test_uniform_magnitudes() -> None:
    found = histogram_of(torch.linspace(0, 8, 200_001))
    assert input_scale(found, "minmax") == 8 / 127
    assert input_scale(found, "percentile", 90) == pytest.approx(7.2 / 127, rel=1e-3)
    assert input_scale(found, "percentile", 100) == 8 / 127
    for name in ("entropy", "mse"):  # nothing is rare: nothing is cut off
        assert input_scale(found, name) == pytest.approx(8 / 127, rel=0.02)


def test_a_single_outlier_is_cut_off_but_by_minmax() -> None:
    normal = torch.randn(200_000, generator=torch.manual_seed(1))
    found = histogram_of(torch.cat((normal, torch.tensor([1000.0]))))
    assert input_scale(found, "minmax") == 1000 / 127
    for name in ("percentile", "entropy"):
        assert input_scale(found, name) < 100 / 127


def test_the_cut_of_least_squares_is_that_of_trying_each() -> None:
    torch.manual_seed(2)
    x = torch.distributions.Laplace(0.0, 1.0).sample((50_000,))
    found = histogram_of(x)

    def error(top: float) -> float:
        step = top / 127
        return float((x - (x / step).round().clamp(-127, 127) * step).pow(2).mean())

    best = min(error(found.largest * i / 100) for i in range(10, 101))
    assert error(127 * input_scale(found, "mse")) < 1.03 * best


def test_scales_of_e4m3() -> None:
    """Its steps grow with values: what is cut off is all that a scale decides."""
    found = histogram_of(torch.linspace(0, 8, 200_001))
    assert input_scale(found, "minmax", rounded="fp8") == 8 / 448
    assert input_scale(found, "percentile", 90, "fp8") == pytest.approx(7.2 / 448, rel=1e-3)
    torch.manual_seed(3)
    x = torch.distributions.Laplace(0.0, 1.0).sample((50_000,))
    found = histogram_of(x)

    def error(scale: float) -> float:
        rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return float((x - rounded).pow(2).mean())

    best = min(error(found.largest * i / 100 / 448) for i in range(10, 101))
    assert error(input_scale(found, "mse", rounded="fp8")) < 1.03 * best
    with pytest.raises(ConfigError, match="equal steps, which E4M3 doesn't have"):
        input_scale(found, "entropy", rounded="fp8")


def test_zeros_have_no_scale() -> None:
    for name in CALIBRATORS:
        with pytest.raises(ConfigError, match="Every calibration activation of a matrix is zero"):
            input_scale(histogram_of(torch.zeros(10)), name)
    with pytest.raises(ConfigError, match="percentile=0"):
        input_scale(histogram_of(torch.ones(10)), "percentile", 0)
    with pytest.raises(ConfigError, match="calibrator='median'"):
        input_scale(histogram_of(torch.ones(10)), "median")  # type: ignore[arg-type]
