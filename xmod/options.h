// The command line. One table of flags drives everything: parsing, checks, suggestions and --help.
#pragma once

#include <getopt.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "xmod/config_json.h"
#include "xmod/error.h"
#include "xmod/schedule.h"
#include "xmod_common.h"

namespace xmod {

enum class Command { train, plan, eval, generate };
enum class Precision { fp32, bf16 };

struct TrainOptions {
  std::string train_data, val_data;  // globs of token shards; no val_data: no validation
  std::string out = "out";
  int64_t batch_size = 16;  // sequences of one forward and backward pass
  int64_t grad_accum = 1;   // such passes per optimizer step
  int64_t steps = 0;        // exactly one of these two is given
  double compute = 0;       // training FLOPs
  Optimizer optimizer = Optimizer::muon;
  double lr = 3.2e-3;
  double adamw_lr = -1;  // -1: lr
  double weight_decay = 0.1;
  int64_t warmup_steps = -1;  // -1: 5% of the steps, at most 500
  LrSchedule lr_schedule = LrSchedule::cosine;
  double final_lr_fraction = 0.1;
  double grad_clip = 1;               // 0: off
  int64_t eval_interval = 100;        // steps; 0: only at the end
  int64_t eval_batches = 20;          // 0: all
  int64_t checkpoint_interval = 500;  // steps; 0: only at the end
  int64_t keep_checkpoints = 2;
  bool resume = false;
  int64_t seed = 42;
  int64_t threads = 0;  // 0: OpenMP's default
  Precision precision = Precision::fp32;
};

struct PlanOptions {
  double compute = 0;  // 0: not given
  int64_t batch_size = 16;
  bool json = false;
};

struct EvalOptions {
  std::string checkpoint, val_data;
  int64_t batch_size = 16;
  int64_t eval_batches = 0;  // 0: all
  bool json = false;
  int64_t threads = 0;
};

struct GenerateOptions {
  std::string checkpoint, prompt;
  int64_t max_new_tokens = 200;
  double temperature = 0.8;  // 0: always the most probable token
  int64_t top_k = 0;         // 0: off
  double top_p = 1;
  int64_t seed = 42;
  int64_t threads = 0;
};

struct Options {
  Command command = Command::train;
  bool help = false;      // print help_text and end
  std::string help_text;  // of the command
  ModelConfig model;
  TrainOptions train;
  PlanOptions plan;
  EvalOptions eval;
  GenerateOptions generate;
};

namespace detail {

// ---------------------------------------------------------------------------------------------------
// Words and the names nearest to them

template <class Enum>
using Names = std::vector<std::pair<std::string, Enum>>;

inline Names<Command> names_of(Command) {
  return {{"train", Command::train},
          {"plan", Command::plan},
          {"eval", Command::eval},
          {"generate", Command::generate}};
}
inline Names<Arch> names_of(Arch) {
  return arch_names();
}
inline Names<Optimizer> names_of(Optimizer) {
  return {{"muon", Optimizer::muon}, {"adamw", Optimizer::adamw}};
}
inline Names<LrSchedule> names_of(LrSchedule) {
  return {{"cosine", LrSchedule::cosine},
          {"linear", LrSchedule::linear},
          {"wsd", LrSchedule::wsd},
          {"constant", LrSchedule::constant}};
}
inline Names<Precision> names_of(Precision) {
  return {{"fp32", Precision::fp32}, {"bf16", Precision::bf16}};
}

template <class Enum>
std::string name_of(Enum value) {
  for (const auto& [name, known] : names_of(value)) {
    if (known == value) return name;
  }
  return "?";
}

template <class Enum>
std::vector<std::string> all_names() {
  std::vector<std::string> all;
  for (const auto& [name, value] : names_of(Enum{})) all.push_back(name);
  return all;
}

// "a, b or c"
inline std::string join(const std::vector<std::string>& words, const std::string& last = " or ") {
  std::string text;
  for (size_t i = 0; i < words.size(); i++) {
    if (i > 0) text += i + 1 < words.size() ? ", " : last;
    text += words[i];
  }
  return text;
}

// Insertions, deletions, substitutions and swaps of neighbours that turn a into b.
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); i++) {
    for (size_t j = 0; j <= b.size(); j++) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const size_t changed = a[i - 1] != b[j - 1];
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + changed});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// A word that is a part of the name ("sparsity" of "token-sparsity") counts as one mistake.
inline size_t mistakes(const std::string& word, const std::string& name) {
  constexpr size_t kTellingPart = 4;
  const bool part = word.size() >= kTellingPart && name.find(word) != std::string::npos;
  return std::min(edit_distance(word, name), part ? 1 : std::string::npos);
}

