// The commands of the binary, for any backend.
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "xmod/checkpoint.h"
#include "xmod/command_line.h"
#include "xmod/communicator.h"
#include "xmod/evaluate.h"
#include "xmod/generate.h"
#include "xmod/model.h"
#include "xmod/options.h"
#include "xmod/plan.h"
#include "xmod/rank_plan.h"
#include "xmod/routing_map.h"
#include "xmod/routing_output.h"
#include "xmod/routing_report.h"
#include "xmod/task_report.h"
#include "xmod/tasks.h"
#include "xmod/tokenizer.h"
#include "xmod/trainer.h"

namespace xmod {

namespace detail {

// The tokenizer saved with a checkpoint; bytes where the vocabulary is that of bytes.
inline Tokenizer checkpoint_tokenizer(const std::string& checkpoint, const ModelConfig& config) {
  const std::string path = checkpoint + "/tokenizer.bin";
  if (path_exists(path)) return load_tokenizer(path, config.vocab_size);
  if (config.vocab_size == 256) return Tokenizer::bytes();
  fail(path, ": not found, and a vocabulary of ", config.vocab_size,
       " is not one of bytes; put the tokenizer.bin there that prepare_data.py wrote beside the shards");
}

// seq_len: of --seq-len, 0 where it was not given.
inline ModelConfig load_config_for(const std::string& checkpoint, int64_t seq_len) {
  ModelConfig config = load_config(checkpoint);
  if (seq_len == 0) return config;
  if (seq_len > config.seq_len) {
    fail("--seq-len ", seq_len, ": longer than the context of ", config.seq_len, " that ", checkpoint,
         " was trained with; give less");
  }
  config.seq_len = seq_len;
  validate(config);
  return config;
}

// The ranks of a host share its processors, whether their launcher has bound each to some or not.
template <class Backend>
int64_t threads_of_each(const Communicator& ranks) {
  const int64_t all = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return std::clamp<int64_t>(all / ranks.local_size(), 1, Backend::threads());
}

template <class Backend>
void train(const Options& options) {
  if (!options.train.init_from.empty()) {
    const std::string& from = options.train.init_from;
    require_same_sizes(from, options.model, load_config(from, "--init-from"));
  }
  Communicator ranks;
  ranks.join();
  MachineOptions machine = options.machine;
  if (ranks.size() > 1) Backend::use_device(ranks.local_rank());
  if (ranks.local_size() > 1 && machine.threads == 0) machine.threads = threads_of_each<Backend>(ranks);
  const MemoryEstimate memory =
      training_memory<Backend>(options.model, run_size(options.train, machine.threads, ranks.size()));
  const int64_t sharers = Backend::kProcessor == Processor::cpu ? ranks.local_size() : 1;
  const int64_t available = Backend::memory_bytes();
  if (sharers * memory.total() > available && ranks.is_root()) {
    std::cerr << "memory\n";
    print_memory(memory, std::cerr);
  }
  require_memory(sharers * memory.total(), available);
  Backend backend(machine);
  Trainer<Backend>(backend, ranks, options, std::cout).run();
}

template <class Backend>
void require_inference_memory(const ModelConfig& config, int64_t batch_size, int64_t threads) {
  RunSize run;
  run.batch_size = batch_size, run.threads = threads;
  require_memory(inference_bytes<Backend>(config, run), Backend::memory_bytes());
}

inline void require_other_file(const char* flag, const std::string& path, const std::string& input) {
  std::error_code error;  // where one of them does not exist
  if (!std::filesystem::equivalent(path, input, error) || error) return;
  fail(flag, " ", path, ": the command reads this file; give another name");
}

// Everything that a command on a checkpoint reads.
inline std::vector<std::string> input_files(const std::string& checkpoint, const TokenShards* shards,
                                            const std::vector<std::string>& more = {}) {
  std::vector<std::string> files = more;
  if (shards) {
    for (const std::string& path : shards->paths()) files.push_back(path);
  }
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint))
    files.push_back(entry.path().string());
  return files;
}

