# The two commands are `make test` and `make check`; both set up .venv on first use.
# Every path below is relative to this folder, so a checkout under a path with spaces works too.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
DOCS_TOOLS := $(VENV)/.docs-tools
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Threads that wait by spinning starve each other where cores are shared. No result depends on it.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help setup check test test-asan lint format bench docs clean verify-elementary verify-portable verify-arm arm-tools \
	native-drivers native-drivers-arm

ROOT := $(shell cd "$$(dirname "$(strip $(MAKEFILE_LIST))")" && pwd -P)
ifneq ($(ROOT),$(shell pwd -P))
# Reached as `make -f PATH/Makefile` from another folder: go there first.
help setup check test test-asan lint format bench docs clean verify-elementary verify-portable verify-arm:
	@$(MAKE) --no-print-directory -C "$(ROOT)" $@
else

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1@\2/p' Makefile | \
		while IFS=@ read -r name text; do printf 'make %-18s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## create .venv and install the project with its pinned tools, if that is not done yet

check: $(STAMP) ## judge the reference and the native provider in both numeric profiles, golden hashes included
	$(BIN)/python scripts/check_p1.py --provider reference
	$(BIN)/python scripts/check_p1.py --provider reference --profile portable-fp32-mhc-v1
	$(BIN)/python scripts/check_p1.py --provider native
	$(BIN)/python scripts/check_p1.py --provider native --profile portable-fp32-mhc-v1

test: lint ## lint, check types, then run every test
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(STAMP) ## ruff check, ruff format --check and mypy; changes no file
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## let ruff mend and format what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

BENCH_FLAGS ?=

bench: $(STAMP) ## time the block beside PyTorch and HF transformers, after a correctness gate (minutes)
	@mkdir -p build
	$(BIN)/python -m benchmarks.block --json build/bench.json --plot build/bench.png $(BENCH_FLAGS)
	$(BIN)/python -m benchmarks.modules

