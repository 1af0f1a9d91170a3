# Two commands: `make demo` and `make test`. Both create .venv, install what they need and start every server they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml Makefile | cksum | cut -d' ' -f1)

.PHONY: demo test fuzz install down lint proto clean image-check

demo: install
	$(BIN)/headrace demo

# Two processes share the tests, file by file. Those that look at the clock, at a whole system or at links between hosts are
# marked `alone` and run after them, one by one. A single one: `.venv/bin/python -m pytest tests/unit/core/test_block.py -k chain`.
ALONE := tests/integration tests/e2e tests/multihost

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ALONE) -m alone

# Each parser that reads from outside, for so many seconds each; `make test` runs a few fixed examples of the same.
fuzz: install
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) $(BIN)/python -m pytest tests/fuzz --timeout 0

# Packages of services/headrace whose types are checked, beside cluster/.
TYPED := core wire gateway blocks client admin store transfer prefill decode index simulate telemetry engine bench

lint: install
	$(BIN)/ruff check services cluster tests benchmarks helm docker
	$(BIN)/ruff format --check services cluster tests benchmarks helm docker
	$(BIN)/mypy --strict --follow-imports=silent $(addprefix services/headrace/,$(TYPED)) cluster/headrace_cluster
	$(BIN)/lint-imports

down:
	$(BIN)/headrace down

install: $(STAMP)

# Quiet twice over: pip's remarks about its own settings and versions help nobody here; its errors are still shown.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install

# torch goes in first and by exact version, so that nothing else chooses another build of it.
$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 1; }
	@echo "Installing into $(VENV), once; a minute or a few, without a word unless something fails."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@echo "1 of 2: torch"
	@$(PIP) torch==2.13.0
	@echo "2 of 2: Headrace and what else it needs"
	@$(PIP) --editable '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# The generated code in services/headrace/wire/v1 is committed; run this after changing a .proto file.
proto: install
	$(BIN)/python -m headrace.wire.generate

# The steps of the Dockerfile's CPU image in a clean environment; fetches 2 GB, so it is no part of `test`.
image-check: install
	HEADRACE_IMAGE_CHECK=1 $(BIN)/python -m pytest tests/unit/image

clean:
	rm -rf $(VENV) build dist *.egg-info