// A file that is opened at once and written at the end, or nothing where the path is empty.
class OptionalFile {
 public:
  // flag: of the path, for messages; inputs: files that must stay what they are.
  OptionalFile(const char* flag, const std::string& path, const std::vector<std::string>& inputs) {
    if (path.empty()) return;
    for (const std::string& input : inputs) require_other_file(flag, path, input);
    file_.emplace(path);
  }
  void write(const std::string& text) {
    if (!file_) return;
    file_->write(text.data(), static_cast<int64_t>(text.size()));
    file_->commit();
  }

 private:
  std::optional<AtomicFile> file_;
};

// A path need not be UTF-8; JSON must.
inline void print_json(const nlohmann::ordered_json& json) {
  std::cout << json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
}

// The evaluation files, each checked before the model is loaded.
inline std::vector<TaskFile> read_tasks(const EvalOptions& o, const ModelConfig& config) {
  std::vector<TaskFile> tasks;
  for (const std::string& path : o.tasks) {
    TaskFileReader reader(path);
    if (reader.tokenizer_fingerprint() != 0)
      reader.require_tokenizer(checkpoint_tokenizer(o.checkpoint, config));
    tasks.push_back(reader.read_items(config.vocab_size));
  }
  return tasks;
}

template <class Backend>
std::vector<TaskReport> evaluate_tasks(Model<Backend>& model, std::vector<TaskFile> tasks,
                                       int64_t max_items) {
  std::vector<TaskReport> reports;
  for (TaskFile& file : tasks) {
    ProgressLine line(file.name);
    TaskScores scores =
        evaluate_task(model, file, max_items, [&](int64_t done, int64_t all) { line.show(done, all); });
    reports.push_back({std::move(file), std::move(scores)});
  }
  sort_as_in_the_paper(reports);
  return reports;
}

inline void print_evaluation(const EvalOptions& o, const std::optional<ValidationLoss>& loss, int64_t targets,
                             const std::vector<TaskReport>& reports) {
  if (o.json) {
    nlohmann::ordered_json json = {{"checkpoint", o.checkpoint}};
    if (loss) {
      json["val_loss_topk"] = loss->topk;
      json["val_loss_threshold"] = loss->threshold;
      json["targets"] = targets;
    }
    for (const TaskReport& report : reports) json["tasks"].push_back(task_json(report));
    return print_json(json);
  }
  if (loss) {
    std::printf("validation loss %.4f top-k, %.4f threshold (mean over %lld targets)\n", loss->topk,
                loss->threshold, static_cast<long long>(targets));
  }
  if (!reports.empty()) std::cout << task_table(reports);
}

template <class Backend>
void eval(const Options& options) {
  const EvalOptions& o = options.eval;
  const ModelConfig config = load_config_for(o.checkpoint, o.seq_len);
  std::optional<TokenShards> shards;
  if (!o.val_data.empty()) shards.emplace(o.val_data, config.seq_len, config.vocab_size, "--val-data");
  std::vector<TaskFile> tasks = read_tasks(o, config);
  OptionalFile per_item("--per-item", o.per_item,
                        input_files(o.checkpoint, shards ? &*shards : nullptr, o.tasks));

  int64_t sequences = shards ? shards->num_sequences() : 0;
  for (const TaskFile& file : tasks) sequences = std::max(sequences, file.num_choices());
  const int64_t B = std::min(o.batch_size, sequences);
  validate_size(config, B);
  require_inference_memory<Backend>(config, B, options.machine.threads);
  Backend backend(options.machine);
  Model<Backend> model(backend, config, B, Use::inference);
  load_model(o.checkpoint, model);

  std::optional<ValidationLoss> loss;
  int64_t targets = 0;
  if (shards) {
    EvalLoader loader(std::move(*shards), B, o.eval_batches == 0 ? INT64_MAX : o.eval_batches * B);
    targets = loader.num_sequences() * config.seq_len;
    loss = evaluate(model, loader, B);
  }
  const std::vector<TaskReport> reports = evaluate_tasks(model, std::move(tasks), o.max_items);
  per_item.write(item_lines(reports));
  print_evaluation(o, loss, targets, reports);
}

// With nothing to continue, start where a document or a line starts.
inline std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> prompt = tokenizer.encode(text);
  if (prompt.empty() && tokenizer.eot() >= 0) prompt = {tokenizer.eot()};
  return prompt.empty() ? tokenizer.encode("\n") : prompt;
}

