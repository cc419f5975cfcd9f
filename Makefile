# One command each on a machine with only Python >= 3.10:
#   make demo          train the demo network, also while workers are killed, and compare
#   make test          the tests but the slow ones
#   make test-changed  the same, of satellites only those that have changed since BASE
#   make test-all      all tests
#   make test-pythons  the tests but the slow ones, on each Python of PYTHONS
#   make test-portable  what Windows and macOS do otherwise, with Linux in the place of both
#   make test-gpu      the tests that need a GPU, on a machine that has one
#   make test-frameworks  the tests with other libraries, in an environment of their own
#   make test-ray      the tests on Ray, in an environment of their own
#   make test-stores   the tests with S3, Lance and ArrayRecord, in an environment of their own
#   make lint          ruff, mypy, and the tests that read words, pages and structure
#   make docs          the documentation, as a site in site/ (begin at site/index.html)
#   make test-docs     the tests of the documentation, with every page in Chromium if there is one
#   make test-lowest   the core of the tests, with the lowest versions that setup.cfg allows, in an environment of its own
#   make test-wheel    the code of README, pages, docstrings and notebooks, with the wheel installed and without the checkout
#   make dist          sdist and wheel, in dist/, checked as a package index does
#   make clean         remove everything that the others made
# For one other Python: make test PYTHON=python3.13 VENV=.venv-python3.13
# The first run makes .venv and installs the versions of constraints.txt; later runs install nothing until
# setup.cfg or constraints.txt change.

PYTHON ?= python3
PYTHONS = python3.10 python3.11 python3.12 python3.13 python3.14
VENV = .venv
BIN = $(VENV)/bin
INPUTS = setup.cfg setup.py pyproject.toml constraints.txt
# A process for each core, but not dozens: some tests watch what happens when.
# The last tests are not the short ones: an idle process takes over what another has not begun.
PARALLEL = -n logical --maxprocesses 4 --dist worksteal
# Else each process of tests, and each program that they start, would compile all modules again.
export PYTHONDONTWRITEBYTECODE =
# Modules are compiled when they are first imported: to compile all of them takes 43 of 102 seconds, and most are never
# imported.
PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-compile -c constraints.txt

.PHONY: help demo test test-changed test-all test-pythons test-portable test-gpu test-frameworks test-ray test-stores lint lint-types lint-tests docs test-docs test-lowest test-wheel dist clean

help:
	@sed -n "s/^#   //p" Makefile

demo: $(VENV)/demo.stamp
	$(BIN)/sharded-loader demo --kill --stop-resume

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "not slow and not lint" $(PARALLEL)

test-changed: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "not slow and not lint" $(PARALLEL) $$($(BIN)/python -m tests.changed $(BASE))

BASE = main

test-all: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(PARALLEL)

# An environment for each, .venv-python3.10 and so on: from PyPI each brings a torch with CUDA, of 5 GB.
test-pythons:
	for python in $(PYTHONS); do $(MAKE) test PYTHON=$$python VENV=.venv-$$python || exit; done

# Each process of the tests begins with tests/portable/sitecustomize.py, which takes away what the other system lacks.
test-portable: $(VENV)/test.stamp
	$(STANDS_IN)=windows $(BIN)/python -m pytest -m "not slow and not lint" $(PARALLEL) $(PORTABLE) $(PORTABLE_PROMISES)
	$(STANDS_IN)=macos $(BIN)/python -m pytest -m "not slow and not lint" $(PARALLEL) $(PORTABLE) tests/promises/test_promises.py

STANDS_IN = PYTHONPATH=$(CURDIR)/tests/portable SHARDED_LOADER_TEST_PORTABLE
PORTABLE = tests/portable tests/memory/test_codec.py
PORTABLE_PROMISES = tests/caching/test_store.py $(filter-out %/test_fuzz.py, \
	$(wildcard tests/promises/test_*.py tests/leases/test_*.py tests/loader/test_*.py tests/text/test_*.py))

test-gpu: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/gpu --session-timeout 480

# Some of these libraries cannot be resolved together, so they come without what they require: constraints-frameworks.txt.
FRAMEWORKS = .venv-frameworks
APART = fastai litdata mosaicml-streaming timm torchvision
NEEDED = apsw apswutils anyio beautifulsoup4 boto3 botocore brotli beartype catalogue cramjam fastcore fastdownload fastlite \
	fastprogress fasttransform h11 httpcore httptools httpx itsdangerous jmespath matplotlib contourpy cycler fonttools \
	kiwisolver oauthlib obstore pillow plum-dispatch pyparsing python-dateutil python-fasthtml python-multipart \
	python-snappy s3transfer six soupsieve starlette tifffile uvicorn websockets zstd

