// The scaling law: its value by hand, the files that it comes in, and what `plan` makes of it.
#include "xmod/scaling_law.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "backend.h"
#include "expect_error.h"
#include "xmod/plan.h"

namespace xmod {
namespace {

class ScalingLawTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() / ("law_" + std::to_string(getpid()) + ".json")).string();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string& write_text(const std::string& text) const {
    std::ofstream(path_) << text;
    return path_;
  }
  const std::string& write(const nlohmann::json& law) const { return write_text(law.dump()); }

  std::string path_;
};

// Powers that can be worked out by hand.
nlohmann::json simple_law() {
  return {{"constants",
           {{"e", 0.5},
            {"u", 3},
            {"eta_N", 0.5},
            {"rho_N", 2},
            {"w", 8},
            {"eta_L", 1},
            {"rho_L", 2},
            {"z", 0.25},
            {"rho_K", 0.5},
            {"rho_A", 2}}}};
}

// e = 0.5; capacity 3 / 10 * (1 - 1/4) = 0.225; context 8 / 64 * 15 = 1.875; stride 0.25 * 1 * (2.25 - 1) =
// 0.3125
constexpr LawPoint kPoint = {200, 100, 64, 4, 3};
constexpr double kDelta = 0.5 - 0.225 + 1.875 - 0.3125;

ModelConfig tiny() {
  ModelConfig c;
  for (const Preset& preset : presets()) {
    if (std::string(preset.name) == "tiny") c = preset.config;
  }
  c.arch = Arch::xmod;
  c.token_sparsity = 4;
  c.anchor_stride = 2;
  return c;
}

TEST_F(ScalingLawTest, ValueByHand) {
  const ScalingLaw law = read_scaling_law(write(simple_law()));
  EXPECT_DOUBLE_EQ(law_delta(law.constants, kPoint), kDelta);
  const LawPrediction prediction = predict(law, kPoint);
  EXPECT_DOUBLE_EQ(prediction.delta, kDelta);
  EXPECT_EQ(prediction.confidence, 0);
  EXPECT_EQ(prediction.beyond, "");
}

// Every term vanishes where the model is dense, the last one also at A = 1.
TEST_F(ScalingLawTest, TermsVanish) {
  const ScalingLaw law = read_scaling_law(write(simple_law()));
  EXPECT_DOUBLE_EQ(law_delta(law.constants, {100, 100, 64, 1, 3}), 0.5);
  EXPECT_DOUBLE_EQ(law_delta(law.constants, {200, 100, 64, 4, 1}), kDelta + 0.3125);
}

TEST_F(ScalingLawTest, IntervalOfSamples) {
  nlohmann::json law = simple_law();
  for (int i = 40; i >= 0; i--) {  // e from 0.30 to 0.70: the middle 90% are 0.32 to 0.68
    std::vector<double> sample = {0.3 + 0.01 * i, 3, 0.5, 2, 8, 1, 2, 0.25, 0.5, 2};
    law["samples"].push_back(sample);
  }
  law["confidence"] = 0.9;
  const LawPrediction prediction = predict(read_scaling_law(write(law)), kPoint);
  EXPECT_DOUBLE_EQ(prediction.confidence, 0.9);
  EXPECT_NEAR(prediction.low, kDelta - 0.18, 1e-12);
  EXPECT_NEAR(prediction.high, kDelta + 0.18, 1e-12);
}

TEST_F(ScalingLawTest, SaysWhereItExtrapolates) {
  nlohmann::json law = simple_law();
  law["range"] = {
      {"L", {32, 64}}, {"K", {2, 3}}, {"A", {1, 4}}, {"N_act", {150, 300}}, {"compute", {1e13, 1e13}}};
  EXPECT_EQ(predict(read_scaling_law(write(law)), kPoint).beyond, "K above 3, N_act below 150");
}

TEST_F(ScalingLawTest, MissingConstantsAreNamed) {
  nlohmann::json law = simple_law();
  law["constants"]["eta_L"] = nullptr;
  law["constants"].erase("rho_A");
  expect_error([&] { read_scaling_law(write(law)); }, {path_, "constants eta_L, rho_A are missing", "fit"});
}

// The file beside the scripts: what the paper's text has, the rest marked as missing.
TEST_F(ScalingLawTest, ThePapersLawIsIncomplete) {
  expect_error([] { read_scaling_law("scripts/paper_law.json"); },
               {"scripts/paper_law.json", "eta_L, rho_L, z, rho_K, rho_A are missing"});
  const nlohmann::json law = read_json_file("scripts/paper_law.json")["constants"];
  EXPECT_EQ(law["e"], 0.01848);
  EXPECT_EQ(law["u"], 0.93519);
  EXPECT_EQ(law["eta_N"], 0.07784);
  EXPECT_EQ(law["rho_N"], 1.19538);
  EXPECT_EQ(law["w"], 105.21108);
}

