// train_xmod: X-MoD on the CPU. This file is the CPU backend, every forward and backward pass as a plain
// function in reading order (those of layers with experts stand in xmod/cpu_experts.h), and main.
//
// What runs the passes, and in which order, stands in xmod/model.h; the training loop in xmod/trainer.h.
// Both are templates over the backend: another one supplies the same passes under the same signatures.
//
// Shapes: n rows (tokens a layer works on), d model width, V vocabulary, H query heads, KV key/value heads,
// hd head size, F FFN width, B sequences, T tokens of a sequence, C tokens a sparse layer selects from each.
//
// Every sum runs in an order that depends on the shapes alone, so results are the same bit for bit whatever
// the number of threads.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "xmod/aligned_floats.h"
#include "xmod/cpu_attention.h"
#include "xmod/cpu_experts.h"
#include "xmod/cpu_matmul.h"
#include "xmod/cpu_muon.h"
#include "xmod/cpu_rows.h"
#include "xmod/cpu_threads.h"
#include "xmod/cpu_vector.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"

namespace xmod {

class CpuBackend : public CpuExpertPasses {
 public:
  using floatX = float;  // of activations and weights inside products
  static constexpr Processor kProcessor = Processor::cpu;

  explicit CpuBackend(const MachineOptions& machine = {})
      : matmul_scratch_(choose_matmul_kernel(machine.precision, machine.instructions)) {
#ifdef _OPENMP
    if (machine.threads > 0) omp_set_num_threads(static_cast<int>(machine.threads));
#endif
  }

  // For the log.
  std::string description() const {
    const MatmulKernel& kernel = matmul_scratch_.kernel();
    return "cpu, " + std::to_string(threads()) + " threads, " + precision_name(kernel.precision) +
           " products on " + kernel.name;
  }

  static int threads() {
    return max_threads();
  }

  // Before anything else: which device this process works on, of the ones that the ranks of a host share out.
  static void use_device(int64_t /*local_rank*/) {}

  // ------------------------------------------------------------------------------------------------
  // memory

  static int64_t memory_bytes() {
    return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  }

  // Beside what a run allocates: the program, its libraries, stacks of threads.
  static int64_t program_bytes(int64_t threads) {
    return kProgramBytes + threads * kThreadBytes;
  }

  // Working memory of the passes over batches of B sequences.
  static int64_t pass_bytes(const ModelConfig& c, int64_t B, Use use, int64_t threads) {
    const int64_t n = B * c.seq_len;
    const bool training = use == Use::training;
    const int64_t selection = threads * c.seq_len * 2 * static_cast<int64_t>(sizeof(uint64_t));
    const int64_t row_values = training ? n * static_cast<int64_t>(sizeof(float)) : 0;
    const int64_t row_sums = training ? row_sums_bytes(n, c.dim) : 0;
    const int64_t scratches = has_experts(c.arch) ? 2 : 1;  // their routers are fp32 in any case
    return scratches * MatmulScratch::bytes(threads) +
           attention_working_bytes(B, c.seq_len, c.heads, c.kv_heads, c.head_dim, threads, training) +
           std::max(row_sums, expert_working_bytes(c, n)) + (is_routed(c.arch) ? selection + row_values : 0);
  }

  // Working memory of Muon.
  static int64_t muon_bytes(const MuonShapes& shapes, int64_t threads) {
    return CpuMuon::bytes(shapes, threads);
  }
  static int64_t newton_schulz_flops(int64_t rows, int64_t cols) {
    return xmod::newton_schulz_flops(rows, cols);
  }

  template <class T>
  T* allocate(int64_t n) {
    return static_cast<T*>(::operator new(static_cast<size_t>(n) * sizeof(T), kAlignment));
  }
  template <class T>
  void release(T* data) {
    ::operator delete(data, kAlignment);
  }
  template <class T>
  void zero(T* data, int64_t n) {
    if (n > 0) std::memset(data, 0, static_cast<size_t>(n) * sizeof(T));
  }
  void fill(float* data, float value, int64_t n) {
    std::fill_n(data, n, value);
  }
  template <class T>
  void copy(T* out, const T* inp, int64_t n) {
    if (n > 0) std::memcpy(out, inp, static_cast<size_t>(n) * sizeof(T));
  }
  template <class T>
  void to_device(T* device, const T* host, int64_t n) {
    copy(device, host, n);
  }
  template <class T>
  void to_host(T* host, const T* device, int64_t n) {
    copy(host, device, n);
  }

