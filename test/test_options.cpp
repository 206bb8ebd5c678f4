// The command line: what is read, what is refused and in which words.
#include "xmod/command_line.h"

#include <gtest/gtest.h>

#include <iterator>
#include <sstream>
#include <string>
#include <vector>

using namespace xmod;

namespace {

// The words behind the program's name.
Options parse(std::vector<std::string> words, Processor processor = Processor::cpu) {
  words.insert(words.begin(), std::string("bin/") + detail::program_on(processor));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return parse_options(static_cast<int>(argv.size()), argv.data(), processor);
}

// Words without spaces, from one text.
std::vector<std::string> words(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

std::string error_of(const std::vector<std::string>& given, Processor processor = Processor::cpu) {
  try {
    parse(given, processor);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code, 2);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line: " << error.what();
    return error.what();
  }
  return "no error";
}

std::string line(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += word + " ";
  return all;
}

void expect_error(const std::vector<std::string>& words, const std::vector<std::string>& parts,
                  Processor processor = Processor::cpu) {
  const std::string message = error_of(words, processor);
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos)
        << line(words) << ": '" << part << "' is not in: " << message;
  }
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The least that trains.
const std::vector<std::string> kTrain = {"--train-data", "x.bin", "--steps", "10"};

// The value of `flag` in --help, or "missing".
std::string help_default(const std::string& page, const std::string& flag) {
  size_t at = page.find("  --" + flag + " ");
  if (at == std::string::npos) return "missing";
  const size_t end = page.find("\n  --", at);
  std::string text = page.substr(at, end == std::string::npos ? end : end - at);
  at = text.find("(default: ");
  if (at == std::string::npos) return "none";
  text = text.substr(at + 10);
  return text.substr(0, text.find(')'));
}

}  // namespace

// ---------------------------------------------------------------------------------------------------
// What is read

TEST(Commands, TrainIsTheDefault) {
  EXPECT_EQ(parse(kTrain).command, Command::train);
  EXPECT_EQ(parse(std::vector<std::string>{"train"} + kTrain).command, Command::train);
  EXPECT_EQ(parse({"plan"}).command, Command::plan);
  EXPECT_EQ(parse({"eval", "--checkpoint", "c", "--val-data", "v"}).command, Command::eval);
  EXPECT_EQ(parse({"generate", "--checkpoint", "c"}).command, Command::generate);
  EXPECT_EQ(parse({"routing", "--checkpoint", "c", "--val-data", "v"}).command, Command::routing);
}

TEST(Defaults, AreTheStructs) {
  const Options o = parse(kTrain);
  EXPECT_EQ(o.train.train_data, "x.bin");
  EXPECT_EQ(o.train.val_data, "");
  EXPECT_EQ(o.train.out, "out");
  EXPECT_EQ(o.train.batch_size, 16);
  EXPECT_EQ(o.train.grad_accum, 1);
  EXPECT_EQ(o.train.steps, 10);
  EXPECT_EQ(o.train.compute, 0);
  EXPECT_EQ(o.train.optimizer, Optimizer::muon);
  EXPECT_EQ(o.train.lr, 3.2e-3);
  EXPECT_EQ(o.train.adamw_lr, -1);
  EXPECT_EQ(o.train.weight_decay, 0.1);
  EXPECT_EQ(o.train.warmup_steps, -1);
  EXPECT_EQ(o.train.lr_schedule, LrSchedule::cosine);
  EXPECT_EQ(o.train.final_lr_fraction, 0.1);
  EXPECT_EQ(o.train.grad_clip, 1);
  EXPECT_EQ(o.train.eval_interval, 100);
  EXPECT_EQ(o.train.eval_batches, 20);
  EXPECT_EQ(o.train.checkpoint_interval, 100);
  EXPECT_EQ(o.train.keep_checkpoints, 2);
  EXPECT_FALSE(o.train.resume);
  EXPECT_EQ(o.train.seed, 42);
  EXPECT_EQ(o.machine.threads, 0);
  EXPECT_EQ(o.machine.precision, Precision::fp32);
  EXPECT_EQ(o.train.recompute, Recompute::none);
  EXPECT_EQ(describe_difference(o.model, ModelConfig{}), "") << "the tiny preset";
  EXPECT_FALSE(o.help);
}

