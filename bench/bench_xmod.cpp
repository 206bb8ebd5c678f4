// `make bench`: how near the trainer comes to what the machine can do. First the machine's peaks, then, for
// models of three sizes, every pass as it runs in a training step and the step as a whole, then dense against
// X-MoD. A pass is timed where it stands in the step, with the data and the caches that it finds there.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#define TESTING  // without the trainer's main
#include "bench/blas.h"
#include "bench/clock.h"
#include "bench/main.h"
#include "bench/pass_report.h"
#include "bench/peaks.h"
#include "bench/report.h"
#include "bench/timed_backend.h"
#include "bench/training.h"
#include "train_xmod.cpp"
#include "xmod/spin_briefly.h"

namespace xmod::bench {

using Backend = TimedBackend<CpuBackend, WallClock>;

// ---------------------------------------------------------------------------------------------------
// What is measured

struct Size {
  std::string name;
  ModelConfig dense;
  int64_t batch_size;
};

// A dense model and a batch of some thousand tokens.
inline std::vector<Size> sizes() {
  ModelConfig tiny;
  ModelConfig dim512{.vocab_size = 8192,
                     .dim = 512,
                     .active_layers = 8,
                     .heads = 8,
                     .kv_heads = 4,
                     .head_dim = 64,
                     .ffn_dim = 1536,
                     .seq_len = 1024};
  ModelConfig dim1024{.vocab_size = 8192,
                      .dim = 1024,
                      .active_layers = 4,
                      .heads = 16,
                      .kv_heads = 8,
                      .head_dim = 128,
                      .ffn_dim = 3072,
                      .seq_len = 2048};
  tiny.arch = dim512.arch = dim1024.arch = Arch::dense;
  return {{"tiny", tiny, 8}, {"512", dim512, 4}, {"1024", dim1024, 2}};
}

inline ModelConfig xmod(ModelConfig c, int64_t A, int64_t K) {
  c.arch = Arch::xmod;
  c.anchor_stride = A;
  c.token_sparsity = K;
  return c;
}

struct BenchOptions {
  std::string size = "all", arch = "dense", only, blas;
  MachineOptions machine;
  int64_t batch_size = 0;
  double seconds = 5;
  bool json = false, routing = false, help = false;
};

// ---------------------------------------------------------------------------------------------------
// The whole step

// peak_now: FLOP/s of fp32 multiply-adds between the steps, with whatever else the machine did then.
inline void report_step(Report& report, const Training<Backend>& training, const Backend& backend,
                        double steps, double seconds, double peak_now, const Bounds& bounds) {
  const double of_peak = seconds_at_peak(backend, bounds) / steps / seconds;
  const double rate = static_cast<double>(training.tokens()) / seconds;
  const double model = rate * training_flops_per_token(training.config);
  report.table("step",
               {{"tokens a step", 0},
                {"ms a step", 1},
                {"tokens/s", 0},
                {"model GFLOP/s", 1},
                {"model of peak", 1, true},
                {"all GFLOP/s", 1},
                {"all of peak", 1, true},
                {"peak between steps, GFLOP/s", 1},
                {"all of that", 1, true}},
               {{training.tokens(), seconds * 1e3, rate, model / 1e9, model / bounds.products,
                 flops_done(backend) / steps / seconds / 1e9, of_peak, peak_now / 1e9,
                 of_peak * bounds.fp32_products / peak_now}});
}

inline void measure_size(Report& report, const Size& size, const BenchOptions& o, const Bounds& bounds) {
  ModelConfig c = size.dense;
  if (o.arch == "xmod") c = xmod(c, 1, c.dim == 128 ? 4 : 8);
  const int64_t B = o.batch_size > 0 ? o.batch_size : size.batch_size;
  report.section(size.name, describe(c, B));
  Backend backend(o.machine);
  Training training(backend, c, B);
  backend.passes.clear();
  progress(size.name, ": first step");
  training.step();
  if (!o.only.empty()) return report_alone(report, backend, o.only, o.seconds, bounds);

  backend.passes.clear();
  std::vector<double> seconds, meanwhile;
  double all = 0;
  while (seconds.size() < 2 || all < o.seconds) {
    meanwhile.push_back(measure_flops_now(peak_loops()[0], backend.threads()));
    const Stopwatch watch;
    training.step();
    seconds.push_back(watch.seconds());
    all += seconds.back();
    progress(size.name, ": a step of ", seconds.back(), " s");
  }
  const double steps = static_cast<double>(seconds.size());
  report_passes(report, backend, steps, all, bounds);
  report_kinds(report, backend, all, bounds);
  report_step(report, training, backend, steps, median(seconds), median(meanwhile), bounds);
}

// ---------------------------------------------------------------------------------------------------
// Dense against X-MoD: what routing costs beyond its arithmetic

// Steps of so many tokens, put together from micro-batches that are all alike: one of them is timed, and the
// optimizer.
struct RoutedModel {
  std::string name;
  std::unique_ptr<Training<Backend>> training;
  double flops = 0;  // of a step: all that is done
  std::vector<double> micro_batch = {}, update = {}, step = {};
};

inline void measure_round(RoutedModel& m, Backend& backend, double micro_batches) {
  backend.passes.clear();
  const Stopwatch first;
  m.training->micro_batch();
  m.micro_batch.push_back(first.seconds());
  m.flops = micro_batches * flops_done(backend);

  backend.passes.clear();
  const Stopwatch second;
  m.training->update();
  m.update.push_back(second.seconds());
  m.flops += flops_done(backend);
  m.step.push_back(micro_batches * m.micro_batch.back() + m.update.back());
}

inline void measure_routing(Report& report, const BenchOptions& o) {
  constexpr int64_t kStepTokens = 32768;
  ModelConfig dense = sizes()[1].dense;
  dense.seq_len = 2048;
  const int64_t B = o.batch_size > 0 ? o.batch_size : 2;
  const double micro_batches = static_cast<double>(kStepTokens) / static_cast<double>(B * dense.seq_len);
  report.section("routing",
                 xmod::detail::concatenate("Dense against X-MoD, dim 512, 8 active layers, T 2048, ",
                                           kStepTokens, " tokens a step"));
  Backend backend(o.machine);
  std::vector<RoutedModel> models;
  models.push_back({"dense", std::make_unique<Training<Backend>>(backend, dense, B)});
  for (int64_t A : {1, 4}) {
    const std::string name = xmod::detail::concatenate("xmod A", A, "K8");
    if (name.find(o.only) == std::string::npos) continue;
    models.push_back({name, std::make_unique<Training<Backend>>(backend, xmod(dense, A, 8), B)});
  }
  for (RoutedModel& m : models) {
    progress(m.name, ": first step");
    m.training->step();
  }
  const Stopwatch all;
  for (int round = 0; round < 2 || all.seconds() < o.seconds; round++) {
    for (RoutedModel& m : models) measure_round(m, backend, micro_batches);
    progress("round ", round + 1, ": ", all.seconds(), " s");
  }

  std::vector<std::vector<Cell>> rows;
  for (const RoutedModel& m : models) {
    std::vector<double> ratios;
    for (size_t i = 0; i < m.step.size(); i++) ratios.push_back(m.step[i] / models[0].step[i]);
    const double time = median(ratios), model = flops_ratio_to_dense(m.training->config);
    const double done = m.flops / models[0].flops;
    rows.push_back({m.name, static_cast<double>(m.training->model().plan.size()), median(m.micro_batch) * 1e3,
                    median(m.update) * 1e3, median(m.step), time, smallest(ratios), largest(ratios), model,
                    time / model, done, time / done});
  }
  report.table("models",
               {{"model", 0},
                {"layers", 0},
                {"ms a micro-batch", 0},
                {"ms of the optimizer", 0},
                {"s a step", 2},
                {"time ratio", 3},
                {"least", 3},
                {"most", 3},
                {"model FLOPs ratio", 3},
                {"time / model FLOPs", 3},
                {"all FLOPs ratio", 3},
                {"time / all FLOPs", 3}},
               rows);
}

// ---------------------------------------------------------------------------------------------------
// Our products against those of a BLAS

inline void measure_blas(Report& report, const Size& size, const BenchOptions& o, Blas& blas,
                         const Bounds& bounds) {
  const ModelConfig& c = size.dense;
  const int64_t n = (o.batch_size > 0 ? o.batch_size : size.batch_size) * c.seq_len;
  report.section("blas " + size.name,
                 xmod::detail::concatenate("Products of ", size.name, " against ", o.blas, ", ", n, " rows"));
  const std::vector<std::pair<int64_t, int64_t>> weights = {{c.dim, c.qkv_dim()},
                                                            {c.q_dim(), c.dim},
                                                            {c.dim, 2 * c.ffn_dim},
                                                            {c.ffn_dim, c.dim},
                                                            {c.dim, c.vocab_size}};
  std::vector<std::vector<Cell>> rows;
  for (const auto& [C, OC] : weights) {
    for (const ProductRace& race : race_products(blas, n, C, OC, o.only, o.seconds)) {
      const double flops = 2.0 * n * C * OC;
      rows.push_back({race.pass, show_shape({Kind::product, {n, C, OC}, 0, 0}), flops / race.ours / 1e9,
                      flops / race.ours / bounds.products, flops / race.theirs / 1e9, race.ratio, race.least,
                      race.most, race.of_fastest});
      progress(race.pass, " ", show_shape({Kind::product, {n, C, OC}, 0, 0}), ": ", race.ratio);
    }
  }
  report.table("products",
               {{"product", 0},
                {"shape", 0},
                {"GFLOP/s", 1},
                {"of peak", 0, true},
                {"BLAS GFLOP/s", 1},
                {"ratio", 2},
                {"least", 2},
                {"most", 2},
                {"of the fastest", 2}},
               rows);
}

// ---------------------------------------------------------------------------------------------------
// The machine

// How it was left alone: by other programs, and by whoever shares its processors unseen, as the neighbours of
// a virtual machine do, who slow down its peak.
inline SectionEnd watch_machine(int threads) {
  return [threads, others = Interruptions(threads)](Cell& section) {
    const double share = others.share();
    const double peak = measure_flops(peak_loops()[0], threads, 0.1) / 1e9;
    section["interrupted"] = share;
    section["fp32 peak at the end, GFLOP/s"] = peak;
    char text[160];
    std::snprintf(text, sizeof text, "fp32 peak at the end: %.1f GFLOP/s.", peak);
    if (std::isnan(share)) return std::string(text);
    const size_t length = std::strlen(text);
    std::snprintf(text + length, sizeof text - length,
                  " Other programs kept this one waiting for %.1f%% of the time.", share * 100);
    return std::string(text);
  };
}

inline Bounds report_peaks(Report& report, const MachineOptions& machine, double seconds) {
  const Backend backend(machine);
  const int threads = Backend::threads();
  report.section("peaks", "Peaks of this machine (" + backend.description() + ")");
  progress("peaks of the machine");
  const Peaks p = measure_peaks(threads, seconds);
  std::vector<std::vector<Cell>> rows;
  for (const Peak& peak : p.arithmetic) {
    rows.push_back({peak.loop.arithmetic, peak.loop.instructions, peak.one / 1e9, peak.all / 1e9});
  }
  report.table("arithmetic",
               {{"arithmetic", 0},
                {"instructions", 0},
                {"1 thread, GFLOP/s", 1},
                {std::to_string(threads) + " threads, GFLOP/s", 1}},
               rows);
  report.table("memory", {{"memory", 0}, {"read, GB/s", 1}, {"copy (read + written), GB/s", 1}},
               {{"1 GiB", p.memory.read / 1e9, p.memory.copy / 1e9},
                {"16 MiB", p.cache.read / 1e9, p.cache.copy / 1e9}});
  const double products = p.products(choose_matmul_kernel(machine.precision, machine.instructions).name);
  return {products, p.fp32(), p.fp32(), p.memory.copy};  // attention computes in fp32
}

// ---------------------------------------------------------------------------------------------------

constexpr char kHelp[] =
    R"(usage: bench_xmod [options]

Measures the machine's peaks, then each pass of a training step and the whole step beside them.

