"""How full the pipe runs: what a step must cost on this machine, and what it did cost."""

from penstock.roofline.cost import Cost, decode_step, floor_s, prefill_step, step_cost
from penstock.roofline.peaks import measure, peaks

__all__ = ["Cost", "decode_step", "floor_s", "measure", "peaks", "prefill_step", "step_cost"]
