// The CPU against CUDA: trains models a few steps with both backends and prints, tensor by tensor, how far
// apart they are. Past a bound the exit status is 1.
//
//   fp32   Every architecture from the same seed, and every model of test/data/ from its weights.
//          Activations and gradients of every step differ by at most 1e-5 of their size, weights by twice
//          as much; both choose the same tokens and experts. CUDA begins each step with the CPU's weights:
//          what a step computes is compared, and not how fast two runs drift apart.
//   bf16   A step of the models of test/data/, at whose weights rounding changes no choice. Loss and
//          gradients, against fp64: at most twice PyTorch's error under autocast, which the files hold. They
//          hold none of the other tensors: activations and new weights, against the CPU in fp32, err at most
//          twice as much as the median of PyTorch's gradients.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "small_config.h"
#include "training_record.h"
#include "xmod/config_json.h"
#include "xmod/safetensors.h"
#include "xmod_common.h"

namespace xmod {
namespace {

constexpr double kBound = 1e-5;
constexpr double kWeightBound = 2 * kBound;  // either may be as far as that from what is exact
constexpr int kSteps = 3;

// ||a - b|| / ||b||; NaN where either holds one.
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double gap = 0, size = 0;
  for (size_t i = 0; i < b.size(); i++) {
    gap += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    size += static_cast<double>(b[i]) * b[i];
  }
  return size == 0 ? std::sqrt(gap) : std::sqrt(gap / size);
}

// One line for each tensor of a model.
class Table {
 public:
  explicit Table(bool all) : all_(all) {}

  void begin(const std::string& title) {
    finish();
    title_ = title;
  }

  // The largest difference of a name counts.
  void add(const std::string& kind, const std::string& name, double found, double bound) {
    for (Line& line : lines_) {
      if (line.kind != kind || line.name != name) continue;
      if (!(line.found >= found)) line.found = found;
      return;
    }
    lines_.push_back({kind, name, found, bound});
  }

  // Prints the lines of a model: all, or the worst of each kind and all that is past its bound.
  void finish() {
    if (lines_.empty()) return;
    std::printf("\n%s\n", title_.c_str());
    for (size_t i = 0; i < lines_.size(); i++) {
      const Line& line = lines_[i];
      failures_ += !line.good();
      if (all_ || !line.good() || is_worst_of_kind(i)) line.print();
    }
    lines_.clear();
  }

  int failures() const { return failures_; }

 private:
  struct Line {
    std::string kind, name;
    double found, bound;

    bool good() const { return found <= bound; }
    void print() const {
      std::printf("  %-11s %-52s %8.1e  at most %8.1e%s\n", kind.c_str(), name.c_str(), found, bound,
                  good() ? "" : "  FAILED");
    }
  };

  bool is_worst_of_kind(size_t i) const {
    auto badness = [&](const Line& line) { return line.bound > 0 ? line.found / line.bound : line.found; };
    for (size_t j = 0; j < lines_.size(); j++) {
      if (lines_[j].kind != lines_[i].kind || j == i) continue;
      if (badness(lines_[j]) > badness(lines_[i])) return false;
      if (badness(lines_[j]) == badness(lines_[i]) && j < i) return false;
    }
    return true;
  }

  bool all_;
  std::string title_;
  std::vector<Line> lines_;
  int failures_ = 0;
};

// A file of test/data/.
class Dump {
 public:
  explicit Dump(const std::string& path)
      : file_(path),
        config_(config_from_json(nlohmann::json::parse(file_.metadata().at("config")), path)),
        optimizer_(nlohmann::json::parse(file_.metadata().at("optimizer"))),
        table(make_parameter_table(config_, make_layer_plan(config_))) {}

  TrainingRun run() const {
    TrainingRun run;
    run.config = config_;
    const Shape shape = file_.info("tokens").shape;
    run.B = shape[0];
    run.config.seq_len = shape[1] - 1;
    std::vector<int32_t> tokens(static_cast<size_t>(element_count(shape)));
    file_.read("tokens", shape, tokens.data());
    run.batches = {tokens};
    run.lr = optimizer_.at("lr"), run.adamw_lr = optimizer_.at("adamw_lr");
    run.weight_decay = optimizer_.at("weight_decay"), run.grad_clip = optimizer_.at("grad_clip");
    run.states = {state()};
    run.keep_tensors = true;
    return run;
  }

  // PyTorch's errors in bf16 are not there where rounding changes what it chooses.
  bool has_bf16_errors() const { return file_.contains("bf16_error.loss"); }
  double bf16_error(const std::string& name) const { return read("bf16_error." + name, {1})[0]; }
  double median_bf16_error() const {
    std::vector<double> errors;
    for (const Parameter& p : table.entries) errors.push_back(bf16_error("grad." + p.name));
    const auto middle = errors.begin() + static_cast<int64_t>(errors.size() / 2);
    std::nth_element(errors.begin(), middle, errors.end());
    return *middle;
  }

  std::vector<float> read(const std::string& name, const Shape& shape) const {
    std::vector<float> values(static_cast<size_t>(element_count(shape)));
    file_.read_f32(name, shape, values.data());
    return values;
  }

 private:
  TrainingState state() const {
    TrainingState state;
    state.params.resize(static_cast<size_t>(table.total));
    for (const Parameter& p : table.entries)
      file_.read_f32("param." + p.name, p.shape, state.params.data() + p.offset);
    state.buffers.resize(static_cast<size_t>(table.buffers_total));
    for (const Buffer& b : table.buffers) {
      std::fill_n(state.buffers.begin() + b.offset, b.size, b.init);
      if (file_.contains("buffer." + b.name))
        file_.read_f32("buffer." + b.name, b.shape, state.buffers.data() + b.offset);
    }
    return state;
  }

