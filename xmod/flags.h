// The table of flags: it drives parsing, checks, suggestions and --help.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "xmod/config_json.h"
#include "xmod/flag_values.h"
#include "xmod/options.h"

namespace xmod {

namespace detail {

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
  bool many = false;       // takes one value or more: --name A B C
  std::string group = {};  // heading in --help
  std::vector<Command> commands = {};
  std::optional<Processor> processor = {};  // of the program that knows the flag; nothing: both do
  std::function<std::string(const Options&)> show = {};  // the value that it has there; null: sets no field
};

inline const char* program_on(Processor processor) {
  return processor == Processor::cpu ? "train_xmod" : "train_xmodcu";
}

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
  Flag flag{name, metavar, help, set};
  flag.show = [=](const Options& o) { return show_value(o.*part.*member); };
  flag.default_text = flag.show(Options{});
  return flag;
}

template <class Part>
Flag switch_flag(const std::string& name, Part Options::*part, bool Part::*member, bool value,
                 const std::string& help) {
  Flag flag{name, "", help, [=](Options& o, const std::string&) { o.*part.*member = value; }};
  flag.show = [=](const Options& o) { return o.*part.*member == value ? "on" : "off"; };
  return flag;
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
      model_flag("untied-head", "", "an output head of its own, not the embedding"),
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
  Flag dense_prefix = model_flag("dense-prefix", "P", "dense layers before the first unit; also of deco");
  dense_prefix.default_text += "; deco: 1";
  dense_prefix.stage = Stage::derived;
  return {
      model_flag("token-sparsity", "K", "a sparse layer processes 1 in K tokens"),
      model_flag("anchor-stride", "A", "units of K sparse layers between dense anchors"),
      dense_prefix,
      model_flag("no-anchors", "", "only sparse units behind the prefix"),
      model_flag("no-residual-gate", "", "no learned scale of a sparse layer's update"),
      residual_gate_init_flag(),
      model_flag("token-bias-strength", "X", "gamma: how much a token's score falls once it was selected"),
      no_token_bias,
  };
}

inline std::vector<Flag> expert_flags() {
  auto required = [](Flag flag) {
    flag.default_text = "";
    flag.required = true;
    return flag;
  };
  Flag shared = model_flag("shared-experts", "N",
                           "experts that every token goes to; deco: one, N times --expert-dim wide");
  shared.default_text = "0; deco: 1";
  shared.stage = Stage::derived;
  return {
      required(model_flag("experts", "E", "routed experts of a layer")),
      required(model_flag("experts-per-token", "N", "experts that a token goes to")),
      required(model_flag("expert-dim", "N", "hidden width of an expert")),
      shared,
      model_flag("expert-bias-rate", "X", "step of the expert biases that balance the load; 0: off"),
      model_flag("active-ratio", "X", "share of active (token, expert) pairs to train towards"),
      model_flag("entropy-weight", "X", "lambda of the entropy term at the start, and its least"),
      model_flag("entropy-growth", "X", "lambda's factor of a step with too many active pairs"),
  };
}

// The checkpoint's sizes take the place of a preset's.
inline Flag init_from_flag() {
  Flag flag =
      value_flag("init-from", "DIR", &Options::train, &TrainOptions::init_from, {},
                 "start from the weights of a dense checkpoint, ours or Hugging Face's Qwen3; the model's "
                 "flags follow its config.json where they are not given");
  const auto take_path = flag.set;
  flag.set = [=](Options& o, const std::string& directory) {
    take_path(o, directory);
    o.model = load_config(directory, "--init-from");
  };
  flag.stage = Stage::preset;
  flag.excludes = "preset";
  return flag;
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
      init_from_flag(),
  };
}

inline std::vector<Flag> length_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  Flag steps =
      value_flag("steps", "N", part, &O::steps, between(1, 2147483647), "optimizer steps to train for");
  Flag compute = value_flag("compute", "FLOPS", part, &O::compute, above(0),
                            "or: train for as many tokens as this compute pays for, such as 2e13");
  Flag total = value_flag("total-batch-tokens", "N", part, &O::total_batch_tokens, between(1, 1e15),
                          "or: tokens of an optimizer step, for any number of processes; sets --grad-accum");
  steps.default_text = compute.default_text = total.default_text = "";
  steps.excludes = "compute";
  total.excludes = "grad-accum";
  return {
      steps,
      compute,
      value_flag("batch-size", "N", part, &O::batch_size, between(1, 2147483647),
                 "sequences of a micro-batch, in each process"),
      value_flag("grad-accum", "N", part, &O::grad_accum, between(1, 2147483647),
                 "micro-batches of an optimizer step, in each process"),
      total,
  };
}

