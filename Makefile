# Everything runs inside $(VENV); nothing is installed outside this directory.
PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?= -q -n 2 --dist worksteal --durations=10
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

DEMO := $(BIN)/eqprop demo

.PHONY: test campaigns demo docs docs-serve gpu setup clean lint

test: setup lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# The long tests: thousands of kills and bad inputs, random models, pages and notebooks executed; an hour or two.
campaigns: setup
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m slow --record results/long-tests.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

demo: setup
	$(DEMO)

# Builds the site into site/, executing every tutorial; in a Chromium, if there is one, opens each page, wide and on a
# phone, and keeps what it saw in screenshots/.
docs: setup
	@$(PIP) install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict --quiet
	PYTHONPATH=. $(BIN)/python -m docs.site.look site screenshots

docs-serve: docs
	cd site && ../$(BIN)/python -m http.server 8000 --bind 127.0.0.1

# What only a CUDA machine can show, in ten minutes, with the torch that is there; records in results/gpu.
gpu:
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu results/gpu

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "make: '$(PYTHON)' was not found. Install Python 3.11 or newer, or say where it is: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1), but eqprop needs Python 3.11 or newer. Choose another: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "make: '$(PYTHON)' cannot create virtual environments (its venv or ensurepip module is missing). On Debian and Ubuntu: apt install python3-venv"; exit 1; }; \
	  echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing eqprop and its dependencies into $(VENV) (torch is large: the first time takes minutes)"
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site screenshots src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
