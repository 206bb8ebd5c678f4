// train_xmodcu with its kernels on the CPU, in fp32, for tests of several ranks (test/test_ranks.py).
#define TESTING
#include "train_xmod.cu"
#include "xmod/commands.h"

int main(int argc, char** argv) {
  return xmod::run_commands<xmod::CudaBackend<float>>(argc, argv);
}
