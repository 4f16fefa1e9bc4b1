# make run: install, then train a small GLM-5 on the Python standard library's source files. make pipeline: all stages of the
# recipe, from pre-training to distillation. make test: the suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run pipeline test test-all smoke lint clean

run: $(VENV)/installed
	$(BIN)/glm5 train tiny

pipeline: $(VENV)/installed
	$(BIN)/glm5 run experiments/recipe

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow" tests/sharded

test-all: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile tests
	$(BIN)/python -m pytest -n 3 --dist loadfile tests/sharded

smoke: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 -m smoke tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("glm5_jax needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[plot]'
	touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info