TEST(Values, EveryTrainFlag) {
  const Options o =
      parse(words("--train-data a --val-data b --out=c --batch-size 3 --grad-accum 4 --compute 2e13 "
                  "--optimizer adamw --lr 0.5 --adamw-lr 0 --weight-decay 0 --warmup-steps 0 "
                  "--lr-schedule wsd --final-lr-fraction 1 --grad-clip 0 --eval-interval 0 "
                  "--eval-batches 7 --checkpoint-interval 8 --keep-checkpoints 9 --resume --seed 10 "
                  "--threads 2 --precision bf16 --instructions amx --recompute block"));
  const TrainOptions& t = o.train;
  EXPECT_EQ(t.train_data, "a");
  EXPECT_EQ(t.val_data, "b");
  EXPECT_EQ(t.out, "c");
  EXPECT_EQ(t.batch_size, 3);
  EXPECT_EQ(t.grad_accum, 4);
  EXPECT_EQ(t.steps, 0);
  EXPECT_EQ(t.compute, 2e13);
  EXPECT_EQ(t.optimizer, Optimizer::adamw);
  EXPECT_EQ(t.lr, 0.5);
  EXPECT_EQ(t.adamw_lr, 0);
  EXPECT_EQ(t.weight_decay, 0);
  EXPECT_EQ(t.warmup_steps, 0);
  EXPECT_EQ(t.lr_schedule, LrSchedule::wsd);
  EXPECT_EQ(t.final_lr_fraction, 1);
  EXPECT_EQ(t.grad_clip, 0);
  EXPECT_EQ(t.eval_interval, 0);
  EXPECT_EQ(t.eval_batches, 7);
  EXPECT_EQ(t.checkpoint_interval, 8);
  EXPECT_EQ(t.keep_checkpoints, 9);
  EXPECT_TRUE(t.resume);
  EXPECT_EQ(t.seed, 10);
  EXPECT_EQ(o.machine.threads, 2);
  EXPECT_EQ(o.machine.precision, Precision::bf16);
  EXPECT_EQ(o.machine.instructions, "amx");
  EXPECT_EQ(t.recompute, Recompute::block);
}

TEST(Values, EveryModelFlag) {
  const ModelConfig c =
      parse(words("plan --active-layers 9 --dim 96 --heads 6 --kv-heads 3 --head-dim 32 --ffn-dim 100 "
                  "--vocab-size 300 --seq-len 64 --rope-theta 500 --token-sparsity 3 --anchor-stride 2 "
                  "--dense-prefix 1 --no-anchors --token-bias-strength 0.5 --residual-gate-init 0.25"))
          .model;
  EXPECT_EQ(c.arch, Arch::xmod);
  EXPECT_EQ(c.active_layers, 9);
  EXPECT_EQ(c.dim, 96);
  EXPECT_EQ(c.heads, 6);
  EXPECT_EQ(c.kv_heads, 3);
  EXPECT_EQ(c.head_dim, 32);
  EXPECT_EQ(c.ffn_dim, 100);
  EXPECT_EQ(c.vocab_size, 300);
  EXPECT_EQ(c.seq_len, 64);
  EXPECT_EQ(c.rope_theta, 500);
  EXPECT_EQ(c.token_sparsity, 3);
  EXPECT_EQ(c.anchor_stride, 2);
  EXPECT_EQ(c.dense_prefix, 1);
  EXPECT_FALSE(c.anchors);
  EXPECT_TRUE(c.residual_gate);
  EXPECT_EQ(c.token_bias_strength, 0.5);
  EXPECT_EQ(c.residual_gate_init, 0.25);

  const ModelConfig moe =
      parse(words("plan --arch moe --experts 8 --experts-per-token 2 --shared-experts 1 --expert-dim 48"))
          .model;
  EXPECT_EQ(moe.experts, 8);
  EXPECT_EQ(moe.experts_per_token, 2);
  EXPECT_EQ(moe.shared_experts, 1);
  EXPECT_EQ(moe.expert_dim, 48);

  const ModelConfig deco =
      parse(words("plan --arch deco --experts 8 --expert-dim 48 --active-ratio 0.3")).model;
  EXPECT_EQ(deco.active_ratio, 0.3);
  EXPECT_EQ(deco.dense_prefix, 1) << "as in DECO's models";
  EXPECT_EQ(deco.shared_experts, 1);
  const ModelConfig own =
      parse(words("plan --arch deco --experts 8 --expert-dim 48 --dense-prefix 0 --shared-experts 2")).model;
  EXPECT_EQ(own.dense_prefix, 0);
  EXPECT_EQ(own.shared_experts, 2);
}

