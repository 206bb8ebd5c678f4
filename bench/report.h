// What the program prints: headings, lines and tables (Markdown, so that they can go into a document as they
// are), or all of it as one JSON object.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

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

// Figures are worth as much as the machine was left alone. A watch is called when a section begins, and what
// it returns when the section ends: that notes in the section's JSON how the machine was, and says so.
using SectionEnd = std::function<std::string(Cell& section)>;
using SectionWatch = std::function<SectionEnd()>;

class Report {
 public:
  Report(bool json, SectionWatch watch) : json_(json), watch_(std::move(watch)) {}

  // Begins a section; `key` names it in the JSON.
  void section(const std::string& key, const std::string& heading) {
    end_section();
    key_ = key;
    end_ = watch_();
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
  void end_section() {
    if (!end_) return;
    const std::string text = std::exchange(end_, nullptr)(all_[key_]);
    if (!json_) std::cout << "\n" << text << "\n" << std::flush;
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
  SectionWatch watch_;
  SectionEnd end_;  // of the running section
  std::string key_;
  Cell all_;
};

}  // namespace xmod::bench
