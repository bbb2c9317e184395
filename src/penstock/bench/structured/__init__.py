"""What outputs of a given form cost, and whether they have it.

In the order of a run: `schemas` (what is asked), `compiling` (which of it can be followed, and how
fast), `runs` (an engine on it), `outputs` (whether what comes out is valid), `speed` (what masks
cost a step, and what jumps spare), `result` (how it is shown), `benchmark` (all of it).
"""
