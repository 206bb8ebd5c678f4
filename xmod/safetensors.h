// Safetensors, the file format that Hugging Face stores weights in:
//
//   8 bytes          N, the length of the header (little-endian)
//   N bytes          JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//                    "__metadata__": {"key": "text", ...}}, padded with spaces
//   the rest         the tensors' bytes, row-major, little-endian; offsets count from here
//
// SafetensorsWriter streams tensors to a file; SafetensorsFile reads them one by one. A file may come from
// anywhere: nothing in it is trusted before it is checked, and every complaint is one line that names the
// file.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xmod/error.h"
#include "xmod/files.h"

namespace xmod {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

// ----------------------------------------------------------------------------
// what a file says about a tensor

enum class Dtype { BOOL, U8, I8, F8_E4M3, F8_E5M2, U16, I16, F16, BF16, U32, I32, F32, U64, I64, F64 };

struct DtypeName {
  Dtype dtype;
  const char* name;
  int64_t bytes;
};

inline constexpr std::array<DtypeName, 15> kDtypes = {{
    {Dtype::BOOL, "BOOL", 1},
    {Dtype::U8, "U8", 1},
    {Dtype::I8, "I8", 1},
    {Dtype::F8_E4M3, "F8_E4M3", 1},
    {Dtype::F8_E5M2, "F8_E5M2", 1},
    {Dtype::U16, "U16", 2},
    {Dtype::I16, "I16", 2},
    {Dtype::F16, "F16", 2},
    {Dtype::BF16, "BF16", 2},
    {Dtype::U32, "U32", 4},
    {Dtype::I32, "I32", 4},
    {Dtype::F32, "F32", 4},
    {Dtype::U64, "U64", 8},
    {Dtype::I64, "I64", 8},
    {Dtype::F64, "F64", 8},
}};  // in the order of the enum

inline const char* dtype_name(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)].name;
}
inline int64_t dtype_bytes(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)].bytes;
}

// The dtype that holds a C++ type unchanged.
template <class T>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>) return Dtype::F32;
  if constexpr (std::is_same_v<T, double>) return Dtype::F64;
  if constexpr (std::is_same_v<T, int32_t>) return Dtype::I32;
  if constexpr (std::is_same_v<T, int64_t>) return Dtype::I64;
  if constexpr (std::is_same_v<T, uint8_t>) return Dtype::U8;
}

using Shape = std::vector<int64_t>;

struct TensorInfo {
  std::string name = {};
  Dtype dtype = Dtype::F32;
  Shape shape = {};
  int64_t begin = 0, end = 0;  // bytes, from the start of the data

  int64_t bytes() const { return end - begin; }
  int64_t elements() const { return bytes() / dtype_bytes(dtype); }
};

// The size of a tensor; nothing for a negative dimension, or when it exceeds 64 bits.
inline std::optional<int64_t> shape_bytes(Dtype dtype, const Shape& shape) {
  int64_t bytes = dtype_bytes(dtype);
  for (const int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(bytes, dimension, &bytes)) return std::nullopt;
  }
  return bytes;
}

inline std::string to_text(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Text from a file, fit to stand in a one-line message.
inline std::string printable(std::string_view text, size_t longest = 100) {
  std::string line(text.substr(0, longest));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < ' ' || c == 127) c = '?';
  }
  return text.size() > longest ? line + "..." : line;
}

[[noreturn]] inline void fail_missing_tensor(const std::string& path, const std::string& name,
                                             size_t tensors) {
  fail(path, ": there is no tensor ", printable(name), " among its ", tensors,
       "; is it the file of another model?");
}

// ----------------------------------------------------------------------------
// 16-bit floats

inline float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline float f16_to_f32(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);  // infinity or NaN
  if (exponent > 0) return std::bit_cast<float>(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);  // zero or subnormal
  return sign ? -magnitude : magnitude;
}

// ----------------------------------------------------------------------------
// writing

using Metadata = std::map<std::string, std::string>;

