// The commands of the binary, for any backend.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xmod/checkpoint.h"
#include "xmod/command_line.h"
#include "xmod/evaluate.h"
#include "xmod/generate.h"
#include "xmod/model.h"
#include "xmod/options.h"
#include "xmod/plan.h"
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

template <class Backend>
void train(const Options& options) {
  const TrainOptions& o = options.train;
  require_memory(estimate_memory(options.model, o.batch_size, o.optimizer).total(), Backend::memory_bytes());
  Backend backend(o.threads);
  Trainer<Backend>(backend, options, std::cout).run();
}

template <class Backend>
void eval(const Options& options) {
  const EvalOptions& o = options.eval;
  const ModelConfig config = load_config(o.checkpoint);
  TokenShards shards(o.val_data, config.seq_len, config.vocab_size, "--val-data");
  const int64_t B = std::min(o.batch_size, shards.num_sequences());
  const int64_t most = o.eval_batches == 0 ? shards.num_sequences() : o.eval_batches * B;
  validate_size(config, B);
  require_memory(inference_bytes(config, B), Backend::memory_bytes());
  EvalLoader loader(std::move(shards), B, most);
  Backend backend(o.threads);
  Model<Backend> model(backend, config, B, Use::inference);
  load_model(o.checkpoint, model);
  const ValidationLoss loss = evaluate(model, loader, B);
  const int64_t targets = loader.num_sequences() * config.seq_len;
  if (o.json) {
    const nlohmann::ordered_json json = {{"checkpoint", o.checkpoint},
                                         {"val_loss_topk", loss.topk},
                                         {"val_loss_threshold", loss.threshold},
                                         {"targets", targets}};
    std::cout << json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
  } else {
    std::printf("validation loss %.4f top-k, %.4f threshold (mean over %lld targets)\n", loss.topk,
                loss.threshold, static_cast<long long>(targets));
  }
}

// With nothing to continue, start where a document or a line starts.
inline std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> prompt = tokenizer.encode(text);
  if (prompt.empty() && tokenizer.eot() >= 0) prompt = {tokenizer.eot()};
  return prompt.empty() ? tokenizer.encode("\n") : prompt;
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
  const ModelConfig config = load_config(o.checkpoint);
  const Tokenizer tokenizer = checkpoint_tokenizer(o.checkpoint, config);
  std::vector<std::string> prompts = {o.prompt};
  if (!o.prompt_file.empty()) prompts = read_prompts(o.prompt_file);
  std::vector<std::vector<int32_t>> texts;
  for (const std::string& prompt : prompts) texts.push_back(encode_prompt(tokenizer, prompt));

  const auto B = static_cast<int64_t>(texts.size());
  validate_size(config, B);
  require_memory(inference_bytes(config, B), Backend::memory_bytes());
  Backend backend(o.threads);
  Model<Backend> model(backend, config, B, Use::inference);
  load_model(o.checkpoint, model);
  Generation<Backend> generation(model, std::move(texts), {o.temperature, o.top_k, o.top_p},
                                 static_cast<uint64_t>(o.seed), tokenizer.eot());
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

}  // namespace detail

template <class Backend>
void run_command(const Options& options) {
  if (options.help) {
    std::cout << options.help_text;
    return;
  }
  switch (options.command) {
    case Command::train:
      return detail::train<Backend>(options);
    case Command::plan:
      return print_plan(options, std::cout);
    case Command::eval:
      return detail::eval<Backend>(options);
    case Command::generate:
      return detail::generate_text<Backend>(options);
  }
}

// A name in the message may hold line breaks; the message is one line.
inline int report(const std::string& message, int exit_code) {
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", printable(message, message.size()).c_str());
  return exit_code;
}

// main: every error a user can cause ends in one line and the exit status.
template <class Backend>
int run_commands(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file at its size limit is an error of write(), not the end
  try {
    run_command<Backend>(parse_options(argc, argv));
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