  // ------------------------------------------------------------------------------------------------
  // whole steps

  // Runs work(), which launches the same passes with the same arguments whenever owner (a model), B, T and
  // scale are the same: a backend may keep what it can of it for the next time. What the host computes in it
  // may then be left out.
  template <class Work>
  void repeat(const void* /*owner*/, int64_t /*B*/, int64_t /*T*/, float /*scale*/, Work work) {
    work();
  }

  // ------------------------------------------------------------------------------------------------
  // index tables

  void fill_sequence(int32_t* out,  // (n) 0, 1, 2, ...
                     int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = static_cast<int32_t>(i);
  }

  // Counts on in every sequence, from `start` or from 0.
  void fill_positions(int32_t* position,       // (n)
                      const int64_t* offsets,  // (B+1) sequence b owns offsets[b] .. offsets[b+1]
                      const int32_t* start,    // (B), or null
                      int64_t B) {
    for (int64_t b = 0; b < B; b++) {
      for (int64_t i = offsets[b]; i < offsets[b + 1]; i++)
        position[i] = static_cast<int32_t>(i - offsets[b]) + (start ? start[b] : 0);
    }
  }

  void gather_ints(int32_t* out,        // (n)
                   const int32_t* inp,  // one for each row of the stream
                   const int32_t* row,  // (n)
                   int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = inp[row[i]];
  }

  void uniform_offsets(int64_t* out,  // (B+1) 0, rows, 2 rows, ...
                       int64_t B, int64_t rows) {
    for (int64_t b = 0; b <= B; b++) out[b] = b * rows;
  }