// "; did you mean A, B or C?": the one to three names with the fewest mistakes.
inline std::string suggestion(const std::string& word, const std::vector<std::string>& names,
                              const std::string& prefix = "") {
  constexpr size_t kMost = 3;
  size_t fewest = std::string::npos;
  for (const std::string& name : names) fewest = std::min(fewest, mistakes(word, name));
  std::vector<std::string> nearest;
  for (const std::string& name : names) {
    if (mistakes(word, name) == fewest && nearest.size() < kMost) nearest.push_back(prefix + name);
  }
  const bool likely = fewest <= std::max<size_t>(2, word.size() / 3);
  return likely ? "; did you mean " + join(nearest) + "?" : "; the nearest is " + join(nearest);
}

// ---------------------------------------------------------------------------------------------------
// Values: the whole word must be a value, and within its range

// A word of the command line, fit to stand in a message of one line.
inline std::string show_word(std::string word) {
  for (char& c : word) {
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return word.empty() ? "''" : word;
}

template <class Number>
bool read_number(const std::string& text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

inline void parse_value(const std::string& flag, const std::string& text, const Range& range, int64_t& out) {
  if (read_number(text, out) && range.contains(static_cast<double>(out))) return;
  double real = 0;  // 1e3 where a whole number is due: say how to write it
  const bool whole = read_number(text, real) && std::abs(real) < 1e15 && real == std::floor(real);
  const std::string remedy =
      whole && range.contains(real) ? "; write " + std::to_string(static_cast<int64_t>(real)) : "";
  usage_error("--", flag, " ", show_word(text), ": expected a whole number", range.text(), remedy);
}

inline void parse_value(const std::string& flag, const std::string& text, const Range& range, double& out) {
  if (read_number(text, out) && range.contains(out)) return;
  usage_error("--", flag, " ", show_word(text), ": expected a number", range.text());
}

inline void parse_value(const std::string& flag, const std::string& text, const Range&, std::string& out) {
  if (text.empty()) usage_error("--", flag, " is empty: expected a text");
  out = text;
}

template <class Enum>
void parse_value(const std::string& flag, const std::string& text, const Range&, Enum& out) {
  for (const auto& [name, value] : names_of(Enum{})) {
    if (name == text) {
      out = value;
      return;
    }
  }
  const std::vector<std::string> valid = all_names<Enum>();
  usage_error("--", flag, " ", show_word(text), ": expected ", join(valid), suggestion(text, valid));
}

inline std::string show_value(int64_t value) {
  return std::to_string(value);
}
inline std::string show_value(double value) {
  return shortest(value);
}
inline std::string show_value(const std::string& value) {
  return value;
}
template <class Enum>
std::string show_value(Enum value) {
  return name_of(value);
}

// ---------------------------------------------------------------------------------------------------
// The table of flags

// Flags are applied in this order, wherever they stand on the command line.
enum class Stage {
  preset,   // what the others override
  value,    // most flags
  derived,  // what depends on other values or replaces what follows from them
};

struct Flag {
  std::string name;     // without the dashes
  std::string metavar;  // empty: a switch, which takes no value
  std::string help;
  std::function<void(Options&, const std::string& value)> set;
  std::string default_text = {};       // for --help; empty: none
  bool (*belongs_to)(Arch) = nullptr;  // architectures that know the flag; null: all
  std::string excludes = {};           // the flag that says the opposite
  bool required = false;
  Stage stage = Stage::value;
  std::string group = {};  // heading in --help
  std::vector<Command> commands = {};
};

inline bool of_command(const Flag& flag, Command command) {
  return std::find(flag.commands.begin(), flag.commands.end(), command) != flag.commands.end();
}

// The commands that describe a model by flags; the others read it from a checkpoint.
inline bool has_model(Command command) {
  return command == Command::train || command == Command::plan;
}

// A flag that sets one field of a part of Options; its default is the field's.
template <class Part, class T>
Flag value_flag(const std::string& name, const std::string& metavar, Part Options::*part, T Part::*member,
                const Range& range, const std::string& help) {
  auto set = [=](Options& o, const std::string& text) { parse_value(name, text, range, o.*part.*member); };
  return {name, metavar, help, set, show_value(Options{}.*part.*member)};
}

template <class Part>
Flag switch_flag(const std::string& name, Part Options::*part, bool Part::*member, bool value,
                 const std::string& help) {
  return {name, "", help, [=](Options& o, const std::string&) { o.*part.*member = value; }};
}

// A field of the model: range, default and architectures from the table in config_json.h.
inline Flag model_flag(const std::string& name, const std::string& metavar, const std::string& help) {
  const ModelField& field = model_field(name);
  Flag flag;
  if (const auto integer = std::get_if<int64_t ModelConfig::*>(&field.member)) {
    flag = value_flag(name, metavar, &Options::model, *integer, field.range, help);
  } else if (const auto real = std::get_if<double ModelConfig::*>(&field.member)) {
    flag = value_flag(name, metavar, &Options::model, *real, field.range, help);
  } else {
    flag = switch_flag(name, &Options::model, std::get<bool ModelConfig::*>(field.member), false, help);
  }
  flag.belongs_to = field.belongs_to;
  return flag;
}

inline Flag preset_flag() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  auto set = [names](Options& o, const std::string& text) {
    for (const Preset& preset : presets()) {
      if (preset.name != text) continue;
      o.model = preset.config;
      return;
    }
    usage_error("--preset ", show_word(text), ": expected ", join(names), suggestion(text, names));
  };
  Flag flag{"preset", "NAME", join(names) + "; the other flags override it", set, names.front()};
  flag.stage = Stage::preset;
  return flag;
}

// alpha at the start: a number, or a formula in K and A, which must be known by then.
inline Flag residual_gate_init_flag() {
  auto set = [](Options& o, const std::string& text) {
    const double K = static_cast<double>(o.model.token_sparsity);
    const double A = static_cast<double>(o.model.anchor_stride);
    const std::map<std::string, double> formulas = {{"1/sqrtK", K}, {"1/sqrtA", A}, {"1/sqrtAK", A * K}};
    const auto formula = formulas.find(text);
    double& alpha = o.model.residual_gate_init;
    if (formula != formulas.end()) {
      alpha = 1 / std::sqrt(formula->second);
    } else if (!read_number(text, alpha) || !std::isfinite(alpha)) {
      usage_error("--residual-gate-init ", show_word(text),
                  ": expected a number, 1/sqrtK, 1/sqrtA or 1/sqrtAK");
    }
  };
  Flag flag = model_flag("residual-gate-init", "X",
                         "residual gate alpha at the start: a number, 1/sqrtK, 1/sqrtA or 1/sqrtAK");
  flag.set = set;
  flag.stage = Stage::derived;
  flag.excludes = "no-residual-gate";
  return flag;
}

inline std::vector<Flag> size_flags() {
  Flag rope = model_flag("rope-theta", "X", "base frequency of the rotary position embedding");
  rope.default_text = "10000; 1e6 from a context of 16384";
  rope.stage = Stage::derived;
  return {
      preset_flag(),
      value_flag("arch", "NAME", &Options::model, &ModelConfig::arch, {},
                 "architecture: " + join(all_names<Arch>())),
      model_flag("active-layers", "N", "dense layers + sparse layers / K"),
      model_flag("dim", "N", "width of the residual stream"),
      model_flag("heads", "N", "query heads, a multiple of the key/value heads"),
      model_flag("kv-heads", "N", "key/value heads"),
      model_flag("head-dim", "N", "size of a head, even"),
      model_flag("ffn-dim", "N", "hidden width of the feed-forward network"),
      model_flag("vocab-size", "N", "token ids are below this"),
      model_flag("seq-len", "N", "context length T in tokens"),
      rope,
  };
}

inline std::vector<Flag> routing_flags() {
  Flag no_token_bias = model_flag("token-bias-strength", "", "the same as --token-bias-strength 0");
  no_token_bias.name = "no-token-bias";
  no_token_bias.default_text = "";
  no_token_bias.set = [](Options& o, const std::string&) { o.model.token_bias_strength = 0; };
  no_token_bias.excludes = "token-bias-strength";
  return {
      model_flag("token-sparsity", "K", "a sparse layer processes 1 in K tokens"),
      model_flag("anchor-stride", "A", "units of K sparse layers between dense anchors"),
      model_flag("dense-prefix", "P", "dense layers before the first unit"),
      model_flag("no-anchors", "", "only sparse units behind the prefix"),
      model_flag("no-residual-gate", "", "no learned scale of a sparse layer's update"),
      residual_gate_init_flag(),
      model_flag("token-bias-strength", "X", "gamma: how much a token's score falls once it was selected"),
      no_token_bias,
  };
}

inline std::vector<Flag> expert_flags() {
  std::vector<Flag> flags = {
      model_flag("experts", "E", "routed experts of a layer"),
      model_flag("experts-per-token", "N", "experts that a token goes to"),
      model_flag("expert-dim", "N", "hidden width of an expert"),
      model_flag("shared-experts", "N", "experts that every token goes to"),
  };
  for (size_t i = 0; i < 3; i++) {
    flags[i].default_text = "";
    flags[i].required = true;
  }
  return flags;
}

inline std::vector<Flag> train_data_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  Flag train = value_flag("train-data", "GLOB", part, &O::train_data, {},
                          "token shards to train on, in quotes: 'data/*_train_*.bin'");
  train.required = true;
  return {
      train,
      value_flag("val-data", "GLOB", part, &O::val_data, {}, "token shards to validate on"),
      value_flag("out", "DIR", part, &O::out, {}, "directory for checkpoints and metrics.csv"),
  };
}

