// train_xmodcu as a program, emulated: it trains, and where it cannot it says why and what to do.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_emulation/include/cuda_runtime.h"
#include "training_record.h"

namespace xmod {
namespace {

struct Outcome {
  int status;
  std::string out, error;
};

Outcome run(const std::string& command) {
  std::istringstream in("train_xmodcu " + command);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int status = run_train_xmodcu(static_cast<int>(argv.size()), argv.data());
  const std::string error = ::testing::internal::GetCapturedStderr();
  return {status, ::testing::internal::GetCapturedStdout(), error};
}

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  if (end == std::string::npos) return "";
  const size_t before = text.rfind('\n', end);
  return text.substr(before == std::string::npos ? 0 : before + 1, end + 1);
}

std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class CudaProgram : public ::testing::Test {
 protected:
  CudaProgram() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    std::vector<int32_t> header(256);
    const std::vector<int32_t> tokens = learnable_tokens(400, 256, 1);
    header[0] = 20240520, header[1] = 1, header[2] = static_cast<int32_t>(tokens.size());
    std::ofstream file(folder_ / "tokens.bin", std::ios::binary);
    file.write(reinterpret_cast<const char*>(header.data()), 1024);
    for (const int32_t token : tokens) file.write(reinterpret_cast<const char*>(&token), 2);
  }
  ~CudaProgram() {
    cuda_emulation::set_device_count(1);
    cuda_emulation::set_device_error(cudaSuccess);
    cuda_emulation::set_memory_bytes(size_t{16} << 30);
    std::filesystem::remove_all(folder_);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string train(const std::string& out, const std::string& more = "") const {
    return "train --train-data " + path("tokens.bin") + " --val-data " + path("tokens.bin") + " --out " +
           path(out) +
           " --arch xmod --active-layers 3 --dense-prefix 1 --token-sparsity 2 --dim 32 --heads 2 --kv-heads "
           "1 "
           "--head-dim 16 --ffn-dim 48 --seq-len 24 --batch-size 2 --steps 3 --eval-batches 1 " +
           more;
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("xmod_cuda_program_" + std::to_string(getpid()));
};

// All columns but the last, the speed.
std::string without_speed(const std::string& metrics) {
  std::istringstream lines(metrics);
  std::string all;
  for (std::string line; std::getline(lines, line);) all += line.substr(0, line.rfind(',')) + "\n";
  return all;
}

TEST_F(CudaProgram, TrainsAndWritesText) {
  for (const std::string precision : {"fp32", "bf16"}) {
    const std::string with = "with_" + precision, without = "without_" + precision;
    const Outcome graphs = run(train(with, "--precision " + precision));
    ASSERT_EQ(graphs.status, 0) << graphs.error;
    EXPECT_EQ(graphs.error, "");
    ASSERT_EQ(run(train(without, "--no-cuda-graph --precision " + precision)).status, 0);
    const std::string metrics = without_speed(file_text(folder_ / with / "metrics.csv"));
    EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 4) << metrics;
    EXPECT_EQ(metrics, without_speed(file_text(folder_ / without / "metrics.csv")));
  }
  const Outcome text = run("generate --checkpoint " + path("with_bf16/step_00000003") +
                           " --prompt a --max-new-tokens 5 --temperature 0");
  EXPECT_EQ(text.status, 0) << text.error;
  EXPECT_EQ(text.out.size(), 1 + 5 + 1u) << "the prompt, five bytes, a line's end: " << text.out;
}

TEST_F(CudaProgram, WithoutAGpuPointsToTheOther) {
  cuda_emulation::set_device_count(0);
  const Outcome outcome = run(train("out"));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.error,
            "error: CUDA: cudaMemGetInfo failed: cudaErrorNoDevice (no CUDA-capable device is detected): "
            "train without "
            "a GPU: ./train_xmod takes the same flags\n");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
  EXPECT_EQ(run("plan").status, 0) << "needs none";
}

TEST_F(CudaProgram, NamesADriverThatDoesNotFit) {
  for (const cudaError_t error : {cudaErrorInsufficientDriver, cudaErrorSystemDriverMismatch}) {
    cuda_emulation::set_device_error(error);
    const Outcome outcome = run(train("out"));
    EXPECT_EQ(outcome.status, 1);
    EXPECT_EQ(outcome.error, last_line(outcome.error) + "\n");
    EXPECT_NE(outcome.error.find(cudaGetErrorName(error)), std::string::npos) << outcome.error;
    EXPECT_NE(outcome.error.find("update the NVIDIA driver, or train without a GPU: ./train_xmod"),
              std::string::npos)
        << outcome.error;
  }
}

TEST_F(CudaProgram, OutOfMemoryEndsWithThePlanAndWhatToChange) {
  cuda_emulation::set_memory_bytes(size_t{30} << 20);
  const Outcome outcome = run(train("out"));
  EXPECT_EQ(outcome.status, 1);
  for (const char* part :
       {"memory\n", "  parameters ", "  gradients ", "  saved by sparse layers ", "  total "})
    EXPECT_NE(outcome.error.find(part), std::string::npos) << part << "is not in:\n" << outcome.error;
  const std::string line = last_line(outcome.error);
  EXPECT_EQ(line.find("error: out of memory: "), 0u) << line;
  for (const char* part : {"needed", "--batch-size", "--seq-len", "--recompute block"})
    EXPECT_NE(line.find(part), std::string::npos) << part << " is not in: " << line;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
}

}  // namespace
}  // namespace xmod