TEST(Values, EveryFlagOfTheOtherCommands) {
  const Options of_plan =
      parse(words("plan --compute 1e20 --batch-size 1 --optimizer adamw --recompute ffn "
                  "--threads 3 --precision bf16 --json --ranks 8 --zero 0 --grad-accum 2 --bandwidth 12.5 "
                  "--device-flops 4e14 "
                  "--device-memory 80"));
  const PlanOptions& plan = of_plan.plan;
  EXPECT_EQ(plan.compute, 1e20);
  EXPECT_EQ(plan.batch_size, 1);
  EXPECT_EQ(plan.optimizer, Optimizer::adamw);
  EXPECT_EQ(plan.recompute, Recompute::ffn);
  EXPECT_EQ(of_plan.machine.threads, 3);
  EXPECT_EQ(of_plan.machine.precision, Precision::bf16);
  EXPECT_TRUE(plan.json);
  EXPECT_EQ(plan.ranks, 8);
  EXPECT_EQ(plan.zero, 0);
  EXPECT_EQ(plan.grad_accum, 2);
  EXPECT_EQ(plan.bandwidth, 12.5);
  EXPECT_EQ(plan.device_flops, 4e14);
  EXPECT_EQ(plan.device_memory, 80);

  const Options of_eval =
      parse(words("eval --checkpoint c --val-data v --batch-size 2 --eval-batches 3 --json --threads 4"));
  const EvalOptions& eval = of_eval.eval;
  EXPECT_EQ(eval.checkpoint, "c");
  EXPECT_EQ(eval.val_data, "v");
  EXPECT_EQ(eval.batch_size, 2);
  EXPECT_EQ(eval.eval_batches, 3);
  EXPECT_TRUE(eval.json);
  EXPECT_EQ(of_eval.machine.threads, 4);

  const Options of_generate =
      parse({"generate", "--checkpoint", "c", "--prompt", "Once upon", "--max-new-tokens", "5",
             "--temperature", "0", "--top-k", "6", "--top-p", "0.9", "--seed", "7", "--threads", "1"});
  const GenerateOptions& generate = of_generate.generate;
  EXPECT_EQ(generate.checkpoint, "c");
  EXPECT_EQ(generate.prompt, "Once upon");
  EXPECT_EQ(generate.max_new_tokens, 5);
  EXPECT_EQ(generate.temperature, 0);
  EXPECT_EQ(generate.top_k, 6);
  EXPECT_EQ(generate.top_p, 0.9);
  EXPECT_EQ(generate.seed, 7);
  EXPECT_EQ(of_generate.machine.threads, 1);

  const Options of_routing =
      parse(words("routing --checkpoint c --val-data v --batch-size 2 --eval-batches 3 --csv a --map b "
                  "--map-tokens 4 --json --threads 5"));
  const RoutingOptions& routing = of_routing.routing;
  EXPECT_EQ(routing.checkpoint, "c");
  EXPECT_EQ(routing.val_data, "v");
  EXPECT_EQ(routing.batch_size, 2);
  EXPECT_EQ(routing.eval_batches, 3);
  EXPECT_EQ(routing.csv, "a");
  EXPECT_EQ(routing.map, "b");
  EXPECT_EQ(routing.map_tokens, 4);
  EXPECT_TRUE(routing.json);
  EXPECT_EQ(of_routing.machine.threads, 5);
}

TEST(Values, TheLastOfAFlagCounts) {
  EXPECT_EQ(parse({"plan", "--dim", "64", "--dim", "32"}).model.dim, 32);
}

TEST(Values, ATextMayBeginWithADash) {
  EXPECT_EQ(parse({"generate", "--checkpoint", "c", "--prompt", "-5 degrees"}).generate.prompt, "-5 degrees");
  EXPECT_EQ(parse({"generate", "--checkpoint", "c", "--prompt=--help me"}).generate.prompt, "--help me");
  EXPECT_EQ(parse({"generate", "--checkpoint", "c", "--prompt", ""}).generate.prompt, "");
}

TEST(Values, BeginningsOfNames) {
  EXPECT_EQ(parse({"plan", "--token-s", "2"}).model.token_sparsity, 2);
  EXPECT_EQ(parse(words("plan --arch moe --experts 4 --experts-p 2 --expert-d 8")).model.experts, 4)
      << "a whole name counts before a beginning";
  expect_error({"plan", "--token", "2"},
               {"--token is ambiguous", "--token-sparsity", "--token-bias-strength"});
  expect_error({"plan", "--no"}, {"ambiguous", "--no-anchors", "--no-residual-gate", "--no-token-bias"});
}

