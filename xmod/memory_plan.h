// How much memory a run takes, group by group, before anything is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "xmod/activations.h"
#include "xmod/gradient_exchange.h"
#include "xmod/optimizer.h"
#include "xmod/optimizer_shares.h"
#include "xmod/options.h"
#include "xmod/safetensors.h"
#include "xmod_common.h"

namespace xmod {

struct MemoryEstimate {
  std::vector<std::pair<std::string, int64_t>> groups;  // name, bytes

  int64_t total() const {
    int64_t bytes = 0;
    for (const auto& [name, size] : groups) bytes += size;
    return bytes;
  }
};

// What the memory of a run depends on beside its model.
struct RunSize {
  int64_t batch_size = 1;  // sequences
  Optimizer optimizer = Optimizer::muon;
  Recompute recompute = Recompute::none;
  int64_t threads = 0;  // 0: as many as the backend takes by itself
  int64_t ranks = 1;
  int64_t zero = 1;  // 1: the ranks share out the optimizer's state, and with bf16 the fp32 weights
};

// Of TrainOptions or PlanOptions.
template <class Part>
RunSize run_size(const Part& o, int64_t threads, int64_t ranks) {
  return {o.batch_size, o.optimizer, o.recompute, threads, ranks, o.zero};
}

template <class Backend>
int64_t threads_of(const RunSize& run) {
  return run.threads > 0 ? run.threads : Backend::threads();
}

namespace detail {

inline int64_t state_bytes(const ModelConfig& c, const ParameterTable& table) {
  return (c.seq_len * c.head_dim + table.buffers_total + table.step_sums_total) *
         static_cast<int64_t>(sizeof(float));
}

// Inputs and targets of the training batch and of one that is evaluated; the piece of a tensor that is on its
// way to a file.
inline int64_t host_bytes(const ModelConfig& c, const ParameterTable& table, int64_t batch_size) {
  int64_t largest = 0;
  for (const Parameter& p : table.entries) largest = std::max(largest, p.size);
  return 4 * batch_size * c.seq_len * static_cast<int64_t>(sizeof(int32_t)) +
         std::min(largest * static_cast<int64_t>(sizeof(float)), SafetensorsWriter::kPiece);
}

// Of the optimizer on one rank, and the fp32 weights that it keeps.
struct OptimizerMemory {
  int64_t masters, momentum, second_moments, working;

