# Two targets are all a newcomer needs, demo and test; each builds what it needs into .venv by itself.
#   make demo    two real trainings on this machine, one with a planted fault, and its name found
#   make test    the test suite
#   make cases   public bug reports, planted and found again; writes docs/cases.md
#                (cases-long: with 300 random faults; cases-peers: asks DebugMode too)

PYTHON ?= python3
BIN := .venv/bin
PACKAGING := setup.cfg pyproject.toml constraints.txt
PYTHON_FILES := upguard_plugin integrations launch tests benchmarks examples

# Tests start mpiexec, deepspeed and torchrun by name, and DeepSpeed compiles with ninja. It compiles
# into this checkout: a lock left by a killed run elsewhere would make it wait for ever.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions

.PHONY: demo test test-long cases cases-long cases-peers lint types clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/upguard demo

test: .venv/test.stamp
	$(BIN)/python -m pytest

test-long: .venv/test.stamp
	$(BIN)/python -m pytest -m "long or not long"

cases: .venv/test.stamp
	$(BIN)/python -m pytest tests/cases
	$(BIN)/python -m tests.cases.scoreboard docs/cases.md

cases-long: .venv/test.stamp
	mkdir -p build
	CASES_SEARCH_REPORT=build/search.json $(BIN)/python -m pytest tests/cases -m "long or not long"
	$(BIN)/python -m tests.cases.scoreboard docs/cases.md --search build/search.json

cases-peers: .venv/test.stamp
	$(BIN)/python -m tests.cases.scoreboard docs/cases.md --peers

lint: .venv/test.stamp
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)

# Types are checked on what users get: installed, the folders integrations/ and launch/ have their
# full names.
types: .venv/test.stamp
	rm -rf build/types
	$(BIN)/python -m pip install --quiet --no-deps --target build/types .
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p upguard_plugin

.venv/torch.stamp: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	touch $@

.venv/demo.stamp: .venv/torch.stamp $(PACKAGING)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[megatron]'
	touch $@

.venv/test.stamp: .venv/torch.stamp $(PACKAGING)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	rm -f $(TORCH_EXTENSIONS_DIR)/*/lock $(TORCH_EXTENSIONS_DIR)/*/*/lock
	$(BIN)/python -c 'from deepspeed.accelerator import get_accelerator as get; get().create_op_builder("ShareMemCommBuilder").load()'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
