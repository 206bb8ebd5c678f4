// `scripts/gpu_check.sh` runs this: how near the trainer comes to what a GPU can do. First the ceilings,
// then, for a backbone at two context lengths, dense, a mixture of experts and X-MoD: every pass as it runs
// in a training step, and the step as a whole with its memory. --floors counts instead of measuring: the
// least time that each pass could take on an H200.
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#define TESTING  // without the trainer's main
#include "bench/clock.h"
#include "bench/cuda_clock.h"
#include "bench/cuda_peaks.h"
#include "bench/main.h"
#include "bench/pass_report.h"
#include "bench/report.h"
#include "bench/timed_backend.h"
#include "bench/training.h"
#include "train_xmod.cu"
#include "xmod/plan.h"

namespace xmod::bench {

// ---------------------------------------------------------------------------------------------------
// What is measured

struct BenchOptions {
  std::string size = "556M", model, only;
  MachineOptions machine = {.precision = Precision::bf16};
  int64_t step_tokens = int64_t{1} << 19;
  double seconds = 1;
  bool floors = false, json = false, help = false;
};

struct Case {
  std::string name;
  ModelConfig config;
  int64_t batch_size;

  double batch_tokens() const { return static_cast<double>(batch_size * config.seq_len); }
};

inline ModelConfig moe(ModelConfig c, int64_t experts, int64_t per_token) {
  c.arch = Arch::moe;
  c.experts = experts, c.experts_per_token = per_token;
  c.expert_dim = c.ffn_dim / per_token;
  return c;
}

inline ModelConfig xmod(ModelConfig c, int64_t A, int64_t K) {
  c.arch = Arch::xmod;
  c.anchor_stride = A, c.token_sparsity = K;
  return c;
}

// All of one backbone, and of as much compute for a token; batches of one number of tokens.
inline std::vector<Case> cases(const BenchOptions& o) {
  const bool tiny = o.size == "tiny";
  ModelConfig c;
  for (const Preset& preset : presets()) {
    if (preset.name == o.size) c = preset.config;
  }
  if (tiny) c.active_layers = 4;
  const std::vector<int64_t> lengths =
      tiny ? std::vector<int64_t>{32, 64} : std::vector<int64_t>{4096, 32768};
  std::vector<Case> all;
  for (int64_t T : lengths) {
    c.arch = Arch::dense;
    c.seq_len = T;
    c.rope_theta = default_rope_theta(T);
    const auto add = [&](const std::string& name, const ModelConfig& config) {
      const std::string full = xmod::detail::concatenate(name, ", T ", T);
      if (full.find(o.model) != std::string::npos) all.push_back({full, config, lengths.back() / T});
    };
    add("dense", c);
    add(tiny ? "moe 2:8" : "moe 8:64", tiny ? moe(c, 8, 2) : moe(c, 64, 8));
    add("xmod A4K8", xmod(c, 4, 8));
    add("xmod A3K16", xmod(c, 3, 16));
  }
  return all;
}

// ---------------------------------------------------------------------------------------------------
// The ceilings

template <class Backend>
Bounds report_peaks(Report& report, const BenchOptions& o, const PeakSizes& sizes) {
  const std::string device = Backend::description();
  const DataSheet sheet = data_sheet(device);
  report.section("peaks", "Ceilings (" + device + ")");
  progress("ceilings of ", device);
  Backend backend(o.machine);
  backend.timing = Timing::off;
  const CudaPeaks p = measure_cuda_peaks(backend, sizes, o.seconds / 10);
  const auto row = [](const std::string& name, double rate, double of_sheet) {
    return std::vector<Cell>{name, rate / 1e12, of_sheet > 0 ? Cell(rate / of_sheet) : Cell()};
  };
  const std::string shape = xmod::detail::concatenate(", ", sizes.matrix, " rows and columns");
  report.table("products", {{"cuBLAS", 0}, {"TFLOP/s", 1}, {"of data sheet", 0, true}},
               {row("bf16" + shape, p.bf16, sheet.bf16), row("tf32" + shape, p.tf32, sheet.bf16 / 2),
                row("fp32" + shape, p.fp32, sheet.fp32)});
  report.table("memory", {{"copy (read + written)", 0}, {"TB/s", 2}, {"of data sheet", 0, true}},
               {row(std::to_string(sizes.memory >> 20) + " MiB", p.memory, sheet.memory),
                row(std::to_string(sizes.cache >> 20) + " MiB, in the cache", p.cache, 0)});
  const double products = Backend::kMixed ? p.bf16 : p.fp32;
  return {products, p.fp32, products, p.memory, {"TFLOP/s", 1e12}, {"GB/s", 1e9}};
}

// A hot GPU is slower: what its products come to behind a section.
template <class Backend>
SectionEnd watch_gpu(const BenchOptions& o, const PeakSizes& sizes) {
  return [=](Cell& section) {
    Backend backend(o.machine);
    backend.timing = Timing::off;
    const double rate =
        LargeProduct<Backend>(backend, sizes.matrix).rate(CUDA_R_16BF, CUBLAS_COMPUTE_32F, 0) / 1e12;
    section["bf16 products at the end, TFLOP/s"] = rate;
    char text[80];
    std::snprintf(text, sizeof text, "bf16 products at the end: %.1f TFLOP/s.", rate);
    return std::string(text);
  };
}

// ---------------------------------------------------------------------------------------------------
// A model

// What a model's steps came to; seconds are medians.
struct Measured {
  Case model;
  double micro_batch, update;                  // seconds
  double micro_batch_at_peak, update_at_peak;  // what their products would take at the ceilings
  double memory, planned;                      // bytes taken from the GPU