inline std::vector<Flag> length_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  Flag steps =
      value_flag("steps", "N", part, &O::steps, between(1, 2147483647), "optimizer steps to train for");
  Flag compute = value_flag("compute", "FLOPS", part, &O::compute, above(0),
                            "or: train for as many tokens as this compute pays for, such as 2e13");
  steps.default_text = compute.default_text = "";
  steps.excludes = "compute";
  return {
      steps,
      compute,
      value_flag("batch-size", "N", part, &O::batch_size, between(1, 2147483647),
                 "sequences of a micro-batch"),
      value_flag("grad-accum", "N", part, &O::grad_accum, between(1, 2147483647),
                 "micro-batches of an optimizer step"),
  };
}

inline std::vector<Flag> optimizer_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  Flag adamw_lr = value_flag("adamw-lr", "X", part, &O::adamw_lr, at_least(0),
                             "peak learning rate of what AdamW trains: embedding, norms, routers, gates");
  adamw_lr.default_text = "the same as --lr";
  Flag warmup = value_flag("warmup-steps", "N", part, &O::warmup_steps, between(0, 2147483647),
                           "steps in which the learning rate rises from 0");
  warmup.default_text = "5% of the steps, at most 500";
  return {
      value_flag("optimizer", "NAME", part, &O::optimizer, {}, "muon or adamw, for the hidden matrices"),
      value_flag("lr", "X", part, &O::lr, above(0), "peak learning rate"),
      adamw_lr,
      value_flag("weight-decay", "X", part, &O::weight_decay, at_least(0),
                 "pull of the matrices and the embedding towards 0"),
      warmup,
      value_flag("lr-schedule", "NAME", part, &O::lr_schedule, {}, join(all_names<LrSchedule>())),
      value_flag("final-lr-fraction", "X", part, &O::final_lr_fraction, between(0, 1),
                 "the schedule ends at this share of the peak"),
      value_flag("grad-clip", "X", part, &O::grad_clip, at_least(0), "largest global gradient norm; 0: off"),
  };
}

