"""The C function, built as a library of its own: it is loaded by its path, and never imported."""

from setuptools import Extension, setup

from penstock.plugins import include

relu2 = Extension(
    "penstock_jais2.relu2",
    sources=["penstock_jais2/relu2.c"],
    include_dirs=[str(include())],
    extra_compile_args=["-O3", "-ffp-contract=off"],
)
setup(ext_modules=[relu2])