  int64_t total() const { return masters + momentum + second_moments + working; }
};

// One rank alone shares nothing out.
inline bool is_shared(const RunSize& run) {
  return run.zero > 0 && run.ranks > 1;
}

// Where products read weights in another format, ranks share out the fp32 ones too.
template <class Backend>
bool shares_masters(const RunSize& run) {
  return is_shared(run) && sizeof(typename Backend::floatX) < sizeof(float);
}

// One, where it is not shared.
inline std::vector<OptimizerShare> planned_shares(const ParameterTable& table, const RunSize& run) {
  const OptimizerTable optimizer = make_optimizer_table(table, run.optimizer);
  if (is_shared(run)) return share_optimizer(table, optimizer, run.ranks);
  return {whole_optimizer(table, optimizer)};
}

template <class Backend>
int64_t master_bytes(const ParameterTable& table, const OptimizerShare& share, const RunSize& run) {
  if constexpr (sizeof(typename Backend::floatX) < sizeof(float)) {
    if (shares_masters<Backend>(run)) return Backend::bytes_of_parts(kept_masters(table, share));
  }
  return table.total * static_cast<int64_t>(sizeof(float));
}

// On the rank that needs most.
template <class Backend>
OptimizerMemory optimizer_memory(const ParameterTable& table, const std::vector<OptimizerShare>& shares,
                                 const RunSize& run) {
  constexpr int64_t kFloat = sizeof(float);
  OptimizerMemory most{};
  for (const OptimizerShare& share : shares) {
    const OptimizerMemory memory{master_bytes<Backend>(table, share, run), share.first_moment_total * kFloat,
                                 share.second_moment_total * kFloat,
                                 Backend::muon_bytes(muon_shapes(table, share), threads_of<Backend>(run))};
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

// Gradients of other ranks that wait to be added.
inline int64_t arriving_bytes(const ParameterTable& table, const std::vector<OptimizerShare>& shares,
                              const RunSize& run) {
  if (run.ranks == 1) return 0;
  const int ranks = static_cast<int>(run.ranks);
  return GradientExchange::bytes(
      is_shared(run) ? owned_pieces(table, shares) : even_pieces(table.total, ranks), ranks);
}

// Measured with Open MPI 4.1 between processes of one host.
inline int64_t mpi_bytes(int64_t ranks) {
  return ranks > 1 ? int64_t{14} << 20 : 0;
}

}  // namespace detail

template <class Backend>
MemoryEstimate training_memory(const ModelConfig& c, const RunSize& run) {
  using floatX = typename Backend::floatX;
  constexpr int64_t kFloat = sizeof(float);
  const ParameterTable table = make_parameter_table(c, make_layer_plan(c));
  const std::vector<OptimizerShare> shares = detail::planned_shares(table, run);
  const int64_t B = run.batch_size, threads = threads_of<Backend>(run);
  const detail::OptimizerMemory state = detail::optimizer_memory<Backend>(table, shares, run);
  const Arena arena = measure_activations<floatX>(c, B, c.seq_len, Use::training, run.recompute);
  MemoryEstimate memory;
  memory.groups = {
      {"parameters", state.masters},
      {"gradients", table.total * kFloat},
      {"optimizer: momentum", state.momentum},
      {"optimizer: AdamW's second moments", state.second_moments},
      {"rotary table, thresholds, biases", detail::state_bytes(c, table)},
  };
  memory.groups.insert(memory.groups.end(), arena.groups().begin(), arena.groups().end());
  const std::pair<std::string, int64_t> rest[] = {
      {"evaluation, beyond training", arena_bytes<floatX>(c, B, Use::training, run.recompute) - arena.used()},
      {"working memory of the passes", Backend::pass_bytes(c, B, Use::training, threads)},
      {"working memory of Muon", state.working},
      {"gradients that other ranks send", detail::arriving_bytes(table, shares, run)},
      {"batches, a piece of a checkpoint", detail::host_bytes(c, table, B)},
      {"MPI", detail::mpi_bytes(run.ranks)},
      {"program, libraries, threads' stacks", Backend::program_bytes(threads)},
  };
  memory.groups.insert(memory.groups.end(), std::begin(rest), std::end(rest));
  return memory;
}

// Running a model on batches without training it.
template <class Backend>
int64_t inference_bytes(const ModelConfig& c, const RunSize& run) {
  using floatX = typename Backend::floatX;
  const ParameterTable table = make_parameter_table(c, make_layer_plan(c));
  const int64_t B = run.batch_size, threads = threads_of<Backend>(run);
  return table.total * static_cast<int64_t>(sizeof(float)) + detail::state_bytes(c, table) +
         arena_bytes<floatX>(c, B, Use::inference, run.recompute) +
         Backend::pass_bytes(c, B, Use::inference, threads) + detail::host_bytes(c, table, B) +
         Backend::program_bytes(threads);
}

namespace detail {

template <class... Values>
std::string print(const char* pattern, Values... values) {
  char text[128];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

inline std::string bytes(int64_t n) {
  const double mib = static_cast<double>(n) / (1 << 20);
  return mib < 1024 ? print("%9.2f MiB", mib) : print("%9.2f GiB", mib / 1024);
}

}  // namespace detail

inline constexpr const char* kMemoryRemedy =
    "`plan` shows what a run needs: choose a smaller --batch-size, --seq-len or model, or train with "
    "--recompute block";

// Refuses what cannot fit. Asking for it would not tell: Linux hands out more memory than it has, and ends
// the process that comes to use it.
inline void require_memory(int64_t needed, int64_t available) {
  if (needed <= available) return;
  auto gib = [](int64_t n) { return detail::print("%.1f GiB", static_cast<double>(n) / (1 << 30)); };
  fail("out of memory: ", gib(needed), " needed, the machine has ", gib(available), "; ", kMemoryRemedy);
}

inline void print_memory(const MemoryEstimate& memory, std::ostream& out) {
  auto row = [&](const std::string& name, const std::string& value) {
    out << detail::print("  %-38s", name.c_str()) << value << "\n";
  };
  for (const auto& [name, bytes] : memory.groups) {
    if (bytes > 0) row(name, detail::bytes(bytes));
  }
  row("total", detail::bytes(memory.total()));
}

}  // namespace xmod
