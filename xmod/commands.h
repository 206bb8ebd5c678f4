// The commands of the binary, for any backend.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <string>
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

template <class Backend>
void generate_text(const Options& options) {
  const GenerateOptions& o = options.generate;
  const ModelConfig config = load_config(o.checkpoint);
  const Tokenizer tokenizer = checkpoint_tokenizer(o.checkpoint, config);
  // With nothing to continue, start where a document or a line starts.
  std::vector<int32_t> prompt = tokenizer.encode(o.prompt);
  if (prompt.empty() && tokenizer.eot() >= 0) prompt = {tokenizer.eot()};
  if (prompt.empty()) prompt = tokenizer.encode("\n");
  require_memory(inference_bytes(config, 1), Backend::memory_bytes());
  Backend backend(o.threads);
  Model<Backend> model(backend, config, 1, Use::inference);
  load_model(o.checkpoint, model);
  std::cout << o.prompt << std::flush;
  generate(model, prompt, o.max_new_tokens, {o.temperature, o.top_k, o.top_p}, static_cast<uint64_t>(o.seed),
           tokenizer.eot(), [&](int32_t id) { std::cout << tokenizer.token(id) << std::flush; });
  std::cout << "\n";
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
