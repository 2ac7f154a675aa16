# Everything runs from a virtual environment that this file makes. To use a Python that has what requirements.txt lists:
#   make test VENV= PYTHON=python3
VENV ?= .venv
PYTHON ?= python3

.DEFAULT_GOAL := help

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
$(INSTALLED): requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
endif

.PHONY: help venv build build-here test demo golden cuda-check clean

help:
	@echo 'make test        build what this machine can run, then run the tests'
	@echo 'make demo        build what this machine can run, then run demo/demo.py'
	@echo 'make build       build every variant this machine can compile (CUDA where nvcc is found, all architectures)'
	@echo 'make cuda-check  compile the CUDA variant for all architectures and check all binaries'
	@echo 'make golden      regenerate tests/golden.json (only for a new spec version)'
	@echo 'make venv        only make .venv and install requirements.txt'
	@echo 'make clean       remove build/'
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV) (empty: use PYTHON as it is)  ARGS= (more arguments for test and demo)'

venv: $(INSTALLED)

build: $(INSTALLED)
	$(PY) scripts/build_local.py

# The CPU variant, and the CUDA variant for this machine's GPU if it has one.
build-here: $(INSTALLED)
	$(PY) scripts/build_local.py --cuda-archs native

test: build-here
	$(PY) -m pytest tests $(ARGS)

demo: build-here
	$(PY) demo/demo.py $(ARGS)

golden: build-here
	$(PY) tests/make_golden.py

cuda-check: build
	$(PY) scripts/check_binary.py

clean:
	rm -rf build
