import json
import subprocess
import sys

IN_A_COMMAND = """
import gc, json, time
from penstock.cli.loading import collect_rarely, load
from penstock.config import EngineConfig

def collected():
    start = time.perf_counter()
    gc.collect()
    return time.perf_counter() - start

usual = gc.get_threshold()
collect_rarely()
while_loading = gc.get_threshold()
runtime = load(EngineConfig.of(model="stories"))
after = gc.get_threshold()
seconds = min(collected() for _ in range(3))
left = gc.get_objects()
frozen, seen = gc.get_freeze_count(), any(one is runtime for one in left)
gc.unfreeze()
print(json.dumps({
    "thresholds": [usual, while_loading, after], "frozen": frozen, "left": len(left),
    "runtime is left": seen, "seconds": seconds, "unfrozen seconds": collected(),
}))
"""


def test_what_is_loaded_is_not_walked_by_garbage_collections() -> None:
    code = [sys.executable, "-c", IN_A_COMMAND]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    usual, while_loading, after = found["thresholds"]
    assert usual == after
    assert while_loading[0] > 100 * usual[0]
    assert found["frozen"] > 50_000  # modules, and the model with its tokenizer
    assert found["left"] < 5_000
    assert not found["runtime is left"]
    # Twentieth to fiftieth on a quiet machine.
    assert found["seconds"] < found["unfrozen seconds"] / 5
