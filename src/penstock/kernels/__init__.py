"""Fast implementations of the operators: the native CPU library, and Triton's for GPUs."""

from penstock.kernels.gpu import interpreting, use_triton, why_not_on
from penstock.kernels.load import NativeLibrary, native, report, report_cache, report_linear

__all__ = [
    "NativeLibrary",
    "interpreting",
    "native",
    "report",
    "report_cache",
    "report_linear",
    "use_triton",
    "why_not_on",
]