TEST(Preset, ComesFirstWhereverItStands) {
  for (const auto& words : {std::vector<std::string>{"plan", "--preset", "556M", "--dim", "64"},
                            std::vector<std::string>{"plan", "--dim", "64", "--preset", "556M"}}) {
    const ModelConfig c = parse(words).model;
    EXPECT_EQ(c.dim, 64);
    EXPECT_EQ(c.ffn_dim, 3072);
    EXPECT_EQ(c.token_sparsity, 8);
  }
}

TEST(Preset, AnyArchitecture) {
  EXPECT_EQ(parse({"plan", "--preset", "936M", "--arch", "dense"}).model.arch, Arch::dense);
  EXPECT_EQ(parse({"plan", "--arch", "mod", "--preset", "936M"}).model.arch, Arch::mod);
  for (const char* name : {"tiny", "165M", "298M", "556M", "936M", "1.65B"}) {
    EXPECT_EQ(error_of({"plan", "--preset", name, "--batch-size", "1"}), "no error") << name;
  }
}

TEST(RopeTheta, FollowsTheContextUnlessGiven) {
  EXPECT_EQ(parse({"plan"}).model.rope_theta, 10000);
  EXPECT_EQ(parse({"plan", "--seq-len", "16384"}).model.rope_theta, 1e6);
  EXPECT_EQ(parse({"plan", "--preset", "165M"}).model.rope_theta, 1e6);
  EXPECT_EQ(parse({"plan", "--preset", "165M", "--seq-len", "1024"}).model.rope_theta, 10000);
  EXPECT_EQ(parse({"plan", "--rope-theta", "123", "--preset", "165M"}).model.rope_theta, 123);
}

TEST(ResidualGateInit, FormulasAreResolvedLast) {
  auto alpha = [](const std::string& formula) {
    return parse({"plan", "--residual-gate-init", formula, "--token-sparsity", "4", "--anchor-stride", "9"})
        .model.residual_gate_init;
  };
  EXPECT_EQ(alpha("1/sqrtK"), 0.5);
  EXPECT_EQ(alpha("1/sqrtA"), 1.0 / 3);
  EXPECT_EQ(alpha("1/sqrtAK"), 1.0 / 6);
  EXPECT_EQ(alpha("-0.5"), -0.5);
  EXPECT_EQ(parse({"plan", "--residual-gate-init", "1/sqrtK", "--preset", "556M", "--token-sparsity", "16"})
                .model.residual_gate_init,
            0.25);
  for (const char* bad : {"1/sqrtB", "1/sqrt", "nan", "inf", "", "1x"}) {
    expect_error({"plan", "--residual-gate-init", bad},
                 {"--residual-gate-init", "1/sqrtK, 1/sqrtA or 1/sqrtAK"});
  }
}

TEST(TokenBias, NoTokenBiasIsStrengthZero) {
  EXPECT_EQ(parse({"plan"}).model.token_bias_strength, 1);
  EXPECT_EQ(parse({"plan", "--no-token-bias"}).model.token_bias_strength, 0);
  EXPECT_FALSE(parse({"plan", "--no-residual-gate"}).model.residual_gate);
}

TEST(Getopt, ParsesAfreshEveryTime) {
  for (int i = 0; i < 3; i++) {
    EXPECT_EQ(parse({"plan", "--dim", "64", "--json"}).model.dim, 64);
    expect_error({"plan", "--dmi", "64"}, {"--dim"});
  }
}

// ---------------------------------------------------------------------------------------------------
// What is refused

TEST(Refused, UnknownOptions) {
  expect_error({"plan", "--tokn-sparsity", "3"},
               {"unknown option --tokn-sparsity; did you mean --token-sparsity?"});
  expect_error({"plan", "--tokn-sparsity=3"}, {"unknown option --tokn-sparsity;", "--token-sparsity?"});
  expect_error({"plan", "--sparsity", "3"}, {"did you mean --token-sparsity?"});
  expect_error({"plan", "--haeds", "3"}, {"did you mean --heads?"});
  expect_error({"plan", "--qqqqqqqqqqqq"},
               {"unknown option --qqqqqqqqqqqq; the nearest is --", "train_xmod plan --help"});
  expect_error({"--tran-data", "x"}, {"did you mean --train-data?"});
  expect_error({"plan", "-x"}, {"unknown option -x", "two dashes"});
  expect_error({"plan", "-dim", "3"}, {"unknown option -d", "two dashes"});
  expect_error({"plan", "--=3"}, {"unknown option --"});
  expect_error({"plan", "--di\nm"}, {"unknown option --di?m"});
}

