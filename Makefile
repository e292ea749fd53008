# make demo        train a small real model on real conversations, from nothing, in a few minutes
# make test        lint, types and the tests that need neither a GPU nor minutes
# make test-full   every test this machine can run; on a GPU the GPU tests too
# make sanitize    the optimizer's tests over a C++ core built with address and undefined-behaviour sanitizers (gcc)
# make bench       measure the optimizer on this machine (BENCH="step --help": others); results go to bench/results
#
# All of them set up .venv first: they need Python 3.11 or newer (PYTHON=…) and, for the fast optimizer, a C++ compiler.

# Rooms that the type checker passes without a complaint: the list only grows.
TYPED := cli checkpoint codec config.py config_page.py config_spellings.py config_values.py config_yaml.py errors.py \
	hardware importers optim planner report store train
# The report page is looked at where a Chromium is installed; elsewhere only its structure is tested, and that is said.
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PYTHON ?= python3
BENCH ?= adamw
VENV := .venv
BIN := $(VENV)/bin
# The versions the tests were run with; a machine that brings its own torch can leave them out: CONSTRAINTS=
CONSTRAINTS ?= $(wildcard constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

.PHONY: setup demo test test-full sanitize bench lint clean

demo: setup
	$(BIN)/python demo/run.py

test: lint
	$(if $(BROWSER),,@echo "no Chromium here: the looks of the report page are not tested (apt install chromium)")
	$(BIN)/python -m pytest -q -m "not gpu and not slow$(if $(BROWSER),, and not browser)"

test-full: lint
	$(BIN)/python -m pytest -q -m "$$($(BIN)/python -c 'import torch; print("gpu or not gpu" if torch.cuda.is_available() else "not gpu")')"

sanitize: setup
	$(PIP_INSTALL) --no-deps --upgrade --target build/sanitized \
	  -C build-dir=build/sanitized-objects -C cmake.define.MEGATRAIN_SANITIZE=address,undefined .
	PYTHONPATH=build/sanitized ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -q -m "not gpu and not slow" tests/optim

lint: setup
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python $(addprefix src/megatrain/,$(TYPED))

bench: setup
	$(BIN)/python -m bench $(BENCH)

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(CONSTRAINTS) $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python %d.%d is too old: 3.11 or newer, make PYTHON=…" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; torch is large)"
	$(PIP_INSTALL) -e ".[test,demo]"
	@touch $@

clean:
	rm -rf build $(VENV) .pytest_cache .ruff_cache
