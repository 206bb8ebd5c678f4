// Checkpoints: a directory OUT/step_00000500/ with
//
//   model.safetensors      weights under Hugging Face's names, and what training moves without
//                         a gradient: thresholds, expert biases, deco's entropy weight
//   config.json            the model's configuration; a dense one opens in transformers as it is
//   optimizer.safetensors  NAME.momentum (Muon), NAME.exp_avg and NAME.exp_avg_sq (AdamW)
//   trainer.json           step, tokens, and where the data loader stands
//   tokenizer.bin          when the training shards came with one
//
// It appears whole or not at all (xmod/files.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dataloader.h"
#include "xmod/config_json.h"
#include "xmod/files.h"
#include "xmod/json_file.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"
#include "xmod/safetensors.h"
#include "xmod/weight_files.h"

namespace xmod {

// Everything of a run besides weights and optimizer state.
struct TrainerState {
  int64_t step = 0;    // optimizer steps taken
  int64_t tokens = 0;  // trained on
  TrainLoaderState loader;
};

namespace detail {

// A tensor on the device and its name in a file.
struct StoredTensor {
  std::string name;
  Shape shape;
  float* device;
};

template <class Backend>
void save_tensors(const std::string& path, Backend& be, const std::vector<StoredTensor>& tensors) {
  std::vector<TensorInfo> infos;
  for (const StoredTensor& t : tensors) infos.push_back({t.name, Dtype::F32, t.shape});
  SafetensorsWriter writer(path, std::move(infos));
  for (const StoredTensor& t : tensors) {
    writer.write_pieces(t.name, [&](int64_t first_byte, void* buffer, int64_t bytes) {
      constexpr int64_t kFloat = sizeof(float);
      float* values = static_cast<float*>(buffer);
      be.to_host(values, t.device + first_byte / kFloat, bytes / kFloat);
      if (std::all_of(values, values + bytes / kFloat, [](float value) { return std::isfinite(value); }))
        return;
      fail("cannot save ", path, ": ", t.name,
           " has become infinite or NaN; the checkpoint before it stays: ",
           "resume from that with a lower --lr");
    });
  }
  writer.commit();
}

// Reads `tensors`, finite values.
template <class Backend>
void load_tensors(const WeightFiles& files, Backend& be, const std::vector<StoredTensor>& tensors) {
  for (const StoredTensor& t : tensors) {
    files.file(t.name).read_f32_pieces(t.name, t.shape, [&](int64_t first, const float* values, int64_t n) {
      be.to_device(t.device + first, values, n);
    });
  }
}

// Refuses files with tensors beside those of the table.
inline void require_no_others(const WeightFiles& files, const std::set<std::string>& known) {
  for (const std::string& name : files.names()) {
    if (known.count(name)) continue;
    fail(files.file(name).path(), ": tensor ", printable(name), " is not one of this model's ", known.size(),
         " tensors; does config.json belong to this file?");
  }
}

inline std::set<std::string> tensor_names(const std::vector<StoredTensor>& tensors) {
  std::set<std::string> names;
  for (const StoredTensor& t : tensors) names.insert(t.name);
  return names;
}

template <class Backend>
void load_all_tensors(const WeightFiles& files, Backend& be, const std::vector<StoredTensor>& tensors) {
  load_tensors(files, be, tensors);
  require_no_others(files, tensor_names(tensors));
}

template <class Backend>
std::vector<StoredTensor> model_tensors(const Model<Backend>& model) {
  std::vector<StoredTensor> tensors;
  for (const Parameter& p : model.table.entries) {
    tensors.push_back({p.name, p.shape, model.params() + p.offset});
  }
  for (const Buffer& b : model.table.buffers)
    tensors.push_back({b.name, b.shape, model.buffers() + b.offset});
  return tensors;
}

template <class Backend>
std::vector<StoredTensor> optimizer_tensors(const Model<Backend>& model,
                                            const OptimizerState<Backend>& optimizer) {
  std::vector<StoredTensor> tensors;
  for (size_t i = 0; i < model.table.entries.size(); i++) {
    const Parameter& p = model.table.entries[i];
    const bool muon = optimizer.table.optimizer[i] == Optimizer::muon;
    tensors.push_back(
        {p.name + (muon ? ".momentum" : ".exp_avg"), p.shape, optimizer.first_moment() + p.offset});
    if (!muon) {
      tensors.push_back({p.name + ".exp_avg_sq", p.shape,
                         optimizer.second_moment() + optimizer.table.second_moment_offset[i]});
    }
  }
  return tensors;
}

// The names of the tensors tell which optimizer wrote them.
inline void require_optimizer(const std::string& path, const std::vector<StoredTensor>& tensors) {
  const SafetensorsFile file(path);
  for (const StoredTensor& t : tensors) {
    if (file.contains(t.name)) continue;
    fail("--resume: ", path, " has no ", t.name, ", so another --optimizer wrote it; ",
         "give the flags of the first run, or another --out");
  }
}

inline nlohmann::json to_json(const TrainerState& s) {
  return {{"step", s.step},
          {"tokens", s.tokens},
          {"data_loader",
           {{"seed", s.loader.seed},
            {"epoch", s.loader.epoch},
            {"position", s.loader.position},
            {"num_sequences", s.loader.num_sequences}}}};
}

inline TrainerState trainer_state_from_json(const nlohmann::json& json, const std::string& path) {
  const std::string loader_path = path + ": data_loader";
  const ConfigReader run(json, path), loader(run.value("data_loader"), loader_path);
  auto count = [](const ConfigReader& in, const char* key, const Range& range = between(0, 1e18)) {
    int64_t value = 0;
    in.read(key, range, value);
    return value;
  };
  return {.step = count(run, "step"),
          .tokens = count(run, "tokens"),
          .loader = {.seed = static_cast<uint64_t>(count(loader, "seed", at_least(0))),
                     .epoch = count(loader, "epoch"),
                     .position = count(loader, "position"),
                     .num_sequences = count(loader, "num_sequences")}};
}

}  // namespace detail

// extra: (name, bytes) of small files that travel with the weights.
template <class Backend>
void save_checkpoint(const std::string& out, const Model<Backend>& model,
                     const OptimizerState<Backend>& optimizer, const TrainerState& state,
                     const std::vector<std::pair<std::string, std::string>>& extra) {
  DirectoryTransaction checkpoint(checkpoint_directory(out, state.step));
  detail::save_tensors(checkpoint.file("model.safetensors"), model.backend(), detail::model_tensors(model));
  detail::save_tensors(checkpoint.file("optimizer.safetensors"), model.backend(),
                       detail::optimizer_tensors(model, optimizer));
  write_file_atomically(checkpoint.file("config.json"), config_to_json(model.config).dump(2) + "\n");
  write_file_atomically(checkpoint.file("trainer.json"), detail::to_json(state).dump(2) + "\n");
  for (const auto& [name, bytes] : extra) write_file_atomically(checkpoint.file(name), bytes);
  checkpoint.commit();
}

inline WeightFiles open_weights(const std::string& checkpoint, const ModelConfig& c) {
  WeightFiles files = WeightFiles::of_checkpoint(checkpoint);
  if (c.tie_word_embeddings) files.drop_copy("lm_head.weight", "model.embed_tokens.weight");
  return files;
}

template <class Backend>
void load_model(const std::string& checkpoint, Model<Backend>& model) {
  detail::load_all_tensors(open_weights(checkpoint, model.config), model.backend(),
                           detail::model_tensors(model));
}

// Weights, optimizer and trainer state; refuses a checkpoint of another model.
template <class Backend>
TrainerState load_checkpoint(const std::string& checkpoint, Model<Backend>& model,
                             OptimizerState<Backend>& optimizer) {
  const std::string difference = describe_difference(model.config, load_config(checkpoint));
  if (!difference.empty()) {
    fail("--resume: the model differs from that of ", checkpoint, ": ", difference,
         "; give the flags of the first run, or another --out");
  }
  load_model(checkpoint, model);
  const std::string state = checkpoint + "/optimizer.safetensors";
  const std::vector<detail::StoredTensor> tensors = detail::optimizer_tensors(model, optimizer);
  detail::require_optimizer(state, tensors);
  detail::load_all_tensors(WeightFiles(state), model.backend(), tensors);
  const std::string path = checkpoint + "/trainer.json";
  return detail::trainer_state_from_json(read_json_file(path), path);
}

}  // namespace xmod