  SafetensorsFile file_;
  ModelConfig config_;
  nlohmann::json optimizer_;

 public:
  const ParameterTable table;
};

void compare_tensors(Table& table, const std::string& kind, const std::vector<RecordedTensor>& cuda,
                     const std::vector<RecordedTensor>& cpu, double bound) {
  if (cuda.size() != cpu.size()) fail("the backends record ", cuda.size(), " and ", cpu.size(), " tensors");
  for (size_t i = 0; i < cpu.size(); i++) {
    if (cuda[i].name != cpu[i].name || cuda[i].values.size() != cpu[i].values.size())
      fail("the backends record different tensors: ", cuda[i].name, " and ", cpu[i].name);
    table.add(kind, cpu[i].name, difference(cuda[i].values, cpu[i].values), bound);
  }
}

// Gates of all layers as one tensor: the gradient of a single number may be the small rest of large terms.
std::vector<RecordedTensor> with_gates_together(const std::vector<RecordedTensor>& tensors) {
  std::vector<RecordedTensor> out;
  RecordedTensor gates{"residual gates of all layers", {}};
  for (const RecordedTensor& tensor : tensors) {
    if (tensor.name.find("residual_gate") == std::string::npos) {
      out.push_back(tensor);
    } else {
      gates.values.push_back(tensor.values.at(0));
    }
  }
  if (!gates.values.empty()) out.push_back(gates);
  return out;
}

void compare_fp32(Table& table, TrainingRun run) {
  const TrainingRecord cpu = record_on_cpu(run);
  run.states.resize(1);  // the weights given, or those of the seed
  for (size_t step = 1; step < cpu.size(); step++) run.states.push_back(cpu[step].state);
  const TrainingRecord cuda = record_on_cuda(run);
  for (size_t step = 0; step < cpu.size(); step++) {
    table.add("loss", "loss", std::abs(cuda[step].loss / cpu[step].loss - 1), kBound);
    compare_tensors(table, "choice", cuda[step].routing, cpu[step].routing, 0);
    compare_tensors(table, "activation", cuda[step].activations, cpu[step].activations, kBound);
    compare_tensors(table, "gradient", with_gates_together(cuda[step].gradients),
                    with_gates_together(cpu[step].gradients), kBound);
    // AdamW makes a whole step of a tiny gradient, whose rounding so counts as much as the gradient.
    compare_tensors(table, "weight", cuda[step].weights, cpu[step].weights, kWeightBound);
  }
}

void compare_bf16(Table& table, const Dump& dump) {
  TrainingRun run = dump.run();
  const RecordedStep fp32 = record_on_cpu(run)[0];
  run.machine.precision = Precision::bf16;
  const RecordedStep cuda = record_on_cuda(run)[0];
  const double loss = dump.read("loss", {1})[0], most = 2 * dump.median_bf16_error();
  table.add("loss", "loss", std::abs(cuda.loss / loss - 1), 2 * dump.bf16_error("loss") + kBound);
  compare_tensors(table, "choice", cuda.routing, fp32.routing, 0);
  compare_tensors(table, "activation", cuda.activations, fp32.activations, most);
  for (const Parameter& p : dump.table.entries) {
    for (const RecordedTensor& gradient : cuda.gradients) {
      if (gradient.name != p.name) continue;
      table.add("gradient", p.name, difference(gradient.values, dump.read("grad." + p.name, p.shape)),
                2 * dump.bf16_error("grad." + p.name) + kBound);
    }
  }
  compare_tensors(table, "weight", cuda.weights, fp32.weights, most);
}

std::vector<std::string> dumps() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator("test/data")) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Small, but with heads and rows of the sizes that CUDA has its fast kernels for.
ModelConfig small_model(Arch arch) {
  ModelConfig c = small_config(arch);
  c.vocab_size = 256;
  c.dim = 64;
  c.active_layers = has_experts(arch) ? 3 : 4;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = arch == Arch::dense ? 128 : 64;
  c.ffn_dim = 128;
  c.seq_len = 48;
  if (has_experts(arch)) c.experts = 6, c.expert_dim = 32, c.shared_experts = 1;
  // A strong entropy term turns rounding into errors: its gradient's slope is up to 1e5 at experts that are
  // all but inactive.
  c.entropy_weight = ModelConfig{}.entropy_weight;
  return c;
}

TrainingRun run_from_seed(const ModelConfig& config) {
  TrainingRun run;
  run.config = config;
  run.B = 2;
  for (uint64_t step = 0; step < kSteps; step++)
    run.batches.push_back(learnable_tokens(run.B * (config.seq_len + 1), config.vocab_size, step));
  run.keep_tensors = true;
  return run;
}

int compare(bool all) {
  Table table(all);
  for (const auto& [name, arch] : arch_names()) {
    table.begin(std::string(name) + " from a seed, fp32, " + std::to_string(kSteps) + " steps");
    compare_fp32(table, run_from_seed(small_model(arch)));
  }
  for (const std::string& path : dumps()) {
    const Dump dump(path);
    table.begin(path + ", fp32, a step");
    compare_fp32(table, dump.run());
    if (!dump.has_bf16_errors()) continue;
    table.begin(path + ", bf16, a step");
    compare_bf16(table, dump);
  }
  table.finish();
  std::printf("\n%d tensors are further apart than they may be\n", table.failures());
  return table.failures() > 0 ? 1 : 0;
}

}  // namespace
}  // namespace xmod

int main(int argc, char** argv) {
  try {
    const bool worst = argc == 2 && std::strcmp(argv[1], "--worst") == 0;
    if (argc > 1 && !worst)
      xmod::usage_error("unknown argument ", argv[argc - 1],
                        "; --worst prints only the worst tensor of each kind");
    return xmod::compare(!worst);
  } catch (const xmod::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
  }
}
