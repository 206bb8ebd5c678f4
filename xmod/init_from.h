// `train --init-from DIR`: the first weights of a run are those of a checkpoint. Any model begins as a copy
// of one like it; a model with sparse layers also begins as a dense one, ours or a Qwen3 of Hugging Face:
//
//   dense        0   1   2            3   4            5    its L_act layers
//   xmod A1K4    0   1   2 2 2 2      3   4 4 4 4      5    each active layer begins as the one in its place
//   mod K4       0 1 1 2 3 3 4 4 5                          each layer as the one at its relative depth
//
// So with K = 1, and routers that do nothing, such a model is the dense one. Routers and residual gates begin
// as they always do.
#pragma once

#include <cstdint>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "xmod/checkpoint.h"
#include "xmod/config_json.h"
#include "xmod/model.h"
#include "xmod/weight_files.h"

namespace xmod {

// The dense layer, of L_act, that each layer begins as. A unit of K sparse layers is one active layer; mod
// has no units, and more layers than active ones.
inline std::vector<int64_t> source_layers(const ModelConfig& c, const LayerPlan& plan) {
  const int64_t unit = has_units(c.arch) ? c.token_sparsity : 1;
  std::vector<int64_t> place;
  int64_t places = 0, in_unit = 0;
  for (const Layer& layer : plan) {
    if (layer.ffn == Ffn::none) continue;  // the attention of the layer that follows
    place.push_back(places);
    in_unit = layer.routed ? in_unit + 1 : unit;
    if (in_unit < unit) continue;
    places++;
    in_unit = 0;
  }
  for (int64_t& p : place) {  // to the nearest of L_act
    if (places > 1) p = (2 * p * (c.active_layers - 1) + places - 1) / (2 * (places - 1));
  }
  return place;
}

// "0, 1, 4 x 2, 3, 4 x 4, 5"
inline std::string describe_layers(const std::vector<int64_t>& source) {
  std::string text;
  for (size_t i = 0, same; i < source.size(); i += same) {
    for (same = 1; i + same < source.size() && source[i + same] == source[i];) same++;
    text += (i > 0 ? ", " : "") + (same > 1 ? std::to_string(same) + " x " : "") + std::to_string(source[i]);
  }
  return text;
}

// Refuses what cannot begin as the checkpoint. Context and RoPE may differ from its own.
inline void require_same_sizes(const std::string& directory, ModelConfig c, const ModelConfig& source) {
  const std::string flag = "--init-from " + directory;
  if (source.arch == Arch::dense && has_experts(c.arch)) {
    fail(flag, ": a dense model, which has no experts for --arch ", arch_name(c.arch),
         "; choose dense, mod, xmod, routed-ffn or selected-q");
  }
  if (source.arch == Arch::dense) c.arch = Arch::dense;
  c.seq_len = source.seq_len;
  c.rope_theta = source.rope_theta;
  const std::string difference = describe_difference(c, source);
  if (difference.empty()) return;
  fail(flag, ": the model differs from that checkpoint: ", difference,
       "; leave out what sets it, or start from another checkpoint");
}

namespace detail {

// "3" and "mlp.up_proj.weight" of "model.layers.3.mlp.up_proj.weight"; -1 and all of any other name.
inline std::pair<int64_t, std::string> split_layer(const std::string& name) {
  const std::string before = "model.layers.";
  if (name.compare(0, before.size(), before) != 0) return {-1, name};
  size_t digits = 0;
  const int64_t number = std::stoll(name.substr(before.size()), &digits);
  return {number, name.substr(before.size() + digits + 1)};
}

// The tensors of the model that the dense one has, under its names.
template <class Backend>
std::vector<StoredTensor> tensors_of_dense(const Model<Backend>& model, const std::set<std::string>& dense) {
  const std::vector<int64_t> source = source_layers(model.config, model.plan);
  std::vector<StoredTensor> tensors;
  for (const Parameter& p : model.table.entries) {
    const auto [number, rest] = split_layer(p.name);
    const std::string name = number < 0 ? rest : layer_prefix(source[static_cast<size_t>(number)]) + rest;
    if (dense.count(name)) tensors.push_back(kept_tensor(name, model, p));
  }
  return tensors;
}

}  // namespace detail

// Replaces the weights of an initialised model as far as the checkpoint has them, and says so.
template <class Backend>
void load_first_weights(const std::string& directory, Model<Backend>& model, std::ostream& log) {
  const ModelConfig source = load_config(directory, "--init-from");
  require_same_sizes(directory, model.config, source);
  log << "starting from the weights of " << directory << "\n";
  if (source.arch != Arch::dense) return load_model(directory, model);
  std::set<std::string> dense;
  for (const Parameter& p : make_parameter_table(source, make_layer_plan(source)).entries)
    dense.insert(p.name);
  const WeightFiles files = open_weights(directory, source);
  for (const std::string& name : dense) files.file(name);  // each must be there, also those of no use here
  detail::require_no_others(files, dense);
  Communicator alone;
  detail::load_tensors(files, model.backend(), detail::tensors_of_dense(model, dense), alone);
  if (model.config.arch == Arch::dense) return;
  log << "  layers begin as its layers " << describe_layers(source_layers(model.config, model.plan))
      << "; routers and gates anew\n";
}

}  // namespace xmod
