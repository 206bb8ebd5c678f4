// Every tensor of a model by name, shape and place. Parameters lie in one allocation, their gradients and
// first moments in others of the same layout.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace xmod {

enum class Optimizer { muon, adamw };
enum class Init {
  embedding,        // N(0, 0.02^2); also an output head of its own
  matrix,           // N(0, 1/fan_in)
  residual_matrix,  // the same, divided by sqrt(2 * active_layers): it writes to the residual stream
  ones,             // norms
  router,           // N(0, 0.25/d)
  gate,             // residual_gate_init
  relu_router,      // N(0, 0.01^2)
  expert_scale,     // 0.1
};

// How passes read a parameter. Products in bf16 read a copy, so what they alone read is needed in fp32 only
// where it is updated.
enum class Read { in_fp32, by_products_alone };

struct Parameter {
  std::string name;            // Hugging Face's
  std::vector<int64_t> shape;  // row-major; matrices are (out, in)
  int64_t offset;              // floats from the start of the allocation
  int64_t size;                // floats
  Optimizer optimizer;
  Init init;
  Read read = Read::in_fp32;
};

// Consecutive numbers of an allocation.
struct NumberRange {
  int64_t offset, size;
};

// Weight decay pulls on what multiplies activations, not on norms, routers and gates.
inline bool has_weight_decay(const Parameter& p) {
  return p.optimizer == Optimizer::muon || p.init == Init::embedding;
}

// State that training moves without a gradient (thresholds, expert biases), saved with the weights. Buffers
// lie one behind the other without padding.
struct Buffer {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset;  // floats from the start of the buffers' allocation
  int64_t size;
  float init;
};

struct TensorTable {
  std::vector<Parameter> entries;
  int64_t total = 0;  // floats of the parameters' allocation, padding included

  std::vector<Buffer> buffers;
  int64_t buffers_total = 0;    // floats
  int64_t step_sums_total = 0;  // floats that a training step sums up over its micro-batches

  int64_t count() const {  // parameters, padding excluded
    int64_t n = 0;
    for (const Parameter& p : entries) n += p.size;
    return n;
  }
};

namespace detail {
constexpr int64_t kAlignment = 16;  // floats: one cache line

inline int64_t padded(int64_t floats) {
  return (floats + kAlignment - 1) / kAlignment * kAlignment;
}
}  // namespace detail

inline int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

// Adds tensors to a table, under names that begin with `prefix`; each function returns the offset.
class TensorAdder {
 public:
  TensorAdder(TensorTable& table, std::string prefix) : table_(table), prefix_(std::move(prefix)) {}

  // A tensor fused with the previous one starts where that ends.
  int64_t parameter(const std::string& name, std::vector<int64_t> shape, Optimizer optimizer, Init init,
                    bool fused_with_previous = false, Read read = Read::in_fp32) {
    const int64_t offset = fused_with_previous ? table_.total : next_offset();
    const int64_t size = element_count(shape);
    table_.entries.push_back({prefix_ + name, std::move(shape), offset, size, optimizer, init, read});
    table_.total = offset + size;
    return offset;
  }

  // Of a tensor that is not fused with the previous one.
  int64_t next_offset() const { return detail::padded(table_.total); }

  // A layer that reads it in another pass than a product, too, says so.
  int64_t matrix(const std::string& name, int64_t out, int64_t in, Init init = Init::matrix,
                 bool fused_with_previous = false, Read read = Read::by_products_alone) {
    return parameter(name + ".weight", {out, in}, Optimizer::muon, init, fused_with_previous, read);
  }

  int64_t norm(const std::string& name, int64_t width) {
    return parameter(name + ".weight", {width}, Optimizer::adamw, Init::ones);
  }

  int64_t buffer(const std::string& name, std::vector<int64_t> shape, float init = 0) {
    const int64_t offset = table_.buffers_total, size = element_count(shape);
    table_.buffers.push_back({prefix_ + name, std::move(shape), offset, size, init});
    table_.buffers_total += size;
    return offset;
  }

  int64_t step_sum(int64_t size) {
    const int64_t offset = table_.step_sums_total;
    table_.step_sums_total += size;
    return offset;
  }

  // The same table, with a longer prefix.
  TensorAdder inside(const std::string& name) const { return {table_, prefix_ + name + "."}; }

 private:
  TensorTable& table_;
  std::string prefix_;
};

}  // namespace xmod
