// metrics.csv: one row a step, and continued without a gap or a duplicate after a run was killed.
#include "xmod/metrics.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "xmod/error.h"

namespace xmod {
namespace {

const std::string kFirstLine =
    "step,tokens,flops,train_loss,val_loss_topk,val_loss_threshold,lr,grad_norm,tokens_per_second\n";
const std::string kExpertsFirstLine =
    "step,tokens,flops,train_loss,val_loss_topk,val_loss_threshold,lr,grad_norm,tokens_per_second,"
    "expert_load_max,expert_load_entropy,expert_active_ratio\n";
constexpr bool kExperts = true;

MetricsRow row(int64_t step) {
  return {.step = step,
          .tokens = step * 48,
          .flops = static_cast<double>(step) * 1000,
          .train_loss = 5.25,
          .val_loss_topk = {},
          .val_loss_threshold = {},
          .lr = 0.0032,
          .grad_norm = 1.5,
          .tokens_per_second = 1000};
}

// The line that row(step) becomes.
std::string line(int64_t step) {
  return std::to_string(step) + "," + std::to_string(step * 48) + "," + std::to_string(step) +
         "000,5.25,,,0.0032,1.5,1000\n";
}

MetricsRow expert_row(int64_t step) {
  MetricsRow r = row(step);
  r.expert_loads = {.max = 1.5, .entropy = 0.75, .active_ratio = 0.25};
  return r;
}

std::string expert_line(int64_t step) {
  const std::string plain = line(step);
  return plain.substr(0, plain.size() - 1) + ",1.5,0.75,0.25\n";
}

class Metrics : public testing::Test {
 protected:
  // The file stays as it is.
  void expect_refused(const std::string& content, bool experts) const {
    put(content);
    try {
      MetricsLog log(path_, 5, experts);
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code, 1);
      EXPECT_NE(std::string(error.what()).find(path_), std::string::npos) << error.what();
    }
    EXPECT_EQ(text(), content);
  }

  void SetUp() override {
    std::string name = testing::TempDir() + "xmod_metrics_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ + "/metrics.csv";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void put(const std::string& text) const { std::ofstream(path_) << text; }
  std::string text() const { return read_file(path_); }

  std::string folder_, path_;
};

TEST_F(Metrics, ANewFileHasItsColumnsAtOnce) {
  MetricsLog log(path_, 0);
  EXPECT_EQ(text(), kFirstLine);
}

TEST_F(Metrics, EveryRowIsThereAsSoonAsItIsWritten) {
  MetricsLog log(path_, 0);
  for (int64_t step = 1; step <= 3; step++) {
    log.append(row(step));
    log.sync();
  }
  EXPECT_EQ(text(), kFirstLine + line(1) + line(2) + line(3));
}

TEST_F(Metrics, ValidationFillsItsTwoCells) {
  MetricsRow evaluated = row(7);
  evaluated.val_loss_topk = 2.5;
  evaluated.val_loss_threshold = 0;  // a value, not an empty cell
  MetricsLog(path_, 0).append(evaluated);
  EXPECT_EQ(text(), kFirstLine + "7,336,7000,5.25,2.5,0,0.0032,1.5,1000\n");
}

// Nine digits: single precision comes back unchanged.
TEST_F(Metrics, NumbersKeepTheirDigits) {
  MetricsRow exact = row(1);
  exact.train_loss = static_cast<double>(0.1f);
  exact.grad_norm = static_cast<double>(16777217.0f * 3);
  exact.tokens = int64_t{1} << 60;
  MetricsLog(path_, 0).append(exact);
  const std::string last = text().substr(kFirstLine.size());
  EXPECT_EQ(last, "1,1152921504606846976,1000,0.100000001,,,0.0032,50331648,1000\n");
  EXPECT_EQ(std::stof("0.100000001"), 0.1f);
}

TEST_F(Metrics, ANewRunStartsAnew) {
  put(kFirstLine + line(1) + line(2));
  MetricsLog log(path_, 0);
  log.append(row(1));
  EXPECT_EQ(text(), kFirstLine + line(1));
}

TEST_F(Metrics, AResumedRunDropsTheRowsBehindItsCheckpoint) {
  put(kFirstLine + line(9) + line(10) + line(11) + line(100));
  MetricsLog log(path_, 10);
  EXPECT_EQ(text(), kFirstLine + line(9) + line(10));
  log.append(row(11));
  EXPECT_EQ(text(), kFirstLine + line(9) + line(10) + line(11));
}

// A cut number looks like a smaller one: step 1 of step 11.
TEST_F(Metrics, ARowCutOffAnywhereGoes) {
  const std::string cut = line(11);
  for (size_t length = 1; length < cut.size(); length++) {
    put(kFirstLine + line(1) + line(2) + cut.substr(0, length));
    MetricsLog log(path_, 2);
    log.append(row(3));
    EXPECT_EQ(text(), kFirstLine + line(1) + line(2) + line(3)) << length << " bytes of the row";
  }
}

TEST_F(Metrics, AResumedRunWithoutTheFileStartsOne) {
  MetricsLog log(path_, 5);
  log.append(row(6));
  EXPECT_EQ(text(), kFirstLine + line(6));
}

TEST_F(Metrics, AnotherFileIsNotTouched) {
  expect_refused("", !kExperts);
  expect_refused("name,age\nAda,36\n", !kExperts);
}

TEST_F(Metrics, OnlyAModelWithExpertsHasTheirColumns) {
  MetricsLog(path_, 0, kExperts).append(expert_row(1));
  EXPECT_EQ(text(), kExpertsFirstLine + expert_line(1));
  MetricsLog(path_, 0).append(expert_row(1));
  EXPECT_EQ(text(), kFirstLine + line(1));
}

TEST_F(Metrics, AResumedRunWithExpertsGoesOn) {
  put(kExpertsFirstLine + expert_line(9) + expert_line(10) + expert_line(11) + expert_line(12).substr(0, 40));
  MetricsLog(path_, 10, kExperts).append(expert_row(11));
  EXPECT_EQ(text(), kExpertsFirstLine + expert_line(9) + expert_line(10) + expert_line(11));
}

TEST_F(Metrics, ColumnsOfAnotherKindOfModelAreRefused) {
  expect_refused(kFirstLine + line(5), kExperts);
  expect_refused(kExpertsFirstLine + expert_line(5), !kExperts);
}

TEST_F(Metrics, NoTemporaryFileStays) {
  put(kFirstLine + line(1));
  MetricsLog log(path_, 1);
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_EQ(entry.path().filename(), "metrics.csv");
  }
}

}  // namespace
}  // namespace xmod
