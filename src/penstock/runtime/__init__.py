"""Where a model meets its cache: loading, sizing, running."""

from penstock.runtime import compile_counter
from penstock.runtime.hidden import HiddenRunner
from penstock.runtime.loader import Runtime, load_runtime
from penstock.runtime.memory import SEES_ALL, Horizon, plan_blocks, plan_swap
from penstock.runtime.program import Program
from penstock.runtime.runner import Forward, Runner

__all__ = [
    "SEES_ALL",
    "Forward",
    "HiddenRunner",
    "Horizon",
    "Program",
    "Runner",
    "Runtime",
    "compile_counter",
    "load_runtime",
    "plan_blocks",
    "plan_swap",
]
