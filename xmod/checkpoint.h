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
#include "xmod/communicator.h"
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

constexpr int kEveryRank = -1;

// Consecutive numbers of a tensor, on the device of the rank that keeps them.
struct StoredPart {
  int64_t first, size;
  int owner;      // or kEveryRank
  float* device;  // null where another rank keeps them
};

// A tensor and its name in a file.
struct StoredTensor {
  std::string name;
  Shape shape;
  std::vector<StoredPart> parts;  // one behind the other
};

inline StoredTensor whole_tensor(const std::string& name, const Shape& shape, float* device) {
  return {name, shape, {{0, element_count(shape), kEveryRank, device}}};
}

// Ranks speak of tensors in these pieces; files are read and written in them.
constexpr int64_t kStoredPiece = SafetensorsFile::kPiece;
static_assert(SafetensorsWriter::kPiece == kStoredPiece * static_cast<int64_t>(sizeof(float)));

// Calls visit(part, begin, n) for the numbers begin .. begin + n of the tensor that are among first .. end
// and in one part.
template <class Visit>
void for_each_part(const StoredTensor& tensor, int64_t first, int64_t end, Visit visit) {
  for (const StoredPart& part : tensor.parts) {
    const int64_t begin = std::max(first, part.first), stop = std::min(end, part.first + part.size);
    if (begin < stop) visit(part, begin, stop - begin);
  }
}

// The same for whole tensors, in the order of the pieces of a file.
template <class Visit>
void for_each_piece(const std::vector<StoredTensor>& tensors, Visit visit) {
  for (const StoredTensor& t : tensors) {
    const int64_t size = element_count(t.shape);
    for (int64_t first = 0; first < size; first += kStoredPiece)
      for_each_part(t, first, std::min(size, first + kStoredPiece), visit);
  }
}

// The first rank writes; the others send it what they keep.
template <class Backend>
void save_tensors(const std::string& path, Backend& be, const std::vector<StoredTensor>& tensors,
                  Communicator& ranks) {
  std::vector<TensorInfo> infos;
  for (const StoredTensor& t : tensors) infos.push_back({t.name, Dtype::F32, t.shape});
  SafetensorsWriter writer(path, std::move(infos));
  for (const StoredTensor& t : tensors) {
    writer.write_pieces(t.name, [&](int64_t first_byte, void* buffer, int64_t bytes) {
      constexpr int64_t kFloat = sizeof(float);
      const int64_t first = first_byte / kFloat, end = first + bytes / kFloat;
      float* values = static_cast<float*>(buffer);
      for_each_part(t, first, end, [&](const StoredPart& part, int64_t begin, int64_t n) {
        if (part.device) {
          be.to_host(values + begin - first, part.device + begin - part.first, n);
        } else {
          ranks.receive(values + begin - first, n, part.owner);
        }
      });
      if (std::all_of(values, values + bytes / kFloat, [](float value) { return std::isfinite(value); }))
        return;
      fail("cannot save ", path, ": ", t.name,
           " has become infinite or NaN; the checkpoint before it stays: ",
           "resume from that with a lower --lr");
    });
  }
  writer.commit();
}

template <class Backend>
void send_tensors(Backend& be, const std::vector<StoredTensor>& tensors, Communicator& ranks) {
  std::vector<float> values(static_cast<size_t>(kStoredPiece));
  for_each_piece(tensors, [&](const StoredPart& part, int64_t begin, int64_t n) {
    if (part.owner != ranks.rank()) return;
    be.to_host(values.data(), part.device + begin - part.first, n);
    ranks.send(values.data(), n, 0);
  });
}

// The first rank reads `tensors`, finite values, and sends the others what they keep.
template <class Backend>
void load_tensors(const WeightFiles& files, Backend& be, const std::vector<StoredTensor>& tensors,
                  Communicator& ranks) {
  for (const StoredTensor& t : tensors) {
    files.file(t.name).read_f32_pieces(t.name, t.shape, [&](int64_t first, const float* values, int64_t n) {
      for_each_part(t, first, first + n, [&](const StoredPart& part, int64_t begin, int64_t count) {
        const float* found = values + begin - first;
        if (part.device) be.to_device(part.device + begin - part.first, found, count);
        if (part.owner == kEveryRank) {
          ranks.broadcast_from_here(found, count * static_cast<int64_t>(sizeof(float)));
        } else if (!part.device) {
          ranks.send(found, count, part.owner);
        }
      });
    });
  }
}