  double micro_batches(const BenchOptions& o) const {
    return static_cast<double>(o.step_tokens) / model.batch_tokens();
  }
  double step(const BenchOptions& o) const { return micro_batches(o) * micro_batch + update; }
  double step_at_peak(const BenchOptions& o) const {
    return micro_batches(o) * micro_batch_at_peak + update_at_peak;
  }
};

// The memory that training takes from the GPU.
template <class Backend>
int64_t planned_bytes(const Case& model) {
  RunSize run;
  run.batch_size = model.batch_size;
  int64_t bytes = 0;
  for (const auto& [name, size] : training_memory<Backend>(model.config, run).groups) {
    if (name != "batches, a piece of a checkpoint") bytes += size;  // those lie on the host
  }
  return bytes;
}

// Seconds of each run, for about `seconds` in all but three times at least.
template <class Run>
std::vector<double> time_steps(const Run& run, double seconds) {
  std::vector<double> times;
  do {
    const Stopwatch watch;
    run();
    times.push_back(watch.seconds());
  } while (times.size() < 3 || sum(times) < seconds);
  return times;
}

// Of the calls noted in a step that are Muon's, or are not.
template <class Backend>
double at_peak(const Backend& backend, const Bounds& bounds, bool muon) {
  double seconds = 0;
  for (const auto& [key, calls] : backend.passes) {
    const bool counts = (calls.cost.kind == Kind::muon) == muon;
    if (counts) seconds += calls.cost.flops * static_cast<double>(calls.count) / bounds.of(calls.cost.kind);
  }
  return seconds;
}

template <class Backend>
std::optional<Measured> measure_case(Report& report, const Case& model, const BenchOptions& o,
                                     const Bounds& bounds) {
  report.section(model.name, model.name + ": " + describe(model.config, model.batch_size));
  const int64_t free = Backend::memory_bytes(), planned = planned_bytes<Backend>(model);
  if (planned > free) {
    progress(model.name, ": left out, since it needs ", planned >> 20, " MiB and the GPU has ", free >> 20);
    return std::nullopt;
  }
  progress(model.name, ": first step");
  Backend backend(o.machine);
  backend.timing = Timing::off;
  Training training(backend, model.config, model.batch_size);
  training.step();

  progress(model.name, ": passes");
  backend.use_graphs(false);
  backend.timing = Timing::on;
  training.step();
  backend.clock.collect();
  if (!o.only.empty()) {
    report_alone(report, backend, o.only, o.seconds, bounds);
    return std::nullopt;
  }

  progress(model.name, ": steps");
  backend.use_graphs(true);
  backend.timing = Timing::off;
  training.micro_batch();
  training.micro_batch();  // as a graph from here on
  Measured m = {model,
                0,
                0,
                at_peak(backend, bounds, false),
                at_peak(backend, bounds, true),
                0,
                static_cast<double>(planned)};
  m.micro_batch = median(time_steps([&] { training.micro_batch(); }, o.seconds));
  m.update = median(time_steps([&] { training.update(); }, o.seconds / 4));
  m.memory = static_cast<double>(free - Backend::memory_bytes());
  report_passes(report, backend, 1, m.micro_batch + m.update, bounds);
  report_kinds(report, backend, m.micro_batch + m.update, bounds);
  return m;
}

// The steps of all models, put together from micro-batches that are all alike.
inline void report_steps(Report& report, const std::vector<Measured>& all, const BenchOptions& o,
                         const Bounds& bounds, const DataSheet& sheet) {
  std::vector<std::vector<Cell>> rows;
  constexpr double kGib = 1 << 30;
  for (const Measured& m : all) {
    const double rate = static_cast<double>(o.step_tokens) / m.step(o);
    const double flops = rate * training_flops_per_token(m.model.config);
    Cell times_dense;
    for (const Measured& other : all) {
      const ModelConfig& c = other.model.config;
      if (c.arch == Arch::dense && c.seq_len == m.model.config.seq_len)
        times_dense = other.step(o) / m.step(o);
    }
    rows.push_back({m.model.name, m.micro_batch * 1e3, m.update * 1e3, rate, times_dense, flops / 1e12,
                    flops / bounds.products, sheet.bf16 > 0 ? Cell(flops / sheet.bf16) : Cell(),
                    m.step_at_peak(o) / m.step(o), m.memory / kGib, m.planned / kGib, m.memory / m.planned});
  }
  report.section("steps", xmod::detail::concatenate("Whole steps of ", o.step_tokens, " tokens"));
  report.table("steps",
               {{"model", 0},
                {"ms a micro-batch", 1},
                {"ms of the optimizer", 1},
                {"tokens/s", 0},
                {"times dense", 2},
                {"model TFLOP/s", 1},
                {"of ceiling", 1, true},
                {"of data sheet", 1, true},
                {"all of ceiling", 1, true},
                {"memory, GiB", 2},
                {"plan, GiB", 2},
                {"of plan", 1, true}},
               rows);
}

// ---------------------------------------------------------------------------------------------------
// Floors: what each pass takes at least on an H200, from its operations and bytes

inline Bounds floor_bounds() {
  return {kH200.bf16, kH200.fp32, kH200.bf16, kH200.memory};
}

template <class Backend>
void report_floors(Report& report, const Case& model, const BenchOptions& o) {
  report.section(model.name, model.name + ": " + describe(model.config, model.batch_size));
  Backend backend(o.machine);
  backend.timing = Timing::counted;
  Training training(backend, model.config, model.batch_size);
  backend.passes.clear();
  training.step();
  struct Line {
    double seconds;
    std::vector<Cell> cells;
  };
  const Bounds bounds = floor_bounds();
  std::vector<Line> lines;
  double micro_batch = 0, update = 0;
  for (const PassLine& line : pass_lines(backend.passes)) {
    const double flops = line.flops / line.calls, bytes = line.bytes / line.calls;
    const bool muon = line.kind == Kind::muon;  // whose products go through memory as often as they like
    const double arithmetic = flops / bounds.of(line.kind), memory = muon ? 0 : bytes / bounds.copy;
    const double each = std::max(arithmetic, memory);
    const bool of_update =
        muon || line.pass == "adamw_update" || line.pass == "sum_of_squares" || line.pass == "zero";
    (of_update ? update : micro_batch) += each * line.calls;
    lines.push_back({each * line.calls,
                     {line.pass, line.shape, line.calls, flops > 0 ? Cell(flops / 1e9) : Cell(),
                      muon ? Cell() : Cell(bytes / 1e6), arithmetic > memory ? "arithmetic" : "memory",
                      each * 1e6, each * line.calls * 1e3}});
  }
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.seconds > b.seconds; });
  std::vector<std::vector<Cell>> rows;
  for (const Line& line : lines) {
    if (line.seconds >= 0.001 * (micro_batch + update)) rows.push_back(line.cells);
  }
  report.table("passes",
               {{"pass", 0},
                {"shape", 0},
                {"calls", 0},
                {"GFLOP", 1},
                {"MB", 1},
                {"bound by", 0},
                {"floor, us", 1},
                {"all calls, ms", 2}},
               rows);
  const double rate = model.batch_tokens() /
                      (micro_batch + update * model.batch_tokens() / static_cast<double>(o.step_tokens));
  report.table(
      "step",
      {{"micro-batch, ms", 1},
       {"optimizer, ms", 1},
       {"tokens/s at most", 0},
       {"model of data sheet at most", 1, true},
       {"memory, plan, GiB", 2}},
      {{micro_batch * 1e3, update * 1e3, rate, rate * training_flops_per_token(model.config) / kH200.bf16,
        static_cast<double>(planned_bytes<Backend>(model)) / (1 << 30)}});
}