// On the error output: the model does not see the beginning of a prompt that is longer than its context.
inline void note_long_prompts(const std::vector<std::vector<int32_t>>& texts, int64_t T) {
  for (size_t i = 0; i < texts.size(); i++) {
    const auto size = static_cast<long long>(texts[i].size());
    if (size <= T) continue;
    std::fprintf(stderr, "note: prompt %zu has %lld tokens, the context %lld; the model sees its last %lld\n",
                 i + 1, size, static_cast<long long>(T), static_cast<long long>(T));
  }
}

inline std::vector<std::string> read_prompts(const std::string& path) {
  std::vector<std::string> prompts;
  std::istringstream lines(read_file(path));
  for (std::string line; std::getline(lines, line);) prompts.push_back(line);
  if (prompts.empty()) fail("--prompt-file ", path, ": empty, expected a prompt on each line");
  return prompts;
}

// A single text appears as it grows; of several, each as a paragraph of its own at the end.
class TextPrinter {
 public:
  explicit TextPrinter(std::vector<std::string> prompts) : texts_(std::move(prompts)) {
    if (streams()) std::cout << texts_[0] << std::flush;
  }
  void add(size_t text, std::string_view piece) {
    if (streams()) {
      std::cout << piece << std::flush;
    } else {
      texts_[text] += piece;
    }
  }
  void finish() const {
    for (size_t i = 0; !streams() && i < texts_.size(); i++) std::cout << (i > 0 ? "\n\n" : "") << texts_[i];
    std::cout << std::endl;
  }

 private:
  bool streams() const { return texts_.size() == 1; }
  std::vector<std::string> texts_;
};

// On the error output: the text alone stands on the other.
template <class Backend>
void report_generation(const ModelConfig& c, int64_t tokens, double seconds,
                       const Generation<Backend>& generation) {
  const double dense = account(dense_reference(c)).cached_per_token * sizeof(float) *
                       static_cast<double>(generation.cached_tokens());
  std::fprintf(stderr,
               "%lld tokens, %.0f a second; key/value cache %s, of a dense model with %lld layers %s\n",
               static_cast<long long>(tokens), static_cast<double>(tokens) / std::max(seconds, 1e-9),
               trimmed(bytes(generation.cache_bytes())).c_str(), static_cast<long long>(c.active_layers),
               trimmed(bytes(std::llround(dense))).c_str());
}

template <class Backend>
void generate_text(const Options& options) {
  const GenerateOptions& o = options.generate;
  const ModelConfig config = load_config_for(o.checkpoint, o.seq_len);
  const Tokenizer tokenizer = checkpoint_tokenizer(o.checkpoint, config);
  std::vector<std::string> prompts = {o.prompt};
  if (!o.prompt_file.empty()) prompts = read_prompts(o.prompt_file);
  std::vector<std::vector<int32_t>> texts;
  for (const std::string& prompt : prompts) texts.push_back(encode_prompt(tokenizer, prompt));

  const auto B = static_cast<int64_t>(texts.size());
  validate_size(config, B);
  require_inference_memory<Backend>(config, B, options.machine.threads);
  Backend backend(options.machine);
  Model<Backend> model(backend, config, B, Use::inference);
  load_model(o.checkpoint, model);
  note_long_prompts(texts, config.seq_len);
  Generation<Backend> generation(model, std::move(texts), {o.temperature, o.top_k, o.top_p},
                                 static_cast<uint64_t>(o.seed), tokenizer.eot(), o.use_cache);
  TextPrinter printer(std::move(prompts));
  const Stopwatch watch;
  int64_t tokens = 0;
  generation.run(o.max_new_tokens, [&](size_t text, int32_t id) {
    tokens++;
    printer.add(text, tokenizer.token(id));
  });
  printer.finish();
  if (std::cout) report_generation(config, tokens, watch.seconds(), generation);
}

inline void require_sparse_layers(const std::string& checkpoint, const ModelConfig& config) {
  const LayerPlan plan = make_layer_plan(config);
  if (count_sparse(plan) > 0) return;
  fail("--checkpoint ", checkpoint, ": a ", arch_name(config.arch), " model of ", count_layers(plan),
       " layers, none of them sparse; routing measures mod, xmod, routed-ffn and selected-q models");
}

