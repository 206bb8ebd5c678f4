// The weights of a directory, whole or in shards; whatever is missing, cut off or mixed up ends in a line
// that names file and tensor.
#include "xmod/weight_files.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "expect_error.h"

namespace xmod {
namespace {

using Floats = std::vector<float>;
using Names = std::vector<std::string>;
using nlohmann::json;

const char* const kFirst = "model-00001-of-00002.safetensors";
const char* const kSecond = "model-00002-of-00002.safetensors";

class WeightFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "xmod_weights_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    write(kFirst, {{"a", {1, 2}}, {"b", {3}}});
    write(kSecond, {{"c", {4, 5, 6}}});
    put_index(
        {{"weight_map", {{"a", kFirst}, {"b", kFirst}, {"c", kSecond}}}, {"metadata", {{"total_size", 24}}}});
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary | std::ios::trunc) << bytes;
  }
  void put_index(const json& index) const { put("model.safetensors.index.json", index.dump()); }
  void put_map(const json& map) const { put_index({{"weight_map", map}}); }

  void write(const std::string& name, const std::vector<std::pair<std::string, Floats>>& tensors) const {
    std::vector<TensorInfo> infos;
    for (const auto& [tensor, values] : tensors)
      infos.push_back({tensor, Dtype::F32, {static_cast<int64_t>(values.size())}});
    SafetensorsWriter writer(path(name), infos);
    for (const auto& [tensor, values] : tensors) writer.write(tensor, values.data());
    writer.commit();
  }

  static Floats read(const WeightFiles& files, const std::string& name) {
    const SafetensorsFile& file = files.file(name);
    Floats values(static_cast<size_t>(file.info(name).elements()));
    file.read_f32(name, file.info(name).shape, values.data());
    return values;
  }

  void expect_refused(const Names& parts) const {
    expect_error([&] { WeightFiles::of_checkpoint(folder_); }, parts);
  }

  std::string folder_;
};

TEST_F(WeightFilesTest, EveryTensorComesFromItsShard) {
  const WeightFiles files = WeightFiles::of_checkpoint(folder_);
  EXPECT_EQ(files.names(), (Names{"a", "b", "c"}));
  EXPECT_EQ(read(files, "a"), (Floats{1, 2}));
  EXPECT_EQ(read(files, "b"), (Floats{3}));
  EXPECT_EQ(read(files, "c"), (Floats{4, 5, 6}));
  EXPECT_EQ(files.file("c").path(), path(kSecond));
  EXPECT_TRUE(files.contains("b"));
  EXPECT_FALSE(files.contains("d"));
  expect_error([&] { files.file("d"); }, {path("model.safetensors.index.json"), "no tensor d among its 3"});
}

// As transformers chooses.
TEST_F(WeightFilesTest, ASingleFileComesBeforeShards) {
  write("model.safetensors", {{"x", {9}}});
  const WeightFiles files = WeightFiles::of_checkpoint(folder_);
  EXPECT_EQ(files.names(), Names{"x"});
  EXPECT_EQ(files.path(), path("model.safetensors"));
}

TEST_F(WeightFilesTest, NoWeightsAtAll) {
  std::filesystem::remove(path("model.safetensors.index.json"));
  expect_refused({path("model.safetensors"), "No such file"});
}

// ---------------------------------------------------------------------------------------------------
// shards

TEST_F(WeightFilesTest, AShardThatIsNotThere) {
  std::filesystem::remove(path(kSecond));
  expect_refused({path(kSecond), "not there", "tensor c"});
  std::filesystem::create_symlink("blob_that_is_still_being_fetched", path(kSecond));
  expect_refused({path(kSecond), "not there", "tensor c"});
}

TEST_F(WeightFilesTest, AShardThatIsCutOffAnywhere) {
  const std::string whole = read_file(path(kSecond));
  for (size_t size = 0; size < whole.size(); size++) {
    put(kSecond, whole.substr(0, size));
    expect_refused({path(kSecond), "fetch or save it again"});
  }
  put(kSecond, whole.substr(0, whole.size() - 1));
  expect_refused({path(kSecond), "tensor c", "reach beyond"});
}

TEST_F(WeightFilesTest, AShardOfAnotherModel) {
  write(kSecond, {{"e", {4, 5, 6}}});
  expect_refused({path(kSecond), "no tensor c", "index.json"});
  write(kSecond, {{"c", {4, 5, 6}}, {"more\nlines", {0}}});
  expect_refused({path(kSecond), "tensor more?lines", "index.json", "belong together"});
  write(kSecond, {{"c", {4, 5, 6}}, {"b", {3}}});  // of which the index speaks, in the other file
  expect_refused({path(kSecond), "tensor b", "index.json"});
}

// ---------------------------------------------------------------------------------------------------
// the index

TEST_F(WeightFilesTest, AnIndexThatIsDamaged) {
  for (const std::string& text :
       {std::string(), std::string("{\"weight_map\": {"), std::string("[]"), std::string("{}"),
        std::string("{\"weight_map\": []}"), std::string("{\"weight_map\": {}}"), std::string(100000, '[')}) {
    put("model.safetensors.index.json", text);
    expect_refused({path("model.safetensors.index.json")});
  }
}

TEST_F(WeightFilesTest, NamesThatLeadElsewhere) {
  write("elsewhere.safetensors", {{"a", {1}}});
  for (const json& name : {json("../elsewhere.safetensors"), json("/etc/passwd"), json("model.bin"), json(""),
                           json(3), json(nullptr), json("x\n/y.safetensors")}) {
    put_map({{"a", name}});
    expect_refused({path("model.safetensors.index.json"), "tensor a is in", "beside the index"});
  }
}

// ---------------------------------------------------------------------------------------------------
// copies

TEST_F(WeightFilesTest, ACopyIsDroppedIfItIsOne) {
  write("model.safetensors",
        {{"embedding", {1, 2}}, {"head", {1, 2}}, {"other", {1, 3}}, {"longer", {1, 2, 3}}});
  WeightFiles files = WeightFiles::of_checkpoint(folder_);
  files.drop_copy("absent", "embedding");
  files.drop_copy("head", "embedding");
  EXPECT_EQ(files.names(), (Names{"embedding", "longer", "other"}));
  expect_error([&] { files.drop_copy("other", "embedding"); },
               {path("model.safetensors"), "tensor other differs from embedding", "tie_word_embeddings"});
  expect_error([&] { files.drop_copy("longer", "embedding"); },
               {"tensor longer has shape [3], expected [2]"});
}

}  // namespace
}  // namespace xmod