TEST(Refused, AtMostThreeSuggestions) {
  EXPECT_EQ(detail::suggestion("aaaa", {"aaab", "aaac", "aaad", "aaae", "zzzz"}),
            "; did you mean aaab, aaac or aaad?");
  EXPECT_EQ(detail::suggestion("aaba", {"aaab", "aabaxyz"}), "; did you mean aaab or aabaxyz?")
      << "swapped letters and a part of a name are one mistake each";
}

TEST(Refused, OptionOfTheProgramForTheOtherProcessor) {
  for (const std::string flag : {"--cuda-graph", "--no-cuda-graph"})
    expect_error(kTrain + words(flag), {flag + " is an option of train_xmodcu, not of train_xmod;"});
  expect_error(kTrain + words("--instructions=avx2"),
               {"--instructions is an option of train_xmod, not of train_xmodcu;"}, Processor::gpu);
  expect_error(words("plan --cuda-graph"), {"--cuda-graph is an option of train, not of plan"},
               Processor::gpu);
  const std::string page = parse({"--help"}).help_text,
                    gpu_page = parse({"--help"}, Processor::gpu).help_text;
  EXPECT_EQ(page.find("cuda-graph"), std::string::npos);
  EXPECT_EQ(gpu_page.find("--instructions"), std::string::npos);
  EXPECT_NE(gpu_page.find("  --no-cuda-graph"), std::string::npos);
}

TEST(Values, CudaGraph) {
  auto graphs = [](const std::string& flags) {
    return parse(kTrain + words(flags), Processor::gpu).machine.cuda_graph;
  };
  EXPECT_TRUE(graphs(""));
  EXPECT_TRUE(graphs("--cuda-graph"));
  EXPECT_FALSE(graphs("--no-cuda-graph"));
  expect_error(kTrain + words("--cuda-graph --no-cuda-graph"), {"exclude each other"}, Processor::gpu);
}

TEST(Refused, OptionsOfOtherCommands) {
  expect_error({"plan", "--steps", "3"}, {"--steps is an option of train, not of plan"});
  expect_error(kTrain + std::vector<std::string>{"--json"},
               {"--json is an option of plan, eval and routing, not of train"});
  expect_error({"generate", "--checkpoint", "c", "--val-data", "x"},
               {"--val-data", "train, eval and routing", "not of generate"});
  expect_error({"eval", "--dim", "3"}, {"--dim is an option of train and plan, not of eval"});
}

TEST(Refused, UnknownCommands) {
  expect_error({"pln"},
               {"unknown command pln; did you mean plan?", "train, plan, eval, generate and routing"});
  expect_error({"genrate", "--checkpoint", "c"}, {"did you mean generate?"});
  expect_error({""}, {"unknown command ''"});
  expect_error({"--dim", "64", "plan"}, {"the command comes first: train_xmod plan"});
}

TEST(Refused, StrayWords) {
  expect_error({"--train-data", "a.bin", "b.bin", "--steps", "1"}, {"unexpected argument b.bin", "quotes"});
  expect_error({"plan", "--", "--dim"}, {"unexpected argument --dim"});
  expect_error({"plan", "-"}, {"unexpected argument -"});
  expect_error({"plan", ""}, {"unexpected argument ''"});
}

TEST(Refused, UnknownValues) {
  expect_error(
      {"plan", "--arch", "xmodd"},
      {"--arch xmodd: expected dense, mod, xmod, routed-ffn, selected-q, moe or deco; did you mean xmod?"});
  expect_error({"plan", "--preset", "556m"},
               {"--preset 556m: expected tiny, 165M, 298M, 556M, 936M or 1.65B; did you mean 556M?"});
  expect_error(kTrain + std::vector<std::string>{"--optimizer", "adam"},
               {"--optimizer adam: expected muon or adamw; did you mean adamw?"});
  expect_error(kTrain + std::vector<std::string>{"--lr-schedule", "cos"},
               {"--lr-schedule cos", "cosine, linear, wsd or constant"});
  expect_error(kTrain + std::vector<std::string>{"--recompute", "blocks"},
               {"--recompute blocks", "none, ffn or block", "did you mean block?"});
  expect_error(kTrain + std::vector<std::string>{"--precision", "fp16"},
               {"--precision fp16", "fp32 or bf16"});
}