inline std::vector<Flag> record_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  return {
      value_flag("eval-interval", "N", part, &O::eval_interval, at_least(0),
                 "steps between validations; 0: only at the end"),
      value_flag("eval-batches", "N", part, &O::eval_batches, between(0, 2147483647),
                 "batches of a validation; 0: all the data"),
      value_flag("checkpoint-interval", "N", part, &O::checkpoint_interval, at_least(0),
                 "steps between checkpoints; 0: only at the end"),
      value_flag("keep-checkpoints", "N", part, &O::keep_checkpoints, at_least(1),
                 "how many of the newest checkpoints stay"),
      switch_flag("resume", part, &O::resume, true, "go on from the newest checkpoint in --out"),
  };
}

inline std::vector<Flag> train_machine_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  return {
      value_flag("seed", "N", part, &O::seed, at_least(0),
                 "seed of the first weights and of the order of the data"),
      value_flag("threads", "N", part, &O::threads, between(0, 4096),
                 "threads to compute with; 0: all processors"),
      value_flag("precision", "NAME", part, &O::precision, {}, "number format of the matrix products: fp32"),
  };
}

inline std::vector<Flag> plan_flags() {
  using O = PlanOptions;
  constexpr auto part = &Options::plan;
  Flag compute = value_flag("compute", "FLOPS", part, &O::compute, above(0),
                            "training compute to count tokens for, such as 1e20");
  compute.default_text = "";
  return {
      compute,
      value_flag("batch-size", "N", part, &O::batch_size, between(1, 2147483647),
                 "sequences of a micro-batch, for the memory estimate"),
      switch_flag("json", part, &O::json, true, "print JSON"),
  };
}

