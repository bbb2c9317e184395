"""Tests of whole engines over Triton's kernels, interpreted.

The kernels are chosen when penstock is imported, so these run in a process of their own:
`tests/engine/test_interpreted.py` starts it. Elsewhere they aren't collected.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("PENSTOCK_KERNELS") == "triton" else ["test_*.py"]
