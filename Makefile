# make             build ./train_xmod, the CPU trainer, and say what was found
# make quickstart  install what is missing, build, train a small model on this repository's text, show a sample
# make test        install what the tests need, build and run all of them
# make bench      measure each pass and the whole training step beside what this machine can do (some minutes);
#                 BENCH='--size tiny' or other options: BENCH=--help lists them
# make format      format the C++ sources
# make clean       remove what was built (quickstart/ holds a trained model: it stays)
#
# Variables: CXX, ARCH (a -march value; by default this machine's), CXXFLAGS, PYTHON.

SHELL := /bin/bash
.DEFAULT_GOAL := all

ifeq ($(origin CXX),default)
  CXX := g++
endif
ARCH ?= native
CXXFLAGS ?= -O3
TEST_CXXFLAGS ?= -O2
WARNINGS := -Wall -Wextra -Wno-unknown-pragmas

# What the compiler can do is found out by compiling: $(call compiles,source,flags) is "yes" or empty.
compiles = $(shell printf '$(1)' | $(CXX) -x c++ $(2) -o /dev/null - >/dev/null 2>&1 && echo yes)
HASH := \#
MACHINE := $(if $(call compiles,int main() {},-march=$(ARCH)),-march=$(ARCH))
OPENMP := $(if $(call compiles,$(HASH)include <omp.h>\nint main() { return omp_get_max_threads() == 0; },-fopenmp),-fopenmp)
MPI := $(shell command -v mpicxx 2>/dev/null)
NVCC := $(shell command -v nvcc 2>/dev/null)
# The first Python that has the packages of the scripts.
PYTHON ?= $(or $(shell for p in python3 /usr/bin/python3; do \
  $$p -c 'import numpy, matplotlib' 2>/dev/null && echo $$p && break; done),python3)

# No fast-math: NaN checks must work. -fno-math-errno only says that nobody reads errno behind sqrt.
COMPILE = $(CXX) -std=c++20 -fno-math-errno $(MACHINE) $(OPENMP) $(WARNINGS) -I. -MMD -MP

TESTS := $(patsubst test/%.cpp,build/%,$(wildcard test/test_*.cpp))

.PHONY: all report quickstart test test-programs bench format clean

all: report train_xmod

report:
	@echo "compiler  $(CXX) $(MACHINE)"
	@echo "OpenMP    $(if $(OPENMP),found: all cores are used,not found: one thread only)"
	@echo "MPI       $(if $(MPI),found at $(MPI),not found); several ranks are not built yet: skipped"
	@echo "nvcc      $(if $(NVCC),found at $(NVCC),not found); train_xmodcu is not built yet: skipped"

build:
	@mkdir -p build

train_xmod: train_xmod.cpp | build
	@printf '#include <nlohmann/json.hpp>\n' | $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	  { echo 'error: nlohmann/json not found: run scripts/install_deps.sh build' >&2; exit 1; }
	@printf 'typedef int v __attribute__((vector_size(16)));\nv f(v a) { return __builtin_shufflevector(a, a, 1, 0, 3, 2); }\n' | \
	  $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	  { echo 'error: $(CXX) is too old: g++ 12 or clang++ 12 is needed, for example make CXX=g++-12' >&2; exit 1; }
	$(COMPILE) $(CXXFLAGS) -MF build/train_xmod.d $< -o $@

build/test_%: test/test_%.cpp | build
	$(COMPILE) $(TEST_CXXFLAGS) $< -o $@ -lgtest -lgtest_main -pthread

build/bench_xmod: bench/bench_xmod.cpp | build
	$(COMPILE) $(CXXFLAGS) $< -o $@ -ldl

-include $(wildcard build/*.d)

test-programs: $(TESTS)

# The second make starts after the packages are there, so it sees them.
test:
	@scripts/install_deps.sh build test plot
	@$(MAKE) --no-print-directory -j2 train_xmod test-programs
	@$(PYTHON) scripts/run_tests.py

bench: build/bench_xmod
	@build/bench_xmod $(BENCH)

quickstart:
	@scripts/install_deps.sh build plot
	@$(MAKE) --no-print-directory all
	@PYTHON='$(PYTHON)' scripts/quickstart.sh

format:
	clang-format -i train_xmod.cpp bench/*.h bench/*.cpp *.h xmod/*.h xmod/layers/*.h test/*.h test/*.cpp

clean:
	rm -rf build train_xmod
