# Every target sets up what it needs: .venv with the full stack, from the lock.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: run test test-slow bench lint format lock build-files clean

run: $(INSTALLED)  ## The main job; pass flags with ARGS="--dataset=mnist".
	$(BIN)/python -m experiments.train --overwrite $(ARGS)

# Two processes, each with one thread, so that they do not wait for each other.
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
  -n 2 --dist loadgroup --no-loadscope-reorder

test: $(INSTALLED)  ## The tests; pass pytest's options with ARGS="-k panel".
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(INSTALLED)  ## The few tests that take longest.
	$(PYTEST) -m slow $(ARGS)

bench: $(INSTALLED)  ## Speed, as ratios to named alternatives.
	$(BIN)/python -m benchmarks.accounting
	$(BIN)/python -m benchmarks.example_gradients
	$(BIN)/python -m benchmarks.rounds $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tf_bdp

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build-files: $(INSTALLED)  ## Rewrites the BUILD files from the imports.
	$(BIN)/python -m tools.build_files

lock:  ## Resolves requirements.in anew.
	$(PYTHON) tools/lock.py > requirements-lock.txt.new
	mv requirements-lock.txt.new requirements-lock.txt

clean:
	rm -rf $(VENV)

# Without the resolver, because TFF's own pins cannot be met any more.
$(INSTALLED): requirements-lock.txt setup.py
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else "Python 3.11 is needed; found %d.%d. Say which with: make PYTHON=/path/to/python3.11" % v)'
	@echo 'Setting up $(VENV) from requirements-lock.txt: about two minutes, 3 GB.'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements-lock.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(INSTALLED)
