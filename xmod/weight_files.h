// The weights of a checkpoint directory: model.safetensors, or the shards of a larger model as Hugging Face
// writes it,
//
//   model.safetensors.index.json   {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors",
//   ...}} model-00001-of-00002.safetensors, ...
//
// Shards are fetched one by one, so some may be missing, cut off or of another version: every shard must be
// whole and hold just the tensors that the index names.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "xmod/error.h"
#include "xmod/json_file.h"
#include "xmod/safetensors.h"

namespace xmod {

class WeightFiles {
 public:
  // The tensors of a single file.
  explicit WeightFiles(const std::string& path) : path_(path) {
    files_.emplace_back(path);
    for (const TensorInfo& tensor : files_[0].tensors()) file_of_[tensor.name] = 0;
  }

  static WeightFiles of_checkpoint(const std::string& directory) {
    const std::string single = directory + "/model.safetensors";
    const std::string index = single + ".index.json";
    if (path_exists(single) || !path_exists(index)) return WeightFiles(single);
    return WeightFiles(directory, index);
  }

  // Of all tensors; it stands for them in messages.
  const std::string& path() const { return path_; }
  bool contains(const std::string& name) const { return file_of_.count(name) > 0; }

  // The file that holds a tensor.
  const SafetensorsFile& file(const std::string& name) const {
    const auto found = file_of_.find(name);
    if (found == file_of_.end()) fail_missing_tensor(path_, name, file_of_.size());
    return files_[found->second];
  }

  // Sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, file] : file_of_) all.push_back(name);
    return all;
  }

  // Forgets a tensor that may be there, but only as a copy of another: some writers store a tied output head.
  void drop_copy(const std::string& name, const std::string& original) {
    if (!contains(name)) return;
    const Shape shape = file(original).info(original).shape;
    std::vector<float> values(static_cast<size_t>(file(original).info(original).elements())),
        copy(values.size());
    file(original).read_f32(original, shape, values.data());
    file(name).read_f32(name, shape, copy.data());
    if (copy != values) {
      fail(file(name).path(), ": tensor ", name, " differs from ", original,
           ", but config.json says tie_word_embeddings true; does it belong to this file?");
    }
    file_of_.erase(name);
  }

 private:
  WeightFiles(const std::string& directory, const std::string& index) : path_(index) {
    std::map<std::string, size_t> opened;  // shards
    const nlohmann::json map = weight_map();
    for (const auto& [name, shard] : map.items()) {
      require_file_name(name, shard);
      const std::string shard_path = directory + "/" + shard.get<std::string>();
      const auto [place, is_new] = opened.emplace(shard_path, files_.size());
      if (is_new) open_shard(name, shard_path);
      if (!files_[place->second].contains(name)) {
        fail(shard_path, ": there is no tensor ", printable(name), ", which ", path_,
             " looks for in this file; fetch both again");
      }
      file_of_[name] = place->second;
    }
    for (const SafetensorsFile& file : files_) require_indexed(file);
  }

  nlohmann::json weight_map() const {
    const nlohmann::json index = read_json_file(path_);
    const auto map = index.find("weight_map");
    if (index.is_object() && map != index.end() && map->is_object() && !map->empty()) return *map;
    fail(path_, ": expected {\"weight_map\": {tensor: file, ...}}; fetch it again");
  }

  // Nothing in the index may lead out of the directory.
  void require_file_name(const std::string& tensor, const nlohmann::json& shard) const {
    const std::string name = shard.is_string() ? shard.get<std::string>() : "";
    if (name.ends_with(".safetensors") && name.find('/') == std::string::npos) return;
    fail(path_, ": tensor ", printable(tensor), " is in ",
         printable(shard.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)),
         ", expected the name of a .safetensors file beside the index");
  }

  void open_shard(const std::string& tensor, const std::string& path) {
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      fail(path, ": not there, but ", path_, " looks for tensor ", printable(tensor),
           " in it; fetch that file too");
    }
    files_.emplace_back(path);
  }

  void require_indexed(const SafetensorsFile& file) const {
    for (const TensorInfo& tensor : file.tensors()) {
      const auto found = file_of_.find(tensor.name);
      if (found != file_of_.end() && &files_[found->second] == &file) continue;
      fail(file.path(), ": tensor ", printable(tensor.name), " is not in this file according to ", path_,
           "; do they belong together?");
    }
  }

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> file_of_;  // of a tensor, in files_
};

}  // namespace xmod
