# Two commands do everything: `make demo` (the whole pipeline on this CPU) and `make test`.
PYTHON ?= python3.11
BIN := .venv/bin
OUT ?= demo-out
WORKERS ?= 2

.PHONY: help setup demo test lint docs format clean

help:
	@echo "make setup   create .venv and install everything, pinned by constraints.txt"
	@echo "make demo    run the whole pipeline on real text on this CPU; results in $(OUT)/"
	@echo "make test    run the whole test suite on WORKERS processes (2)"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make docs    write the tables of docs/configuration.md from the fields' documentation"

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/calm-scale demo --out $(OUT)

test: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	{ sed '/^<!-- Below/q' docs/configuration.md; $(BIN)/calm-scale config explain --markdown; } > build-docs.md
	mv build-docs.md docs/configuration.md

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo-out build *.egg-info .mypy_cache .ruff_cache .pytest_cache