TEST(Refused, WhatIsNotAWholeNumber) {
  for (const char* bad : {"", "x", "1.5", "3x", " 3", "3 ", "+3", "0x10", "nan", "inf", "0", "-1",
                          "99999999999999999999", "1e-3"}) {
    expect_error({"--train-data", "x", "--steps", bad}, {"--steps ", "expected a whole number from 1"});
  }
  expect_error({"--train-data", "x", "--steps", "1e3"},
               {"--steps 1e3: expected a whole number", "write 1000"});
  expect_error({"--train-data", "x", "--steps", "2.0"}, {"write 2"});
  expect_error({"plan", "--dim", "2000000"}, {"--dim 2000000: expected a whole number from 1 to 1048576"});
  expect_error({"plan", "--dense-prefix", "-1"},
               {"--dense-prefix -1: expected a whole number of at least 0"});
}

TEST(Refused, WhatIsNotANumber) {
  for (const char* bad : {"", "x", "1e", "1e400", "nan", "inf", "-inf", "-1", "0", "1,5", "0x1p3", "1 "}) {
    expect_error(kTrain + std::vector<std::string>{"--lr", bad}, {"--lr ", "expected a number above 0"});
  }
  expect_error(kTrain + std::vector<std::string>{"--final-lr-fraction", "1.5"},
               {"--final-lr-fraction 1.5: expected a number from 0 to 1"});
  expect_error({"generate", "--checkpoint", "c", "--top-p", "0"},
               {"--top-p 0: expected a number above 0, at most 1"});
  expect_error({"generate", "--checkpoint", "c", "--temperature", "-1"},
               {"--temperature -1: expected a number of at least 0"});
  expect_error({"plan", "--token-bias-strength", "-1"},
               {"--token-bias-strength -1: expected a number from 0 to 1e+06"});
  expect_error({"plan", "--compute", "0"}, {"--compute 0: expected a number above 0"});
  // What is infinite as a float would select by NaN.
  expect_error({"plan", "--token-bias-strength", "1e39"}, {"--token-bias-strength 1e39", "from 0 to 1e+06"});
  expect_error({"plan", "--rope-theta", "0"}, {"--rope-theta 0: expected a number from 1 to 1e+12"});
}

TEST(Refused, MissingAndSuperfluousValues) {
  expect_error({"--train-data", "x", "--steps"}, {"--steps needs a value: --steps N"});
  expect_error({"--train-data", "--steps", "3"},
               {"--train-data needs a value: --train-data GLOB; found --steps"});
  expect_error({"--train-data=", "--steps", "3"}, {"--train-data is empty"});
  expect_error(kTrain + std::vector<std::string>{"--resume=yes"}, {"--resume takes no value"});
}

TEST(Refused, WhatMustBeGiven) {
  expect_error({}, {"train needs --train-data GLOB"});
  expect_error({"--train-data", "x"}, {"train needs --steps N or --compute FLOPS"});
  expect_error({"eval", "--val-data", "v"}, {"eval needs --checkpoint DIR"});
  expect_error({"eval", "--checkpoint", "c"}, {"eval needs --val-data GLOB"});
  expect_error({"generate"}, {"generate needs --checkpoint DIR"});
  expect_error({"routing", "--checkpoint", "c"}, {"routing needs --val-data GLOB"});
  for (const char* flag :
       {"--zero", "--grad-accum", "--total-batch-tokens", "--bandwidth", "--device-flops", "--device-memory"})
    expect_error({"plan", flag, "1"}, {flag, "needs --ranks R"});
  expect_error({"plan", "--ranks", "4", "--zero", "2"}, {"--zero 2", "0 to 1"});
  expect_error({"routing", "--checkpoint", "c", "--val-data", "v", "--csv", "a", "--map", "a"},
               {"--csv and --map are both a: give two files"});
  expect_error({"plan", "--arch", "moe"}, {"--arch moe needs --experts E"});
  expect_error({"plan", "--arch", "deco", "--experts", "8"}, {"--arch deco needs --expert-dim N"});
  expect_error({"plan", "--arch", "moe", "--experts", "8", "--experts-per-token", "2"},
               {"--arch moe needs --expert-dim N"});
}