// A file larger than memory could be written: only the header is assembled. Data follows in the order of
// `tensors`:
//
//   SafetensorsWriter writer(path, {{"a", Dtype::F32, {2, 3}}, {"step", Dtype::I64, {1}}});
//   writer.write("a", a);
//   writer.write("step", &step);
//   writer.commit();   // until here there is no file at `path`, or still the old one
class SafetensorsWriter {
 public:
  static constexpr int64_t kPiece = int64_t{1} << 22;  // bytes of a tensor in memory, by write_pieces

  // transformers wants to be told that the tensors are laid out as PyTorch lays them out.
  SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                    Metadata metadata = {{"format", "pt"}})
      : file_(path), tensors_(std::move(tensors)) {
    const std::string header = lay_out(metadata);
    const uint64_t length = header.size();
    file_.write(&length, sizeof length);
    file_.write(header.data(), static_cast<int64_t>(header.size()));
  }

  // The next tensor: data has its shape and dtype.
  void write(const std::string& name, const void* data) {
    file_.write(data, next_tensor(name).bytes());
    next_++;
  }

  // The next tensor piece by piece, for data that lies elsewhere (on a device) or has to be converted:
  // fill(first_byte, buffer, bytes) supplies the tensor's bytes [first_byte, first_byte + bytes).
  template <class Fill>
  void write_pieces(const std::string& name, Fill fill) {
    const int64_t bytes = next_tensor(name).bytes();
    std::vector<char> buffer(std::min(bytes, kPiece));
    for (int64_t first = 0; first < bytes; first += kPiece) {
      const int64_t piece = std::min(kPiece, bytes - first);
      fill(first, static_cast<void*>(buffer.data()), piece);
      file_.write(buffer.data(), piece);
    }
    next_++;
  }

  void commit() {
    if (next_ < tensors_.size()) complain(tensors_[next_].name, "has not been written");
    file_.commit();
  }

 private:
  // Gives each tensor its place and returns the header, padded so that the data begins at a multiple of 8
  // bytes.
  std::string lay_out(const Metadata& metadata) {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();  // keeps the order of the tensors
    if (!metadata.empty()) header["__metadata__"] = metadata;
    std::set<std::string> names = {"__metadata__"};
    int64_t end = 0;
    for (TensorInfo& tensor : tensors_) {
      if (!names.insert(tensor.name).second) complain(tensor.name, "is there twice");
      const std::optional<int64_t> bytes = shape_bytes(tensor.dtype, tensor.shape);
      if (!bytes) complain(tensor.name, "has the impossible shape " + to_text(tensor.shape));
      tensor.begin = end;
      tensor.end = end += *bytes;
      header[tensor.name] = {{"dtype", dtype_name(tensor.dtype)},
                             {"shape", tensor.shape},
                             {"data_offsets", {tensor.begin, tensor.end}}};
    }
    std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
  }

  const TensorInfo& next_tensor(const std::string& name) const {
    if (next_ == tensors_.size()) complain(name, "comes after the last tensor of the header");
    if (tensors_[next_].name != name) complain(name, "comes where the header has " + tensors_[next_].name);
    return tensors_[next_];
  }

  [[noreturn]] void complain(const std::string& name, const std::string& what) const {
    fail("cannot write ", file_.path(), ": tensor ", name, " ", what);
  }

  AtomicFile file_;
  std::vector<TensorInfo> tensors_;  // in file order
  size_t next_ = 0;                  // the tensor to be written next
};

// ----------------------------------------------------------------------------
// reading

namespace detail {

// Receives the header's JSON piece by piece and keeps only what a header may hold. Reading it this way, and
// not into a tree of values first, catches names that are there twice, and bounds the memory and the nesting.
class SafetensorsHeader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit SafetensorsHeader(const std::string& path) : path_(path) {}

  std::vector<TensorInfo> tensors;
  Metadata metadata;

  bool start_object(size_t) override {
    if (depth_ == 2 || in_array_) complain("holds an object where a value is expected");
    depth_++;
    return true;
  }