template <class Backend>
void receive_tensors(Backend& be, const std::vector<StoredTensor>& tensors, Communicator& ranks) {
  std::vector<float> values(static_cast<size_t>(kStoredPiece));
  for_each_piece(tensors, [&](const StoredPart& part, int64_t begin, int64_t n) {
    if (part.owner == kEveryRank) {
      ranks.broadcast(values.data(), n * static_cast<int64_t>(sizeof(float)));
    } else if (part.owner == ranks.rank()) {
      ranks.receive(values.data(), n, 0);
    }
    if (part.device) be.to_device(part.device + begin - part.first, values.data(), n);
  });
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
void load_all_tensors(const WeightFiles& files, Backend& be, const std::vector<StoredTensor>& tensors,
                      Communicator& ranks) {
  load_tensors(files, be, tensors, ranks);
  require_no_others(files, tensor_names(tensors));
}

// What this rank has of a parameter.
template <class Backend>
StoredTensor kept_tensor(const std::string& name, const Model<Backend>& model, const Parameter& p) {
  StoredTensor tensor{name, p.shape, {}};
  model.for_each_master(p, [&](int64_t begin, int64_t end) {
    tensor.parts.push_back({begin, end - begin, kEveryRank, model.params() + p.offset + begin});
  });
  return tensor;
}

template <class Backend>
void add_buffers(std::vector<StoredTensor>& tensors, const Model<Backend>& model) {
  for (const Buffer& b : model.table.buffers)
    tensors.push_back(whole_tensor(b.name, b.shape, model.buffers() + b.offset));
}

template <class Backend>
std::vector<StoredTensor> model_tensors(const Model<Backend>& model) {
  std::vector<StoredTensor> tensors;
  for (const Parameter& p : model.table.entries) tensors.push_back(kept_tensor(p.name, model, p));
  add_buffers(tensors, model);
  return tensors;
}

// A number for each element of each parameter, kept by the rank that updates it: the parts of the tensor of
// each parameter. place(piece): where a piece's lie on the device of `rank`.
template <class Backend, class Place>
std::vector<std::vector<StoredPart>> parts_of_owners(const OptimizerState<Backend>& optimizer, int rank,
                                                     Place place) {
  std::vector<std::vector<StoredPart>> parts(optimizer.table.optimizer.size());
  for (size_t r = 0; r < optimizer.shares.size(); r++) {
    const bool here = !optimizer.is_shared || static_cast<int>(r) == rank;
    const int owner = optimizer.is_shared ? static_cast<int>(r) : kEveryRank;
    for (const OptimizerPiece& p : optimizer.shares[r].pieces)
      parts[static_cast<size_t>(p.entry)].push_back({p.first, p.size, owner, here ? place(p) : nullptr});
  }
  for (std::vector<StoredPart>& of_tensor : parts) {
    std::sort(of_tensor.begin(), of_tensor.end(),
              [](const StoredPart& a, const StoredPart& b) { return a.first < b.first; });
  }
  return parts;
}

// rank: whose device is meant.
template <class Backend>
std::vector<StoredTensor> model_tensors(const Model<Backend>& model, const OptimizerState<Backend>& optimizer,
                                        int rank) {
  if (model.has_all_masters) return model_tensors(model);
  const std::vector<Parameter>& entries = model.table.entries;
  auto masters = parts_of_owners(optimizer, rank, [&](const OptimizerPiece& p) {
    return model.params() + entries[static_cast<size_t>(p.entry)].offset + p.first;
  });
  std::vector<StoredTensor> tensors;
  for (size_t i = 0; i < entries.size(); i++) {
    const Parameter& p = entries[i];
    const bool is_shared = p.read == Read::by_products_alone;
    tensors.push_back(is_shared ? StoredTensor{p.name, p.shape, std::move(masters[i])}
                                : kept_tensor(p.name, model, p));
  }
  add_buffers(tensors, model);
  return tensors;
}

template <class Backend>
std::vector<StoredTensor> optimizer_tensors(const Model<Backend>& model,
                                            const OptimizerState<Backend>& optimizer, int rank) {
  const std::vector<Parameter>& entries = model.table.entries;
  auto first = parts_of_owners(
      optimizer, rank, [&](const OptimizerPiece& p) { return optimizer.first_moment() + p.first_moment; });
  auto second = parts_of_owners(
      optimizer, rank, [&](const OptimizerPiece& p) { return optimizer.second_moment() + p.second_moment; });
  std::vector<StoredTensor> tensors;
  auto add = [&](const Parameter& p, const char* moment, std::vector<StoredPart>& parts) {
    tensors.push_back({p.name + moment, p.shape, std::move(parts)});
  };
  for (size_t i = 0; i < entries.size(); i++) {
    const bool muon = optimizer.table.optimizer[i] == Optimizer::muon;
    add(entries[i], muon ? ".momentum" : ".exp_avg", first[i]);
    if (!muon) add(entries[i], ".exp_avg_sq", second[i]);
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

// extra: (name, bytes) of small files that travel with the weights. Of several ranks the first alone writes.
template <class Backend>
void save_checkpoint(const std::string& out, const Model<Backend>& model,
                     const OptimizerState<Backend>& optimizer, const TrainerState& state,
                     const std::vector<std::pair<std::string, std::string>>& extra, Communicator& ranks) {
  Backend& be = model.backend();
  const std::vector<detail::StoredTensor> weights = detail::model_tensors(model, optimizer, ranks.rank()),
                                          moments = detail::optimizer_tensors(model, optimizer, ranks.rank());
  if (!ranks.is_root()) {
    detail::send_tensors(be, weights, ranks);
    return detail::send_tensors(be, moments, ranks);
  }
  DirectoryTransaction checkpoint(checkpoint_directory(out, state.step));
  detail::save_tensors(checkpoint.file("model.safetensors"), be, weights, ranks);
  detail::save_tensors(checkpoint.file("optimizer.safetensors"), be, moments, ranks);
  write_file_atomically(checkpoint.file("config.json"), config_to_json(model.config).dump(2) + "\n");
  write_file_atomically(checkpoint.file("trainer.json"), detail::to_json(state).dump(2) + "\n");
  for (const auto& [name, bytes] : extra) write_file_atomically(checkpoint.file(name), bytes);
  checkpoint.commit();
}

template <class Backend>
void save_checkpoint(const std::string& out, const Model<Backend>& model,
                     const OptimizerState<Backend>& optimizer, const TrainerState& state,
                     const std::vector<std::pair<std::string, std::string>>& extra) {
  Communicator alone;
  save_checkpoint(out, model, optimizer, state, extra, alone);
}

inline WeightFiles open_weights(const std::string& checkpoint, const ModelConfig& c) {
  WeightFiles files = WeightFiles::of_checkpoint(checkpoint);
  if (c.tie_word_embeddings) files.drop_copy("lm_head.weight", "model.embed_tokens.weight");
  return files;
}

template <class Backend>
void load_model(const std::string& checkpoint, Model<Backend>& model) {
  Communicator alone;
  detail::load_all_tensors(open_weights(checkpoint, model.config), model.backend(),
                           detail::model_tensors(model), alone);
}

// Weights, optimizer and trainer state; refuses a checkpoint of another model. Of several ranks the first
// alone reads.
template <class Backend>
TrainerState load_checkpoint(const std::string& checkpoint, Model<Backend>& model,
                             OptimizerState<Backend>& optimizer, Communicator& ranks) {
  Backend& be = model.backend();
  const std::vector<detail::StoredTensor> weights = detail::model_tensors(model, optimizer, ranks.rank()),
                                          moments = detail::optimizer_tensors(model, optimizer, ranks.rank());
  TrainerState state;
  if (ranks.is_root()) {
    const std::string difference = describe_difference(model.config, load_config(checkpoint));
    if (!difference.empty()) {
      fail("--resume: the model differs from that of ", checkpoint, ": ", difference,
           "; give the flags of the first run, or another --out");
    }
    detail::load_all_tensors(open_weights(checkpoint, model.config), be, weights, ranks);
    const std::string path = checkpoint + "/optimizer.safetensors";
    detail::require_optimizer(path, moments);
    detail::load_all_tensors(WeightFiles(path), be, moments, ranks);
    const std::string trainer = checkpoint + "/trainer.json";
    state = detail::trainer_state_from_json(read_json_file(trainer), trainer);
  } else {
    detail::receive_tensors(be, weights, ranks);
    detail::receive_tensors(be, moments, ranks);
  }
  ranks.broadcast(&state, sizeof state);
  return state;
}

template <class Backend>
TrainerState load_checkpoint(const std::string& checkpoint, Model<Backend>& model,
                             OptimizerState<Backend>& optimizer) {
  Communicator alone;
  return load_checkpoint(checkpoint, model, optimizer, alone);
}

}  // namespace xmod
