// What `eval --tasks` shows: progress, the table, JSON, and the score of every item.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "xmod/tasks.h"
#include "xmod/trainer.h"  // defines: Stopwatch, show_duration

namespace xmod {

struct TaskReport {
  TaskFile file;
  TaskScores scores;
};

namespace detail {

inline std::string show(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace detail

// Share done and time left on the standard error: one line rewritten on a terminal, else a line now and then.
class ProgressLine {
 public:
  explicit ProgressLine(const std::string& what) : what_(what) {}
  ~ProgressLine() {
    if (terminal_ && shown_) std::fputc('\n', stderr);
  }

  void show(int64_t done, int64_t all) {
    if (since_shown_.seconds() < (terminal_ ? 0.2 : 10)) return;
    since_shown_.restart();
    shown_ = true;
    const double share = static_cast<double>(done) / static_cast<double>(all);
    const std::string left = show_duration(watch_.seconds() * (1 - share) / share);
    std::fprintf(stderr, terminal_ ? "\r%s: %3.0f%%, %s left  " : "%s: %3.0f%%, %s left\n", what_.c_str(),
                 100 * share, left.c_str());
  }

 private:
  const std::string what_;
  const bool terminal_ = isatty(STDERR_FILENO);
  bool shown_ = false;
  Stopwatch watch_, since_shown_;
};

// ---------------------------------------------------------------------------------------------------
// The table: a column a task, in the paper's order

namespace detail {

using Cell = std::function<std::string(const TaskReport&)>;

inline std::string column_name(const TaskReport& report) {
  return report.file.task == Task::unnamed ? report.file.name : traits(report.file.task).column;
}

// The name of the row, then a cell a task, right-aligned; each column is as wide as its name needs.
inline std::string table_row(const std::string& name, const std::vector<TaskReport>& reports,
                             const Cell& cell, const std::string& last = "") {
  constexpr size_t kName = 14, kNarrowest = 9;
  auto right_aligned = [](const std::string& text, size_t width) {
    return std::string(width - std::min(width, text.size()), ' ') + text;
  };
  std::string line = name + std::string(kName - name.size(), ' ');
  for (const TaskReport& report : reports) {
    line += right_aligned(cell(report), std::max(kNarrowest, column_name(report).size() + 2));
  }
  if (!last.empty()) line += right_aligned(last, kNarrowest);
  return line + "\n";
}

inline std::string show_percent(const std::optional<Estimate>& estimate, double Estimate::*part) {
  return estimate && std::isfinite((*estimate).*part) ? show("%.2f", 100 * (*estimate).*part) : "-";
}

inline std::string show_perplexity(const std::optional<Estimate>& estimate, double Estimate::*part) {
  if (!estimate || !std::isfinite((*estimate).*part)) return "-";
  return show((*estimate).*part < 1e4 ? "%.2f" : "%.2e", (*estimate).*part);
}

// The paper's last column: the mean over its six tasks. Empty unless each is there once.
inline std::string show_average(const std::vector<TaskReport>& reports, bool normalised) {
  double sum = 0;
  int32_t next = static_cast<int32_t>(Task::hellaswag);
  for (const TaskReport& report : reports) {
    if (static_cast<int32_t>(report.file.task) != next++) return "";
    sum += normalised ? report.scores.acc_norm.value_or(report.scores.acc).value : report.scores.acc.value;
  }
  return next > static_cast<int32_t>(Task::boolq) ? show("%.2f", 100 * sum / 6) : "";
}

inline std::string estimate_rows(const std::string& name, const std::vector<TaskReport>& reports,
                                 bool normalised) {
  auto estimate = [=](const TaskReport& r) {
    return normalised ? r.scores.acc_norm : std::optional(r.scores.acc);
  };
  return table_row(
             name, reports, [=](const TaskReport& r) { return show_percent(estimate(r), &Estimate::value); },
             show_average(reports, normalised)) +
         table_row("  std. error", reports,
                   [=](const TaskReport& r) { return show_percent(estimate(r), &Estimate::error); });
}

}  // namespace detail

// The paper's tasks first, in its order, then others.
inline void sort_as_in_the_paper(std::vector<TaskReport>& reports) {
  auto place = [](const TaskReport& r) {
    return r.file.task == Task::unnamed ? INT32_MAX : static_cast<int32_t>(r.file.task);
  };
  std::stable_sort(reports.begin(), reports.end(),
                   [&](const TaskReport& a, const TaskReport& b) { return place(a) < place(b); });
}

// Accuracies in percent.
inline std::string task_table(const std::vector<TaskReport>& reports) {
  const bool normalised =
      std::any_of(reports.begin(), reports.end(), [](auto& r) { return r.scores.acc_norm; });
  const bool lambada =
      std::any_of(reports.begin(), reports.end(), [](auto& r) { return r.scores.perplexity; });
  const std::string average = detail::show_average(reports, false).empty() ? "" : "Avg.";
  std::string table = detail::table_row("", reports, detail::column_name, average);
  table += detail::estimate_rows("acc", reports, false);
  if (normalised) table += detail::estimate_rows("acc_norm", reports, true);
  if (lambada) {
    table += detail::table_row("perplexity", reports, [](const TaskReport& r) {
      return detail::show_perplexity(r.scores.perplexity, &Estimate::value);
    });
    table += detail::table_row("  std. error", reports, [](const TaskReport& r) {
      return detail::show_perplexity(r.scores.perplexity, &Estimate::error);
    });
  }
  table += detail::table_row("items", reports,
                             [](const TaskReport& r) { return std::to_string(r.scores.items.size()); });
  table += detail::table_row("contexts cut", reports,
                             [](const TaskReport& r) { return std::to_string(r.scores.cut); });
  for (const TaskReport& r : reports) {
    if (r.scores.acc_norm && !r.file.lengths_in_bytes)
      table += "acc_norm of " + r.file.name + " is normalised by tokens: its file has no byte lengths\n";
  }
  return table;
}

// ---------------------------------------------------------------------------------------------------
// JSON

inline nlohmann::ordered_json task_json(const TaskReport& report) {
  nlohmann::ordered_json json = {{"task", report.file.name},
                                 {"file", report.file.path},
                                 {"items", report.scores.items.size()},
                                 {"contexts_cut", report.scores.cut}};
  auto add = [&](const std::string& name, const std::optional<Estimate>& estimate) {
    if (!estimate) return;
    json[name] = estimate->value;
    json[name + "_stderr"] = estimate->error;  // NaN becomes null
  };
  add("acc", report.scores.acc);
  add("acc_norm", report.scores.acc_norm);
  if (report.scores.acc_norm) json["normalised_by"] = report.file.lengths_in_bytes ? "bytes" : "tokens";
  add("perplexity", report.scores.perplexity);
  return json;
}

// A line of JSON for each item: what the model thinks of every choice, and which it takes.
inline std::string item_lines(const TaskReport& report) {
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  std::string lines;
  for (size_t i = 0; i < report.scores.items.size(); i++) {
    const TaskItem& item = report.file.items[i];
    const ItemScore& score = report.scores.items[i];
    nlohmann::ordered_json json = {{"task", report.file.name}, {"item", i}, {"gold", item.gold}};
    for (const ChoiceScore& choice : score) json["loglikelihoods"].push_back(choice.loglikelihood);
    if (report.file.task == Task::lambada) {
      json["greedy"] = score[0].greedy;
    } else {
      json["choice"] = best_choice(item, score, false);
    }
    if (report.scores.acc_norm) json["choice_norm"] = best_choice(item, score, true);
    lines += json.dump(-1, ' ', false, kReplace) + "\n";
  }
  return lines;
}

inline std::string item_lines(const std::vector<TaskReport>& reports) {
  std::string lines;
  for (const TaskReport& report : reports) lines += item_lines(report);
  return lines;
}

}  // namespace xmod