inline std::vector<Flag> eval_flags() {
  using O = EvalOptions;
  constexpr auto part = &Options::eval;
  Flag checkpoint =
      value_flag("checkpoint", "DIR", part, &O::checkpoint, {}, "checkpoint, such as out/step_00000500");
  Flag data = value_flag("val-data", "GLOB", part, &O::val_data, {}, "token shards, in quotes");
  checkpoint.required = data.required = true;
  return {
      checkpoint,
      data,
      value_flag("batch-size", "N", part, &O::batch_size, between(1, 2147483647), "sequences of a batch"),
      value_flag("eval-batches", "N", part, &O::eval_batches, between(0, 2147483647), "0: all the data"),
      switch_flag("json", part, &O::json, true, "print JSON"),
      value_flag("threads", "N", part, &O::threads, between(0, 4096),
                 "threads to compute with; 0: all processors"),
  };
}

inline std::vector<Flag> generate_flags() {
  using O = GenerateOptions;
  constexpr auto part = &Options::generate;
  Flag checkpoint =
      value_flag("checkpoint", "DIR", part, &O::checkpoint, {}, "checkpoint, such as out/step_00000500");
  checkpoint.required = true;
  Flag prompt = value_flag("prompt", "TEXT", part, &O::prompt, {}, "text to go on from");
  prompt.set = [](Options& o, const std::string& text) { o.generate.prompt = text; };
  return {
      checkpoint,
      prompt,
      value_flag("max-new-tokens", "N", part, &O::max_new_tokens, at_least(1), "tokens to write"),
      value_flag("temperature", "X", part, &O::temperature, at_least(0), "0: the most probable token"),
      value_flag("top-k", "N", part, &O::top_k, at_least(0), "choose among the K most probable; 0: off"),
      value_flag("top-p", "X", part, &O::top_p, Range{0, 1, true},
                 "choose among the most probable that together have this probability"),
      value_flag("seed", "N", part, &O::seed, at_least(0), "seed of the choice of tokens"),
      value_flag("threads", "N", part, &O::threads, between(0, 4096),
                 "threads to compute with; 0: all processors"),
  };
}