struct ValidationData {
  int64_t batch_size;  // no larger than the data
  EvalLoader loader;
};

// Opens the shards and checks that the model can run on batches of them. batches 0: all.
template <class Backend>
ValidationData validation_data(const std::string& pattern, const ModelConfig& config, int64_t batch_size,
                               int64_t batches, int64_t threads) {
  TokenShards shards(pattern, config.seq_len, config.vocab_size, "--val-data");
  const int64_t B = std::min(batch_size, shards.num_sequences());
  const int64_t most = batches == 0 ? shards.num_sequences() : batches * B;
  validate_size(config, B);
  require_inference_memory<Backend>(config, B, threads);
  return {B, EvalLoader(std::move(shards), B, most)};
}

template <class Backend>
void routing(const Options& options) {
  const RoutingOptions& o = options.routing;
  const ModelConfig config = load_config(o.checkpoint);
  require_sparse_layers(o.checkpoint, config);
  ValidationData data =
      validation_data<Backend>(o.val_data, config, o.batch_size, o.eval_batches, options.machine.threads);
  // What cannot be written or spelt is found out before the work.
  const std::vector<std::string> inputs = input_files(o.checkpoint, &data.loader.shards());
  OptionalFile csv("--csv", o.csv, inputs), map_file("--map", o.map, inputs);
  std::optional<Tokenizer> tokenizer;
  if (!o.map.empty()) tokenizer = checkpoint_tokenizer(o.checkpoint, config);

  Backend backend(options.machine);
  Model<Backend> model(backend, config, data.batch_size, Use::inference);
  load_model(o.checkpoint, model);
  RoutingMap map(config, tokenizer ? o.map_tokens : 0);
  const RoutingMeasurement measured =
      measure_routing(model, data.loader, data.batch_size,
                      [&](const int32_t* tokens, int64_t B, const Selections& selections) {
                        map.add(tokens, B, selections);
                      });
  csv.write(routing_csv(measured));
  if (tokenizer) map_file.write(map.csv(*tokenizer));
  if (o.json) {
    print_json(routing_json(measured, o.checkpoint));
  } else {
    print_routing(measured, std::cout);
  }
}

}  // namespace detail

template <class Backend>
void run_command(const Options& options) {
  if (options.help) {
    std::cout << options.help_text;
    return;
  }
  if (options.command != Command::train) require_one_process(detail::name_of(options.command));
  switch (options.command) {
    case Command::train:
      return detail::train<Backend>(options);
    case Command::plan:
      return print_plan_of_ranks<Backend>(options, std::cout);
    case Command::eval:
      return detail::eval<Backend>(options);
    case Command::generate:
      return detail::generate_text<Backend>(options);
    case Command::routing:
      return detail::routing<Backend>(options);
  }
}

// A name in the message may hold line breaks; the message is one line. Where all ranks of a run fail alike,
// the first has said so and ended the others before they say it again.
inline int report(const std::string& message, int exit_code) {
  const Launch launch = find_launch();
  if (launch.rank > 0) std::this_thread::sleep_for(std::chrono::seconds(1));
  const std::string rank =
      launch.rank > 0 ? detail::concatenate("rank ", launch.rank, " on ", host_name(), ": ") : "";
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s%s\n", rank.c_str(), printable(message, message.size()).c_str());
  abort_ranks(exit_code);
  return exit_code;
}

// main: every error a user can cause ends in one line and the exit status. Bf16Backend: for --precision bf16.
template <class Backend, class Bf16Backend = Backend>
int run_commands(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file at its size limit is an error of write(), not the end
  try {
    const Options options = parse_options(argc, argv, Backend::kProcessor);
    if (options.machine.precision == Precision::bf16) {
      run_command<Bf16Backend>(options);
    } else {
      run_command<Backend>(options);
    }
    std::cout << std::flush;
    if (!std::cout) fail("cannot write to the standard output; is the disk full?");
    return 0;
  } catch (const Error& error) {
    return report(error.what(), error.exit_code);
  } catch (const std::bad_alloc&) {
    return report(std::string("out of memory; ") + kMemoryRemedy, 1);
  } catch (const std::exception& error) {
    return report(error.what(), 1);
  }
}

}  // namespace xmod