test-frameworks:
	$(MAKE) $(FRAMEWORKS)/frameworks.stamp VENV=$(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pytest -m frameworks tests/frameworks tests/integrations tests/docs/test_blocks.py tests/test_packaging.py tests/storage/test_frames.py
	$(FRAMEWORKS)/bin/python -m pytest tests/storage/test_shard_tables.py tests/storage/test_opening.py  # with pyarrow

# The promises over RayPool, then what is Ray's own. Each process of tests has a Ray; one at a time.
RAY = .venv-ray

test-ray:
	$(MAKE) $(RAY)/ray.stamp VENV=$(RAY)
	SHARDED_LOADER_TEST_POOLS=ray $(RAY)/bin/python -m pytest -m "not slow" $(RAY_PROMISES)
	$(RAY)/bin/python -m pytest -m ray tests/pools/ray/test_on_ray.py tests/storage/test_read_ahead.py
	$(RAY)/bin/python -m pytest -m ray tests/pools/ray/test_cluster.py

RAY_PROMISES = $(addprefix tests/promises/test_,promises.py resume.py iterable.py iteration.py kinds.py)

# A server of S3 on this machine, s3fs and obstore; the examples with Lance and ArrayRecord.
STORES = .venv-stores

test-stores:
	$(MAKE) $(STORES)/stores.stamp VENV=$(STORES)
	$(STORES)/bin/python -m pytest -m stores tests/storage

# NumPy 1 needs Python 3.10 or 3.11: make test-lowest PYTHON=python3.11
LOWEST = .venv-lowest

test-lowest:
	$(MAKE) $(LOWEST)/lowest.stamp VENV=$(LOWEST)
	$(LOWEST)/bin/python -m pytest -m "not slow" tests/promises/test_promises.py tests/pools tests/storage tests/batching tests/memory

# Side by side with `make -j2 lint`: mypy keeps one core busy for as long as the tests take.
lint: lint-types lint-tests

lint-types: $(VENV)/test.stamp
	$(BIN)/mypy

lint-tests: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m lint $(PARALLEL) $(LINTED)

LINTED = $(addprefix tests/,docs tutorials base/test_private.py test_rules.py test_structure.py)

# A warning is an error (not with --quiet, which hides them from --strict too). The variable silences an advertisement.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation: open site/index.html (its search needs a server: python3 -m http.server -d site)"

# Chromium comes from the system's packages, from CHROMIUM=path, or from `playwright install chromium`.
test-docs: $(VENV)/test-docs.stamp
	$(BIN)/python -m pytest tests/docs

# build makes the wheel from the sdist. The list of files of an earlier build would get into the sdist.
dist: $(VENV)/dist.stamp
	rm -rf dist sharded_loader.egg-info
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# The wheel is made of the sdist, as `make dist` does, in the environment that it is installed in. The tests run in a
# folder of the sdist's files without the package.
WHEEL = .venv-wheel
WITHOUT = build/without-package

test-wheel:
	$(MAKE) $(WHEEL)/wheel.stamp VENV=$(WHEEL)
	rm -rf dist sharded_loader.egg-info $(WITHOUT)
	$(WHEEL)/bin/python -m build --no-isolation
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(WHEEL)/bin/python -m pip install -qq --force-reinstall --no-deps dist/*.whl
	mkdir -p $(WITHOUT)
	tar -xzf dist/*.tar.gz -C $(WITHOUT) --strip-components 1
	rm -r $(WITHOUT)/sharded_loader
	cd $(WITHOUT) && env -u PYTHONPATH $(abspath $(WHEEL))/bin/python -c "$$IN_SITE_PACKAGES"
	cd $(WITHOUT) && env -u PYTHONPATH $(abspath $(WHEEL))/bin/python -m pytest -m "not lint" tests/docs/test_blocks.py tests/tutorials
	cd $(WITHOUT) && env -u PYTHONPATH $(abspath $(WHEEL))/bin/python -m pytest --pyargs sharded_loader --ignore-glob "/*/integrations/*"

export IN_SITE_PACKAGES = import sharded_loader, sysconfig; assert sharded_loader.__file__.startswith(sysconfig.get_path("purelib"))

clean:
	rm -rf $(VENV) $(PYTHONS:%=.venv-%) $(FRAMEWORKS) $(RAY) $(STORES) $(LOWEST) $(WHEEL) build dist site sharded_loader.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# pip is what `venv` makes last: an interrupted one is made again.
$(BIN)/pip:
	@$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 10) else \"Python >= 3.10 needed, this is \" + sys.version.split()[0] + \": make PYTHON=python3.11\")"
	$(PYTHON) -m venv $(VENV)

# setuptools first and no isolated build: pip fills that one without asking constraints.txt.
$(VENV)/demo.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[demo]"
	touch $@

$(VENV)/test.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[test]"
	touch $(VENV)/demo.stamp $@

$(VENV)/frameworks.stamp: $(INPUTS) constraints-frameworks.txt | $(BIN)/pip
	@echo "Installing into $(VENV) (once, several minutes) ..."
	$(PIP) setuptools
	$(PIP) -c constraints-frameworks.txt --no-build-isolation -e ".[test,frameworks]"
	$(PIP) -c constraints-frameworks.txt --no-deps $(APART) $(NEEDED)
	touch $@

$(VENV)/ray.stamp: $(INPUTS) constraints-ray.txt | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) -c constraints-ray.txt --no-build-isolation -e ".[test,ray]" "ray[train]"
	touch $@

$(VENV)/stores.stamp: $(INPUTS) constraints-stores.txt | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[test]"
	$(PIP) --no-deps -r constraints-stores.txt
	touch $@

$(VENV)/docs.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[docs]"
	touch $@

$(VENV)/test-docs.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[test,docs,browser]"
	touch $(VENV)/demo.stamp $(VENV)/test.stamp $(VENV)/docs.stamp $@

# pip installs the versions of constraints.txt, then the lowest in their place. `pip check` fails if a package needs more.
$(VENV)/lowest.stamp: $(INPUTS) constraints-lowest.txt | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e . aiohttp hypothesis psutil pytest pytest-timeout
	$(BIN)/python -m pip install -qq --no-deps -r constraints-lowest.txt
	$(BIN)/python -m pip check
	touch $@

$(VENV)/dist.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[dist]"
	touch $@

# What the wheel's extra "test" requires, not the package itself: an editable install would be found before the wheel.
$(VENV)/wheel.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into $(VENV) (once, a minute or two) ..."
	$(PIP) setuptools build
	$(PIP) --no-build-isolation ".[test]"
	touch $@
