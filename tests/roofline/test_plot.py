"""The roofline plot is well-formed, and its marks stand where their figures say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from penstock.hardware import Peaks
from penstock.roofline.plot import HEIGHT, WIDTH, Dot, roofline_svg, spread

PEAKS = Peaks(1e10, 1e11, 1e12, 2, "", int8_ops=4e12)
DOTS = [
    Dot("up & <down>", "decode", 1.0, 1e10, 0.25, False),  # on the roof of memory
    Dot("qkv", "decode", 1.0, 1e9, 0.09, False),
    Dot("norm", "decode", 10.0, 1e9, 0.0, True),
    Dot("head", "prefill", 100.0, 1e10, 0.04, False),
]
SPACE = "{http://www.w3.org/2000/svg}"


def draw(dots: list[Dot], peaks: Peaks = PEAKS) -> ET.Element:
    return ET.fromstring(roofline_svg(peaks, dots, "A & B", "<caption>"))


def texts(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SPACE}text")]


def test_it_is_xml_with_a_label_for_every_dot() -> None:
    found = texts(draw(DOTS))
    for text in ("A & B", "<caption>", "up & <down>", "qkv", "norm", "head", "decode", "prefill",
                 "read 10 GB/s", "float32 FMA: 100 GFLOP/s", "bfloat16, AMX: 1 TFLOP/s",
                 "int8: 4 TOP/s"):  # fmt: skip
        assert found.count(text) == 1, text
    plain = texts(draw(DOTS, replace(PEAKS, tile_flops=0.0, int8_ops=0.0)))
    assert not any(text.startswith(("bfloat16", "int8")) for text in plain)


def test_a_decade_is_as_long_everywhere() -> None:
    svg = draw(DOTS)
    circles = {c[0].text.partition(":")[0]: c for c in svg.iter(f"{SPACE}circle") if len(c)}  # type: ignore[union-attr]
    at = {name: (float(c.attrib["cx"]), float(c.attrib["cy"])) for name, c in circles.items()}
    up, qkv = at["decode, up & <down>"], at["decode, qkv"]
    norm, head = at["decode, norm"], at["prefill, head"]
    assert up[0] == qkv[0]
    assert qkv[1] == norm[1] and up[1] == head[1]
    assert norm[0] - qkv[0] == pytest.approx(head[0] - norm[0], abs=0.2)
    assert qkv[1] - up[1] > 0
    radius = {name: float(c.attrib["r"]) - 3 for name, c in circles.items()}
    assert radius["decode, up & <down>"] ** 2 / radius["prefill, head"] ** 2 == pytest.approx(6.25)
    assert circles["decode, norm"].attrib["fill-opacity"] == "0"
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in at.values())
    (slope,) = [p for p in svg.iter(f"{SPACE}path") if "L" in p.attrib["d"]]
    (x0, y0), (x1, y1) = (
        tuple(map(float, p.split())) for p in slope.attrib["d"].lstrip("M").split("L")
    )
    assert y0 + (up[0] - x0) / (x1 - x0) * (y1 - y0) == pytest.approx(up[1], abs=0.2)


def test_labels_keep_apart_and_move_little() -> None:
    assert spread([10, 100, 200], 15) == [10, 100, 200]
    assert spread([50, 50], 10) == [45, 55]
    close = spread([50, 51, 52, 53, 200], 10)
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(close))
    assert math.fsum(close[:4]) == pytest.approx(50 + 51 + 52 + 53)
    assert close[4] == 200


def test_nothing_to_show_is_an_empty_plot() -> None:
    svg = draw([replace(DOTS[0], flops_per_s=0.0)])
    assert not list(svg.iter(f"{SPACE}circle"))
