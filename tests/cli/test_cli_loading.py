import gc
import time

from penstock.cli.loading import collect_rarely, load
from penstock.config import EngineConfig


def test_what_is_loaded_is_not_walked_by_garbage_collections() -> None:
    usual = gc.get_threshold()
    collect_rarely()
    assert gc.get_threshold()[0] > 100 * usual[0]
    runtime = load(EngineConfig.of(model="stories"))
    assert gc.get_threshold() == usual
    begin = time.perf_counter()
    gc.collect()
    seconds = time.perf_counter() - begin
    left = gc.get_objects()
    assert gc.get_freeze_count() > 50_000  # modules, and the model with its tokenizer
    assert len(left) < 5_000
    assert not any(one is runtime for one in left)
    gc.unfreeze()
    begin = time.perf_counter()
    gc.collect()
    assert seconds < (time.perf_counter() - begin) / 5  # twentieth to fiftieth on a quiet machine
