// Safetensors: what is written is read back unchanged, and no file whatever does more than end in an Error.
#include "xmod/safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "xmod/error.h"

namespace xmod {
namespace {

// The message of the Error that `action` ends in; empty when it does not.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}

// `header` and `data` as a safetensors file.
std::string assemble(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "xmod_safetensors_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ + "/model.safetensors";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void put(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  // Opening a file of these bytes must fail with a message that names the file and holds all of `parts`.
  void expect_refused(const std::string& bytes, const std::vector<std::string>& parts) const {
    put(bytes);
    const std::string message = error_of([&] { SafetensorsFile file(path_); });
    EXPECT_EQ(message.find(path_ + ": "), 0u) << "'" << message << "' for " << printable(bytes, 300);
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "'" << message << "' has no '" << part << "'";
    }
  }

  std::string folder_, path_;
};

// ----------------------------------------------------------------------------
// what is written is read back

TEST_F(Safetensors, RoundTripOfEveryReadableType) {
  const std::vector<float> f32 = {1, -2.5f, 1e-42f, 3e38f, -0.0f, 7};
  const std::vector<double> f64 = {M_PI};
  const std::vector<int32_t> i32 = {INT32_MIN, INT32_MAX};
  const std::vector<int64_t> i64 = {INT64_MIN, INT64_MAX, 0};
  const std::vector<uint8_t> u8 = {0, 255, 127, 1, 2};
  SafetensorsWriter writer(path_,
                           {{"b.weight", Dtype::F32, {2, 3}},
                            {"bytes", Dtype::U8, {5}},
                            {"a.scalar", Dtype::F64, {}},
                            {"\"quoted\" \xc3\xa9", Dtype::I32, {2, 1}},
                            {"long", Dtype::I64, {1, 1, 3}}},
                           {{"format", "pt"}, {"step", "500"}});
  writer.write("b.weight", f32.data());
  writer.write("bytes", u8.data());
  writer.write("a.scalar", f64.data());
  writer.write("\"quoted\" \xc3\xa9", i32.data());
  writer.write("long", i64.data());
  EXPECT_FALSE(path_exists(path_));
  writer.commit();

  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"step", "500"}}));
  ASSERT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(file.tensors()[2].name, "a.scalar");  // the order of the file
  EXPECT_TRUE(file.contains("bytes"));
  EXPECT_FALSE(file.contains("byte"));
  EXPECT_EQ(file.info("b.weight").shape, (Shape{2, 3}));
  EXPECT_EQ(file.info("b.weight").elements(), 6);

  std::vector<float> f32_read(6);
  std::vector<double> f64_read(1);
  std::vector<int32_t> i32_read(2);
  std::vector<int64_t> i64_read(3);
  std::vector<uint8_t> u8_read(5);
  file.read("b.weight", {2, 3}, f32_read.data());
  file.read("a.scalar", {}, f64_read.data());
  file.read("\"quoted\" \xc3\xa9", {2, 1}, i32_read.data());
  file.read("long", {1, 1, 3}, i64_read.data());
  file.read("bytes", {5}, u8_read.data());
  EXPECT_EQ(std::memcmp(f32.data(), f32_read.data(), 6 * sizeof(float)), 0);
  EXPECT_EQ(f64, f64_read);
  EXPECT_EQ(i32, i32_read);
  EXPECT_EQ(i64, i64_read);
  EXPECT_EQ(u8, u8_read);
  std::fill(f32_read.begin(), f32_read.end(), 0.0f);
  file.read_f32("b.weight", {2, 3}, f32_read.data());
  EXPECT_EQ(std::memcmp(f32.data(), f32_read.data(), 6 * sizeof(float)), 0);
}

TEST_F(Safetensors, LayoutIsTheOneOfTheFormat) {
  SafetensorsWriter writer(path_, {{"x", Dtype::F32, {1}}});
  const float x = 1;
  writer.write("x", &x);
  writer.commit();
  std::string header =
      R"({"__metadata__":{"format":"pt"},"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(read_file(path_), assemble(header, std::string("\0\0\x80\x3f", 4)));
}