  void rope_table(float* table,  // (T, hd/2) cosines, then (T, hd/2) sines
                  int64_t T, int64_t hd, double theta) {
    const int64_t half = hd / 2;
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j < half; j++) {
        const double angle = static_cast<double>(t) / std::pow(theta, 2.0 * j / hd);
        table[t * half + j] = static_cast<float>(std::cos(angle));
        table[(T + t) * half + j] = static_cast<float>(std::sin(angle));
      }
    }
  }

  // ------------------------------------------------------------------------------------------------
  // embedding

  void encoder_forward(float* out,             // (n, d)
                       const int32_t* tokens,  // (n)
                       const float* embed,     // (V, d)
                       int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) copy(out + i * d, embed + tokens[i] * d, d);
  }

  // Several rows may add to the same embedding: each task owns a block of columns and walks all rows.
  void encoder_backward(float* dembed,          // (V, d) added to
                        const float* dout,      // (n, d)
                        const int32_t* tokens,  // (n)
                        int64_t n, int64_t /*V*/, int64_t d) {
    constexpr int64_t kColumns = 64;
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < d; begin += kColumns) {
      const int64_t end = std::min(begin + kColumns, d);
      for (int64_t i = 0; i < n; i++) {
        float* row = dembed + tokens[i] * d;
        for (int64_t j = begin; j < end; j++) row[j] += dout[i * d + j];
      }
    }
  }

  // ------------------------------------------------------------------------------------------------
  // RMSNorm, on its own and fused with what stands before it

  void rmsnorm_forward(float* out,           // (n, d)
                       float* rstd,          // (n) 1 / sqrt(mean(inp^2) + eps)
                       const float* inp,     // (n, d)
                       const float* weight,  // (d)
                       int64_t n, int64_t d, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      rstd[i] = rmsnorm_row(out + i * d, inp + i * d, weight, d, eps);
    }
  }

  // The gradient of a row is rstd * (w dout - xhat * mean(w dout * xhat)), with xhat = inp * rstd.
  void rmsnorm_backward(float* dinp,          // (n, d)
                        float* dweight,       // (d) added to
                        const float* dout,    // (n, d)
                        const float* inp,     // (n, d)
                        const float* weight,  // (d)
                        const float* rstd,    // (n)
                        int64_t n, int64_t d) {
    add_row_sums(dweight, n, d, [=](int64_t i, float* sum) {
      const auto grad = rmsnorm_row_gradient(dout + i * d, inp + i * d, weight, rstd[i], d, sum);
#pragma omp simd
      for (int64_t j = 0; j < d; j++) dinp[i * d + j] = grad(j);
    });
  }

  // The same, added to dinp.
  void rmsnorm_add_backward(float* dinp,          // (n, d) added to
                            float* dweight,       // (d) added to
                            const float* dout,    // (n, d)
                            const float* inp,     // (n, d)
                            const float* weight,  // (d)
                            const float* rstd,    // (n)
                            int64_t n, int64_t d) {
    add_row_sums(dweight, n, d, [=](int64_t i, float* sum) {
      const auto grad = rmsnorm_row_gradient(dout + i * d, inp + i * d, weight, rstd[i], d, sum);
#pragma omp simd
      for (int64_t j = 0; j < d; j++) dinp[i * d + j] += grad(j);
    });
  }

  // x = stream[row], out = RMSNorm(x): the only reading of the stream that a layer does.
  void gather_rmsnorm_forward(float* x,             // (n, d)
                              float* out,           // (n, d)
                              float* rstd,          // (n)
                              const float* stream,  // (B*T, d)
                              const float* weight,  // (d)
                              const int32_t* row,   // (n)
                              int64_t n, int64_t d, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      copy(x + i * d, stream + row[i] * d, d);
      rstd[i] = rmsnorm_row(out + i * d, x + i * d, weight, d, eps);
    }
  }

  // h = x + delta, out = RMSNorm(h).
  void residual_rmsnorm_forward(float* h,             // (n, d)
                                float* out,           // (n, d)
                                float* rstd,          // (n)
                                const float* x,       // (n, d)
                                const float* delta,   // (n, d)
                                const float* weight,  // (d)
                                int64_t n, int64_t d, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
#pragma omp simd
      for (int64_t j = i * d; j < (i + 1) * d; j++) h[j] = x[j] + delta[j];
      rstd[i] = rmsnorm_row(out + i * d, h + i * d, weight, d, eps);
    }
  }

  // Both summands of h receive its gradient.
  void residual_rmsnorm_backward(float* dx,            // (n, d) written
                                 float* ddelta,        // (n, d) added to
                                 float* dweight,       // (d) added to
                                 const float* dout,    // (n, d)
                                 const float* h,       // (n, d)
                                 const float* weight,  // (d)
                                 const float* rstd,    // (n)
                                 int64_t n, int64_t d) {
    add_row_sums(dweight, n, d, [=](int64_t i, float* sum) {
      const auto grad = rmsnorm_row_gradient(dout + i * d, h + i * d, weight, rstd[i], d, sum);
#pragma omp simd
      for (int64_t j = 0; j < d; j++) {
        dx[i * d + j] = grad(j);
        ddelta[i * d + j] += dx[i * d + j];
      }
    });
  }

  // ------------------------------------------------------------------------------------------------
  // routing (README.md, "A sparse layer")

  // s = weight . RMSNorm(stream), the norm without a weight.
  void router_forward(float* score,         // (n)
                      const float* stream,  // (n, d)
                      const float* weight,  // (d)
                      int64_t n, int64_t d, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      score[i] = dot(stream + i * d, weight, d) * rms_rstd(stream + i * d, d, eps);
    }
  }

  // ds reaches the router's weight and, through the norm, the layer's rows: RMSNorm's gradient for an output
  // gradient of ds in every column.
  void router_backward(float* dx,            // (n, d) added to
                       float* dweight,       // (d) added to
                       const float* dlogit,  // (n) ds
                       const float* x,       // (n, d) the selected rows
                       const float* weight,  // (d)
                       int64_t n, int64_t d, float eps) {
    add_row_sums(dweight, n, d, [=](int64_t i, float* sum) {
      const float* row = x + i * d;
      const float rstd = rms_rstd(row, d, eps);
      const float s = dot(row, weight, d) * rstd;
      const float ds = dlogit[i], shrink = s * rstd / static_cast<float>(d);
#pragma omp simd
      for (int64_t j = 0; j < d; j++) {
        dx[i * d + j] += ds * rstd * (weight[j] - row[j] * shrink);
        sum[j] += ds * row[j] * rstd;
      }
    });
  }

  // u = s + b, b = -gamma * (times selected in this interval - j/K).
  void token_bias_forward(float* out,                     // (n) u
                          const float* score,             // (n) s
                          const int32_t* times_selected,  // (n)
                          float gamma, float expected, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      out[i] = score[i] - gamma * (static_cast<float>(times_selected[i]) - expected);
    }
  }

  // The C tokens with the largest u of each sequence, ties to the earlier token, kept in position order.
  void select_topk(int32_t* row,    // (B*C) b*T + t, ascending
                   float* kth,      // (B) the C-th largest u
                   const float* u,  // (B, T)
                   int64_t B, int64_t T, int64_t C) {
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < B; b++) {
      // One key orders by u, then by position: no two are equal.
      std::vector<uint64_t> keys(static_cast<size_t>(T));
      for (int64_t t = 0; t < T; t++) {
        keys[t] = uint64_t{sortable(u[b * T + t])} << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(t));
      }
      std::vector<uint64_t> order = keys;
      std::nth_element(order.begin(), order.begin() + (C - 1), order.end(), std::greater<>());
      const uint64_t smallest = order[C - 1];
      int32_t* out = row + b * C;
      for (int64_t t = 0; t < T; t++) {
        if (keys[t] >= smallest) *out++ = static_cast<int32_t>(b * T + t);
      }
      kth[b] = u[b * T + (0xFFFFFFFFu - static_cast<uint32_t>(smallest))];
    }
  }

  // Every token with u > tau; returns how many rows there are in all.
  int64_t select_threshold(int32_t* row,                // (up to all rows) ascending
                           int64_t* offsets,            // (B+1)
                           const float* u,              // one for each row of the stream
                           const float* tau,            // (1)
                           const int64_t* all_offsets,  // (B+1) of the sequences in the stream
                           int64_t B) {
    int64_t n = 0;
    for (int64_t b = 0; b < B; b++) {
      offsets[b] = n;
      for (int64_t i = all_offsets[b]; i < all_offsets[b + 1]; i++) {
        if (u[i] > *tau) row[n++] = static_cast<int32_t>(i);
      }
    }
    offsets[B] = n;
    return n;
  }

  // Notes the selection: the rows' own logits, and one more in their counts.
  void count_selected(float* router_logit,      // (n)
                      int32_t* times_selected,  // (B*T) added to
                      const float* score,       // (B*T)
                      const int32_t* row,       // (n)
                      int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      router_logit[i] = score[row[i]];
      times_selected[row[i]]++;
    }
  }

  // The whole choice of a sparse layer under top-k routing: scores, bias, selection, and what is noted of it.
  void route_topk(int32_t* row,                 // (B*C)
                  int32_t* position,            // (B*C)
                  int64_t* offsets,             // (B+1) 0, C, 2C, ...
                  float* router_logit,          // (B*C)
                  float* kth,                   // (B)
                  float* score,                 // (B*T) s
                  float* u,                     // (B*T)
                  int32_t* times_selected,      // (B*T) added to
                  const float* stream,          // (B*T, d)
                  const float* weight,          // (d)
                  const int32_t* all_position,  // (B*T)
                  float gamma, float expected, int64_t B, int64_t T, int64_t C, int64_t d, float eps) {
    router_forward(score, stream, weight, B * T, d, eps);
    token_bias_forward(u, score, times_selected, gamma, expected, B * T);
    select_topk(row, kth, u, B, T, C);
    uniform_offsets(offsets, B, C);
    gather_ints(position, all_position, row, B * C);
    count_selected(router_logit, times_selected, score, row, B * C);
  }

  // out += mean of each row: the C-th largest u of one micro-batch.
  void add_row_means(float* out,        // (rows) added to
                     const float* inp,  // (rows, columns)
                     int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) out[i] += static_cast<float>(mean(inp + i * columns, columns));
  }

  // tau += rate * (kth_sum * scale - tau)
  void threshold_update(float* tau,            // (layers)
                        const float* kth_sum,  // (layers)
                        float scale, float rate, int64_t layers) {
    for (int64_t l = 0; l < layers; l++) tau[l] += rate * (kth_sum[l] * scale - tau[l]);
  }

  // ------------------------------------------------------------------------------------------------
  // residual update: stream[row] += gate * delta, gate = alpha * 2 sigmoid(s); without a router the gate is 1

  void gated_scatter_forward(float* stream,       // (B*T, d) rows `row` updated in place
                             const float* delta,  // (n, d)
                             const float* logit,  // (n) s, or null: gate 1
                             const float* alpha,  // (1), or null: alpha 1
                             const int32_t* row,  // (n)
                             int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float gate = logit ? (alpha ? *alpha : 1) * 2 * logistic(logit[i]) : 1;
      float* out = stream + row[i] * d;
#pragma omp simd
      for (int64_t j = 0; j < d; j++) out[j] += gate * delta[i * d + j];
    }
  }

  void gated_scatter_backward(float* ddelta,         // (n, d) gate * dstream[row]
                              float* dlogit,         // (n) ds, untouched without a router
                              float* dalpha,         // (1) added to, or null
                              const float* dstream,  // (B*T, d)
                              const float* delta,    // (n, d)
                              const float* logit,    // (n), or null
                              const float* alpha,    // (1), or null
                              const int32_t* row,    // (n)
                              int64_t n, int64_t d) {
    if (!logit) return gather(ddelta, dstream, row, n, d);
    const float a = alpha ? *alpha : 1;
    float* dgate = row_values_.reserve(n);  // (n) <dstream, delta> * 2 sigmoid(s): the gradient of alpha
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float* dout = dstream + row[i] * d;
      const float sigma = logistic(logit[i]), gate = a * 2 * sigma;
      const float product = dot(dout, delta + i * d, d);
#pragma omp simd
      for (int64_t j = 0; j < d; j++) ddelta[i * d + j] = gate * dout[j];
      dlogit[i] = product * a * 2 * sigma * (1 - sigma);
      dgate[i] = product * 2 * sigma;
    }
    if (dalpha) *dalpha += static_cast<float>(sum(dgate, n));
  }

  void scatter_add(float* stream,       // (B*T, d) rows `row` added to
                   const float* inp,    // (n, d)
                   const int32_t* row,  // (n)
                   int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      float* out = stream + row[i] * d;
#pragma omp simd
      for (int64_t j = 0; j < d; j++) out[j] += inp[i * d + j];
    }
  }

  // out[row] = inp, rows of inp `stride` apart.
  void scatter_rows(float* out,        // (some, d) rows `row` written
                    const float* inp,  // (n, d)
                    int64_t stride,
                    const int32_t* row,  // (n)
                    int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) copy(out + row[i] * d, inp + i * stride, d);
  }

  void gather(float* out,           // (n, d)
              const float* stream,  // (B*T, d)
              const int32_t* row,   // (n)
              int64_t n, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) copy(out + i * d, stream + row[i] * d, d);
  }

  // ------------------------------------------------------------------------------------------------
  // matrix products

  // The numbers in these parts of params (n) are new. A backend whose products read weights of another format
  // makes those from them; here there are none.
  void use_parameters(const float* /*params*/, int64_t /*n*/, const std::vector<NumberRange>& /*parts*/) {}

  // out = inp weight^T
  void matmul_forward(float* out,           // (n, OC)
                      const float* inp,     // (n, C)
                      const float* weight,  // (OC, C)
                      int64_t n, int64_t C, int64_t OC) {
    matmul(out, OC, stored(inp, C), transposed(weight, C), n, OC, C, matmul_scratch_);
  }

  // out += inp weight^T
  void matmul_add_forward(float* out,           // (n, OC) added to
                          const float* inp,     // (n, C)
                          const float* weight,  // (OC, C)
                          int64_t n, int64_t C, int64_t OC) {
    matmul(out, OC, stored(inp, C), transposed(weight, C), n, OC, C, matmul_scratch_, {.accumulate = true});
  }

  // dinp = dout weight, dweight += dout^T inp
  void matmul_backward(float* dinp,          // (n, C)
                       float* dweight,       // (OC, C) added to
                       const float* dout,    // (n, OC)
                       const float* inp,     // (n, C)
                       const float* weight,  // (OC, C)
                       int64_t n, int64_t C, int64_t OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, false);
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }

  // The same, added to dinp.
  void matmul_add_backward(float* dinp,          // (n, C) added to
                           float* dweight,       // (OC, C) added to
                           const float* dout,    // (n, OC)
                           const float* inp,     // (n, C)
                           const float* weight,  // (OC, C)
                           int64_t n, int64_t C, int64_t OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, true);
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }

  // Each group of rows with the matrix of its expert: group e is rows expert_offsets[e] ..
  // expert_offsets[e+1], matrix e begins at weight + e * stride, its gradient at dweight + e * stride.
  void expert_matmul_forward(float* out,                     // (pairs, OC)
                             const float* inp,               // (pairs, C)
                             const float* weight,            // E of (OC, C)
                             int64_t stride,                 // from one matrix to the next
                             const int64_t* expert_offsets,  // (E+1)
                             int64_t /*pairs*/, int64_t E, int64_t C, int64_t OC) {
    for (int64_t e = 0; e < E; e++) {
      const int64_t first = expert_offsets[e], rows = expert_offsets[e + 1] - first;
      if (rows > 0) matmul_forward(out + first * OC, inp + first * C, weight + e * stride, rows, C, OC);
    }
  }

  void expert_matmul_backward(float* dinp,                    // (pairs, C)
                              float* dweight,                 // E of (OC, C) added to
                              const float* dout,              // (pairs, OC)
                              const float* inp,               // (pairs, C)
                              const float* weight,            // E of (OC, C)
                              int64_t stride,                 // from one matrix to the next
                              const int64_t* expert_offsets,  // (E+1)
                              int64_t /*pairs*/, int64_t E, int64_t C, int64_t OC) {
    for (int64_t e = 0; e < E; e++) {
      const int64_t first = expert_offsets[e], rows = expert_offsets[e + 1] - first;
      if (rows == 0) continue;
      matmul_backward(dinp + first * C, dweight + e * stride, dout + first * OC, inp + first * C,
                      weight + e * stride, rows, C, OC);
    }
  }

  // The two products that they are.
  void matmul_dinp(float* dinp,          // (n, C)
                   const float* dout,    // (n, OC)
                   const float* weight,  // (OC, C)
                   int64_t n, int64_t C, int64_t OC, bool accumulate) {
    matmul(dinp, C, stored(dout, OC), stored(weight, C), n, C, OC, matmul_scratch_,
           {.accumulate = accumulate});
  }

  void matmul_dweight(float* dweight,     // (OC, C) added to
                      const float* dout,  // (n, OC)
                      const float* inp,   // (n, C)
                      int64_t n, int64_t C, int64_t OC) {
    matmul(dweight, C, transposed(dout, OC), stored(inp, C), OC, C, n, matmul_scratch_, {.accumulate = true});
  }

  // Products in fp32 whatever the precision of the others: routers decide in full precision.
  void matmul_fp32_forward(float* out,           // (n, OC)
                           const float* inp,     // (n, C)
                           const float* weight,  // (OC, C)
                           int64_t n, int64_t C, int64_t OC) {
    matmul(out, OC, stored(inp, C), transposed(weight, C), n, OC, C, fp32_scratch_);
  }

  void matmul_fp32_backward(float* dinp,          // (n, C)
                            float* dweight,       // (OC, C) added to
                            const float* dout,    // (n, OC)
                            const float* inp,     // (n, C)
                            const float* weight,  // (OC, C)
                            int64_t n, int64_t C, int64_t OC) {
    fp32_gradients(dinp, dweight, dout, inp, weight, n, C, OC, {.accumulate = false});
  }

  // The same, added to dinp.
  void matmul_fp32_add_backward(float* dinp,          // (n, C) added to
                                float* dweight,       // (OC, C) added to
                                const float* dout,    // (n, OC)
                                const float* inp,     // (n, C)
                                const float* weight,  // (OC, C)
                                int64_t n, int64_t C, int64_t OC) {
    fp32_gradients(dinp, dweight, dout, inp, weight, n, C, OC, {.accumulate = true});
  }

  // ------------------------------------------------------------------------------------------------
  // attention

  // RMSNorm of every query and key head, then RoPE at the token's position:
  // (a, b) -> (a cos - b sin, b cos + a sin) for the first and second half of a head.
  void qk_norm_rope_forward(float* q,                 // (n, H*hd)
                            float* k,                 // (n, KV*hd)
                            float* rstd,              // (n, H+KV)
                            const float* qkv,         // (n, (H+2KV)*hd)
                            const float* q_weight,    // (hd)
                            const float* k_weight,    // (hd)
                            const float* rope,        // (2, table_T, hd/2) cosines and sines
                            const int32_t* position,  // (n)
                            int64_t n, int64_t table_T, int64_t H, int64_t KV, int64_t hd, float eps) {
    const int64_t half = hd / 2;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float* cosine = rope + position[i] * half;
      const float* sine = cosine + table_T * half;
      for (int64_t head = 0; head < H + KV; head++) {
        const float* inp = qkv + (i * (H + 2 * KV) + head) * hd;
        const float* weight = head < H ? q_weight : k_weight;
        float* out = head < H ? q + (i * H + head) * hd : k + (i * KV + head - H) * hd;
        const float scale = rms_rstd(inp, hd, eps);
#pragma omp simd
        for (int64_t j = 0; j < half; j++) {
          const float a = inp[j] * scale * weight[j], b = inp[j + half] * scale * weight[j + half];
          out[j] = a * cosine[j] - b * sine[j];
          out[j + half] = b * cosine[j] + a * sine[j];
        }
        rstd[i * (H + KV) + head] = scale;
      }
    }
  }

  // Rotates back, then RMSNorm's gradient; v's part of dqkv is left as it is.
  void qk_norm_rope_backward(float* dqkv,              // (n, (H+2KV)*hd) q and k parts written
                             float* dq_weight,         // (hd) added to
                             float* dk_weight,         // (hd) added to
                             const float* dq,          // (n, H*hd)
                             const float* dk,          // (n, KV*hd)
                             const float* qkv,         // (n, (H+2KV)*hd)
                             const float* q_weight,    // (hd)
                             const float* k_weight,    // (hd)
                             const float* rstd,        // (n, H+KV)
                             const float* rope,        // (2, table_T, hd/2)
                             const int32_t* position,  // (n)
                             int64_t n, int64_t table_T, int64_t H, int64_t KV, int64_t hd) {
    const int64_t half = hd / 2;
    auto heads_backward = [=, this](float* dweight, const float* dheads, const float* weight, int64_t first,
                                    int64_t count) {
      if (count == 0) return;
      add_row_sums(dweight, n, hd, [=](int64_t i, float* sum) {
        const float* cosine = rope + position[i] * half;
        const float* sine = cosine + table_T * half;
        for (int64_t head = 0; head < count; head++) {
          const int64_t at = (i * (H + 2 * KV) + first + head) * hd;
          const float* dout = dheads + (i * count + head) * hd;
          float* dinp = dqkv + at;
#pragma omp simd
          for (int64_t j = 0; j < half; j++) {
            dinp[j] = dout[j] * cosine[j] + dout[j + half] * sine[j];
            dinp[j + half] = dout[j + half] * cosine[j] - dout[j] * sine[j];
          }
          const auto grad =
              rmsnorm_row_gradient(dinp, qkv + at, weight, rstd[i * (H + KV) + first + head], hd, sum);
#pragma omp simd
          for (int64_t j = 0; j < hd; j++) dinp[j] = grad(j);
        }
      });
    };
    heads_backward(dq_weight, dq, q_weight, 0, H);
    heads_backward(dk_weight, dk, k_weight, H, KV);
  }

  // Causal attention inside each sequence; see xmod/cpu_attention.h. A query sees the keys up to its own;
  // without own_key queries and keys are the same rows.
  void attention_forward(float* out,      // (nq, H*hd)
                         float* lse,      // (nq, H)
                         const float* q,  // (nq, H*hd)
                         const float* k,  // (nk, KV*hd)
                         const float* v,  // (nk, KV*hd), rows v_stride apart
                         int64_t v_stride,
                         const int32_t* own_key,     // (nq) row of k, or null
                         const int64_t* q_offsets,   // (B+1)
                         const int64_t* kv_offsets,  // (B+1)
                         int64_t /*nq*/, int64_t B, int64_t H, int64_t KV, int64_t hd) {
    xmod::attention_forward(out, lse, q, k, v, v_stride, own_key, q_offsets, kv_offsets, B, H, KV, hd,
                            attention_scratch_);
  }

  void attention_backward(float* dq,  // (nq, H*hd)
                          float* dk,  // (nk, KV*hd)
                          float* dv,  // (nk, KV*hd), rows dv_stride apart
                          int64_t dv_stride,
                          const float* dout,  // (nq, H*hd)
                          const float* q,     // (nq, H*hd)
                          const float* k,     // (nk, KV*hd)
                          const float* v,     // (nk, KV*hd), rows v_stride apart
                          int64_t v_stride,
                          const float* out,           // (nq, H*hd)
                          const float* lse,           // (nq, H)
                          const int32_t* own_key,     // (nq), or null
                          const int64_t* q_offsets,   // (B+1)
                          const int64_t* kv_offsets,  // (B+1)
                          int64_t /*nq*/, int64_t /*nk*/, int64_t B, int64_t H, int64_t KV, int64_t hd) {
    xmod::attention_backward(dq, dk, dv, dv_stride, dout, q, k, v, v_stride, out, lse, own_key, q_offsets,
                             kv_offsets, B, H, KV, hd, attention_scratch_);
  }

  // ------------------------------------------------------------------------------------------------
  // FFN activation: act = silu(gate) * up

  void swiglu_forward(float* act,            // (n, F)
                      const float* gate_up,  // (n, 2F) gate, then up
                      int64_t n, int64_t F) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float* gate = gate_up + i * 2 * F;
      const float* up = gate + F;
      for_each_vector(F, [&](auto at) {
        const Vector g = at.load(gate);
        at.store(act + i * F, g * sigmoid(g) * at.load(up));
      });
    }
  }

  void swiglu_backward(float* dgate_up,       // (n, 2F)
                       const float* dact,     // (n, F)
                       const float* gate_up,  // (n, 2F)
                       int64_t n, int64_t F) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float* gate = gate_up + i * 2 * F;
      const float* up = gate + F;
      float* dgate = dgate_up + i * 2 * F;
      float* dup = dgate + F;
      for_each_vector(F, [&](auto at) {
        const Vector g = at.load(gate), dout = at.load(dact + i * F), s = sigmoid(g);
        at.store(dup, dout * g * s);
        at.store(dgate, dout * at.load(up) * s * (1.0f + g * (1.0f - s)));
      });
    }
  }

  // ------------------------------------------------------------------------------------------------
  // loss

  void crossentropy_forward(float* losses,           // (n) -log p[target]
                            float* logits,           // (n, V) left as exp(logit - max)
                            const int32_t* targets,  // (n)
                            int64_t n, int64_t V) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) losses[i] = softmax_row(logits + i * V, targets[i], V).loss;
  }

  void crossentropy_forward_backward(float* losses,           // (n)
                                     float* logits,           // (n, V) in: logits; out: their gradient
                                     const int32_t* targets,  // (n)
                                     float dloss,             // gradient of each row's loss
                                     int64_t n, int64_t V) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      float* row = logits + i * V;
      const SoftmaxRow softmax = softmax_row(row, targets[i], V);
      losses[i] = softmax.loss;
      const float scale = dloss / softmax.sum;