  bool key(std::string& key) override {
    if (depth_ == 1)
      start_tensor(key);
    else if (fields_.insert(key).second)
      field_ = key;
    else
      complain("has '" + printable(key) + "' twice");
    return true;
  }

  bool string(std::string& text) override {
    if (depth_ == 2 && in_metadata())
      metadata[field_] = text;
    else if (depth_ == 2 && field_ == "dtype" && !in_array_)
      tensors.back().dtype = parse_dtype(text);
    else
      complain_value("a text");
    return true;
  }

  bool start_array(size_t) override {
    const bool expected = depth_ == 2 && !in_metadata() && (field_ == "shape" || field_ == "data_offsets");
    if (!expected || in_array_) complain_value("an array");
    in_array_ = true;
    return true;
  }

  bool number_unsigned(uint64_t number) override {
    if (!in_array_) complain_value("a number");
    if (number > INT64_MAX) complain("has a number in its " + field_ + " that is too large");
    (field_ == "shape" ? tensors.back().shape : offsets_).push_back(static_cast<int64_t>(number));
    return true;
  }

  bool number_integer(int64_t) override {
    if (in_array_) complain("has a negative number in its " + field_);
    complain_value("a negative number");
  }

  bool number_float(double, const std::string&) override {
    if (in_array_) complain("has a number in its " + field_ + " that is not a 64-bit integer");
    complain_value("a number");
  }

  bool end_array() override {
    in_array_ = false;
    return true;
  }

  bool end_object() override {
    if (depth_ == 2 && !in_metadata()) finish_tensor();
    depth_--;
    return true;
  }

  bool null() override { complain_value("null"); }
  bool boolean(bool) override { complain_value("true or false"); }
  bool binary(nlohmann::json::binary_t&) override { complain_value("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail(path_, ": the header is not valid JSON at its byte ", position, kDamaged);
  }

  static constexpr const char* kDamaged =
      "; the file is damaged or no safetensors file, fetch or save it again";

 private:
  bool in_metadata() const { return name_ == "__metadata__"; }

  void start_tensor(const std::string& name) {
    name_ = name;
    fields_.clear();
    offsets_.clear();
    if (!names_.insert(name).second) complain("is there twice");
    if (!in_metadata()) tensors.push_back({.name = name});
  }

  void finish_tensor() {
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      if (!fields_.count(field)) complain(std::string("has no ") + field);
    }
    if (offsets_.size() != 2)
      complain("has " + std::to_string(offsets_.size()) + " data_offsets, expected 2");
    tensors.back().begin = offsets_[0];
    tensors.back().end = offsets_[1];
  }

  Dtype parse_dtype(const std::string& text) const {
    for (const DtypeName& known : kDtypes) {
      if (text == known.name) return known.dtype;
    }
    complain("has the unknown dtype '" + printable(text) + "'");
  }

  [[noreturn]] void complain(const std::string& what) const {
    fail(path_, ": ", in_metadata() ? "" : "tensor ", printable(name_), " ", what, kDamaged);
  }

  [[noreturn]] void complain_value(const char* found) const {
    if (depth_ == 1) complain(std::string("is ") + found + ", expected an object");
    complain(std::string("has ") + found + " as '" + printable(field_) + "'");
  }

  std::string path_;
  std::set<std::string> names_, fields_;  // seen so far: in the header, in the object being read
  std::string name_, field_;              // where we are: the key of the header, and that inside its object
  Shape offsets_;
  int depth_ = 0;
  bool in_array_ = false;
};

}  // namespace detail

// An open file. Opening reads and checks the header; tensors are read when asked for.
class SafetensorsFile {
 public:
  static constexpr int64_t kPiece = int64_t{1} << 20;  // elements of a tensor in memory, by read_f32_pieces