inline std::vector<Flag> optimizer_flags() {
  using O = TrainOptions;
  constexpr auto part = &Options::train;
  Flag adamw_lr = value_flag("adamw-lr", "X", part, &O::adamw_lr, at_least(0),
                             "peak learning rate of what AdamW trains: embedding, norms, routers, gates");
  adamw_lr.default_text = "the same as --lr";
  Flag warmup = value_flag("warmup-steps", "N", part, &O::warmup_steps, between(0, 2147483647),
                           "steps in which the learning rate rises");
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
      value_flag("zero", "N", part, &O::zero, between(0, 1),
                 "several processes: 1: each keeps a share of the optimizer's state; 0: all of it"),
  };
}

inline constexpr const char* kRecomputeHelp =
    "none, ffn or block: what layers do not keep for the backward pass but compute again";

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
      value_flag("seed", "N", part, &O::seed, at_least(0),
                 "seed of the first weights and of the order of the data"),
      value_flag("recompute", "NAME", part, &O::recompute, {}, kRecomputeHelp),
      switch_flag("resume", part, &O::resume, true, "go on from the newest checkpoint in --out"),
  };
}

inline Flag threads_flag() {
  return value_flag("threads", "N", &Options::machine, &MachineOptions::threads, between(0, 4096),
                    "threads to compute with; 0: all processors");
}

inline Flag precision_flag() {
  return value_flag("precision", "NAME", &Options::machine, &MachineOptions::precision, {},
                    "of the factors in matrix products: fp32 or bf16; sums and weights stay fp32");
}

inline Flag instructions_flag() {
  Flag instructions =
      value_flag("instructions", "NAME", &Options::machine, &MachineOptions::instructions, {},
                 "of the processor, for matrix products: avx512, avx2 or portable; with bf16 amx, "
                 "avx512-bf16 or portable (slow); auto: the fastest it says it has");
  instructions.processor = Processor::cpu;
  return instructions;
}

inline std::vector<Flag> graph_flags() {
  constexpr auto part = &Options::machine;
  Flag with = switch_flag("cuda-graph", part, &MachineOptions::cuda_graph, true,
                          "launch each training step as one CUDA graph (default)");
  Flag without = switch_flag("no-cuda-graph", part, &MachineOptions::cuda_graph, false,
                             "launch its kernels one by one: slower, for profilers and for comparison");
  with.processor = without.processor = Processor::gpu;
  with.excludes = "no-cuda-graph";
  return {with, without};
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
                 "sequences of a micro-batch, for the memory estimate, as the next two"),
      value_flag("optimizer", "NAME", part, &O::optimizer, {}, "muon or adamw, for the hidden matrices"),
      value_flag("recompute", "NAME", part, &O::recompute, {}, kRecomputeHelp),
      value_flag("law", "FILE", part, &O::law, {},
                 "predict the difference to the dense model's loss by the scaling law that "
                 "scripts/scaling_law.py fit wrote"),
      switch_flag("json", part, &O::json, true, "print JSON"),
  };
}

inline std::vector<Flag> rank_plan_flags() {
  using O = PlanOptions;
  constexpr auto part = &Options::plan;
  std::vector<Flag> flags = {
      value_flag("ranks", "R", part, &O::ranks, between(1, 16384),
                 "plan for R processes side by side: memory, traffic and time of a step"),
      value_flag("zero", "Z", part, &O::zero, between(0, 1),
                 "0: every rank has the whole optimizer; 1: its state is shared out"),
      value_flag("grad-accum", "N", part, &O::grad_accum, between(1, 2147483647),
                 "micro-batches of a rank in an optimizer step"),
      value_flag("total-batch-tokens", "N", part, &O::total_batch_tokens, between(1, 1e15),
                 "or: tokens of an optimizer step, all processes together; sets --grad-accum"),
      value_flag("bandwidth", "GB/s", part, &O::bandwidth, above(0),
                 "that a rank sends, and at the same time receives (1 GB: 1e9 bytes)"),
      value_flag("device-flops", "F", part, &O::device_flops, above(0),
                 "FLOP/s that a rank reaches, such as 4e14 (docs/ranks.md: how to find it out)"),
      value_flag("device-memory", "GB", part, &O::device_memory, above(0),
                 "memory of a rank's device, to say whether the run fits"),
  };
  for (Flag& flag : flags) {
    if (flag.name != "zero" && flag.name != "grad-accum") flag.default_text = "";
    if (flag.name == "total-batch-tokens") flag.excludes = "grad-accum";
  }
  return flags;
}

template <class Part>
Flag shorter_context_flag(Part Options::*part) {
  Flag flag = value_flag("seq-len", "N", part, &Part::seq_len, between(1, 2147483647),
                         "a shorter context than the checkpoint's, for less memory");
  flag.default_text = "the checkpoint's";
  return flag;
}

