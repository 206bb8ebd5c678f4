// The CPU's passes of layers with experts: how MoE and DECO route tokens to them, and what they add to an
// FFN around the experts' matrix products.
//
// A pair is a token and one of the experts that it chose. Experts work on grouped rows: one row a pair, in
// the order of the experts, so that those of one expert lie side by side and make one matrix product.
//
// Shapes: n tokens, E experts, `pairs` pairs, d model width, `width` of an expert, or any other of its rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "xmod/cpu_rows.h"
#include "xmod/cpu_vector.h"
#include "xmod/model_config.h"

namespace xmod {

namespace detail {

// The k largest of key become 1, the others 0; ties go to the lower index. They are k even if keys are NaN.
inline void choose_largest(uint8_t* chosen,   // (E)
                           const float* key,  // (E)
                           int64_t E, int64_t k) {
  for (int64_t e = 0; e < E; e++) chosen[e] = 0;
  for (int64_t count = 0; count < k; count++) {
    int64_t best = -1;
    for (int64_t e = 0; e < E; e++) {
      if (!chosen[e] && (best < 0 || key[e] > key[best])) best = e;
    }
    chosen[best] = 1;
  }
}

// sigmoid(s) of the chosen experts, divided by its sum. sigmoid(s) = e^min(s, 0) / (1 + e^-|s|); taking the
// largest e^min(s, 0) out of all of them keeps the sum above 0 however negative the logits are.
inline void normalised_sigmoids(float* weight,          // (E) 0 where not chosen
                                const float* logit,     // (E)
                                const uint8_t* chosen,  // (E)
                                int64_t E) {
  float peak = -std::numeric_limits<float>::infinity(), total = 0;
  for (int64_t e = 0; e < E; e++) {
    if (chosen[e]) peak = std::max(peak, std::min(logit[e], 0.0f));
  }
  for (int64_t e = 0; e < E; e++) {
    const float s = logit[e];
    weight[e] = chosen[e] ? std::exp(std::min(s, 0.0f) - peak) / (1 + std::exp(-std::abs(s))) : 0;
    total += weight[e];
  }
  for (int64_t e = 0; e < E; e++) weight[e] /= total;
}

inline Vector relu(Vector s) {
  return s <= 0.0f ? Vector{} : s;  // NaN stays NaN
}

inline float relu_sum(const float* logit, int64_t E) {
  Vector total = {};
  for_each_vector(E, [&](auto at) { total += relu(at.load(logit)); });
  return horizontal_sum(total);
}

}  // namespace detail

class CpuExpertPasses : protected RowSums {
 public:
  // ------------------------------------------------------------------------------------------------
  // grouped rows

  // Orders the pairs by expert, and by token within one; returns how many there are. A backend that does not
  // know it on the host returns most_pairs, and puts -1 into row behind the last pair: its passes over pairs
  // leave such rows out.
  int64_t group_by_expert(int32_t* row,             // (pairs) token of each grouped row
                          int32_t* expert,          // (pairs) its expert
                          int32_t* slot,            // (pairs) grouped row of each pair; by token, then expert
                          int64_t* slot_offsets,    // (n+1) a token's pairs: slot[offsets[i]..offsets[i+1])
                          int64_t* expert_offsets,  // (E+1) where an expert's grouped rows begin
                          const uint8_t* chosen,    // (n, E)
                          int64_t n, int64_t E, int64_t /*most_pairs*/) {
    std::fill(expert_offsets, expert_offsets + E + 1, int64_t{0});
    for (int64_t i = 0; i < n; i++) {
      for (int64_t e = 0; e < E; e++) expert_offsets[e + 1] += chosen[i * E + e];
    }
    for (int64_t e = 0; e < E; e++) expert_offsets[e + 1] += expert_offsets[e];
    std::vector<int64_t> next(expert_offsets, expert_offsets + E);  // free row of each expert
    int64_t pairs = 0;
    for (int64_t i = 0; i < n; i++) {
      slot_offsets[i] = pairs;
      for (int64_t e = 0; e < E; e++) {
        if (!chosen[i * E + e]) continue;
        const int64_t r = next[e]++;
        row[r] = static_cast<int32_t>(i);
        expert[r] = static_cast<int32_t>(e);
        slot[pairs++] = static_cast<int32_t>(r);
      }
    }
    slot_offsets[n] = pairs;
    return pairs;
  }

  // out = weight * inp, each grouped row by its pair's weight.
  void expert_weight_forward(float* out,             // (pairs, width)
                             const float* inp,       // (pairs, width)
                             const float* weight,    // (n, E)
                             const int32_t* row,     // (pairs)
                             const int32_t* expert,  // (pairs)
                             int64_t pairs, int64_t E, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < pairs; r++) {
      const float w = weight[row[r] * E + expert[r]];
#pragma omp simd
      for (int64_t j = r * width; j < (r + 1) * width; j++) out[j] = w * inp[j];
    }
  }