  explicit SafetensorsFile(const std::string& path) : path_(path), file_(open_for_reading(path)) {
    const std::string header = read_header();
    detail::SafetensorsHeader parsed(path);
    nlohmann::json::sax_parse(header, &parsed);
    tensors_ = std::move(parsed.tensors);
    metadata_ = std::move(parsed.metadata);
    check_layout(file_size(file_, path) - data_begin_);
    for (size_t i = 0; i < tensors_.size(); i++) index_[tensors_[i].name] = i;
  }

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in file order
  const Metadata& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return index_.count(name) > 0; }

  const TensorInfo& info(const std::string& name) const {
    const auto found = index_.find(name);
    if (found == index_.end()) fail_missing_tensor(path_, name, tensors_.size());
    return tensors_[found->second];
  }

  // float, double, int32_t, int64_t or uint8_t, stored as just that.
  template <class T>
  void read(const std::string& name, const Shape& shape, T* out) const {
    const TensorInfo& tensor = checked_info(name, shape);
    if (tensor.dtype != dtype_of<T>()) complain_dtype(tensor, dtype_name(dtype_of<T>()));
    read_bytes(tensor, 0, tensor.bytes(), out);
  }

  enum class Values { any, finite };

  // Weights: F32, or BF16 and F16 widened. With Values::finite, a NaN or infinity among them is an error.
  void read_f32(const std::string& name, const Shape& shape, float* out,
                Values values = Values::finite) const {
    read_f32_pieces(
        name, shape,
        [&](int64_t first, const float* piece, int64_t n) { std::copy_n(piece, n, out + first); }, values);
  }

  // The same piece by piece, for data that goes elsewhere (to a device): visit(first, values, n) takes the
  // elements first .. first + n.
  template <class Visit>
  void read_f32_pieces(const std::string& name, const Shape& shape, Visit visit,
                       Values values = Values::finite) const {
    const TensorInfo& tensor = checked_info(name, shape);
    std::vector<float> piece(std::min(kPiece, tensor.elements()));
    for (int64_t first = 0; first < tensor.elements(); first += kPiece) {
      const int64_t n = std::min(kPiece, tensor.elements() - first);
      read_widened(tensor, first, n, piece.data());
      if (values == Values::finite) check_finite(tensor, first, n, piece.data());
      visit(first, piece.data(), n);
    }
  }

 private:
  static constexpr const char* kDamaged = detail::SafetensorsHeader::kDamaged;
  static constexpr int64_t kLongestHeader = 100'000'000;  // the format's own limit

  std::string read_header() {
    const int64_t size = file_size(file_, path_);
    uint64_t length = 0;
    if (size < static_cast<int64_t>(sizeof length)) {
      fail(path_, ": the file has ", size, " bytes, a safetensors file has at least 8", kDamaged);
    }
    read_fully_at(file_, &length, sizeof length, 0, path_);
    const int64_t rest = size - static_cast<int64_t>(sizeof length);
    if (length > static_cast<uint64_t>(kLongestHeader)) {
      fail(path_, ": the header is said to have ", length, " bytes, at most ", kLongestHeader, " are allowed",
           kDamaged);
    }
    if (static_cast<int64_t>(length) > rest) {
      fail(path_, ": the header is said to have ", length, " bytes, but only ", rest, " follow", kDamaged);
    }
    data_begin_ = static_cast<int64_t>(sizeof length + length);
    std::string header(length, '\0');
    read_fully_at(file_, header.data(), static_cast<int64_t>(length), sizeof length, path_);
    // The JSON parser takes a zero byte for the end of the text.
    if (header.empty() || header[0] != '{' || header.find('\0') != std::string::npos) {
      fail(path_, ": the header is not a JSON object", kDamaged);
    }
    return header;
  }

  // The tensors must fill the data exactly: each as long as its shape says, no hole and no overlap between
  // them.
  void check_layout(int64_t data_bytes) {
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    int64_t previous_end = 0;
    for (const TensorInfo& tensor : tensors_) {
      const std::optional<int64_t> expected = shape_bytes(tensor.dtype, tensor.shape);
      if (!expected) {
        fail(path_, ": tensor ", printable(tensor.name), ": its shape ", printable(to_text(tensor.shape)),
             " is too large for any file", kDamaged);
      }
      if (tensor.begin > tensor.end) complain_offsets(tensor, "are out of order");
      if (tensor.end > data_bytes)
        complain_offsets(tensor, "reach beyond the ", data_bytes, " bytes of data");
      if (tensor.bytes() != *expected) {
        complain_offsets(tensor, "hold ", tensor.bytes(), " bytes, but ", dtype_name(tensor.dtype),
                         " of shape ", printable(to_text(tensor.shape)), " needs ", *expected);
      }
      if (tensor.begin < previous_end)
        complain_offsets(tensor, "overlap the tensor before, which ends at ", previous_end);
      if (tensor.begin > previous_end)
        complain_offsets(tensor, "leave a hole: the tensor before ends at ", previous_end);
      previous_end = tensor.end;
    }
    if (previous_end != data_bytes) {
      fail(path_, ": ", data_bytes - previous_end, " bytes follow after the last tensor", kDamaged);
    }
  }

  template <class... Parts>
  [[noreturn]] void complain_offsets(const TensorInfo& tensor, const Parts&... what) const {
    fail(path_, ": tensor ", printable(tensor.name), ": its data_offsets [", tensor.begin, ", ", tensor.end,
         "] ", what..., kDamaged);
  }

  [[noreturn]] void complain_dtype(const TensorInfo& tensor, const char* expected) const {
    fail(path_, ": tensor ", printable(tensor.name), " is ", dtype_name(tensor.dtype), ", expected ",
         expected, "; convert it first");
  }

  const TensorInfo& checked_info(const std::string& name, const Shape& shape) const {
    const TensorInfo& tensor = info(name);
    if (tensor.shape != shape) {
      fail(path_, ": tensor ", printable(name), " has shape ", printable(to_text(tensor.shape)),
           ", expected ", to_text(shape), "; is it the file of another model?");
    }
    return tensor;
  }

  void read_bytes(const TensorInfo& tensor, int64_t first, int64_t bytes, void* out) const {
    read_fully_at(file_, out, bytes, data_begin_ + tensor.begin + first, path_);
  }

  // out (n) = the elements from `first` on
  void read_widened(const TensorInfo& tensor, int64_t first, int64_t n, float* out) const {
    switch (tensor.dtype) {
      case Dtype::F32:
        return read_bytes(tensor, 4 * first, 4 * n, out);
      case Dtype::BF16:
        return read_16bit(tensor, first, n, out, bf16_to_f32);
      case Dtype::F16:
        return read_16bit(tensor, first, n, out, f16_to_f32);
      default:
        complain_dtype(tensor, "F32, BF16 or F16");
    }
  }

  template <class Widen>
  void read_16bit(const TensorInfo& tensor, int64_t first, int64_t n, float* out, Widen widen) const {
    std::vector<uint16_t> piece(static_cast<size_t>(n));
    read_bytes(tensor, 2 * first, 2 * n, piece.data());
    std::transform(piece.begin(), piece.end(), out, widen);
  }

  // values (n): the elements from `first` on
  void check_finite(const TensorInfo& tensor, int64_t first, int64_t n, const float* values) const {
    for (int64_t i = 0; i < n; i++) {
      if (std::isfinite(values[i])) continue;
      fail(path_, ": tensor ", printable(tensor.name), " holds ", values[i], " at ",
           position(tensor.shape, first + i), "; the weights are spoilt, use an earlier checkpoint");
    }
  }

  // The row-major index of an element, as [row, column].
  static std::string position(const Shape& shape, int64_t element) {
    Shape index(shape.size());
    for (size_t i = shape.size(); i-- > 0; element /= shape[i]) index[i] = element % shape[i];
    return to_text(index);
  }

  std::string path_;
  FileDescriptor file_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> index_;  // of a name in tensors_
  Metadata metadata_;
  int64_t data_begin_ = 0;
};

}  // namespace xmod
