# Uses the active virtual environment, or makes .venv; adds what is missing and replaces no installed torch or triton.
# `make test PYTHON=/path/to/python` takes that interpreter as it is and installs nothing.

TORCH := torch==2.13.0
# CUDA builds of torch bring the Triton they want; the CPU build brings none.
TRITON := triton==3.6.0

ifndef PYTHON
VENV := $(or $(VIRTUAL_ENV),.venv)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.deep-gemm-ready
endif

CHECK := -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, not " + sys.version)'

export LOCAL_KERNELS := kernels-community/deep-gemm=$(CURDIR)/build

.PHONY: build example test clean

build: $(READY)
	"$(PYTHON)" scripts/build_kernel.py

example: build
	"$(PYTHON)" example.py

test: build
	"$(PYTHON)" -m pytest tests
	TRITON_INTERPRET=1 "$(PYTHON)" -m pytest tests -m interpreter

clean:
	rm -rf build

ifdef READY
$(READY): requirements-dev.txt Makefile
	test -x "$(PYTHON)" || { python3 $(CHECK) && python3 -m venv "$(VENV)"; }
	"$(PYTHON)" $(CHECK)
	"$(PYTHON)" -c "import torch" 2>/dev/null || "$(PYTHON)" -m pip install "$(TORCH)"
	"$(PYTHON)" -c "import triton" 2>/dev/null || "$(PYTHON)" -m pip install "$(TRITON)"
	"$(PYTHON)" -m pip install -r requirements-dev.txt
	touch "$@"
endif