  void expert_weight_backward(float* dinp,            // (pairs, width)
                              float* dweight,         // (n, E) written, 0 where not chosen
                              const float* dout,      // (pairs, width)
                              const float* inp,       // (pairs, width)
                              const float* weight,    // (n, E)
                              const int32_t* row,     // (pairs)
                              const int32_t* expert,  // (pairs)
                              int64_t pairs, int64_t n, int64_t E, int64_t width) {
    std::fill(dweight, dweight + n * E, 0.0f);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < pairs; r++) {
      const int64_t pair = row[r] * E + expert[r];
      dweight[pair] = dot(dout + r * width, inp + r * width, width);
#pragma omp simd
      for (int64_t j = r * width; j < (r + 1) * width; j++) dinp[j] = weight[pair] * dout[j];
    }
  }

  // Brings grouped rows back to their tokens: out += the sum of its pairs' rows, in the experts' order.
  void sum_pairs_add(float* out,                   // (n, d) added to
                     const float* inp,             // (pairs, d)
                     const int32_t* slot,          // (pairs)
                     const int64_t* slot_offsets,  // (n+1)
                     int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      for (int64_t p = slot_offsets[i]; p < slot_offsets[i + 1]; p++) {
        const float* pair = inp + slot[p] * d;
#pragma omp simd
        for (int64_t j = 0; j < d; j++) out[i * d + j] += pair[j];
      }
    }
  }

  // loads += how many tokens chose each expert.
  void add_expert_loads(float* loads,                   // (E) added to
                        const int64_t* expert_offsets,  // (E+1)
                        int64_t E) {
    for (int64_t e = 0; e < E; e++) {
      loads[e] += static_cast<float>(expert_offsets[e + 1] - expert_offsets[e]);
    }
  }

  // ------------------------------------------------------------------------------------------------
  // MoE's router: score = sigmoid(logit), the k largest score + bias are chosen, their scores divided by
  // their sum are the weights

  void moe_route_forward(uint8_t* chosen,    // (n, E)
                         float* weight,      // (n, E) 0 where not chosen
                         float* score,       // (n, E) in: logits; out: their sigmoids
                         const float* bias,  // (E)
                         int64_t n, int64_t E, int64_t k) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      float* s = score + i * E;
      float* key = weight + i * E;  // what to choose by, until the weights are known
      for_each_vector(E, [&](auto at) { at.store(key, sigmoid(at.load(s)) + at.load(bias)); });
      detail::choose_largest(chosen + i * E, key, E, k);
      detail::normalised_sigmoids(weight + i * E, s, chosen + i * E, E);
      for_each_vector(E, [&](auto at) { at.store(s, sigmoid(at.load(s))); });
    }
  }

  // dscore = (dweight - <dweight, weight>) / (sum of the chosen scores) and dlogit = dscore * score *
  // (1 - score), where score / sum is the weight again: nothing is divided by what may be 0.
  void moe_route_backward(float* dlogit,          // (n, E)
                          const float* dweight,   // (n, E) 0 where not chosen
                          const float* weight,    // (n, E)
                          const float* score,     // (n, E) sigmoids
                          const uint8_t* chosen,  // (n, E)
                          int64_t n, int64_t E) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float mean = dot(dweight + i * E, weight + i * E, E);
      for (int64_t j = i * E; j < (i + 1) * E; j++) {
        dlogit[j] = chosen[j] ? weight[j] * (1 - score[j]) * (dweight[j] - mean) : 0;
      }
    }
  }

  // After an optimizer step: what is chosen too often becomes less likely to be, and the other way round.
  void expert_bias_update(float* bias,         // (E)
                          const float* loads,  // (E) tokens of the step
                          float rate, int64_t E) {
    const double mean = sum(loads, E) / static_cast<double>(E);
    for (int64_t e = 0; e < E; e++) bias[e] += loads[e] < mean ? rate : loads[e] > mean ? -rate : 0;
  }

  // ------------------------------------------------------------------------------------------------
  // DECO's router: p = relu(logit), experts with logit > 0 are active, weight = scale * p.
  // Entropy of a token: H = -sum_e q_e log(q_e + tiny) with q = p / Z, Z = sum p + tiny

  // A logit that is NaN counts as active, so that it shows in the layer's output.
  void deco_route_forward(uint8_t* chosen,     // (n, E)
                          float* weight,       // (n, E) 0 where not chosen
                          float* entropy,      // (n)
                          const float* logit,  // (n, E)
                          const float* scale,  // (E)
                          int64_t n, int64_t E) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float* s = logit + i * E;
      const float norm = detail::relu_sum(s, E) + kTiny;
      Vector minus_entropy = {};
      for_each_vector(E, [&](auto at) {
        const Vector p = detail::relu(at.load(s)), q = p / norm;
        minus_entropy += q * log(q + kTiny);
        at.store(weight + i * E, at.load(scale) * p);
      });
      entropy[i] = -horizontal_sum(minus_entropy);
      for (int64_t e = 0; e < E; e++) chosen[i * E + e] = !(s[e] <= 0);
    }
  }

  // With g = tiny / (q + tiny) - log(q + tiny), dH/dq = g - 1 and, through Z as well,
  // dH/dp_e = (g_e - sum q g - tiny / Z) / Z. Nothing reaches experts that are not active.
  void deco_route_backward(float* dlogit,         // (n, E)
                           float* dscale,         // (E) added to
                           const float* dweight,  // (n, E) 0 where not chosen
                           const float* logit,    // (n, E)
                           const float* scale,    // (E)
                           const float* lambda,   // (1) weight of the entropy
                           float share,           // of one token; lambda * share is its entropy's gradient
                           int64_t n, int64_t E) {
    const float dentropy = *lambda * share;
    add_row_sums(dscale, n, E, [=](int64_t i, float* sum) {
      const float *s = logit + i * E, *dw = dweight + i * E;
      float* g = dlogit + i * E;  // until it becomes the gradient
      const float norm = detail::relu_sum(s, E) + kTiny;
      Vector product = {};
      for_each_vector(E, [&](auto at) {
        const Vector q = detail::relu(at.load(s)) / norm, g_e = kTiny / (q + kTiny) - log(q + kTiny);
        product += q * g_e;
        at.store(g, g_e);
      });
      const float mean = horizontal_sum(product) + kTiny / norm;
      for_each_vector(E, [&](auto at) {
        const Vector p = detail::relu(at.load(s)), dp_of_weight = at.load(dw) * at.load(scale);
        const Vector dp = dp_of_weight + (at.load(g) - mean) * (dentropy / norm);
        at.store(dlogit + i * E, at.load(s) <= 0.0f ? Vector{} : dp);
        at.store(sum, at.load(sum) + at.load(dw) * p);
      });
    });
  }

  // lambda *= factor, but not below `least`.
  void entropy_weight_update(float* lambda,  // (1)
                             float factor, float least) {
    *lambda = std::max(*lambda * factor, least);
  }

  // ------------------------------------------------------------------------------------------------
  // DECO's activation: c = up - mean (of its token), act = silu(RMSNorm(c))

  void norm_silu_forward(float* act,           // (pairs, width)
                         float* rstd,          // (pairs) 1 / sqrt(mean(c^2) + eps)
                         const float* up,      // (pairs, width)
                         const float* mean,    // (n)
                         const float* weight,  // (width)
                         const int32_t* row,   // (pairs)
                         int64_t pairs, int64_t width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < pairs; r++) {
      float* out = act + r * width;
      for (int64_t j = 0; j < width; j++) out[j] = up[r * width + j] - mean[row[r]];
      rstd[r] = rmsnorm_row(out, out, weight, width, eps);
      for_each_vector(width, [&](auto at) { at.store(out, at.load(out) * sigmoid(at.load(out))); });
    }
  }

  void norm_silu_backward(float* dup,           // (pairs, width)
                          float* dpair_mean,    // (pairs) what each pair adds to the gradient of mean
                          float* dweight,       // (width) added to
                          const float* dact,    // (pairs, width)
                          const float* up,      // (pairs, width)
                          const float* mean,    // (n)
                          const float* rstd,    // (pairs)
                          const float* weight,  // (width)
                          const int32_t* row,   // (pairs)
                          int64_t pairs, int64_t width) {
    add_row_sums(dweight, pairs, width, [=](int64_t r, float* sum) {
      const float* u = up + r * width;
      const float m = mean[row[r]];
      float* du = dup + r * width;  // at first the gradient of the norm's output
      for_each_vector(width, [&](auto at) {
        const Vector x = (at.load(u) - m) * rstd[r] * at.load(weight), s = sigmoid(x);
        at.store(du, at.load(dact + r * width) * s * (1.0f + x * (1.0f - s)));
      });
      const auto grad = rmsnorm_row_gradient(du, u, weight, rstd[r], width, sum, m);
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < width; j++) {
        du[j] = grad(j);
        total += du[j];
      }
      dpair_mean[r] = -total;
    });
  }

  // ------------------------------------------------------------------------------------------------
  // mean row of a matrix

  void column_mean(float* out,        // (d)
                   const float* inp,  // (rows, d)
                   int64_t rows, int64_t d) {
    std::fill(out, out + d, 0.0f);
    add_row_sums(out, rows, d, [=](int64_t i, float* sum) {
#pragma omp simd
      for (int64_t j = 0; j < d; j++) sum[j] += inp[i * d + j];
    });
    for (int64_t j = 0; j < d; j++) out[j] /= static_cast<float>(rows);
  }

  void column_mean_backward(float* dinp,        // (rows, d) added to
                            const float* dout,  // (d)
                            int64_t rows, int64_t d) {
    const float share = 1 / static_cast<float>(rows);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
#pragma omp simd
      for (int64_t j = 0; j < d; j++) dinp[i * d + j] += dout[j] * share;
    }
  }

 protected:
  // Working memory of these passes over n tokens.
  static int64_t expert_working_bytes(const ModelConfig& c, int64_t n) {
    if (c.arch != Arch::deco) return 0;
    return std::max({row_sums_bytes(c.experts * c.expert_dim, c.dim), row_sums_bytes(n, c.experts),
                     row_sums_bytes(n * c.experts, c.expert_dim)});
  }

 private:
  static constexpr float kTiny = 1e-5f;  // keeps DECO's entropy finite
};

}  // namespace xmod