inline std::vector<Flag> flag_table() {
  const std::vector<Command> train = {Command::train}, plan = {Command::plan}, eval = {Command::eval},
                             generate = {Command::generate}, model = {Command::train, Command::plan},
                             all = {Command::train, Command::plan, Command::eval, Command::generate};
  std::vector<Flag> table;
  auto add = [&](const std::string& group, const std::vector<Command>& commands, std::vector<Flag> flags) {
    for (Flag& flag : flags) {
      flag.group = group;
      flag.commands = commands;
      table.push_back(std::move(flag));
    }
  };
  add("Data", train, train_data_flags());
  add("Length", train, length_flags());
  add("Model", model, size_flags());
  add("Routing (mod has only the first; xmod, routed-ffn and selected-q all)", model, routing_flags());
  add("Experts (moe)", model, expert_flags());
  add("Optimizer", train, optimizer_flags());
  add("Validation and checkpoints", train, record_flags());
  add("Machine", train, train_machine_flags());
  add("Plan", plan, plan_flags());
  add("Evaluation", eval, eval_flags());
  add("Generation", generate, generate_flags());
  add("Help", all,
      {{"help", "", "this page, also -h", [](Options& o, const std::string&) { o.help = true; }}});
  return table;
}

// ---------------------------------------------------------------------------------------------------
// --help

inline std::string usage_line(Command command) {
  switch (command) {
    case Command::train:
      return "[train] --train-data GLOB (--steps N | --compute FLOPS) [options]";
    case Command::plan:
      return "plan [options]";
    case Command::eval:
      return "eval --checkpoint DIR --val-data GLOB [options]";
    case Command::generate:
      return "generate --checkpoint DIR [options]";
  }
  return "";
}

inline std::string summary(Command command) {
  switch (command) {
    case Command::train:
      return "Trains a model on token shards; writes checkpoints and metrics.csv.";
    case Command::plan:
      return "Counts a model's layers, parameters, FLOPs and memory; trains nothing.";
    case Command::eval:
      return "Measures a checkpoint's validation loss under top-k and threshold routing.";
    case Command::generate:
      return "Writes text with a checkpoint, under threshold routing.";
  }
  return "";
}

inline std::string spelling(const Flag& flag) {
  return "--" + flag.name + (flag.metavar.empty() ? "" : " " + flag.metavar);
}

// left in its column, then text in lines of at most `width` from column `indent` on.
inline std::string two_columns(const std::string& left, const std::string& text, size_t indent,
                               size_t width) {
  std::string out, line = left + std::string(left.size() < indent ? indent - left.size() : 1, ' ');
  bool first = true;
  std::istringstream words(text);
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > width) {
      out += line + "\n";
      line = std::string(indent, ' ');
      first = true;
    }
    line += (first ? "" : " ") + word;
  }
  return out + line + "\n";
}

inline std::string help_page(const std::string& program, Command command, const std::vector<Flag>& table) {
  constexpr size_t kIndent = 27, kWidth = 100;
  std::string page = "usage: " + program + " " + usage_line(command) + "\n\n" + summary(command) + "\n";
  if (command == Command::train) {
    page += "\nCommands (" + program + " COMMAND --help for their options)\n";
    for (const auto& [name, other] : names_of(command)) {
      page += two_columns("  " + name, summary(other), kIndent, kWidth);
    }
  }
  std::string group;
  for (const Flag& flag : table) {
    if (!of_command(flag, command)) continue;
    if (flag.group != group) page += "\n" + flag.group + "\n";
    group = flag.group;
    const std::string value = flag.default_text.empty() ? "" : " (default: " + flag.default_text + ")";
    page += two_columns("  " + spelling(flag), flag.help + value, kIndent, kWidth);
  }
  return page;
}

