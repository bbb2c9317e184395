# `make run` and `make test` set everything up on a fresh machine: Python ≥ 3.11 and, for the fast
# kernels, a C++ compiler are all they need.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin

.PHONY: run test test-all durations check clean

run: .venv/.run  ## generate text with the embedded model; tokens/s and the share of the floor
	$(BIN)/penstock generate --prompt "Once upon a time" --max-tokens 200 --seed 1 --stats

# Tests start hundreds of processes: none should compile the modules anew.
test test-all durations: export PYTHONDONTWRITEBYTECODE =
test: .venv/.dev  ## the quick suite (tests/quick.py): in JOBS processes, then what must run alone
	$(RUN_TESTS) --quick
	$(RUN_ALONE)

test-all: .venv/.dev  ## every test but those marked slow and those of GPUs: an hour on two cores
	$(RUN_TESTS)
	$(RUN_ALONE)

durations: .venv/.dev  ## tests/durations.json brought up to date, by which `make test` chooses
	$(RUN_TESTS) --write-durations

check: .venv/.dev  ## style, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

FAST := not slow and not gpu
RUN_TESTS = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
	-m "$(FAST) and not alone"
RUN_ALONE = $(BIN)/python -m pytest -m "$(FAST) and alone" \
	$$(grep --recursive --files-with-matches --include="test_*.py" mark.alone tests)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/cpu/*)

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.tools: .venv/bin/python
	@echo "Installing torch and what compiles the kernels into .venv (some 1 GB in all) ..."
	$(BIN)/pip install --quiet "torch>=2.11,<2.14" "scikit-build-core>=0.10" cmake ninja
	touch $@

.venv/.run: .venv/.tools $(SOURCES)
	@echo "Compiling the C++ kernels: 4 minutes of two cores that are free ..."
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[server]"
	touch $@

.venv/.dev: .venv/.run
	@echo "Installing what tests and checks need ..."
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build
