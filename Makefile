# make demo        train a small real model on real conversations, from nothing, in a few minutes
# make test        lint, types and the tests that need neither a GPU nor minutes
# make test-full   every test this machine can run, on a GPU the GPU tests too; writes docs/test_full.md
# make test-gpu    on a GPU: the tests that need one, in a few minutes, one line a part (ONLY=parity,golden: those)
# make sanitize    the optimizer's tests over a C++ core built with address, undefined-behaviour and thread sanitizers (gcc)
# make mutants     break the program in every way of a list, one at a time, and see the tests notice
# make bench       measure the optimizer on this machine (BENCH="step --help": others); results go to bench/results
#
# All of them set up .venv first: they need Python 3.11 or newer (PYTHON=…) and, for the fast optimizer, a C++ compiler.

# Rooms that the type checker passes without a complaint: the list only grows.
TYPED := cli checkpoint codec config.py config_keys.py config_page.py config_run.py config_spellings.py config_values.py \
	config_yaml.py errors.py \
	hardware importers optim planner report store strict_json.py train
# The report page is looked at where a Chromium is installed; elsewhere only its structure is tested, and that is said.
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PYTHON ?= python3
BENCH ?= adamw
# Each test has one torch thread: on two cores two processes take 11 minutes where one took 16 to 21.
PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
comma := ,
# The versions the tests were run with; a machine that brings its own torch can leave them out: CONSTRAINTS=
CONSTRAINTS ?= $(wildcard constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

.PHONY: setup demo test test-full test-gpu sanitize sanitize-address sanitize-thread mutants bench lint clean

demo: setup
	$(BIN)/python demo/run.py

test: lint
	$(if $(BROWSER),,@echo "no Chromium here: the looks of the report page are not tested (apt install chromium)")
	$(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadfile -m "not gpu and not slow$(if $(BROWSER),, and not browser)"

test-full: lint
	$(BIN)/python -m tests.report_full

test-gpu: setup
	$(BIN)/python -m tests.gpu $(if $(ONLY),--only $(ONLY))

# The core built with other flags, in build/$(1), and a test run that is sure to import it. Reports go to the terminal (-s).
build_sanitized = $(PIP_INSTALL) --no-deps --upgrade --target build/$(1) -C build-dir=build/$(1)-objects \
	  -C install.strip=false -C cmake.define.MEGATRAIN_SANITIZE=$(2) .
run_sanitized = PYTHONPATH=tests/only_this_tree:build/$(1) MEGATRAIN_CORE_BELOW=$(CURDIR)/build/$(1) OMP_NUM_THREADS=1 \
	  $(2) $(BIN)/python -m pytest -q -s -p no:cacheprovider -m "not gpu and not slow"
TSAN = $(shell c++ -print-file-name=libtsan.so)
# Without randomized addresses, where that may be asked for: the thread sanitizer's shadow memory has no room for some.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

sanitize: sanitize-address sanitize-thread

sanitize-address: setup
	$(call build_sanitized,address,address$(comma)undefined)
	$(call run_sanitized,address,ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)") tests/optim

sanitize-thread: setup
ifeq ($(wildcard $(TSAN)),)
	@echo "no libtsan beside this compiler: the core's threads are not checked for races (apt install libtsan2, or use gcc)"
else
	$(call build_sanitized,thread,thread)
	$(call run_sanitized,thread,TSAN_OPTIONS="halt_on_error=1" LD_PRELOAD=$(TSAN) $(FIXED_ADDRESSES)) tests/optim/test_threads.py
endif

# Half an hour on two cores. Goes on where it was stopped; `make clean` starts anew. On a GPU: --device cuda, minutes.
mutants: setup
	$(BIN)/python -m tests.mutation --resume --report build/mutants.jsonl
	$(BIN)/python -m tests.mutation --device core --resume --report build/mutants-core.jsonl

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
