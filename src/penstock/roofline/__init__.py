"""How full the pipe runs: what a step must cost on this machine, and what it did cost."""

from penstock.roofline.cost import Cost, floor_s, step_cost
from penstock.roofline.peaks import measure, peaks

__all__ = ["Cost", "floor_s", "measure", "peaks", "step_cost"]