// ---------------------------------------------------------------------------------------------------
// From words to options

// A flag as it was given.
struct Given {
  const Flag* flag;
  std::string value;
};

// What getopt_long could not place.
[[noreturn]] inline void unknown_option(std::string word, const std::string& program, Command command,
                                        const std::vector<Flag>& table) {
  word = word.substr(0, word.find('='));
  const std::string name = word.substr(std::min<size_t>(2, word.size()));  // behind the dashes
  std::vector<std::string> names, beginnings, commands;
  for (const Flag& flag : table) {
    if (flag.name == name) {
      for (Command other : flag.commands) commands.push_back(name_of(other));
    }
    if (!of_command(flag, command)) continue;
    names.push_back(flag.name);
    if (!name.empty() && flag.name.compare(0, name.size(), name) == 0) beginnings.push_back("--" + flag.name);
  }
  if (!commands.empty()) {
    usage_error(word, " is an option of ", join(commands, " and "), ", not of ", name_of(command));
  }
  if (beginnings.size() > 1) usage_error(word, " is ambiguous: ", join(beginnings));
  usage_error("unknown option ", show_word(word), suggestion(name, names, "--"), " (", program, " ",
              name_of(command), " --help lists them)");
}

[[noreturn]] inline void unexpected_word(const std::string& word, const std::string& program) {
  for (const std::string& name : all_names<Command>()) {
    if (word == name) usage_error("the command comes first: ", program, " ", name, " [options]");
  }
  usage_error("unexpected argument ", show_word(word),
              "; put quotes around a glob and around text with spaces");
}

// The command, if the first word is not an option; removes it from the words.
inline Command take_command(std::vector<char*>& words) {
  if (words.size() < 2 || words[1][0] == '-') return Command::train;
  const std::string word = words[1];
  words.erase(words.begin() + 1);
  for (const auto& [name, command] : names_of(Command{})) {
    if (name == word) return command;
  }
  const std::vector<std::string> valid = all_names<Command>();
  usage_error("unknown command ", show_word(word), suggestion(word, valid),
              " (commands: ", join(valid, " and "), ")");
}

// Runs getopt_long, which also takes --name=value and unambiguous beginnings of names.
inline std::vector<Given> read_flags(std::vector<char*> words, const std::string& program, Command command,
                                     const std::vector<Flag>& table) {
  constexpr int kFirst = 1000;  // codes of long options, above every short one
  std::vector<option> long_options;
  for (size_t i = 0; i < table.size(); i++) {
    if (!of_command(table[i], command)) continue;
    const int takes_value = table[i].metavar.empty() ? no_argument : required_argument;
    long_options.push_back({table[i].name.c_str(), takes_value, nullptr, kFirst + static_cast<int>(i)});
  }
  long_options.push_back({});

  std::vector<Given> given;
  const int count = static_cast<int>(words.size());
  words.push_back(nullptr);
  opterr = 0;
  optind = 0;  // start afresh
  for (int code; (code = getopt_long(count, words.data(), "-:h", long_options.data(), nullptr)) != -1;) {
    char* const last_word = words[static_cast<size_t>(optind - 1)];
    const bool complaint = code == '?' || code == ':';
    const int about = complaint ? optopt : code;
    if (code == 1) unexpected_word(optarg, program);
    if (about == 0) unknown_option(last_word, program, command, table);
    if (about < kFirst && about != 'h') {
      usage_error("unknown option -", static_cast<char>(about), "; options begin with two dashes");
    }
    const Flag& flag = about == 'h' ? table.back() /* --help */ : table[static_cast<size_t>(about - kFirst)];
    if (code == '?') usage_error("--", flag.name, " takes no value");
    if (code == ':') usage_error("--", flag.name, " needs a value: ", spelling(flag));
    const std::string value = optarg ? optarg : "";
    if (optarg == last_word && value.compare(0, 2, "--") == 0) {
      usage_error("--", flag.name, " needs a value: ", spelling(flag), "; found ", show_word(value),
                  ", use --", flag.name, "=... for a value that begins with dashes");
    }
    given.push_back({&flag, value});
  }
  if (optind < count) unexpected_word(words[static_cast<size_t>(optind)], program);  // behind a bare --
  return given;
}