TEST_F(Safetensors, ZeroSizeTensors) {
  SafetensorsWriter writer(
      path_, {{"first", Dtype::F32, {0}}, {"x", Dtype::F32, {1}}, {"last", Dtype::I64, {3, 0}}});
  const float x = 5;
  writer.write("first", nullptr);
  writer.write("x", &x);
  writer.write("last", nullptr);
  writer.commit();
  const SafetensorsFile file(path_);
  float read[2] = {0, 7};
  file.read_f32("first", {0}, nullptr);
  file.read_f32("x", {1}, read);
  file.read<int64_t>("last", {3, 0}, nullptr);
  EXPECT_EQ(read[0], 5);
  EXPECT_EQ(read[1], 7);
}

TEST_F(Safetensors, NoTensorsAtAll) {
  SafetensorsWriter writer(path_, {}, {});
  writer.commit();
  const SafetensorsFile file(path_);
  EXPECT_TRUE(file.tensors().empty());
  EXPECT_TRUE(file.metadata().empty());
}

TEST_F(Safetensors, PiecesOfALargeTensor) {
  const int64_t n = (int64_t{9} << 20) / 4 + 1;  // more than two pieces of 4 MiB
  SafetensorsWriter writer(path_, {{"x", Dtype::I32, {n}}, {"y", Dtype::U8, {1}}});
  int64_t expected_first = 0;
  writer.write_pieces("x", [&](int64_t first, void* buffer, int64_t bytes) {
    EXPECT_EQ(first, expected_first);
    expected_first += bytes;
    for (int64_t i = 0; i < bytes / 4; i++)
      static_cast<int32_t*>(buffer)[i] = static_cast<int32_t>(first / 4 + i);
  });
  EXPECT_EQ(expected_first, 4 * n);
  const uint8_t y = 3;
  writer.write("y", &y);
  writer.commit();
  std::vector<int32_t> x(n);
  SafetensorsFile(path_).read("x", {n}, x.data());
  for (int64_t i = 0; i < n; i++) ASSERT_EQ(x[i], i);
}

TEST_F(Safetensors, WriterHoldsTheCallerToItsHeader) {
  const float x[2] = {1, 2};
  const auto expect_complaint = [&](const std::function<void()>& action, const std::string& part) {
    EXPECT_NE(error_of(action).find(path_ + ": tensor " + part), std::string::npos) << error_of(action);
    EXPECT_TRUE(directory_entries(folder_).empty());
  };
  expect_complaint(
      [&] {
        SafetensorsWriter(path_, {{"a", Dtype::F32, {2}}}).commit();
      },
      "a has not been written");
  expect_complaint(
      [&] {
        SafetensorsWriter(path_, {{"a", Dtype::F32, {2}}}).write("b", x);
      },
      "b comes where");
  expect_complaint([&] { SafetensorsWriter(path_, {}).write("a", x); }, "a comes after the last");
  expect_complaint(
      [&] {
        SafetensorsWriter(path_, {{"a", Dtype::F32, {2}}, {"a", Dtype::F32, {2}}});
      },
      "a is there twice");
  expect_complaint(
      [&] {
        SafetensorsWriter(path_, {{"__metadata__", Dtype::F32, {2}}});
      },
      "__metadata__ is there");
  expect_complaint(
      [&] {
        SafetensorsWriter(path_, {{"a", Dtype::F32, {-1}}});
      },
      "a has the impossible shape [-1]");
}

TEST_F(Safetensors, FullDiskKeepsTheOldFile) {
  put("old");
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);  // so that write() returns EFBIG
    const rlimit limit{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(98);
    try {
      const std::vector<float> x(1 << 20);
      SafetensorsWriter writer(path_, {{"x", Dtype::F32, {1 << 20}}});
      writer.write("x", x.data());
      writer.commit();
    } catch (const Error& error) {
      const bool named =
          std::string(error.what()).find("model.safetensors: File too large") != std::string::npos;
      ::_exit(named ? error.exit_code : 97);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(read_file(path_), "old");
  EXPECT_EQ(directory_entries(folder_).size(), 1u);
}

// ----------------------------------------------------------------------------
// 16-bit floats

double value_of_16_bits(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1), top = (1u << exponent_bits) - 1;
  const uint32_t exponent = bits >> mantissa_bits & top;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double fraction = mantissa * std::exp2(-mantissa_bits), sign = bits >> 15 ? -1 : 1;
  if (exponent == top) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * fraction * std::exp2(1 - bias);
  return sign * (1 + fraction) * std::exp2(static_cast<int>(exponent) - bias);
}

