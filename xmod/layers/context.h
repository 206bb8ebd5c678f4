// What a layer's passes work with besides their own tensors: the backend, the model's parameters and the
// running batch.
#pragma once

#include <cstdint>

#include "xmod/arena.h"
#include "xmod/key_value_cache.h"
#include "xmod/model_config.h"

namespace xmod {

// Whether a backward pass writes the gradient of its input or adds to it.
enum class Gradient { write, add };

template <class Backend>
struct LayerContext {
  using floatX = typename Backend::floatX;

  Backend& be;
  const ModelConfig& config;
  const float* params;                   // offsets are those of the parameter table
  float* grads;                          // the same layout
  float* buffers;                        // offsets are those of the table's buffers
  float* step_sums;                      // the table's step sums; null: no training step, sum nothing
  const float* rope;                     // (2, seq_len, hd/2) cosines and sines
  int64_t B = 0;                         // sequences of the running batch
  Rows all_rows = {};                    // the rows of the stream
  float* stream = nullptr;               // (all_rows.n, d) the residual stream
  float* dstream = nullptr;              // (all_rows.n, d) its gradient
  LayerCache<Backend>* cache = nullptr;  // of the running layer; null: the batch holds whole sequences
  float dtoken = 0;                      // gradient of one token's share of the loss

  const float* weight(int64_t offset) const { return params + offset; }
  float* gradient(int64_t offset) const { return grads + offset; }
  float eps() const { return static_cast<float>(config.rms_norm_eps); }

  // The keys and values that the tokens `rows` attend to: their own, behind those of a cache if there is one.
  KeysValues<floatX> keys_values(const floatX* k, const floatX* v, int64_t v_stride, const Rows& rows) const {
    if (cache) return cache->append(k, v, v_stride, rows);
    return {k, v, v_stride, nullptr, rows.offsets};
  }

  // dinp = dout W (or added to it), dW += dout^T inp
  void matmul_backward(Gradient mode, floatX* dinp, int64_t matrix, const floatX* dout, const floatX* inp,
                       int64_t n, int64_t C, int64_t OC) const {
    if (mode == Gradient::write) {
      be.matmul_backward(dinp, gradient(matrix), dout, inp, weight(matrix), n, C, OC);
    } else {
      be.matmul_add_backward(dinp, gradient(matrix), dout, inp, weight(matrix), n, C, OC);
    }
  }

  // The same in fp32 whatever the precision of products: for what decides.
  void matmul_fp32_backward(Gradient mode, floatX* dinp, int64_t matrix, const float* dout, const floatX* inp,
                            int64_t n, int64_t C, int64_t OC) const {
    if (mode == Gradient::write) {
      be.matmul_fp32_backward(dinp, gradient(matrix), dout, inp, weight(matrix), n, C, OC);
    } else {
      be.matmul_fp32_add_backward(dinp, gradient(matrix), dout, inp, weight(matrix), n, C, OC);
    }
  }
};

}  // namespace xmod
