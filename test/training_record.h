// A short training run on one backend, recorded, so that runs on two backends can be compared. Where there is
// a GPU no compiler takes both backends: each is compiled in an object of its own, from record_cpu.cpp and
// record_cuda.cu, behind a function that tells nothing of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xmod/options.h"
#include "xmod/rng.h"

namespace xmod {

// What a step starts from, as the parameter table lays it out; empty: from where the last one ended.
struct TrainingState {
  std::vector<float> params, buffers;
};

struct TrainingRun {
  ModelConfig config;
  MachineOptions machine;
  int64_t B = 1;                              // sequences of a batch
  std::vector<std::vector<int32_t>> batches;  // each (B, seq_len+1), a step's
  uint64_t seed = 42;                         // of the first weights
  std::vector<TrainingState> states;          // step i starts from states[i], if there are as many
  double lr = 3.2e-3, adamw_lr = 3.2e-3, weight_decay = 0.1, grad_clip = 1;
  bool keep_tensors = false;  // record more than losses
  uint64_t thread_order = 0;  // where CUDA is emulated: of the kernels' threads
};

struct RecordedTensor {
  std::string name;
  std::vector<float> values;
};

struct RecordedStep {
  double loss = 0;
  TrainingState state;                  // that it started from
  std::vector<RecordedTensor> routing;  // rows that layers select, experts that tokens choose
  std::vector<RecordedTensor> activations, gradients;
  std::vector<RecordedTensor> weights;  // behind the update, with thresholds and biases
};

using TrainingRecord = std::vector<RecordedStep>;

// count tokens in which most follow from the one before.
inline std::vector<int32_t> learnable_tokens(int64_t count, int64_t vocab_size, uint64_t seed) {
  std::vector<int32_t> tokens;
  int64_t token = 0;
  for (int64_t i = 0; i < count; i++) {
    const auto words = philox(seed, stream_of("tokens"), static_cast<uint64_t>(i));
    token = words[0] % 4 == 0 ? words[1] : 5 * token + 3;
    token %= vocab_size;
    tokens.push_back(static_cast<int32_t>(token));
  }
  return tokens;
}

TrainingRecord record_on_cpu(const TrainingRun& run);
TrainingRecord record_on_cuda(const TrainingRun& run);

// train_xmodcu, with its arguments; where CUDA is emulated only.
int run_train_xmodcu(int argc, char** argv);

}  // namespace xmod