void expect_same(float found, double expected, uint32_t bits) {
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(found)) << bits;
  } else {
    ASSERT_EQ(static_cast<double>(found), expected) << bits;
    ASSERT_EQ(std::signbit(found), std::signbit(expected)) << bits;
  }
}

TEST_F(Safetensors, EverySixteenBitFloatIsWidened) {
  std::vector<uint16_t> bits(1 << 16);
  for (uint32_t i = 0; i < bits.size(); i++) bits[i] = static_cast<uint16_t>(i);
  SafetensorsWriter writer(path_, {{"half", Dtype::F16, {256, 256}}, {"brain", Dtype::BF16, {1 << 16}}});
  writer.write("half", bits.data());
  writer.write("brain", bits.data());
  writer.commit();
  const SafetensorsFile file(path_);
  std::vector<float> half(1 << 16), brain(1 << 16);
  file.read_f32("half", {256, 256}, half.data(), SafetensorsFile::Values::any);
  file.read_f32("brain", {1 << 16}, brain.data(), SafetensorsFile::Values::any);
  for (uint32_t i = 0; i < bits.size(); i++) {
    expect_same(half[i], value_of_16_bits(i, 5, 10), i);
    expect_same(brain[i], value_of_16_bits(i, 8, 7), i);
  }
  EXPECT_EQ(half[0x3c01], 1 + 1.0f / 1024);
  EXPECT_EQ(brain[0x3f81], 1 + 1.0f / 128);
}

TEST_F(Safetensors, WidenedInPieces) {
  const int64_t n = (int64_t{2} << 20) + 5;  // more than two pieces of 2^20 elements
  SafetensorsWriter writer(path_, {{"x", Dtype::BF16, {n}}});
  writer.write_pieces("x", [](int64_t first, void* buffer, int64_t bytes) {
    for (int64_t i = 0; i < bytes / 2; i++) static_cast<uint16_t*>(buffer)[i] = (first / 2 + i) % 0x7f80;
  });
  writer.commit();
  std::vector<float> x(n);
  SafetensorsFile(path_).read_f32("x", {n}, x.data());
  for (int64_t i = 0; i < n; i++) ASSERT_EQ(x[i], bf16_to_f32(i % 0x7f80));
}

// ----------------------------------------------------------------------------
// asking for the wrong thing

TEST_F(Safetensors, WrongRequestsAreExplained) {
  std::vector<float> x(12, 1.0f);
  SafetensorsWriter writer(path_, {{"x", Dtype::F32, {3, 4}}, {"n", Dtype::I64, {6}}});
  writer.write("x", x.data());
  writer.write("n", x.data());
  writer.commit();
  const SafetensorsFile file(path_);
  std::vector<int64_t> n(6);
  const auto expect_complaint = [&](const std::function<void()>& action, const std::string& part) {
    EXPECT_NE(error_of(action).find(path_ + ": " + part), std::string::npos) << error_of(action);
  };
  expect_complaint([&] { file.info("y"); }, "there is no tensor y among its 2");
  expect_complaint([&] { file.read_f32("y", {3, 4}, x.data()); }, "there is no tensor y");
  expect_complaint(
      [&] {
        file.read_f32("x", {4, 3}, x.data());
      },
      "tensor x has shape [3, 4], expected [4, 3]");
  expect_complaint([&] { file.read_f32("x", {12}, x.data()); }, "tensor x has shape [3, 4], expected [12]");
  expect_complaint([&] { file.read_f32("n", {6}, x.data()); }, "tensor n is I64, expected F32, BF16 or F16");
  expect_complaint([&] { file.read("x", {3, 4}, n.data()); }, "tensor x is F32, expected I64");
  EXPECT_NE(error_of([&] { SafetensorsFile none(folder_ + "/none"); }).find("/none: No such file"),
            std::string::npos);
}

TEST_F(Safetensors, SpoiltWeightsAreNamed) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x(2 * 3 * 4, 0.5f);
    x[(1 * 3 + 2) * 4 + 3] = bad;
    SafetensorsWriter writer(path_, {{"model.norm.weight", Dtype::F32, {2, 3, 4}}});
    writer.write("model.norm.weight", x.data());
    writer.commit();
    const SafetensorsFile file(path_);
    file.read("model.norm.weight", {2, 3, 4}, x.data());
    file.read_f32("model.norm.weight", {2, 3, 4}, x.data(), SafetensorsFile::Values::any);
    const std::string message = error_of([&] { file.read_f32("model.norm.weight", {2, 3, 4}, x.data()); });
    const std::string found = std::isnan(bad) ? "nan" : bad > 0 ? "inf" : "-inf";
    EXPECT_EQ(message.find(path_ + ": tensor model.norm.weight holds " + found + " at [1, 2, 3]"), 0u)
        << message;
  }
}