TEST(Refused, WhatExcludesEachOther) {
  expect_error(kTrain + std::vector<std::string>{"--compute", "1e13"},
               {"--steps and --compute exclude each other"});
  expect_error({"plan", "--token-bias-strength", "2", "--no-token-bias"},
               {"--no-token-bias and --token-bias-strength exclude"});
  expect_error({"plan", "--no-residual-gate", "--residual-gate-init", "1"},
               {"--residual-gate-init and --no-residual-gate exclude"});
}

TEST(Refused, OptionsOfOtherArchitectures) {
  const std::vector<std::vector<std::string>> units = {
      {"--anchor-stride", "2"},       {"--no-anchors"},    {"--no-residual-gate"},
      {"--token-bias-strength", "1"}, {"--no-token-bias"}, {"--residual-gate-init", "1"}};
  for (const auto& flag : units) {
    for (const char* arch : {"dense", "mod", "moe"}) {
      expect_error(std::vector<std::string>{"plan", "--arch", arch} + flag,
                   {flag[0] + " does not belong to --arch " + arch, "xmod, routed-ffn and selected-q"});
    }
    EXPECT_EQ(error_of(std::vector<std::string>{"plan", "--arch", "selected-q"} + flag), "no error");
  }
  for (const char* arch : {"dense", "mod", "moe"}) {
    expect_error({"plan", "--arch", arch, "--dense-prefix", "1"},
                 {std::string("--dense-prefix does not belong to --arch ") + arch,
                  "xmod, routed-ffn, selected-q and deco"});
  }
  expect_error({"plan", "--token-sparsity", "2", "--arch", "dense"},
               {"--token-sparsity does not belong to --arch dense", "mod, xmod, routed-ffn and selected-q"});
  EXPECT_EQ(error_of({"plan", "--token-sparsity", "2", "--arch", "mod"}), "no error");
  for (const char* flag : {"--experts", "--experts-per-token", "--shared-experts", "--expert-dim"}) {
    expect_error({"plan", flag, "2"},
                 {std::string(flag) + " does not belong to --arch xmod", "option of moe"});
  }
  const std::vector<std::string> deco = {"plan", "--arch", "deco", "--experts", "4", "--expert-dim", "8"};
  EXPECT_EQ(error_of(deco), "no error");
  for (const char* flag : {"--experts-per-token", "--expert-bias-rate"}) {
    expect_error(deco + std::vector<std::string>{flag, "1"},
                 {std::string(flag) + " does not belong to --arch deco", "option of moe"});
  }
  for (const char* flag : {"--active-ratio", "--entropy-weight", "--entropy-growth"}) {
    expect_error({"plan", "--arch", "moe", "--experts", "4", "--experts-per-token", "1", "--expert-dim", "8",
                  flag, "1"},
                 {std::string(flag) + " does not belong to --arch moe", "option of deco"});
    EXPECT_EQ(error_of(deco + std::vector<std::string>{flag, "1"}), "no error");
  }
}

TEST(Refused, ModelsThatCannotBe) {
  expect_error({"plan", "--heads", "3", "--kv-heads", "2"}, {"--heads 3", "multiple of --kv-heads 2"});
  expect_error({"plan", "--head-dim", "63"}, {"--head-dim 63 is odd"});
  expect_error({"plan", "--token-sparsity", "257"}, {"--token-sparsity 257 is larger than --seq-len 256"});
  expect_error({"plan", "--arch", "mod", "--token-sparsity", "9", "--seq-len", "8"},
               {"--token-sparsity 9 is larger than --seq-len 8"});
  expect_error({"plan", "--dense-prefix", "8"}, {"--dense-prefix 8", "at least one unit"});
  expect_error({"plan", "--arch", "moe", "--experts", "2", "--experts-per-token", "3", "--expert-dim", "8"},
               {"--experts-per-token 3 is larger than --experts 2"});
  expect_error({"plan", "--arch", "deco", "--experts", "2", "--expert-dim", "8", "--dense-prefix", "8"},
               {"--dense-prefix 8", "at least one layer with experts"});
  for (const char* value : {"0", "1.5", "nan"}) {
    expect_error({"plan", "--arch", "deco", "--experts", "2", "--expert-dim", "8", "--active-ratio", value},
                 {"--active-ratio", "above 0, at most 1"});
  }
}

