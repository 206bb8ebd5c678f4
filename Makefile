# make             build ./train_xmod, the CPU trainer, and, where nvcc is, ./train_xmodcu for GPUs; say what was found
# make quickstart  install what is missing, build, train a small model on this repository's text, show a sample
# make test        install what the tests need, build and run all of them
# make compare     train a few steps on the CPU and with CUDA (on this machine's GPU; without one, emulated) and print
#                  how far apart their tensors are; COMPARE=--worst: only the worst of each kind
# make bench       measure each pass and the whole training step beside what this machine can do (some minutes);
#                  BENCH='--size tiny' or other options: BENCH=--help lists them; scripts/gpu_check.sh is for GPUs
# make format      format the C++ sources
# make clean       remove what was built (quickstart/ holds a trained model: it stays)
#
# Variables: CXX, ARCH (a -march value; by default this machine's), CXXFLAGS, PYTHON, NVCC,
#   CUDA_ARCH (a GPU's compute capability, such as 90 for an H200; by default this machine's).

SHELL := /bin/bash
.DEFAULT_GOAL := all

ifeq ($(origin CXX),default)
  CXX := g++
endif
ARCH ?= native
CXXFLAGS ?= -O3
TEST_CXXFLAGS ?= -O2
WARNINGS := -Wall -Wextra -Wno-unknown-pragmas

comma := ,
space := $() $()

# What the compiler can do is found out by compiling: $(call compiles,source,flags) is "yes" or empty.
compiles = $(shell printf '$(1)' | $(CXX) -x c++ - $(2) -o /dev/null >/dev/null 2>&1 && echo yes)
HASH := \#
MACHINE := $(if $(call compiles,int main() {},-march=$(ARCH)),-march=$(ARCH))
OPENMP := $(if $(call compiles,$(HASH)include <omp.h>\nint main() { return omp_get_max_threads() == 0; },-fopenmp),-fopenmp)
# Open MPI and MPICH both print their compiler's command so; of MPI, its C interface is used. MPI= builds without.
MPI ?= $(shell command -v mpicxx 2>/dev/null)
MPI_COMMAND := $(if $(MPI),$(shell $(MPI) -show 2>/dev/null))
MPI_COMPILE := $(filter -I%,$(MPI_COMMAND)) -DXMOD_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX
MPI_LINK := $(filter -L% -l% -Wl%,$(filter-out -lmpi_cxx -lmpichcxx -lmpicxx,$(MPI_COMMAND)))
# What can be compiled and linked.
HAS_MPI := $(if $(MPI_COMMAND),$(call compiles,$(HASH)include <mpi.h>\nint main() { return MPI_Finalize(); },$(MPI_COMPILE) $(MPI_LINK)))
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA_ARCH ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
  grep -E '^[0-9]+\.[0-9]+$$' | head -1 | tr -d .)
# The first Python that has the packages of the scripts; SciPy, for the scaling law, where there is one with it.
PYTHON ?= $(or $(shell for packages in numpy,scipy,matplotlib numpy,matplotlib; do for p in python3 /usr/bin/python3; do \
  $$p -c "import $$packages" 2>/dev/null && echo $$p && break 2; done; done),python3)

# No fast-math: NaN checks must work. -fno-math-errno only says that nobody reads errno behind sqrt.
COMPILE = $(CXX) -std=c++20 -fno-math-errno $(MACHINE) $(OPENMP) $(WARNINGS) -I. -MMD -MP

# For GPUs of one architecture, if nvcc knows it, or for 8.x and 9.0, and by way of PTX for later ones.
GPU := $(patsubst sm_%,%,$(subst .,,$(CUDA_ARCH)))
KNOWN_GPU = $(if $(GPU),$(filter-out sm_7%,$(filter sm_$(GPU),$(shell $(NVCC) --list-gpu-code 2>/dev/null))))
GPU_CODE = $(if $(KNOWN_GPU),-gencode arch=compute_$(GPU)$(comma)code=sm_$(GPU),\
  -gencode arch=compute_80$(comma)code=sm_80 -gencode arch=compute_90$(comma)code=[sm_90$(comma)compute_90])