// ----------------------------------------------------------------------------
// hostile files

TEST_F(Safetensors, HostileHeaderLength) {
  expect_refused("", {"has 0 bytes, a safetensors file has at least 8"});
  expect_refused("1234567", {"has 7 bytes"});
  expect_refused(std::string(8, '\0'), {"not a JSON object"});
  expect_refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), {"said to have 3 bytes, but only 2 follow"});
  expect_refused(std::string(8, '\xff') + "{}",
                 {"said to have 18446744073709551615 bytes, at most 100000000"});
  expect_refused(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10),
                 {"said to have 100000001 bytes, at most 100000000"});
  expect_refused(std::string("\x00\xe1\xf5\x05\0\0\0\0{}", 10),
                 {"said to have 100000000 bytes, but only 2 follow"});
}

TEST_F(Safetensors, HostileJson) {
  for (const char* text : {"[]", "5", "null", "\"a\"", "garbage", " {}", "\xef\xbb\xbf{}"}) {
    expect_refused(assemble(text, ""), {"the header is not a JSON object", "fetch or save it again"});
  }
  for (const char* text :
       {"{", "{}}", "{} {}", "{\"a\"", "{\"a\":}", "{\"\xff\":{}}", "{\"a\n\":{}}", "{'a':{}}"}) {
    expect_refused(assemble(text, ""), {"the header is not valid JSON at its byte"});
  }
  expect_refused(assemble(std::string("{}\0{", 4), ""), {"not a JSON object"});
  // A million levels deep: refused at the first that a header cannot have, on any stack.
  for (const std::string level : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 1000000; i++) deep += level;
    expect_refused(assemble("{\"x\":" + deep, ""), {"tensor x "});
    expect_refused(assemble("{\"x\":{\"shape\":" + deep, ""), {"tensor x "});
    expect_refused(assemble("{\"__metadata__\":{\"k\":" + deep, ""), {": __metadata__ "});
  }
}

TEST_F(Safetensors, HostileValues) {
  for (const auto& [value, part] : std::vector<std::pair<std::string, std::string>>{
           {"5", "tensor x is a number, expected an object"},
           {"[]", "tensor x is an array, expected an object"},
           {"null", "tensor x is null"},
           {"true", "tensor x is true or false"},
           {"-5", "tensor x is a negative number"},
           {"\"F32\"", "tensor x is a text"},
           {"{}", "tensor x has no dtype"},
           {R"({"shape":[1],"data_offsets":[0,4]})", "tensor x has no dtype"},
           {R"({"dtype":"F32","data_offsets":[0,4]})", "tensor x has no shape"},
           {R"({"dtype":"F32","shape":[1]})", "tensor x has no data_offsets"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":[]})",
            "tensor x has an array as 'more'"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"shape":[1]})", "tensor x has 'shape' twice"},
           {R"({"dtype":"F31","shape":[1],"data_offsets":[0,4]})", "tensor x has the unknown dtype 'F31'"},
           {R"({"dtype":"","shape":[1],"data_offsets":[0,4]})", "tensor x has the unknown dtype ''"},
           {R"({"dtype":"F\n2","shape":[1],"data_offsets":[0,4]})", "tensor x has the unknown dtype 'F?2'"},
           {R"({"dtype":32,"shape":[1],"data_offsets":[0,4]})", "tensor x has a number as 'dtype'"},
           {R"({"dtype":["F32"],"shape":[1],"data_offsets":[0,4]})", "tensor x has an array as 'dtype'"},
           {R"({"dtype":{},"shape":[1],"data_offsets":[0,4]})", "tensor x holds an object"},
           {R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})", "tensor x has a number as 'shape'"},
           {R"({"dtype":"F32","shape":"1","data_offsets":[0,4]})", "tensor x has a text as 'shape'"},
           {R"({"dtype":"F32","shape":["1"],"data_offsets":[0,4]})", "tensor x has a text as 'shape'"},
           {R"({"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})", "tensor x has an array as 'shape'"},
           {R"({"dtype":"F32","shape":[{}],"data_offsets":[0,4]})", "tensor x holds an object"},
           {R"({"dtype":"F32","shape":[null],"data_offsets":[0,4]})", "tensor x has null as 'shape'"},
           {R"({"dtype":"F32","shape":[true],"data_offsets":[0,4]})",
            "tensor x has true or false as 'shape'"},
           {R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})",
            "tensor x has a negative number in its shape"},
           {R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})",
            "tensor x has a number in its shape that is not"},
           {R"({"dtype":"F32","shape":[1e99999],"data_offsets":[0,4]})", "not valid JSON"},
           {R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]})",
            "in its shape that is too large"},
           {R"({"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]})",
            "in its shape that is not"},
           {R"({"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,4]})",
            "is too large for any file"},
           {R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]})",
            "[4294967296, 4294967296] is too"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":4})", "tensor x has a number as 'data_offsets'"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", "tensor x has 1 data_offsets, expected 2"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,4]})",
            "tensor x has 3 data_offsets, expected 2"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})", "negative number in its data_offsets"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", "data_offsets [4, 0] are out of order"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[0,8]})",
            "data_offsets [0, 8] reach beyond the 4 bytes"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[9223372036854775803,9223372036854775807]})",
            "reach beyond"},
           {R"({"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]})",
            "data_offsets that is too large"},
           {R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})",
            "hold 4 bytes, but F32 of shape [2] needs 8"},
           {R"({"dtype":"F64","shape":[1],"data_offsets":[0,4]})",
            "hold 4 bytes, but F64 of shape [1] needs 8"},
           {R"({"dtype":"F32","shape":[1,0],"data_offsets":[0,4]})", "F32 of shape [1, 0] needs 0"},
       }) {
    expect_refused(assemble("{\"x\":" + value + "}", "1234"), {part});
  }
  // The file they are variations of.
  put(assemble(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   )", "1234"));
  EXPECT_EQ(SafetensorsFile(path_).info("x").elements(), 1);
}

