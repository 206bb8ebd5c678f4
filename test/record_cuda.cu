#define TESTING
#include "record_training.h"
#include "train_xmod.cu"
#ifndef __CUDACC__
#include "xmod/commands.h"
#endif

namespace xmod {

TrainingRecord record_on_cuda(const TrainingRun& run) {
#ifndef __CUDACC__
  cuda_emulation::set_thread_order(run.thread_order);
#endif
  if (run.machine.precision == Precision::bf16) return TrainingRecorder<CudaBackend<bf16>>(run).record();
  return TrainingRecorder<CudaBackend<float>>(run).record();
}

#ifndef __CUDACC__
int run_train_xmodcu(int argc, char** argv) {
  return run_commands<CudaBackend<float>, CudaBackend<bf16>>(argc, argv);
}
#endif

}  // namespace xmod
