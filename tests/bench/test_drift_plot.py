"""The plot of a drift is a picture of its figures, whatever they are."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import torch

from penstock.bench.drift import Drift, LayerError
from penstock.bench.drift_plot import _rung, drift_svg

SVG = "{http://www.w3.org/2000/svg}"


def drift(each: list[float], layers: tuple[LayerError, ...] = ()) -> Drift:
    kl = torch.tensor(each, dtype=torch.float64)
    return Drift(
        positions=len(each),
        equal=not kl.any(),
        kl=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        agreement=1.0,
        perplexity=2.0,
        reference_perplexity=2.0,
        each=kl,
        layers=layers,
    )


def points(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_the_curve_rises_to_all_positions() -> None:
    root = ElementTree.fromstring(drift_svg(drift([0.0, 1e-4, 1e-2, 1e-3]), "A <b>", "& more"))
    (curve,) = points(root)
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
    rises = [curve[i][1] - curve[i + 1][1] for i in range(2)]
    assert rises[0] == pytest.approx(rises[1], abs=0.11) and curve[-1][1] == 96.0  # 100%
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "A <b>" in texts and "& more" in texts and "0.001" in texts
    assert any(text is not None and text.startswith("mean 0.0028") for text in texts)


def test_equal_variants_are_said_to_be() -> None:
    root = ElementTree.fromstring(drift_svg(drift([0.0, 0.0]), "x", "y"))
    assert not points(root)
    assert "All 2 positions: 0" in [t.text for t in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("errors", [[0.0, 0.0], [0.001, 0.1, 0.15], [0.5, math.inf], [1.0] * 70])
def test_layers_have_a_panel(errors: list[float]) -> None:
    layers = tuple(LayerError(e / 2, e, e) for e in errors)
    root = ElementTree.fromstring(drift_svg(drift([0.1, 0.2], layers), "x", "y"))
    curve, bounds, means = points(root)
    assert len(curve) == 2 and len(bounds) == len(means) == len(errors)
    assert all(96 <= y <= 376 for _, y in (*bounds, *means))
    for e, (_, high), (_, low) in zip(errors, bounds, means, strict=True):
        assert high < low if 0 < e < math.inf else high <= low


@pytest.mark.parametrize(("top", "rung"), [(0.19, 0.05), (1.0, 0.2), (4.9, 1.0), (0.051, 0.02)])
def test_rungs_are_round_and_few(top: float, rung: float) -> None:
    assert _rung(top) == pytest.approx(rung)