TEST_F(Safetensors, HostileMetadata) {
  for (const char* value : {"5", "[]", "\"a\"", "null"}) {
    expect_refused(assemble(std::string(R"({"__metadata__":)") + value + "}", ""), {": __metadata__ is "});
  }
  expect_refused(assemble(R"({"__metadata__":{"a":5}})", ""), {": __metadata__ has a number as 'a'"});
  expect_refused(assemble(R"({"__metadata__":{"a":"1","a":"2"}})", ""), {": __metadata__ has 'a' twice"});
  expect_refused(assemble(R"({"__metadata__":{},"__metadata__":{}})", ""), {": __metadata__ is there twice"});
}

TEST_F(Safetensors, HostileLayout) {
  const auto two = [](const std::string& a, const std::string& b, int64_t data) {
    return assemble(R"({"a":{"dtype":"U8","shape":)" + a + R"(},"b":{"dtype":"U8","shape":)" + b + "}}",
                    std::string(data, 'x'));
  };
  expect_refused(two(R"([2],"data_offsets":[0,2])", R"([3],"data_offsets":[1,4])", 4),
                 {"tensor b", "[1, 4] overlap the tensor before, which ends at 2"});
  expect_refused(two(R"([2],"data_offsets":[0,2])", R"([2],"data_offsets":[0,2])", 2),
                 {"tensor b", "overlap"});
  expect_refused(two(R"([4],"data_offsets":[0,4])", R"([0],"data_offsets":[2,2])", 4),
                 {"tensor b", "overlap"});
  expect_refused(two(R"([2],"data_offsets":[0,2])", R"([2],"data_offsets":[3,5])", 5),
                 {"tensor b", "[3, 5] leave a hole: the tensor before ends at 2"});
  expect_refused(two(R"([1],"data_offsets":[1,2])", R"([1],"data_offsets":[2,3])", 3), {"tensor a", "hole"});
  expect_refused(two(R"([1],"data_offsets":[0,1])", R"([1],"data_offsets":[1,2])", 3),
                 {"1 bytes follow after the last"});
  expect_refused(two(R"([1],"data_offsets":[0,1])", R"([1],"data_offsets":[1,2])", 1),
                 {"tensor b", "beyond the 1 bytes"});
  expect_refused(
      assemble(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          "xx"),
      {"tensor a is there twice"});
  expect_refused(assemble("{}", "x"), {"1 bytes follow after the last tensor"});
  // Tensors may stand in the header in any order.
  put(two(R"([1],"data_offsets":[2,3])", R"([2],"data_offsets":[0,2])", 3));
  EXPECT_EQ(SafetensorsFile(path_).tensors()[0].name, "b");
}

