"""How weights are stored (`formats`) and, in later modules, how their values are chosen."""

from penstock.quant.format import WeightFormat, WeightFormats
from penstock.quant.formats.dense import Dense

__all__ = ["Dense", "WeightFormat", "WeightFormats"]