// ---------------------------------------------------------------------------------------------------

constexpr char kHelp[] =
    R"(usage: bench_xmodcu [options]

Measures a GPU's ceilings (products by cuBLAS, copies), then each pass of a training step and the whole step
beside them: dense, a mixture of experts, xmod A4K8 and A3K16, each at two context lengths.

  --size NAME        tiny, 165M, 298M, 556M, 936M or 1.65B: the backbone (default: 556M, T 4096 and 32768)
  --model TEXT       only models whose name contains TEXT, e.g. "A4K8, T 32768" or dense
  --only PASS        only passes whose name contains PASS, each again and again on its own
  --step-tokens N    tokens of a step (default: 524288)
  --precision NAME   bf16 or fp32 (default: bf16)
  --seconds X        of each measurement, about (default: 1)
  --floors           measure nothing: count the least time of each pass on an H200
  --json             print one JSON object
  --help
)";

inline BenchOptions parse_bench_options(int argc, char** argv) {
  using xmod::detail::parse_value;
  BenchOptions o;
  const std::vector<option> table = {{"size", required_argument, nullptr, 's'},
                                     {"model", required_argument, nullptr, 'm'},
                                     {"only", required_argument, nullptr, 'o'},
                                     {"step-tokens", required_argument, nullptr, 't'},
                                     {"precision", required_argument, nullptr, 'p'},
                                     {"seconds", required_argument, nullptr, 'c'},
                                     {"floors", no_argument, nullptr, 'f'},
                                     {"json", no_argument, nullptr, 'j'},
                                     {"help", no_argument, nullptr, 'h'}};
  parse_arguments("bench_xmodcu", argc, argv, table, [&](int code, const std::string& value) {
    if (code == 's') o.size = value;
    if (code == 'm') o.model = value;
    if (code == 'o') o.only = value;
    if (code == 't') parse_value("step-tokens", value, Range{1}, o.step_tokens);
    if (code == 'p') parse_value("precision", value, {}, o.machine.precision);
    if (code == 'c') parse_value("seconds", value, Range{0}, o.seconds);
    if (code == 'f') o.floors = true;
    if (code == 'j') o.json = true;
    if (code == 'h') o.help = true;
  });
  std::vector<std::string> sizes;
  for (const Preset& preset : presets()) sizes.push_back(preset.name);
  if (std::find(sizes.begin(), sizes.end(), o.size) == sizes.end())
    usage_error("--size ", o.size, ": expected ", xmod::detail::join(sizes));
  if (cases(o).empty())
    usage_error("--model ", o.model, ": no model has such a name; see the headings of a run without it");
  return o;
}