inline bool is_given(const std::vector<Given>& given, const std::string& name) {
  return std::any_of(given.begin(), given.end(), [&](const Given& g) { return g.flag->name == name; });
}

inline void apply(Options& options, const std::vector<Given>& given, Stage stage) {
  for (const Given& g : given) {
    if (g.flag->stage == stage) g.flag->set(options, g.value);
  }
}

inline void check_exclusions(const std::vector<Given>& given) {
  for (const Given& g : given) {
    if (g.flag->excludes.empty() || !is_given(given, g.flag->excludes)) continue;
    usage_error("--", g.flag->name, " and --", g.flag->excludes, " exclude each other, give one of them");
  }
}

inline void check_architecture(const std::vector<Given>& given, Arch arch) {
  for (const Given& g : given) {
    if (g.flag->belongs_to == nullptr || g.flag->belongs_to(arch)) continue;
    std::vector<std::string> owners;
    for (const auto& [name, other] : arch_names()) {
      if (g.flag->belongs_to(other)) owners.push_back(name);
    }
    usage_error("--", g.flag->name, " does not belong to --arch ", arch_name(arch), "; it is an option of ",
                join(owners, " and "));
  }
}

inline void check_required(const std::vector<Given>& given, const Options& o,
                           const std::vector<Flag>& table) {
  const bool model = has_model(o.command);
  for (const Flag& flag : table) {
    if (!flag.required || !of_command(flag, o.command) || is_given(given, flag.name)) continue;
    if (flag.belongs_to == nullptr)
      usage_error(name_of(o.command), " needs ", spelling(flag), ": ", flag.help);
    if (model && flag.belongs_to(o.model.arch)) {
      usage_error("--arch ", arch_name(o.model.arch), " needs ", spelling(flag), ": ", flag.help);
    }
  }
  if (o.command == Command::train && !is_given(given, "steps") && !is_given(given, "compute")) {
    usage_error("train needs --steps N or --compute FLOPS: how long to train");
  }
}

inline void check_values(const Options& o) {
  if (o.train.precision != Precision::fp32) {
    usage_error("--precision ", name_of(o.train.precision), " is not in this build, use --precision fp32");
  }
  if (!has_model(o.command)) return;
  validate(o.model);
  validate_size(o.model, o.command == Command::train ? o.train.batch_size : o.plan.batch_size);
}

}  // namespace detail

// Reads `program [command] [options]`. Throws usage errors; prints nothing.
inline Options parse_options(int argc, char** argv) {
  std::vector<char*> words(argv, argv + argc);
  const std::string path = argc > 0 ? argv[0] : "train_xmod";
  const std::string program = path.substr(path.rfind('/') + 1);
  const std::vector<detail::Flag> table = detail::flag_table();

  Options options;
  options.command = detail::take_command(words);
  const auto given = detail::read_flags(words, program, options.command, table);
  if (detail::is_given(given, "help")) {
    options.help = true;
    options.help_text = detail::help_page(program, options.command, table);
    return options;
  }
  detail::check_exclusions(given);
  detail::apply(options, given, detail::Stage::preset);
  detail::apply(options, given, detail::Stage::value);
  detail::check_architecture(given, options.model.arch);
  options.model.rope_theta = default_rope_theta(options.model.seq_len);
  detail::apply(options, given, detail::Stage::derived);
  detail::check_required(given, options, table);
  detail::check_values(options);
  return options;
}

}  // namespace xmod
