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
#include "xmod/layers/expert_loads.h"

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
  ExpertLoads expert_loads = {};  // of a model with experts
};

class MetricsLog {
 public:
  // Continues the file behind `last_step`: rows beyond it, of a run that was killed after its last
  // checkpoint, go; so does a row cut off in the middle. last_step 0 starts anew.
  MetricsLog(const std::string& path, int64_t last_step, bool experts = false)
      : path_(path), experts_(experts) {
    write_file_atomically(path, columns() + "\n" + (last_step > 0 ? rows_up_to(last_step) : ""));
    file_ = open_file(path, O_WRONLY | O_APPEND, "write");
  }

  void append(const MetricsRow& r) {
    char text[512];
    const int length = std::snprintf(
        text, sizeof text, "%lld,%lld,%.9g,%.9g,%s,%s,%.9g,%.9g,%.6g", static_cast<long long>(r.step),
        static_cast<long long>(r.tokens), r.flops, r.train_loss, cell(r.val_loss_topk).c_str(),
        cell(r.val_loss_threshold).c_str(), r.lr, r.grad_norm, r.tokens_per_second);
    std::string line(text, static_cast<size_t>(length));
    for (double value : {r.expert_loads.max, r.expert_loads.entropy, r.expert_loads.active_ratio}) {
      if (experts_) line.append(",").append(cell(value));
    }
    line += '\n';
    write_fully(file_, line.data(), static_cast<int64_t>(line.size()), path_);
  }

  // Forces the rows to the disk: a power cut must not take those of the steps before a checkpoint.
  void sync() const { fsync_path(path_); }

 private:
  std::string columns() const {
    return std::string(
               "step,tokens,flops,train_loss,val_loss_topk,val_loss_threshold,lr,grad_norm,tokens_per_"
               "second") +
           (experts_ ? ",expert_load_max,expert_load_entropy,expert_active_ratio" : "");
  }

  static std::string cell(const std::optional<double>& value) {
    if (!value) return "";
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", *value);
    return text;
  }

  std::string rows_up_to(int64_t last_step) const {
    if (!path_exists(path_)) return "";
    std::istringstream lines(read_file(path_, int64_t{1} << 32));
    std::string kept, line;
    std::getline(lines, line);
    if (line != columns())
      fail(path_, ": its first line is not that of a metrics file; move it away to resume");
    while (std::getline(lines, line) && !lines.eof()) {  // eof: the last line has no end
      if (std::atoll(line.c_str()) <= last_step) kept += line + "\n";
    }
    return kept;
  }

  std::string path_;
  bool experts_;
  FileDescriptor file_;
};

}  // namespace xmod