TEST_F(Safetensors, HostileNamesAreShortenedInMessages) {
  const std::string message = [&] {
    put(assemble("{\"a\\n\\u0001\\u001b[2J" + std::string(10000, 'x') + "\":5}", ""));
    return error_of([&] { SafetensorsFile file(path_); });
  }();
  EXPECT_NE(message.find("tensor a???[2Jxxx"), std::string::npos) << message;
  EXPECT_LT(message.size(), path_.size() + 300) << message;
}

TEST_F(Safetensors, FileThatShrinksAfterOpening) {
  const std::vector<float> x(1000, 1.0f);
  SafetensorsWriter writer(path_, {{"x", Dtype::F32, {1000}}});
  writer.write("x", x.data());
  writer.commit();
  const SafetensorsFile file(path_);
  std::filesystem::resize_file(path_, 2000);
  std::vector<float> out(1000);
  EXPECT_NE(error_of([&] { file.read_f32("x", {1000}, out.data()); }).find("ends at byte 2000"),
            std::string::npos);
}

// A valid file with bytes changed, removed, repeated or inserted either loads or ends in an Error.
TEST_F(Safetensors, Fuzz) {
  const std::vector<float> weights(12, 0.25f);
  const std::vector<int64_t> steps = {1, 2, 3};
  SafetensorsWriter writer(path_,
                           {{"model.norm.weight", Dtype::F32, {3, 4}},
                            {"half", Dtype::BF16, {2, 3}},
                            {"steps", Dtype::I64, {3}},
                            {"nothing", Dtype::U8, {0}}},
                           {{"format", "pt"}});
  writer.write("model.norm.weight", weights.data());
  writer.write("half", weights.data());
  writer.write("steps", steps.data());
  writer.write("nothing", nullptr);
  writer.commit();
  const std::string valid = read_file(path_);
  const size_t header_end = valid.rfind('}');

  int64_t loaded = 0, refused = 0;
  for (uint32_t seed = 0; seed < 2000; seed++) {
    std::mt19937 random(seed);
    // One draw a statement: the order within an expression would be the compiler's choice.
    const auto below = [&](size_t n) { return random() % n; };
    std::string bytes = valid;
    for (size_t changes = 1 + below(3); changes > 0 && !bytes.empty(); changes--) {
      const bool in_header = below(2);
      const size_t at = below(in_header ? std::min(bytes.size(), header_end) : bytes.size());
      const size_t kind = below(6), from = below(bytes.size()), value = below(256), length = below(60);
      switch (kind) {
        case 0:
          bytes[at] ^= static_cast<char>(1 << value % 8);
          break;
        case 1:
          bytes[at] = static_cast<char>(value);
          break;
        case 2:
          bytes[at] = "0123456789[]{},:\"-"[value % 18];
          break;
        case 3:
          bytes.resize(from);
          break;
        case 4:
          bytes.insert(at, bytes.substr(from, length));
          break;
        case 5:
          bytes.erase(at, 1 + length % 8);
          break;
      }
    }
    put(bytes);
    const std::string message = error_of([&] {
      const SafetensorsFile file(path_);
      for (const TensorInfo& tensor : file.tensors()) {
        std::vector<float> out(tensor.elements());
        if (tensor.dtype == Dtype::F32) file.read_f32(tensor.name, tensor.shape, out.data());
        if (tensor.dtype == Dtype::BF16) file.read_f32(tensor.name, tensor.shape, out.data());
      }
    });
    message.empty() ? loaded++ : refused++;
    ASSERT_TRUE(message.empty() || message.starts_with(path_)) << message;
  }
  EXPECT_GT(loaded, 50);
  EXPECT_GT(refused, 1000);
}

TEST_F(Safetensors, DtypeTableFollowsTheEnum) {
  for (size_t i = 0; i < kDtypes.size(); i++) EXPECT_EQ(static_cast<size_t>(kDtypes[i].dtype), i);
  EXPECT_STREQ(dtype_name(Dtype::F64), "F64");
  EXPECT_EQ(dtype_bytes(Dtype::BF16), 2);
}

}  // namespace
}  // namespace xmod
