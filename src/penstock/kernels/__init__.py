"""Fast implementations of the operators: the native CPU library."""

from penstock.kernels.load import NativeLibrary, native, report

__all__ = ["NativeLibrary", "native", "report"]
