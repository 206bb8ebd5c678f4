// What the program prints: headings, lines and tables (Markdown, so that they can go into a document as they
// are), or all of it as one JSON object.
#pragma once

#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/clock.h"
#include "bench/peaks.h"

namespace xmod::bench {

// A cell is a number, a text, or nothing.
using Cell = nlohmann::ordered_json;

struct Column {
  std::string name;
  int digits;  // behind the point
  bool percent = false;
};

inline std::string show(const Cell& cell, const Column& column) {
  if (cell.is_null()) return "";
  if (cell.is_string()) return cell.get<std::string>();
  char text[64];
  std::snprintf(text, sizeof text, column.percent ? "%.*f%%" : "%.*f", column.digits,
                cell.get<double>() * (column.percent ? 100 : 1));
  return text;
}

class Report {
 public:
  Report(bool json, int threads) : json_(json), threads_(threads) {}

  // Begins a section; `key` names it in the JSON.
  void section(const std::string& key, const std::string& heading) {
    end_section();
    key_ = key;
    interruptions_.emplace(threads_);
    all_[key_]["heading"] = heading;
    if (!json_) std::cout << "\n## " << heading << "\n" << std::flush;
  }

  void table(const std::string& key, const std::vector<Column>& columns,
             const std::vector<std::vector<Cell>>& rows) {
    Cell& json = all_[key_][key] = Cell::array();
    for (const auto& row : rows) {
      Cell object;
      for (size_t i = 0; i < columns.size(); i++) object[columns[i].name] = row[i];
      json.push_back(object);
    }
    if (!json_) print(columns, rows);
  }

  void finish() {
    end_section();
    if (json_) std::cout << all_.dump(2) << "\n";
  }

 private:
  // Figures are worth as much as the machine was left alone: by other programs, and by whoever shares its
  // processors unseen, as the neighbours of a virtual machine do, who slow down its peak.
  void end_section() {
    if (!interruptions_) return;
    const double share = interruptions_->share();
    interruptions_.reset();
    const double peak = measure_flops(peak_loops()[0], threads_, 0.1) / 1e9;
    all_[key_]["interrupted"] = share;
    all_[key_]["fp32 peak at the end, GFLOP/s"] = peak;
    if (json_) return;
    std::printf("\nfp32 peak at the end: %.1f GFLOP/s.", peak);
    if (!std::isnan(share))
      std::printf(" Other programs kept this one waiting for %.1f%% of the time.", share * 100);
    std::printf("\n");
    std::fflush(stdout);
  }

  static void print(const std::vector<Column>& columns, const std::vector<std::vector<Cell>>& rows) {
    std::vector<std::vector<std::string>> lines(1);
    for (const Column& column : columns) lines[0].push_back(column.name);
    for (const auto& row : rows) {
      lines.emplace_back();
      for (size_t i = 0; i < columns.size(); i++) lines.back().push_back(show(row[i], columns[i]));
    }
    std::vector<size_t> width(columns.size());
    for (const auto& line : lines) {
      for (size_t i = 0; i < line.size(); i++) width[i] = std::max(width[i], line[i].size());
    }
    std::cout << "\n";
    for (size_t l = 0; l < lines.size(); l++) {
      for (size_t i = 0; i < width.size(); i++) {
        const std::string space(width[i] - lines[l][i].size(), ' ');
        const bool text = !rows.empty() && rows[0][i].is_string();
        std::cout << "| " << (text ? lines[l][i] + space : space + lines[l][i]) << " ";
      }
      std::cout << "|\n";
      if (l > 0) continue;
      for (size_t i = 0; i < width.size(); i++) {
        const bool text = !rows.empty() && rows[0][i].is_string();
        std::cout << "|" << std::string(width[i] + 1, '-') << (text ? "-" : ":");
      }
      std::cout << "|\n";
    }
    std::cout << std::flush;
  }

  bool json_;
  int threads_;
  std::optional<Interruptions> interruptions_;  // of the running section
  std::string key_;
  Cell all_;
};

}  // namespace xmod::bench