TEST_F(ScalingLawTest, DamagedFiles) {
  expect_error([&] { read_scaling_law(path_); }, {"cannot read", path_});
  expect_error([&] { read_scaling_law(write_text("{\"constants\": ")); }, {path_, "not valid JSON"});
  for (const char* text : {"[1, 2]", "{}", "{\"constants\": 3}"})
    expect_error([&] { read_scaling_law(write_text(text)); }, {path_, "no \"constants\"", "fit --out"});
  nlohmann::json law = simple_law();
  law["constants"]["z"] = "much";
  expect_error([&] { read_scaling_law(write(law)); }, {path_, "z is \"much\"", "expected a number"});
  law = simple_law();
  law["samples"] = {{1, 2, 3}};
  expect_error([&] { read_scaling_law(write(law)); }, {path_, "samples", "10 numbers"});
  law["samples"] = 5;
  expect_error([&] { read_scaling_law(write(law)); }, {path_, "samples", "10 numbers"});
  law = simple_law();
  law["range"] = {{"K", {2}}};
  expect_error([&] { read_scaling_law(write(law)); }, {path_, "range of K"});
}

TEST_F(ScalingLawTest, PointOfAModel) {
  const ModelConfig c = tiny();
  const Accounting a = account(c);
  const LawPoint p = law_point(c, "law.json");
  EXPECT_EQ(p.N, static_cast<double>(a.params_total));
  EXPECT_EQ(p.N_act, a.params_active);
  EXPECT_EQ(p.L, 256);
  EXPECT_EQ(p.K, 4);
  EXPECT_EQ(p.A, 2);
}

// 8 active layers behind a prefix of 2: five sparse units and the anchor at the end, whatever more is asked
// for.
TEST_F(ScalingLawTest, StrideThatTheModelHasRoomFor) {
  ModelConfig c = tiny();
  for (const auto& [asked, effective] : {std::pair<int64_t, int64_t>{1, 1}, {4, 4}, {5, 5}, {8, 5}}) {
    c.anchor_stride = asked;
    EXPECT_EQ(law_point(c, "law.json").A, effective);
  }
}

TEST_F(ScalingLawTest, DescribesXmodAlone) {
  ModelConfig c = tiny();
  c.anchors = false;
  for (const auto& [arch, name] :
       {std::pair{Arch::mod, "--arch mod"}, {Arch::xmod, "--no-anchors"}, {Arch::dense, "--arch dense"}}) {
    c.arch = arch;
    try {
      law_point(c, "law.json");
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code, 2);
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST_F(ScalingLawTest, PlanShowsThePrediction) {
  Options options;
  options.model = tiny();
  options.machine.threads = 1;
  std::ostringstream without, text, json;
  print_plan<TestBackend>(options, without);
  EXPECT_EQ(without.str().find("by the law"), std::string::npos);

  nlohmann::json law = simple_law();
  law["constants"]["rho_N"] = 0.5;
  law["samples"] = {{0.5, 3, 0.5, 0.5, 8, 1, 2, 0.25, 0.5, 2}};
  law["range"]["L"] = {64, 128};
  options.plan.law = write(law);
  const LawPrediction expected = predict(read_scaling_law(path_), law_point(options.model, path_));
  print_plan<TestBackend>(options, text);
  char line[128];
  std::snprintf(line, sizeof line, "%+.4f nats per token, 95%% interval %+.4f to %+.4f\n", expected.delta,
                expected.delta, expected.delta);
  EXPECT_NE(text.str().find(line), std::string::npos) << text.str();
  EXPECT_NE(text.str().find("L above 128"), std::string::npos) << text.str();

  options.plan.json = true;
  print_plan<TestBackend>(options, json);
  const nlohmann::json parsed = nlohmann::json::parse(json.str());
  EXPECT_DOUBLE_EQ(parsed["scaling_law"]["delta"], expected.delta);
  EXPECT_DOUBLE_EQ(parsed["scaling_law"]["low"], expected.low);
  EXPECT_EQ(parsed["scaling_law"]["beyond"], "L above 128");
  EXPECT_EQ(parsed["layers"], account(options.model).layers);
}

// A law that does not apply is told before anything is printed.
TEST_F(ScalingLawTest, PlanRefusesBeforeItPrints) {
  Options options;
  options.model = tiny();
  options.plan.law = "scripts/paper_law.json";
  std::ostringstream text;
  expect_error([&] { print_plan<TestBackend>(options, text); }, {"missing"});
  nlohmann::json law = simple_law();
  law["constants"]["eta_L"] = -1e9;
  options.plan.law = write(law);
  expect_error([&] { print_plan<TestBackend>(options, text); }, {path_, "no finite number"});
  EXPECT_EQ(text.str(), "");
}

}  // namespace
}  // namespace xmod
