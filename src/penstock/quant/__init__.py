"""How weights are stored (`formats`) and how their values are chosen (`methods`)."""

from penstock.quant.format import WeightFormat, WeightFormats
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.integer import Integer
from penstock.quant.names import QUANTIZATIONS, formats_of, parse_quantization

__all__ = [
    "QUANTIZATIONS",
    "Dense",
    "Integer",
    "WeightFormat",
    "WeightFormats",
    "formats_of",
    "parse_quantization",
]
