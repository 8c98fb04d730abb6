# `make demo` and `make test` work on a fresh machine with Python >= 3.11 and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

WORKERS ?= $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
CPU_TESTS := $(patsubst %,tests/%.py,training/test_agreement engine/test_engine training/test_gradient_sums training/test_trainer)
# Most of the tests' time is compilation; what is promised of programs as users have them is marked optimized.
QUICKLY = XLA_FLAGS="$(XLA_FLAGS) $$($(BIN)/python tests/quick_flags.py)" $(TESTS)

# Modules are compiled once, also where the environment says not to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=

# Pythons for the lowest and the newest versions of the dependencies.
OLD_PYTHON ?= python3.11
NEW_PYTHON ?= python3.12

.PHONY: demo test cpus gpu lint parity optimized heavy long docs bench versions versions_if_changed clean all_installed

demo: $(VENV)/.demo
	$(BIN)/groupax train --recipe arithmetic --output_dir runs/demo
	@echo "The command is $(BIN)/groupax, or groupax after: . $(BIN)/activate"

test: $(VENV)/.test
	CHECK_TYPES=0 $(QUICKLY) -m "not parity and not heavy and not long"

# This processor's own instruction set on 1 device, and every other one that it has on 2; `make test` runs all tests
# with its own on 4.
cpus: $(VENV)/.test
	@sets=$$($(BIN)/python tests/instruction_sets.py); for isa in $$sets; do \
	  devices=$$([ $$isa = $${sets##* } ] && echo 1 || echo 2); \
	  echo "instruction set $$isa, devices: $$devices"; \
	  JAX_NUM_CPU_DEVICES=$$devices XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=$$isa $$($(BIN)/python tests/quick_flags.py)" \
	  $(TESTS) -m "not parity and not heavy and not long" $(CPU_TESTS) \
	    $$([ $$devices = 1 ] && echo tests/objective/test_objective.py tests/objective/test_objective_golden.py) || exit 1; \
	done

# Programs compiled for a GPU that need not be there, against the table of tests/golden/gpu_programs.json.
gpu: $(VENV)/.test build/cuda
	$(BIN)/python benchmarks/gpu_programs.py

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

parity: optimized heavy

optimized: $(VENV)/.parity build/libtpu
	CHECK_TYPES=0 $(TESTS) -m "optimized and not long" $$(grep -rl --include='*.py' mark.optimized tests)

heavy: $(VENV)/.parity build/libtpu
	$(QUICKLY) -m "(parity or heavy) and not optimized and not long"

# What takes minutes, and all cases of the tests that otherwise draw some of theirs.
long: $(VENV)/.parity
	TEST_SEED=all $(BIN)/python -m pytest -m "long or drawn"

# The documentation as a site, in build/site; a warning or a link to nowhere is an error (with --quiet, warnings would
# not count either).
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.parity
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/start.py

# A short run with the lowest and with the newest versions of the dependencies. dev/dependencies.sha256 says for which
# requirements it has passed; commit it with pyproject.toml.
EXTRAS := view serve math
versions:
	rm -rf build/versions && mkdir -p build/versions
	$(OLD_PYTHON) dev/lowest_versions.py $(EXTRAS) > build/versions/lowest.txt
	touch build/versions/newest.txt
	set -e; for each in lowest:$(OLD_PYTHON) newest:$(NEW_PYTHON); do name=$${each%%:*}; \
	  $${each#*:} -m venv build/versions/$$name; \
	  build/versions/$$name/bin/pip install --quiet -c build/versions/$$name.txt ".[$$(echo $(EXTRAS) | tr ' ' ,)]"; \
	  XLA_FLAGS= PYTHONPATH= build/versions/$$name/bin/groupax train --recipe arithmetic --max_steps 2 --prompts_per_step 2 \
	    --num_generations 4 --output_dir build/versions/run_$$name; \
	done
	$(OLD_PYTHON) dev/lowest_versions.py --digest $(EXTRAS) > dev/dependencies.sha256

versions_if_changed: $(VENV)/.test
	test "$$($(BIN)/python dev/lowest_versions.py --digest $(EXTRAS))" = "$$(cat dev/dependencies.sha256)" || $(MAKE) versions

clean:
	rm -rf $(VENV) runs build

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/pip
	@echo "installing into $(VENV) (about 1.3 GB, about a minute)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[view]"
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

$(VENV)/.lint: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test,lint]"
	touch $@

# PyTorch first and by itself, at the version whose CPU build is small.
$(VENV)/.parity: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test,parity]"
	touch $@

# All of these at once.
all_installed: | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test,lint,parity,docs,view]"
	cd $(VENV) && touch .demo .test .lint .parity .docs

$(VENV)/.docs: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs,view]"
	touch $@

# axe-core, which looks for barriers on the page of groupax view (AXE_CORE in tests/view/test_view_page.py); from npm.
build/axe.min.js:
	mkdir -p build && cd build && npm pack --silent axe-core@4.10.3 && tar -xzOf axe-core-4.10.3.tgz package/axe.min.js > axe.partial
	echo "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb  build/axe.partial" | sha256sum --check --quiet
	rm build/axe-core-4.10.3.tgz && mv build/axe.partial $@

# To compile for TPUs that are not there; in a folder of its own, because with it every jax process looks for a TPU.
build/libtpu: | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ libtpu

# To compile for NVIDIA GPUs that are not there, which takes jax's plugin, of jax's version, and cuDNN, and no driver; in
# a folder of its own for the same reason.
build/cuda: | $(VENV)/.test
	jax=$$($(BIN)/python -c "import jax; print(jax.__version__)") && \
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	  jax-cuda13-plugin==$$jax jax-cuda13-pjrt==$$jax "nvidia-cudnn-cu13<10"
