// What the passes of a training step cost, beside what the machine can do: the tables of both benchmarks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/clock.h"
#include "bench/report.h"
#include "bench/timed_backend.h"
#include "xmod/error.h"
#include "xmod_common.h"

namespace xmod::bench {

// A line of progress, on standard error.
template <class... Parts>
void progress(const Parts&... parts) {
  std::cerr << xmod::detail::concatenate(parts...) << "\n";
}

struct Unit {
  std::string name;
  double size;
};

// What a pass is measured against: FLOP/s of the instructions that it uses, and bytes a second of a copy.
struct Bounds {
  double products, fp32_products, attention;
  double copy;
  Unit arithmetic = {"GFLOP/s", 1e9}, traffic = {"GB/s", 1e9};

  double of(Kind kind) const {
    switch (kind) {
      case Kind::product:
      case Kind::muon:
        return products;
      case Kind::attention:
        return attention;
      default:
        return fp32_products;
    }
  }
};

inline std::string describe(const ModelConfig& c, int64_t B) {
  return xmod::detail::concatenate(arch_name(c.arch), ", dim ", c.dim, ", ", make_layer_plan(c).size(),
                                   " layers, B ", B, ", T ", c.seq_len);
}

// ---------------------------------------------------------------------------------------------------
// Passes

inline std::string show_shape(const Cost& cost) {
  std::string text;
  for (int64_t size : cost.shape) {
    if (size > 0) text.append(text.empty() ? "" : "x").append(std::to_string(size));
  }
  return text;
}

// Calls of one pass with one shape, named.
struct PassLine {
  std::string pass, shape;
  Kind kind;
  double calls, flops, bytes;  // of all calls
  std::vector<double> seconds;

  double total() const { return sum(seconds); }
};

template <class Passes>
std::vector<PassLine> pass_lines(const Passes& passes) {
  std::vector<PassLine> lines;
  for (const auto& [key, calls] : passes) {
    const double count = static_cast<double>(calls.count);
    lines.push_back({std::string(key.first), show_shape(calls.cost), calls.cost.kind, count,
                     calls.cost.flops * count, calls.cost.bytes * count, calls.seconds});
  }
  return lines;
}

// Name, shape and rates of passes of which one takes so long.
inline std::vector<Cell> rates(const PassLine& line, double seconds, const Bounds& bounds) {
  const double flops = line.flops / line.calls, bytes = line.bytes / line.calls;
  std::vector<Cell> row = {line.pass, line.shape, seconds * 1e3, {}, {}, {}, {}};
  if (flops > 0) {
    row[3] = flops / seconds / bounds.arithmetic.size;
    row[4] = flops / seconds / bounds.of(line.kind);
  }
  if (line.kind == Kind::memory) {
    row[5] = bytes / seconds / bounds.traffic.size;
    row[6] = bytes / seconds / bounds.copy;
  }
  return row;
}

inline std::vector<Column> rate_columns(const Bounds& bounds) {
  return {{"pass", 0},
          {"shape", 0},
          {"ms", 3},
          {bounds.arithmetic.name, 1},
          {"of peak", 0, true},
          {bounds.traffic.name, 1},
          {"of copy", 0, true}};
}

// Each pass whose name contains `only`, again and again on its own.
template <class Backend>
void report_alone(Report& report, Backend& backend, const std::string& only, double seconds,
                  const Bounds& bounds) {
  std::vector<std::vector<Cell>> rows;
  for (const auto& [key, calls] : backend.passes) {
    if (key.first.find(only) == std::string_view::npos) continue;
    const PassLine line = {std::string(key.first),
                           show_shape(calls.cost),
                           calls.cost.kind,
                           1,
                           calls.cost.flops,
                           calls.cost.bytes,
                           {}};
    rows.push_back(rates(line, median(backend.clock.repeat(calls.again, seconds)), bounds));
  }
  if (rows.empty()) usage_error("--only ", only, ": no pass of the step has such a name");
  report.table("alone", rate_columns(bounds), rows);
}

// Each pass as it ran in `steps` steps that took `seconds` together.
template <class Backend>
void report_passes(Report& report, const Backend& backend, double steps, double seconds,
                   const Bounds& bounds) {
  constexpr double kSmall = 0.001;  // of the step: not worth a line of its own
  std::vector<PassLine> lines = pass_lines(backend.passes);
  std::sort(lines.begin(), lines.end(),
            [](const PassLine& a, const PassLine& b) { return a.total() > b.total(); });
  std::vector<std::vector<Cell>> rows;
  double small = 0, timed = 0;
  for (const PassLine& line : lines) {
    const double share = line.total() / seconds;
    timed += share;
    if (share < kSmall) {
      small += share;
      continue;
    }
    std::vector<Cell> row = rates(line, median(line.seconds), bounds);
    row.insert(row.begin() + 2, line.calls / steps);
    row.push_back(share);
    rows.push_back(row);
  }
  rows.push_back({"smaller ones together", "", {}, {}, {}, {}, {}, {}, small});
  rows.push_back({"outside the passes", "", {}, {}, {}, {}, {}, {}, 1 - timed});

  std::vector<Column> columns = rate_columns(bounds);
  columns.insert(columns.begin() + 2, {"calls", 0});
  columns.push_back({"of step", 1, true});
  report.table("passes", columns, rows);
}

// By kind of pass: the share of the step, and how near it comes to its bound.
template <class Backend>
void report_kinds(Report& report, const Backend& backend, double seconds, const Bounds& bounds) {
  const std::vector<std::pair<Kind, std::string>> kinds = {{Kind::product, "matrix products"},
                                                           {Kind::fp32_product, "products in fp32"},
                                                           {Kind::attention, "attention"},
                                                           {Kind::muon, "Muon"},
                                                           {Kind::memory, "bound by memory"}};
  const std::vector<PassLine> lines = pass_lines(backend.passes);
  std::vector<std::vector<Cell>> rows;
  for (const auto& [kind, name] : kinds) {
    double total = 0, flops = 0, bytes = 0;
    for (const PassLine& line : lines) {
      if (line.kind != kind) continue;
      total += line.total(), flops += line.flops, bytes += line.bytes;
    }
    if (total == 0) continue;
    const double of_bound =
        kind == Kind::memory ? bytes / total / bounds.copy : flops / total / bounds.of(kind);
    rows.push_back({name, total / seconds, of_bound});
  }
  report.table("kinds", {{"kind of pass", 0}, {"of step", 1, true}, {"of its bound", 0, true}}, rows);
}

// ---------------------------------------------------------------------------------------------------
// The whole step

// FLOPs of the products, attention and Newton-Schulz steps in the calls noted.
template <class Backend>
double flops_done(const Backend& backend) {
  double flops = 0;
  for (const auto& [key, calls] : backend.passes)
    flops += calls.cost.flops * static_cast<double>(calls.count);
  return flops;
}

// The time that they would take at the peaks of their instructions.
template <class Backend>
double seconds_at_peak(const Backend& backend, const Bounds& bounds) {
  double seconds = 0;
  for (const auto& [key, calls] : backend.passes)
    seconds += calls.cost.flops * static_cast<double>(calls.count) / bounds.of(calls.cost.kind);
  return seconds;
}

}  // namespace xmod::bench
