// train_xmodcu with its kernels on the CPU, for tests of several ranks (test/test_ranks.py).
#define TESTING
#include "train_xmod.cu"
#include "xmod/commands.h"

int main(int argc, char** argv) {
  return xmod::run_commands<xmod::CudaBackend<float>, xmod::CudaBackend<xmod::bf16>>(argc, argv);
}