docs: $(DOCS_TOOLS) ## build the documents and an API page for each module as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html; to search it: python -m http.server --directory build/site"

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	rm -f rl_engine/mhc/backends/native/*.so rl_engine/mhc/backends/native/*.so.new
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# All 2^32 inputs of exp, rsqrt and sqrt against a higher precision, then all results of a build with FMA against those of
# the build without. STRIDE=64 runs every 64th input.
STRIDE ?= 1
ELEMENTARY_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
ELEMENTARY_FLAGS := -std=c++20 -O2 -Wall -Wextra -Icsrc/mhc/include
ELEMENTARY_RUN := --stride $(STRIDE) --threads $(ELEMENTARY_THREADS) --hardest tests/elementary/hardest_inputs.txt

verify-elementary: ## exp and rsqrt are correctly rounded on all 2^32 inputs, with and without FMA (minutes)
verify-elementary: build/verify_elementary build/verify_elementary_fma
	build/verify_elementary $(ELEMENTARY_RUN) >build/elementary.txt || { cat build/elementary.txt; exit 1; }
	@cat build/elementary.txt
	build/verify_elementary_fma $(ELEMENTARY_RUN) --no-reference >build/elementary_fma.txt
	@sed -n 's/ wrong .*checksum//p' build/elementary.txt >build/elementary.sums
	@sed -n 's/ wrong .*checksum//p' build/elementary_fma.txt | diff build/elementary.sums - || \
		{ echo "make: the build with FMA has other results" >&2; exit 1; }
	@echo "the build with FMA has the same results"

build/verify_elementary: csrc/mhc/verify/verify_elementary.cpp $(wildcard csrc/mhc/verify/*.hpp csrc/mhc/include/mhc/*.hpp)
	@mkdir -p build
	$(CXX) $(ELEMENTARY_FLAGS) -ffp-contract=off $< -o $@ -lquadmath -lpthread

build/verify_elementary_fma: csrc/mhc/verify/verify_elementary.cpp $(wildcard csrc/mhc/verify/*.hpp csrc/mhc/include/mhc/*.hpp)
	@mkdir -p build
	$(CXX) $(ELEMENTARY_FLAGS) -mfma -ffp-contract=fast $< -o $@ -lquadmath -lpthread

# Both C++ blocks, the plain one and the native backend, against the golden manifest of the portable profile, on this
# machine and on an emulated aarch64. A compiler may fuse a multiply and an add (on aarch64 it does by default), so
# -ffp-contract=off is no detail.
PORTABLE_SOURCES := $(wildcard csrc/mhc/verify/portable_*.cpp)
PORTABLE_HEADERS := $(wildcard csrc/mhc/verify/*.hpp csrc/mhc/include/mhc/*.hpp)
PORTABLE_FLAGS := -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -Wconversion -Icsrc/mhc/include
VERIFY_PORTABLE := $(BIN)/python csrc/mhc/verify/verify_portable.py --stride 4096
ARM_CXX := aarch64-linux-gnu-g++
ARM_OBJDUMP := aarch64-linux-gnu-objdump
ARM_RUN := qemu-aarch64
ARM_PACKAGES := g++-aarch64-linux-gnu qemu-user

VERIFY_UNFUSED := $(BIN)/python csrc/mhc/verify/verify_unfused.py
HOST_DRIVERS := build/verify_native
ARM_DRIVERS := build/verify_native_arm

# $(call native_drivers,FOLDER,COMPILER,MORE OPTIONS): native_driver runs the entries for the whole block,
# native_operators_driver those for each operator. A kept folder would remember another compiler, hence --fresh.
native_drivers = CXX="$(2)" $(BIN)/cmake --fresh --log-level=WARNING -S csrc/mhc/verify -B $(1) -G Ninja \
	-DCMAKE_MAKE_PROGRAM="$(ROOT)/$(BIN)/ninja" -DCMAKE_BUILD_TYPE=Release $(3) && \
	$(BIN)/cmake --build $(1) --parallel $(JOBS) --target native_driver native_operators_driver

verify-portable: ## both C++ blocks give the portable golden hashes on this machine, at each level of instructions
verify-portable: $(STAMP) build/portable_driver native-drivers
	$(VERIFY_UNFUSED) $(HOST_DRIVERS)
	@isas=$$($(HOST_DRIVERS)/native_driver --isas) || exit 1; set -- --driver build/portable_driver; \
	for isa in $$isas; do for driver in native_driver native_operators_driver; do \
		set -- "$$@" --driver "$(HOST_DRIVERS)/$$driver --isa $$isa"; \
	done; done; \
	$(VERIFY_PORTABLE) "$$@"

verify-arm: ## the same on an emulated aarch64 (installs a cross compiler and qemu-user)
verify-arm: $(STAMP) build/portable_driver build/portable_driver_arm native-drivers-arm
	$(VERIFY_UNFUSED) $(ARM_DRIVERS) --objdump $(ARM_OBJDUMP)
	$(VERIFY_PORTABLE) --driver build/portable_driver --driver '$(ARM_RUN) build/portable_driver_arm' \
		--driver '$(ARM_RUN) $(ARM_DRIVERS)/native_driver --isa neon' \
		--driver '$(ARM_RUN) $(ARM_DRIVERS)/native_operators_driver --isa neon'

native-drivers: $(STAMP)
	$(call native_drivers,$(HOST_DRIVERS),$(CXX))

native-drivers-arm: $(STAMP) | arm-tools
	$(call native_drivers,$(ARM_DRIVERS),$(ARM_CXX),-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64)

build/portable_driver: $(PORTABLE_SOURCES) $(PORTABLE_HEADERS)
	@command -v "$(CXX)" >/dev/null || { echo "make: '$(CXX)' was not found. On Debian or Ubuntu:" \
		"apt-get install g++" >&2; exit 1; }
	@mkdir -p build
	$(CXX) $(PORTABLE_FLAGS) $(PORTABLE_SOURCES) -o $@

# Linked statically, so that the emulator needs no aarch64 libraries at run time.
build/portable_driver_arm: $(PORTABLE_SOURCES) $(PORTABLE_HEADERS) | arm-tools
	@mkdir -p build
	$(ARM_CXX) $(PORTABLE_FLAGS) -static $(PORTABLE_SOURCES) -o $@

arm-tools:
	@if command -v $(ARM_CXX) >/dev/null && command -v $(ARM_RUN) >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $(ARM_PACKAGES)"; \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(ARM_PACKAGES) >/dev/null && \
		exit 0; \
	fi; \
	echo "make: verify-arm needs $(ARM_CXX) and $(ARM_RUN). On Debian or Ubuntu, as root:" \
		"apt-get install $(ARM_PACKAGES)" >&2; exit 1

# The stamp of the venv goes first and comes back last. A run that finds none starts from an empty venv, since an
# install may have been cut short; a run that finds an old one brings the venv up to date in place.
# The build backend and its tools are installed beside the others, so their own dependencies are pinned as well.
$(TOOLS): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { echo "make: '$(PYTHON)' was not found." \
		"Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: Python 3.10 or newer is needed, but '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." \
		"Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot create" \
		"virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@if [ -f $(TOOLS) ]; then rm $(TOOLS); else "$(PYTHON)" -m venv --clear $(VENV); fi
	$(PIP_INSTALL) scikit-build-core cmake ninja
	$(PIP_INSTALL) --no-build-isolation --config-settings cmake.define.RL_MHC_NATIVE=OFF --editable '.[dev]'
	@touch $(TOOLS)

# The extra `docs`, at the first build of the site: nothing else needs it. It reads the sources and imports none of them, so
# nothing has to be compiled.
$(DOCS_TOOLS): $(TOOLS)
	$(PIP_INSTALL) mkdocs mkdocs-material 'mkdocstrings[python]'
	@touch $(DOCS_TOOLS)

# The native backend is compiled in build/, where a change recompiles what it touches. A step of its own: an error in it
# leaves the venv as it is.
NATIVE_SOURCES := CMakeLists.txt csrc/mhc/CMakeLists.txt $(wildcard csrc/mhc/include/mhc/* csrc/mhc/core/* csrc/mhc/kernels/*)

$(STAMP): $(TOOLS) $(NATIVE_SOURCES)
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	@touch $(STAMP)

# The native backend's tests with every access and every integer operation checked, at each level of instructions that
# this processor runs. The interpreter has no sanitizer in it, so the runtimes are loaded before it.
SANITIZE := -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -ffp-contract=off -fno-math-errno \
	-fPIC -fvisibility=hidden -Wno-psabi -Icsrc/mhc/include
SANITIZED := $(foreach level,baseline avx2 avx512,$(patsubst csrc/mhc/kernels/%.cpp,build/asan/%.$(level).o,$(wildcard \
	csrc/mhc/kernels/*.cpp))) $(patsubst csrc/mhc/core/%.cpp,build/asan/core_%.o,$(wildcard csrc/mhc/core/*.cpp))
SANITIZED_TESTS := $(addprefix tests/backends/,test_native_cases.py test_native_canaries.py test_native_layouts.py \
	test_native_elementary.py)

test-asan: $(STAMP) ## run the native backend's tests under ASan and UBSan, on x86-64 with g++ (minutes)
	@$(MAKE) --no-print-directory --jobs $(JOBS) build/asan/librl_mhc_native.so
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(BIN)/python -m pytest -q -p no:cacheprovider $(SANITIZED_TESTS) --native-library build/asan/librl_mhc_native.so

build/asan/librl_mhc_native.so: $(SANITIZED)
	g++ -shared -fsanitize=address,undefined $(SANITIZED) -o $@ -lpthread

build/asan/core_%.o: csrc/mhc/core/%.cpp $(NATIVE_SOURCES)
	@mkdir -p build/asan
	g++ $(SANITIZE) -DMHC_HAVE_BASELINE -DMHC_HAVE_AVX2 -DMHC_HAVE_AVX512 -c $< -o $@

build/asan/%.baseline.o: csrc/mhc/kernels/%.cpp $(NATIVE_SOURCES)
	@mkdir -p build/asan
	g++ $(SANITIZE) -DMHC_LEVEL=baseline -c $< -o $@

build/asan/%.avx2.o: csrc/mhc/kernels/%.cpp $(NATIVE_SOURCES)
	@mkdir -p build/asan
	g++ $(SANITIZE) -DMHC_LEVEL=avx2 -mavx2 -c $< -o $@

build/asan/%.avx512.o: csrc/mhc/kernels/%.cpp $(NATIVE_SOURCES)
	@mkdir -p build/asan
	g++ $(SANITIZE) -DMHC_LEVEL=avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 -c $< -o $@

endif
