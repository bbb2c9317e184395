"""How weights are stored (`formats`) and how their values are chosen (`methods`)."""

from penstock.quant.codes import Codes
from penstock.quant.format import Packed, WeightFormat, WeightFormats
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.float8 import Float8
from penstock.quant.formats.integer import Integer
from penstock.quant.formats.levels import Levels
from penstock.quant.formats.storage import PANELS, ROWS, UNORDERED_ROWS, Storage
from penstock.quant.names import QUANTIZATIONS, format_of, formats_of, parse_quantization
from penstock.quant.scheme import SCHEMES, Scheme, parse_scheme

__all__ = [
    "PANELS",
    "QUANTIZATIONS",
    "ROWS",
    "SCHEMES",
    "UNORDERED_ROWS",
    "Codes",
    "Dense",
    "Float8",
    "Integer",
    "Levels",
    "Packed",
    "Scheme",
    "Storage",
    "WeightFormat",
    "WeightFormats",
    "format_of",
    "formats_of",
    "parse_quantization",
    "parse_scheme",
]
