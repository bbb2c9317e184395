"""Fast implementations of the operators: the native CPU library."""

from penstock.kernels.load import NativeLibrary, native, report, report_cache, report_linear

__all__ = ["NativeLibrary", "native", "report", "report_cache", "report_linear"]