TEST(Refused, SizesBeyondCounting) {
  expect_error({"plan", "--active-layers", "100000", "--token-sparsity", "200"},
               {"--active-layers 100000 times --token-sparsity 200", "layers"});
  expect_error({"plan", "--arch", "dense", "--active-layers", "1000000"}, {"--active-layers 1000000"});
  expect_error({"plan", "--batch-size", "2147483647"}, {"--batch-size 2147483647 times --seq-len 256"});
  expect_error(kTrain + std::vector<std::string>{"--batch-size", "10000000"}, {"--batch-size 10000000"});
  expect_error({"plan", "--dim", "1048576", "--ffn-dim", "1048576", "--active-layers", "1000"},
               {"parameters"});
  expect_error({"plan", "--seq-len", "2147483647", "--batch-size", "1", "--ffn-dim", "1048576"},
               {"activations"});
  expect_error({"plan", "--arch", "moe", "--experts", "65536", "--experts-per-token", "1", "--expert-dim",
                "1", "--active-layers", "1000"},
               {"--experts 65536", "matrices"});
}

// ---------------------------------------------------------------------------------------------------
// --help

TEST(Help, OfEachCommand) {
  const Options train = parse({"--help"});
  EXPECT_TRUE(train.help);
  for (const char* part : {"usage: train_xmod [train]", "--train-data GLOB", "--no-anchors", "\nModel\n",
                           "Optimizer", "plan  ", "eval  ", "generate  ", "routing  "}) {
    EXPECT_NE(train.help_text.find(part), std::string::npos) << part;
  }
  const std::string plan = parse({"plan", "--help"}).help_text;
  EXPECT_NE(plan.find("usage: train_xmod plan"), std::string::npos);
  EXPECT_EQ(plan.find("--train-data"), std::string::npos);
  EXPECT_NE(parse({"generate", "-h"}).help_text.find("--top-p X"), std::string::npos);
  EXPECT_NE(parse({"eval", "--help"}).help_text.find("--eval-batches N"), std::string::npos);
}

TEST(Help, WinsOverWhatIsMissingOrWrong) {
  EXPECT_TRUE(parse({"generate", "--help"}).help);
  EXPECT_TRUE(parse({"plan", "--dim", "x", "--help"}).help);
}

TEST(Help, DefaultsAreTheStructs) {
  const std::string page = parse({"--help"}).help_text;
  EXPECT_EQ(help_default(page, "batch-size"), std::to_string(TrainOptions{}.batch_size));
  EXPECT_EQ(help_default(page, "lr"), shortest(TrainOptions{}.lr));
  EXPECT_EQ(help_default(page, "out"), TrainOptions{}.out);
  EXPECT_EQ(help_default(page, "lr-schedule"), "cosine");
  EXPECT_EQ(help_default(page, "dim"), std::to_string(ModelConfig{}.dim));
  EXPECT_EQ(help_default(page, "preset"), "tiny");
  EXPECT_EQ(help_default(page, "steps"), "none");
  EXPECT_EQ(help_default(page, "val-data"), "none");
  EXPECT_EQ(help_default(parse({"generate", "--help"}).help_text, "temperature"),
            shortest(GenerateOptions{}.temperature));
}

TEST(Help, LinesFitAndColumnsAlign) {
  for (const char* command : {"train", "plan", "eval", "generate", "routing"}) {
    std::istringstream lines(parse({command, "--help"}).help_text);
    for (std::string text; std::getline(lines, text);) {
      EXPECT_LE(text.size(), 100u) << text;
      if (text.compare(0, 4, "  --") != 0) continue;
      EXPECT_EQ(text[26], ' ') << text;
      EXPECT_NE(text[27], ' ') << text;
    }
  }
}

// Two rows with one name in one command would shadow each other.
TEST(FlagTable, NamesAreUniqueInACommand) {
  const auto table = detail::flag_table();
  for (size_t i = 0; i < table.size(); i++) {
    for (size_t j = 0; j < i; j++) {
      if (table[i].name != table[j].name) continue;
      for (Command command : table[i].commands) {
        EXPECT_FALSE(detail::of_command(table[j], command)) << table[i].name;
      }
    }
  }
}

TEST(FlagTable, EveryFlagOfAModelFieldExists) {
  const std::string page = parse({"plan", "--help"}).help_text;
  for (const ModelField& field : model_fields()) {
    if (*field.flag == '\0') continue;
    EXPECT_NE(page.find(std::string("  --") + field.flag + " "), std::string::npos) << field.flag;
  }
}
