"""Fast implementations of the operators: the native library, and Triton in later modules."""
