// OUT/metrics.csv: one row a step, written as the step ends.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>

#include "xmod/files.h"

namespace xmod {

struct MetricsRow {
  int64_t step;
  int64_t tokens;
  double flops;
  double train_loss;
  std::optional<double> val_loss_topk, val_loss_threshold;  // only where the step was evaluated
  double lr;
  double grad_norm;
  double tokens_per_second;
};

class MetricsLog {
 public:
  // Continues the file behind `last_step`: rows beyond it, of a run that was killed after its last
  // checkpoint, go; so does a row cut off in the middle. last_step 0 starts anew.
  MetricsLog(const std::string& path, int64_t last_step) : path_(path) {
    write_file_atomically(path, kHeader + (last_step > 0 ? rows_up_to(path, last_step) : ""));
    file_ = open_file(path, O_WRONLY | O_APPEND, "write");
  }

  void append(const MetricsRow& r) {
    char text[512];
    const int length = std::snprintf(
        text, sizeof text, "%lld,%lld,%.9g,%.9g,%s,%s,%.9g,%.9g,%.6g\n", static_cast<long long>(r.step),
        static_cast<long long>(r.tokens), r.flops, r.train_loss, cell(r.val_loss_topk).c_str(),
        cell(r.val_loss_threshold).c_str(), r.lr, r.grad_norm, r.tokens_per_second);
    write_fully(file_, text, length, path_);
  }

  // Forces the rows to the disk: a power cut must not take those of the steps before a checkpoint.
  void sync() const { fsync_path(path_); }

 private:
  static constexpr const char* kColumns =
      "step,tokens,flops,train_loss,val_loss_topk,val_loss_threshold,lr,grad_norm,tokens_per_second";
  inline static const std::string kHeader = std::string(kColumns) + "\n";

  static std::string cell(const std::optional<double>& value) {
    if (!value) return "";
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", *value);
    return text;
  }

  static std::string rows_up_to(const std::string& path, int64_t last_step) {
    if (!path_exists(path)) return "";
    std::istringstream lines(read_file(path, int64_t{1} << 32));
    std::string kept, line;
    std::getline(lines, line);
    if (line != kColumns)
      fail(path, ": its first line is not that of a metrics file; move it away to resume");
    while (std::getline(lines, line) && !lines.eof()) {  // eof: the last line has no end
      if (std::atoll(line.c_str()) <= last_step) kept += line + "\n";
    }
    return kept;
  }

  std::string path_;
  FileDescriptor file_;
};

}  // namespace xmod