  --size NAME        tiny, 512, 1024, or all: also dense against X-MoD (default: all)
  --arch NAME        dense or xmod: the model of the sizes (default: dense)
  --batch-size N     sequences a step (default: 8 at tiny, 4 at 512, 2 at 1024)
  --routing          only dense against X-MoD
  --only PASS        only passes whose name contains PASS, each again and again on its own
  --blas LIBRARY     only products, in turn with the sgemm of a BLAS, e.g. libopenblas.so.0
  --threads N        (default: OpenMP's)
  --precision NAME   of the factors in matrix products: fp32 or bf16 (default: fp32)
  --instructions NAME  for matrix products, as train_xmod has it (default: the fastest)
  --seconds X        of each measurement, about, and a tenth of it of each peak (default: 5); a step is
                     taken twice at least
  --json             print one JSON object
  --help
)";

inline BenchOptions parse_bench_options(int argc, char** argv) {
  using xmod::detail::parse_value;
  BenchOptions o;
  const std::vector<option> table = {{"size", required_argument, nullptr, 's'},
                                     {"arch", required_argument, nullptr, 'a'},
                                     {"batch-size", required_argument, nullptr, 'b'},
                                     {"only", required_argument, nullptr, 'o'},
                                     {"blas", required_argument, nullptr, 'l'},
                                     {"threads", required_argument, nullptr, 't'},
                                     {"precision", required_argument, nullptr, 'p'},
                                     {"instructions", required_argument, nullptr, 'i'},
                                     {"seconds", required_argument, nullptr, 'c'},
                                     {"routing", no_argument, nullptr, 'r'},
                                     {"json", no_argument, nullptr, 'j'},
                                     {"help", no_argument, nullptr, 'h'}};
  parse_arguments("bench_xmod", argc, argv, table, [&](int code, const std::string& value) {
    if (code == 's') o.size = value;
    if (code == 'a') o.arch = value;
    if (code == 'b') parse_value("batch-size", value, Range{1}, o.batch_size);
    if (code == 'o') o.only = value;
    if (code == 'l') o.blas = value;
    if (code == 't') parse_value("threads", value, Range{1}, o.machine.threads);
    if (code == 'p') parse_value("precision", value, {}, o.machine.precision);
    if (code == 'i') parse_value("instructions", value, {}, o.machine.instructions);
    if (code == 'c') parse_value("seconds", value, Range{0}, o.seconds);
    if (code == 'r') o.routing = true;
    if (code == 'j') o.json = true;
    if (code == 'h') o.help = true;
  });
  if (o.arch != "dense" && o.arch != "xmod") usage_error("--arch ", o.arch, ": expected dense or xmod");
  if (!o.blas.empty() && (o.machine.precision != Precision::fp32 || o.machine.instructions != "auto")) {
    usage_error(
        "--blas: the race is in fp32 on the fastest instructions; leave out --precision and --instructions");
  }
  return o;
}

inline std::vector<Size> chosen_sizes(const BenchOptions& o) {
  std::vector<Size> chosen;
  for (const Size& size : sizes()) {
    if (!o.routing && (o.size == "all" || o.size == size.name)) chosen.push_back(size);
  }
  if (chosen.empty() && !o.routing) usage_error("--size ", o.size, ": expected tiny, 512, 1024 or all");
  return chosen;
}

inline void run(const BenchOptions& o) {
  const std::vector<Size> chosen = chosen_sizes(o);
  const int threads = Backend(o.machine).threads();
  Report report(o.json, [threads] { return watch_machine(threads); });
  const Bounds bounds = report_peaks(report, o.machine, std::max(0.05, o.seconds / 10));
  if (!o.blas.empty()) {
    Blas blas(o.blas, threads);
    for (const Size& size : chosen) measure_blas(report, size, o, blas, bounds);
  } else {
    for (const Size& size : chosen) measure_size(report, size, o, bounds);
    if (o.routing || (o.size == "all" && o.only.empty())) measure_routing(report, o);
  }
  report.finish();
}

}  // namespace xmod::bench

int main(int argc, char** argv) {
  xmod::spin_briefly(argv);
  return xmod::bench::run_benchmark([&] {
    const xmod::bench::BenchOptions options = xmod::bench::parse_bench_options(argc, argv);
    if (options.help) {
      std::cout << xmod::bench::kHelp;
    } else {
      xmod::bench::run(options);
    }
  });
}