ANY_GPU := 8.x$(comma) 9.0 and later
FOR_GPU = $(if $(KNOWN_GPU),$(GPU),$(ANY_GPU) ($(if $(GPU),none for $(GPU) itself,no GPU found here)))
HOST_FLAGS = $(subst $(space),$(comma),$(strip $(MACHINE) $(OPENMP) $(WARNINGS) -fno-math-errno))
COMPILE_CUDA = $(NVCC) -std=c++20 -ccbin $(CXX) $(GPU_CODE) -Xcompiler $(HOST_FLAGS) -I. -MMD -MP
TRAIN_CUDA := $(if $(NVCC),$(patsubst %.cu,%cu,$(wildcard train_xmod.cu)))

FORMATTED := $(wildcard *.cpp *.cu *.h bench/*.cpp bench/*.cu bench/*.h xmod/*.cpp xmod/*.h xmod/layers/*.h test/*.cpp test/*.cu test/*.h \
  test/cuda_emulation/*.h test/cuda_emulation/include/*.h)
# Tests that are built a second time, for the CUDA backend. The others run there too, in minutes under emulation:
# make test ON_CUDA='properties properties_routing generate'
ON_CUDA ?= optimizer passes passes_attention passes_experts passes_routing experts reference
RECORDED_EMULATED := build/record_cpu.o build/record_cuda_emulated.o build/cpu_matmul.o
CUDA_TESTS := $(ON_CUDA:%=build/test_cuda_%)
DEVICE_TESTS := $(ON_CUDA:%=build/test_device_%) $(patsubst %,build/test_device_%,\
  cuda_attention cuda_graph cuda_passes_bf16 cuda_shared_masters)
TESTS := $(patsubst test/%.cpp,build/%,$(wildcard test/test_*.cpp)) $(CUDA_TESTS) build/compare_backends_emulated

.PHONY: all report quickstart test test-programs device-test-programs compare bench format format-check clean

all: report train_xmod $(TRAIN_CUDA)

report:
	@echo "compiler  $(CXX) $(MACHINE)"
	@echo "OpenMP    $(if $(OPENMP),found: all cores are used,not found: one thread only)"
	@echo "MPI       $(if $(HAS_MPI),found at $(MPI): mpirun -np N ./train_xmod trains with N processes,not found: one process only (scripts/install_deps.sh mpi))"
	@echo "nvcc      $(if $(NVCC),found at $(NVCC): for compute capability $(FOR_GPU),not found: no train_xmodcu)"

build:
	@mkdir -p build

train_xmod: train_xmod.cpp build/cpu_matmul.o | build
	@printf '#include <nlohmann/json.hpp>\n' | $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	  { echo 'error: nlohmann/json not found: run scripts/install_deps.sh build' >&2; exit 1; }
	@printf 'typedef int v __attribute__((vector_size(16)));\nv f(v a) { return __builtin_shufflevector(a, a, 1, 0, 3, 2); }\n' | \
	  $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	  { echo 'error: $(CXX) is too old: g++ 12 or clang++ 12 is needed, for example make CXX=g++-12' >&2; exit 1; }
	$(COMPILE) $(CXXFLAGS) $(if $(HAS_MPI),$(MPI_COMPILE)) -MF build/train_xmod.d $< $(filter %.o,$^) -o $@ $(if $(HAS_MPI),$(MPI_LINK))

# On its own, so that tests do not compile it again and again, and never without optimisation.
build/cpu_matmul.o: xmod/cpu_matmul.cpp | build
	$(COMPILE) $(CXXFLAGS) -c $< -o $@

train_xmodcu: train_xmod.cu | build
	$(COMPILE_CUDA) $(CXXFLAGS) $(if $(HAS_MPI),$(MPI_COMPILE)) -MF build/train_xmodcu.d $< -o $@ -lcublas \
	  $(if $(HAS_MPI),$(filter -L% -l%,$(MPI_LINK)))

# CUDA code of tests runs on the CPU. -rdynamic: messages name kernels. A GPU loads no vector that is not aligned.
ALIGNED := $(if $(call compiles,int main() {},-fsanitize=alignment),-fsanitize=alignment -fno-sanitize-recover=all)
build/test_cuda_%: EMULATION := -Itest/cuda_emulation/include -rdynamic $(ALIGNED)

$(CUDA_TESTS): build/test_cuda_%: test/test_%.cpp build/cpu_matmul.o | build
	$(COMPILE) $(TEST_CXXFLAGS) -DXMOD_TEST_CUDA $(EMULATION) $< $(filter %.o,$^) -o $@ -lgtest -lgtest_main -pthread

# Both backends in one program.
build/test_cuda_training build/test_cuda_program: build/test_%: test/test_%.cpp $(RECORDED_EMULATED) | build
	$(COMPILE) $(TEST_CXXFLAGS) $(EMULATION) $< $(filter %.o,$^) -o $@ -lgtest -lgtest_main -pthread

build/test_%: test/test_%.cpp build/cpu_matmul.o | build
	$(COMPILE) $(TEST_CXXFLAGS) $(EMULATION) $< $(filter %.o,$^) -o $@ -lgtest -lgtest_main -pthread

# The same tests on a GPU, compiled by nvcc: build/test_device_passes and so on. scripts/gpu_check.sh runs them.
build/test_device_%: test/test_%.cpp build/cpu_matmul.o | build
	$(COMPILE_CUDA) $(TEST_CXXFLAGS) -DXMOD_TEST_CUDA= -x cu $< -Xlinker $(filter %.o,$^) -o $@ -lgtest -lgtest_main -lcublas

device-test-programs: $(DEVICE_TESTS)

# For tests of several ranks.
build/emulated_train: test/emulated_train.cpp build/cpu_matmul.o | build
	$(COMPILE) $(TEST_CXXFLAGS) $(MPI_COMPILE) -Itest/cuda_emulation/include -rdynamic $(ALIGNED) $< $(filter %.o,$^) -o $@ \
	  $(MPI_LINK) -pthread

# The two backends in objects of their own: where there is a GPU, no compiler takes both.
build/record_cpu.o: test/record_cpu.cpp | build
	$(COMPILE) $(TEST_CXXFLAGS) -c $< -o $@

build/record_cuda.o: test/record_cuda.cu | build
	$(COMPILE_CUDA) $(TEST_CXXFLAGS) -c $< -o $@

build/record_cuda_emulated.o: test/record_cuda.cu | build
	$(COMPILE) $(TEST_CXXFLAGS) -Itest/cuda_emulation/include $(ALIGNED) -x c++ -c $< -o $@

build/compare_backends.o: test/compare_backends.cpp | build
	$(COMPILE) $(TEST_CXXFLAGS) -c $< -o $@

build/compare_backends: build/compare_backends.o build/record_cpu.o build/record_cuda.o build/cpu_matmul.o
	$(NVCC) -ccbin $(CXX) $(if $(OPENMP),-Xcompiler $(OPENMP)) $^ -o $@ -lcublas

build/compare_backends_emulated: build/compare_backends.o $(RECORDED_EMULATED)
	$(CXX) $(OPENMP) $(ALIGNED) -rdynamic $^ -o $@ -pthread

build/bench_xmod: bench/bench_xmod.cpp build/cpu_matmul.o | build
	$(COMPILE) $(CXXFLAGS) $< $(filter %.o,$^) -o $@ -ldl

build/bench_xmodcu: bench/bench_xmodcu.cu | build
	$(COMPILE_CUDA) $(CXXFLAGS) $< -o $@ -lcublas

# The GPU's benchmark on the CPU: its figures mean nothing, but it runs.
build/bench_emulated: bench/bench_xmodcu.cu build/cpu_matmul.o | build
	$(COMPILE) $(TEST_CXXFLAGS) -Itest/cuda_emulation/include -rdynamic -x c++ $< -x none $(filter %.o,$^) -o $@

-include $(wildcard build/*.d)

test-programs: $(TESTS) $(if $(HAS_MPI),build/emulated_train)

# The second make starts after the packages are there, so it sees them.
test:
	@scripts/install_deps.sh build test plot
	@$(MAKE) --no-print-directory -j2 train_xmod build/bench_xmod build/bench_emulated test-programs
	@$(PYTHON) scripts/run_tests.py $(TESTS)

COMPARED := build/compare_backends$(if $(and $(NVCC),$(CUDA_ARCH)),,_emulated)
compare: $(COMPARED)
	@echo 'CUDA against the CPU$(if $(findstring emulated,$(COMPARED)),; no GPU found here: its kernels run emulated)'
	@OMP_WAIT_POLICY=passive $(COMPARED) $(COMPARE)

bench: build/bench_xmod
	@build/bench_xmod $(BENCH)

quickstart:
	@scripts/install_deps.sh build plot
	@$(MAKE) --no-print-directory report train_xmod
	@PYTHON='$(PYTHON)' scripts/quickstart.sh

format:
	clang-format -i $(FORMATTED)

format-check:
	clang-format --dry-run --Werror $(FORMATTED)

clean:
	rm -rf build train_xmod train_xmodcu
