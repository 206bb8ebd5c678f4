// What a command line asks for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xmod/activations.h"
#include "xmod/schedule.h"
#include "xmod_common.h"

namespace xmod {

enum class Command { train, plan, eval, generate, routing };
enum class Precision { fp32, bf16 };  // what the factors of matrix products are rounded to

inline const char* precision_name(Precision precision) {
  return precision == Precision::fp32 ? "fp32" : "bf16";
}

// What a program's passes run on.
enum class Processor { cpu, gpu };

// What a backend is made of.
struct MachineOptions {
  int64_t threads = 0;  // of the processor; 0: OpenMP's default
  Precision precision = Precision::fp32;
  std::string instructions = "auto";  // of the processor, for the matrix products
  bool cuda_graph = true;             // of the GPU: training steps as CUDA graphs
};

struct TrainOptions {
  std::string train_data, val_data;  // globs of token shards; no val_data: no validation
  std::string out = "out";
  std::string init_from;           // checkpoint whose weights the run starts from; empty: none
  int64_t batch_size = 16;         // sequences of one forward and backward pass
  int64_t grad_accum = 1;          // such passes of each rank per optimizer step
  int64_t total_batch_tokens = 0;  // of an optimizer step, all ranks together: sets grad_accum; 0: not given
  int64_t zero = 1;                // 1: every rank keeps a share of the optimizer's state; 0: all of it
  int64_t steps = 0;               // exactly one of these two is given
  double compute = 0;              // training FLOPs
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
  int64_t checkpoint_interval = 100;  // steps; 0: only at the end
  int64_t keep_checkpoints = 2;
  bool resume = false;
  int64_t seed = 42;
  Recompute recompute = Recompute::none;
};

struct PlanOptions {
  double compute = 0;       // 0: not given
  std::string law;          // file of a fitted scaling law; empty: none
  int64_t batch_size = 16;  // this and the next two: of the memory estimate
  Optimizer optimizer = Optimizer::muon;
  Recompute recompute = Recompute::none;
  bool json = false;
  int64_t ranks = 0;               // 0: not asked for; the rest is about several ranks
  int64_t zero = 1;                // as that of training
  int64_t grad_accum = 1;          // micro-batches of a rank in a step
  int64_t total_batch_tokens = 0;  // of a step, all ranks together: sets grad_accum; 0: not given
  double bandwidth = 0;      // GB/s that a rank sends and at once receives; 0: not given, as the next two
  double device_flops = 0;   // FLOP/s that a rank reaches
  double device_memory = 0;  // GB
};

struct EvalOptions {
  std::string checkpoint;
  std::string val_data;            // one of these two is given at least
  std::vector<std::string> tasks;  // evaluation files
  std::string per_item;            // file for the score of every item; empty: none
  int64_t max_items = 0;           // of each task; 0: all
  int64_t batch_size = 16;
  int64_t eval_batches = 0;  // 0: all
  int64_t seq_len = 0;       // 0: the checkpoint's
  bool json = false;
};

struct GenerateOptions {
  std::string checkpoint, prompt, prompt_file;
  int64_t max_new_tokens = 200;
  double temperature = 0.8;  // 0: always the most probable token
  int64_t top_k = 0;         // 0: off
  double top_p = 1;
  int64_t seq_len = 0;  // 0: the checkpoint's
  bool use_cache = true;
  int64_t seed = 42;
};

struct RoutingOptions {
  std::string checkpoint, val_data;
  int64_t batch_size = 16;
  int64_t eval_batches = 0;  // 0: all
  std::string csv, map;      // files to write; empty: none
  int64_t map_tokens = 400;
  bool json = false;
};

struct Options {
  Command command = Command::train;
  bool help = false;      // print help_text and end
  std::string help_text;  // of the command
  ModelConfig model;
  MachineOptions machine;
  TrainOptions train;
  PlanOptions plan;
  EvalOptions eval;
  GenerateOptions generate;
  RoutingOptions routing;
};

}  // namespace xmod