template <class Backend>
void run_floors(const BenchOptions& o) {
  Report report(o.json, [] { return [](Cell&) { return std::string(); }; });
  for (const Case& model : cases(o)) report_floors<Backend>(report, model, o);
  report.finish();
}

template <class Backend>
void run(const BenchOptions& o) {
  const bool tiny = o.size == "tiny";
  const PeakSizes sizes = tiny ? PeakSizes{64, 1 << 16, 1 << 12} : PeakSizes{};
  Report report(o.json, [=] { return watch_gpu<Backend>(o, sizes); });
  const Bounds bounds = report_peaks<Backend>(report, o, sizes);
  std::vector<Measured> all;
  for (const Case& model : cases(o)) {
    if (const auto measured = measure_case<Backend>(report, model, o, bounds)) all.push_back(*measured);
  }
  if (!all.empty()) report_steps(report, all, o, bounds, data_sheet(Backend::description()));
  report.finish();
}

}  // namespace xmod::bench

int main(int argc, char** argv) {
  using namespace xmod::bench;
  return run_benchmark([&] {
    const BenchOptions o = parse_bench_options(argc, argv);
    const auto with = [&]<class Element>(Element) {
      using Backend = TimedBackend<xmod::CudaBackend<Element>, EventClock>;
      o.floors ? run_floors<Backend>(o) : run<Backend>(o);
    };
    if (o.help) {
      std::cout << kHelp;
    } else if (o.machine.precision == xmod::Precision::bf16) {
      with(xmod::bf16());
    } else {
      with(float());
    }
  });
}