inline std::vector<Flag> eval_flags() {
  using O = EvalOptions;
  constexpr auto part = &Options::eval;
  Flag checkpoint =
      value_flag("checkpoint", "DIR", part, &O::checkpoint, {}, "checkpoint, such as out/step_00000500");
  checkpoint.required = true;
  Flag tasks{"tasks", "FILE...", "evaluation files, made by scripts/prepare_eval.py",
             [](Options& o, const std::string& path) { o.eval.tasks.push_back(path); }};
  tasks.many = true;
  Flag per_item = value_flag("per-item", "FILE", part, &O::per_item, {},
                             "write what the model thinks of each item of the tasks, a line of JSON each");
  return {
      checkpoint,
      value_flag("val-data", "GLOB", part, &O::val_data, {}, "token shards, in quotes"),
      tasks,
      value_flag("max-items", "N", part, &O::max_items, between(0, 2147483647),
                 "only the first N items of each task; 0: all"),
      per_item,
      value_flag("batch-size", "N", part, &O::batch_size, between(1, 2147483647), "sequences of a batch"),
      value_flag("eval-batches", "N", part, &O::eval_batches, between(0, 2147483647), "0: all the data"),
      shorter_context_flag(part),
      switch_flag("json", part, &O::json, true, "print JSON"),
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
  Flag prompt_file = value_flag("prompt-file", "FILE", part, &O::prompt_file, {},
                                "or: a prompt on each line, continued side by side");
  prompt_file.excludes = "prompt";
  return {
      checkpoint,
      prompt,
      prompt_file,
      value_flag("max-new-tokens", "N", part, &O::max_new_tokens, at_least(1), "tokens to write"),
      value_flag("temperature", "X", part, &O::temperature, at_least(0), "0: the most probable token"),
      value_flag("top-k", "N", part, &O::top_k, at_least(0), "choose among the K most probable; 0: off"),
      value_flag("top-p", "X", part, &O::top_p, Range{0, 1, true},
                 "choose among the most probable that together have this probability"),
      shorter_context_flag(part),
      switch_flag(
          "no-cache", part, &O::use_cache, false,
          "compute each token from all before it, as a check and for comparison: the same text, later"),
      value_flag("seed", "N", part, &O::seed, at_least(0), "seed of the choice of tokens"),
  };
}

inline std::vector<Flag> routing_report_flags() {
  using O = RoutingOptions;
  constexpr auto part = &Options::routing;
  Flag checkpoint =
      value_flag("checkpoint", "DIR", part, &O::checkpoint, {}, "checkpoint, such as out/step_00000500");
  Flag data = value_flag("val-data", "GLOB", part, &O::val_data, {}, "token shards, in quotes");
  checkpoint.required = data.required = true;
  return {
      checkpoint,
      data,
      value_flag("batch-size", "N", part, &O::batch_size, between(1, 2147483647), "sequences of a batch"),
      value_flag("eval-batches", "N", part, &O::eval_batches, between(0, 2147483647), "0: all the data"),
      value_flag("csv", "FILE", part, &O::csv, {}, "also write a row for each sparse layer"),
      value_flag("map", "FILE", part, &O::map, {},
                 "also write which layers select each of the first tokens, under threshold routing (CSV)"),
      value_flag("map-tokens", "N", part, &O::map_tokens, between(1, 1000000), "tokens of --map"),
      switch_flag("json", part, &O::json, true, "print JSON; scripts/plot_routing.py draws it"),
  };
}

// Of all flags; processor: of the program whose flags these are, nothing: of both.
inline std::vector<Flag> flag_table(std::optional<Processor> processor = {}) {
  const std::vector<Command> train = {Command::train}, plan = {Command::plan}, eval = {Command::eval},
                             generate = {Command::generate}, model = {Command::train, Command::plan},
                             all = {Command::train, Command::plan, Command::eval, Command::generate,
                                    Command::routing};
  std::vector<Flag> table;
  auto add = [&](const std::string& group, const std::vector<Command>& commands, std::vector<Flag> flags) {
    for (Flag& flag : flags) {
      if (processor && flag.processor && flag.processor != processor) continue;
      flag.group = group;
      flag.commands = commands;
      table.push_back(std::move(flag));
    }
  };
  add("Data", train, train_data_flags());
  add("Length", train, length_flags());
  add("Model", model, size_flags());
  add("Routing (mod has only the first; xmod, routed-ffn and selected-q all)", model, routing_flags());
  add("Experts (moe, deco)", model, expert_flags());
  add("Optimizer", train, optimizer_flags());
  add("Validation and checkpoints", train, record_flags());
  add("Plan", plan, plan_flags());
  add("Plan for several ranks", plan, rank_plan_flags());
  add("Evaluation", eval, eval_flags());
  add("Generation", generate, generate_flags());
  add("Routing", {Command::routing}, routing_report_flags());
  add("Machine", all, {threads_flag(), precision_flag()});
  add("Machine", {Command::train, Command::eval, Command::generate, Command::routing}, {instructions_flag()});
  add("Machine", train, graph_flags());
  add("Help", all,
      {{"help", "", "this page, also -h", [](Options& o, const std::string&) { o.help = true; }}});
  return table;
}

}  // namespace detail

}  // namespace xmod
