// Twenty training steps with CUDA, emulated, against the CPU: not what a step computes (make compare) but
// whether small differences stay small.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "small_config.h"
#include "training_record.h"

namespace xmod {
namespace {

constexpr size_t kSteps = 20;

TrainingRun run_of(Arch arch) {
  TrainingRun run;
  ModelConfig& c = run.config = small_config(arch);
  c.vocab_size = 64;
  c.dim = 32;
  c.active_layers = has_experts(arch) ? 2 : 3;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 16;
  c.ffn_dim = 48;
  c.seq_len = 30;
  if (has_experts(arch)) c.experts = 4, c.expert_dim = 24, c.shared_experts = 1;
  run.B = 2;
  run.seed = 2;
  run.lr = run.adamw_lr = 0.01;
  for (size_t step = 0; step < kSteps; step++)
    run.batches.push_back(learnable_tokens(run.B * (c.seq_len + 1), c.vocab_size, step));
  return run;
}

std::vector<double> losses(const TrainingRecord& record) {
  std::vector<double> all;
  for (const RecordedStep& step : record) all.push_back(step.loss);
  return all;
}

std::vector<double> on_cpu(TrainingRun run, Precision precision) {
  run.machine.precision = precision;
  run.machine.instructions = precision == Precision::bf16 ? "portable" : "auto";
  return losses(record_on_cpu(run));
}

// Twice, with the kernels' threads in different orders.
std::vector<double> on_cuda(TrainingRun run, Precision precision) {
  run.machine.precision = precision;
  run.thread_order = 1;
  const std::vector<double> first = losses(record_on_cuda(run));
  run.thread_order = 2;
  EXPECT_EQ(losses(record_on_cuda(run)), first) << "a second run, bit for bit";
  return first;
}

double rms_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < b.size(); i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum / static_cast<double>(b.size()));
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < b.size(); i++) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

class TwentySteps : public ::testing::TestWithParam<Arch> {
 protected:
  const TrainingRun run_ = run_of(GetParam());
  const std::vector<double> fp32_ = on_cpu(run_, Precision::fp32);
};

TEST_P(TwentySteps, LossesAreThoseOfTheCpu) {
  ASSERT_EQ(fp32_.size(), kSteps);
  EXPECT_LT(fp32_.back(), fp32_.front() - 0.2) << "too little is learned for the losses to differ";
  EXPECT_LE(largest_difference(on_cuda(run_, Precision::fp32), fp32_), 1e-4);
}

// What rounding does to the CPU's losses is the measure: its own error is at most twice PyTorch's
// (test_reference.cpp).
TEST_P(TwentySteps, InBf16LossesErrAtMostTwiceAsMuchAsTheCpus) {
  const double cpu = rms_difference(on_cpu(run_, Precision::bf16), fp32_);
  const std::vector<double> cuda = on_cuda(run_, Precision::bf16);
  EXPECT_GT(cpu, 1e-5) << "this is no bf16";
  EXPECT_LE(rms_difference(cuda, fp32_), 2 * cpu);
}

INSTANTIATE_TEST_SUITE_P(Architectures, TwentySteps, ::testing::Values(Arch::dense, Arch::xmod, Arch::moe),
                         [](const auto& info) { return std::string(arch_name(info.param)); });

}  // namespace
}  // namespace xmod