#pragma omp simd
      for (int64_t v = 0; v < V; v++) row[v] *= scale;
      row[targets[i]] -= dloss;
    }
  }

  // ------------------------------------------------------------------------------------------------
  // sums over whole tensors, in double

  double mean(const float* inp,  // (n)
              int64_t n) {
    return sum(inp, n) / static_cast<double>(n);
  }

  double sum_of_squares(const float* inp,  // (n)
                        int64_t n) {
    constexpr int64_t kChunk = 1 << 14;
    const int64_t chunks = (n + kChunk - 1) / kChunk;
    std::vector<double> partial(static_cast<size_t>(chunks));
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
      partial[c] = sum_of_squares_double(inp + c * kChunk, std::min(kChunk, n - c * kChunk));
    }
    double total = 0;
    for (double p : partial) total += p;
    return total;
  }

  // ------------------------------------------------------------------------------------------------
  // optimizers (README.md, "Optimizer")

  void adamw_update(float* param,       // (n)
                    float* m,           // (n) first moment
                    float* v,           // (n) second moment
                    const float* grad,  // (n)
                    const AdamWStep& h, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const float g = grad[i] * h.grad_scale;
      m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
      v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
      const float update = (m[i] / h.correction1) / (std::sqrt(v[i] / h.correction2) + h.eps);
      param[i] = param[i] * (1 - h.lr * h.weight_decay) - h.lr * update;
    }
  }

  // Muon on `count` matrices of one shape; see xmod/cpu_muon.h.
  void muon_update(float* params,                    // matrices (rows, cols) at `offsets`
                   float* momentum,                  // matrices at `momentum_offsets`
                   const float* grads,               // at `offsets`
                   const int64_t* offsets,           // (count) on the host
                   const int64_t* momentum_offsets,  // (count) on the host
                   int64_t count, int64_t rows, int64_t cols, const MuonStep& h) {
    muon_.update(params, momentum, grads, offsets, momentum_offsets, count, rows, cols, h, matmul_scratch_);
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  static constexpr int64_t kProgramBytes = int64_t{6} << 20, kThreadBytes = int64_t{1} << 17;

  void fp32_gradients(float* dinp, float* dweight, const float* dout, const float* inp, const float* weight,
                      int64_t n, int64_t C, int64_t OC, const MatmulUpdate& update_dinp) {
    matmul(dinp, C, stored(dout, OC), stored(weight, C), n, C, OC, fp32_scratch_, update_dinp);
    matmul(dweight, C, transposed(dout, OC), stored(inp, C), OC, C, n, fp32_scratch_, {.accumulate = true});
  }

  MatmulScratch matmul_scratch_;  // of the chosen precision and instructions
  MatmulScratch fp32_scratch_;
  AttentionScratch attention_scratch_;
  AlignedFloats row_values_;
  CpuMuon muon_;
};

}  // namespace xmod

#ifndef TESTING
#include "xmod/commands.h"
#include "xmod/spin_briefly.h"

int main(int argc, char** argv) {
  xmod::spin_briefly(argv);
  return xmod::run_commands<xmod::CpuBackend>(argc, argv);
}
#endif
