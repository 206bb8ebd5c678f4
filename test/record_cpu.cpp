#define TESTING
#include "record_training.h"
#include "train_xmod.cpp"

namespace xmod {

TrainingRecord record_on_cpu(const TrainingRun& run) {
  return TrainingRecorder<CpuBackend>(run).record();
}

}  // namespace xmod
