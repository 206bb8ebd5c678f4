// train_xmodcu: X-MoD on an NVIDIA GPU. This file is the CUDA backend: every pass of train_xmod.cpp and
// xmod/cpu_experts.h under the same name, with the same arguments, in the same order; and main. What a pass
// computes is said there; here stands how it is launched. The kernels have rooms of their own, xmod/cuda_*.h.
//
// Element is the format of activations, and of the factors of matrix products: float or bf16. The residual
// stream, what decides the routing, parameters, gradients of parameters and all sums stay in fp32 or better.
// Where a tensor that is fp32 in any case meets activations, a pass has an overload for it (kMixed).
//
// Every sum runs in an order that depends on the shapes alone, and no kernel adds numbers by atomics: on one
// kind of GPU results repeat bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "xmod/cuda_attention.h"
#include "xmod/cuda_common.h"
#include "xmod/cuda_expert_matmul.h"
#include "xmod/cuda_experts.h"
#include "xmod/cuda_graph.h"
#include "xmod/cuda_loss.h"
#include "xmod/cuda_matmul.h"
#include "xmod/cuda_memory.h"
#include "xmod/cuda_optimizer.h"
#include "xmod/cuda_routing.h"
#include "xmod/cuda_rows.h"
#include "xmod/cuda_side_stream.h"
#include "xmod/cuda_sparse_memory.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"
#include "xmod/options.h"

namespace xmod {

template <class Element>
class CudaBackend {
 public:
  using floatX = Element;
  using SideStream = CudaSideStream;
  static constexpr bool kMixed = !std::is_same_v<floatX, float>;
  static constexpr Processor kProcessor = Processor::gpu;

  explicit CudaBackend(const MachineOptions& machine = {}) : matmul_(stream_.get()) {
    graph_.enabled = machine.cuda_graph;
    zero(counters_.reserve(SumScratch::kCounters), SumScratch::kCounters);
    sum_.reserve(1);
    partial_sums_.reserve(kMostSumBlocks);
  }

  static void use_device(int64_t local_rank) {
    int devices = 0;
    cuda_check(cudaGetDeviceCount(&devices));
    cuda_check(cudaSetDevice(static_cast<int>(local_rank % std::max(1, devices))));
  }

  static std::string description() {
    int device = 0;
    cudaDeviceProp properties;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    return std::string(properties.name) + (kMixed ? ", bf16" : ", fp32");
  }

  // ------------------------------------------------------------------------------------------------
  // memory

  static int64_t memory_bytes() {
    size_t free = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }

  // Of the processor, which only launches.
  static int threads() { return 1; }

  // Beside what a run allocates: cuBLAS's workspace. What the driver takes is not free any more.
  static int64_t program_bytes(int64_t /*threads*/) { return CudaMatmul::kWorkspace; }

  // Working memory of the passes over batches of B sequences, with the weights in the products' format.
  static int64_t pass_bytes(const ModelConfig& c, int64_t B, Use use, int64_t /*threads*/) {
    const int64_t n = B * c.seq_len;
    const int64_t sums = SumScratch::floats(std::max({c.dim, 2 * c.head_dim, c.experts, c.expert_dim}));
    const int64_t expert_counts = c.experts * (n / kExpertChunk + 2);
    int64_t bytes = static_cast<int64_t>((sums + expert_counts) * sizeof(float) + n * sizeof(int32_t));
    if (use == Use::training) bytes += static_cast<int64_t>(cuda_attention_workspace_bytes(n, c.heads));
    if constexpr (kMixed) {
      bytes += make_parameter_table(c, make_layer_plan(c)).total * static_cast<int64_t>(sizeof(floatX));
      if (has_experts(c.arch)) bytes += n * c.dim * static_cast<int64_t>(sizeof(float));
    }
    return bytes;
  }

  // Working memory of Muon: all matrices of one shape at a time.
  static int64_t muon_bytes(const MuonShapes& shapes, int64_t /*threads*/) {
    int64_t updates = 0, grams = 0, count = 0;
    for (const auto& [shape, offsets] : shapes) {
      const auto matrices = static_cast<int64_t>(offsets.size());
      const int64_t R = std::min(shape.first, shape.second);
      updates = std::max(updates, matrices * shape.first * shape.second);
      grams = std::max(grams, matrices * R * R);
      count = std::max(count, matrices);
    }
    return 2 * (updates + grams) * static_cast<int64_t>(sizeof(floatX)) +
           count * MuonMatrices::kMostParts * static_cast<int64_t>(sizeof(double));
  }
  // Of a matrix: five steps of two products of 2 R R L FLOPs and one of 2 R R R.
  static int64_t newton_schulz_flops(int64_t rows, int64_t cols) {
    const int64_t R = std::min(rows, cols), L = std::max(rows, cols);
    return 20 * R * R * L + 10 * R * R * R;
  }

  template <class T>
  T* allocate(int64_t n) {
    T* data = nullptr;
    cuda_check(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(n, 1)) * sizeof(T)));
    return data;
  }
  // n addresses, of which these parts have memory.
  template <class T>
  T* allocate_parts(int64_t n, const std::vector<NumberRange>& parts) {
    constexpr int64_t kWidth = sizeof(T);
    auto memory = CudaSparseMemory::make(n * kWidth, granules_of(parts, kWidth));
    if (!memory) {
      std::fprintf(stderr, "fp32 weights are not shared out: this driver has no virtual memory management\n");
      return allocate<T>(n);
    }
    sparse_memory_.push_back(std::move(memory));
    return static_cast<T*>(sparse_memory_.back()->data());
  }
  static int64_t bytes_of_parts(const std::vector<NumberRange>& parts) {
    int64_t bytes = 0;
    for (const NumberRange& run : granules_of(parts, sizeof(float))) bytes += run.size;
    return bytes;
  }
  template <class T>
  void release(T* data) {
    allocations_++;
    bf16_weights_.forget(data);
    const auto gone =
        std::erase_if(sparse_memory_, [&](const auto& memory) { return memory->data() == data; });
    if (gone == 0) cudaFree(data);
  }
  template <class T>
  void zero(T* data, int64_t n) {
    if (n > 0) cuda_check(cudaMemsetAsync(data, 0, static_cast<size_t>(n) * sizeof(T), stream_.get()));
  }
  void fill(float* data, float value, int64_t n) {
    each_number(stream_.get(), fill_kernel<float>, n, data, value, n);
  }
  template <class T>
  void copy(T* out, const T* inp, int64_t n) {
    transfer(out, inp, n, cudaMemcpyDeviceToDevice);
  }
  template <class T>
  void to_device(T* device, const T* host, int64_t n) {
    transfer(device, host, n, cudaMemcpyHostToDevice);
  }
  template <class T>
  void to_host(T* host, const T* device, int64_t n) {
    transfer(host, device, n, cudaMemcpyDeviceToHost);
    cuda_check(cudaStreamSynchronize(stream_.get()));
  }

  // ------------------------------------------------------------------------------------------------
  // whole steps

  template <class Work>
  void repeat(const void* owner, int64_t B, int64_t T, float scale, Work work) {
    graph_.run({owner, B, T, scale}, allocations_, stream_.get(), work);
  }

  // Of a step's work: sets a mark behind what has been launched; says whether the GPU has come there.
  void mark(int64_t i) {
    while (static_cast<int64_t>(marks_.size()) <= i) marks_.push_back(std::make_unique<CudaMark>());
    marks_[static_cast<size_t>(i)]->set(stream_.get());
  }
  bool passed(int64_t i) const { return marks_[static_cast<size_t>(i)]->passed(); }

  void wait() { cuda_check(cudaStreamSynchronize(stream_.get())); }

  void use_graphs(bool use) { graph_.enabled = use; }
  int64_t graph_nodes() const { return graph_.nodes(); }

  // On which all passes run, one behind the other.
  cudaStream_t stream() const { return stream_.get(); }

  // ------------------------------------------------------------------------------------------------
  // index tables

  void fill_sequence(int32_t* out, int64_t n) { each_number(stream_.get(), fill_sequence_kernel, n, out, n); }

  void fill_positions(int32_t* position, const int64_t* offsets, const int32_t* start, int64_t B) {
    launch(fill_positions_kernel, grid(B), kRowThreads, 0, stream_.get(), position, offsets, start);
  }

  void gather_ints(int32_t* out, const int32_t* inp, const int32_t* row, int64_t n) {
    each_number(stream_.get(), gather_ints_kernel, n, out, inp, row, n);
  }

  void uniform_offsets(int64_t* out, int64_t B, int64_t rows) {
    each_number(stream_.get(), uniform_offsets_kernel, B + 1, out, B, rows);
  }

  // Computed on the host, once, so that every backend has the same bits.
  void rope_table(float* table, int64_t T, int64_t hd, double theta) {
    const int64_t half = hd / 2;
    std::vector<float> host(static_cast<size_t>(T * hd));
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j < half; j++) {
        const double angle = static_cast<double>(t) / std::pow(theta, 2.0 * j / hd);
        host[t * half + j] = static_cast<float>(std::cos(angle));
        host[(T + t) * half + j] = static_cast<float>(std::sin(angle));
      }
    }
    to_device(table, host.data(), T * hd);
  }

  // ------------------------------------------------------------------------------------------------
  // embedding

  void encoder_forward(float* out, const int32_t* tokens, const float* embed, int64_t n, int64_t d) {
    gather(out, embed, tokens, n, d);
  }

  void encoder_backward(float* dembed, const float* dout, const int32_t* tokens, int64_t n, int64_t /*V*/,
                        int64_t d) {
    if (n == 0) return;
    int32_t* order = order_.reserve(n);
    launch(token_order_kernel, grid(n, kRowThreads), kRowThreads, 0, stream_.get(), order, tokens, n);
    with_pack(
        d,
        [&](auto N) {
          const dim3 blocks(grid(n, kRowsOfBlock), grid(d, kWarp * N));
          launch(encoder_backward_kernel<N>, blocks, kRowThreads, 0, stream_.get(), dembed, dout, tokens,
                 order, n, d);
        },
        dembed, dout);
  }

  // ------------------------------------------------------------------------------------------------
  // RMSNorm, on its own and fused with what stands before it

  void rmsnorm_forward(floatX* out, float* rstd, const float* inp, const float* weight, int64_t n, int64_t d,
                       float eps) {
    rmsnorm_forward_of(StoredRows{inp}, out, rstd, weight, n, d, eps, inp);
  }

  void rmsnorm_backward(float* dinp, float* dweight, const floatX* dout, const float* inp,
                        const float* weight, const float* rstd, int64_t n, int64_t d) {
    rmsnorm_backward_to(WrittenGradient{dinp}, dweight, dout, inp, weight, rstd, n, d, dinp);
  }

  void rmsnorm_add_backward(float* dinp, float* dweight, const floatX* dout, const float* inp,
                            const float* weight, const float* rstd, int64_t n, int64_t d) {
    rmsnorm_backward_to(AddedGradient{dinp}, dweight, dout, inp, weight, rstd, n, d, dinp);
  }

  void gather_rmsnorm_forward(float* x, floatX* out, float* rstd, const float* stream, const float* weight,
                              const int32_t* row, int64_t n, int64_t d, float eps) {
    rmsnorm_forward_of(GatheredRows{x, stream, row}, out, rstd, weight, n, d, eps, x, stream);
  }

  void residual_rmsnorm_forward(float* h, floatX* out, float* rstd, const float* x, const float* delta,
                                const float* weight, int64_t n, int64_t d, float eps) {
    rmsnorm_forward_of(ResidualRows{h, x, delta}, out, rstd, weight, n, d, eps, h, x, delta);
  }

  void residual_rmsnorm_backward(float* dx, floatX* ddelta, float* dweight, const floatX* dout,
                                 const float* h, const float* weight, const float* rstd, int64_t n,
                                 int64_t d) {
    rmsnorm_backward_to(ResidualGradient<floatX>{dx, ddelta}, dweight, dout, h, weight, rstd, n, d, dx,
                        ddelta);
  }

  // ------------------------------------------------------------------------------------------------
  // routing

  void router_forward(float* score, const float* stream, const float* weight, int64_t n, int64_t d,
                      float eps) {
    scores_forward(score, nullptr, stream, weight, {}, n, d, eps);
  }

  void router_backward(float* dx, float* dweight, const float* dlogit, const float* x, const float* weight,
                       int64_t n, int64_t d, float eps) {
    with_pack(
        d,
        [&](auto N) {
          row_sums(stream_.get(), RouterBackward<N>{dx, dweight, dlogit, x, weight, d, eps}, n, d);
        },
        dx, x, weight);
  }

  void token_bias_forward(float* out, const float* score, const int32_t* times_selected, float gamma,
                          float expected, int64_t n) {
    each_number(stream_.get(), token_bias_kernel, n, out, score, TokenBias{times_selected, gamma, expected},
                n);
  }

  void select_topk(int32_t* row, float* kth, const float* u, int64_t B, int64_t T, int64_t C) {
    select_rows({row, nullptr, nullptr, nullptr, nullptr, nullptr}, nullptr, kth, u, B, T, C);
  }

  int64_t select_threshold(int32_t* row, int64_t* offsets, const float* u, const float* tau,
                           const int64_t* all_offsets, int64_t B) {
    launch(select_threshold_kernel, 1, kSelectThreads, 0, stream_.get(), row, offsets, u, tau, all_offsets,
           B);
    int64_t n = 0;
    to_host(&n, offsets + B, 1);
    return n;
  }

  void count_selected(float* router_logit, int32_t* times_selected, const float* score, const int32_t* row,
                      int64_t n) {
    const SelectedRows rows = {
        const_cast<int32_t*>(row), nullptr, router_logit, times_selected, nullptr, score};
    each_number(stream_.get(), count_selected_kernel, n, rows, n);
  }

  // In two launches.
  void route_topk(int32_t* row, int32_t* position, int64_t* offsets, float* router_logit, float* kth,
                  float* score, float* u, int32_t* times_selected, const float* stream, const float* weight,
                  const int32_t* all_position, float gamma, float expected, int64_t B, int64_t T, int64_t C,
                  int64_t d, float eps) {
    scores_forward(score, u, stream, weight, {times_selected, gamma, expected}, B * T, d, eps);
    select_rows({row, position, router_logit, times_selected, all_position, score}, offsets, kth, u, B, T, C);
  }

  void add_row_means(float* out, const float* inp, int64_t rows, int64_t columns) {
    each_number(stream_.get(), add_row_means_kernel, rows, out, inp, rows, columns);
  }

  void threshold_update(float* tau, const float* kth_sum, float scale, float rate, int64_t layers) {
    each_number(stream_.get(), threshold_update_kernel, layers, tau, kth_sum, scale, rate, layers);
  }

  // ------------------------------------------------------------------------------------------------
  // residual update

  void gated_scatter_forward(float* stream, const float* delta, const float* logit, const float* alpha,
                             const int32_t* row, int64_t n, int64_t d) {
    with_pack(
        d,
        [&](auto N) {
          each_row(stream_.get(), gated_scatter_forward_kernel<N>, n, stream, delta, logit, alpha, row, n, d);
        },
        stream, delta);
  }

  void gated_scatter_backward(floatX* ddelta, float* dlogit, float* dalpha, const float* dstream,
                              const float* delta, const float* logit, const float* alpha, const int32_t* row,
                              int64_t n, int64_t d) {
    if (!logit) return gather_as(ddelta, dstream, row, n, d);
    with_pack(
        d,
        [&](auto N) {
          const GatedScatterBackward<N, floatX> visit = {ddelta, dlogit, dalpha, dstream, delta,
                                                         logit,  alpha,  row,    d};
          row_sums(stream_.get(), visit, n, 1);
        },
        ddelta, dstream, delta);
  }

  void scatter_add(float* stream, const float* inp, const int32_t* row, int64_t n, int64_t d) {
    scatter_add_as(stream, inp, row, n, d);
  }
  void scatter_add(floatX* stream, const floatX* inp, const int32_t* row, int64_t n,
                   int64_t d) requires kMixed {
    scatter_add_as(stream, inp, row, n, d);
  }

  void scatter_rows(float* out, const float* inp, int64_t stride, const int32_t* row, int64_t n, int64_t d) {
    scatter_as(out, inp, stride, row, n, d);
  }
  void scatter_rows(floatX* out, const floatX* inp, int64_t stride, const int32_t* row, int64_t n,
                    int64_t d) requires kMixed {
    scatter_as(out, inp, stride, row, n, d);
  }

  void gather(float* out, const float* stream, const int32_t* row, int64_t n, int64_t d) {
    gather_as(out, stream, row, n, d);
  }
  void gather(floatX* out, const floatX* stream, const int32_t* row, int64_t n, int64_t d) requires kMixed {
    gather_as(out, stream, row, n, d);
  }

  // ------------------------------------------------------------------------------------------------
  // matrix products

  // The weights in these parts of params (n) are new: those of products are taken from them.
  void use_parameters(const float* params, int64_t n, const std::vector<NumberRange>& parts) {
    if constexpr (kMixed) {
      floatX* weights = product_weights(params, n);
      for (const NumberRange& part : parts) convert(weights + part.offset, params + part.offset, part.size);
    }
  }

  // (n) what products read in the place of params.
  floatX* product_weights(const float* params, int64_t n) requires kMixed {
    return bf16_weights_.copy_of(params, n);
  }

  void matmul_forward(floatX* out, const floatX* inp, const float* weight, int64_t n, int64_t C, int64_t OC) {
    forward_product(out, inp, weight, n, C, OC, 0);
  }
  void matmul_forward(float* out, const floatX* inp, const float* weight, int64_t n, int64_t C,
                      int64_t OC) requires kMixed {
    forward_product(out, inp, weight, n, C, OC, 0);
  }

  void matmul_add_forward(float* out, const floatX* inp, const float* weight, int64_t n, int64_t C,
                          int64_t OC) {
    forward_product(out, inp, weight, n, C, OC, 1);
  }

  void matmul_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp,
                       const float* weight, int64_t n, int64_t C, int64_t OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, false);
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }

  void matmul_add_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp,
                           const float* weight, int64_t n, int64_t C, int64_t OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, true);
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }

  void matmul_dinp(floatX* dinp, const floatX* dout, const float* weight, int64_t n, int64_t C, int64_t OC,
                   bool accumulate) {
    if (n == 0) return;
    matmul_(dinp, Factor<floatX>{dout}, Factor<floatX>{weight_factor(weight, OC * C)}, {n, C, OC}, 1,
            accumulate);
  }

  void matmul_dweight(float* dweight, const floatX* dout, const floatX* inp, int64_t n, int64_t C,
                      int64_t OC) {
    if (n == 0) return;
    matmul_(dweight, Factor<floatX>{dout, true}, Factor<floatX>{inp}, {OC, C, n}, 1, 1);
  }

  void expert_matmul_forward(floatX* out, const floatX* inp, const float* weight, int64_t stride,
                             const int64_t* expert_offsets, int64_t pairs, int64_t E, int64_t C, int64_t OC) {
    const floatX* matrices = weight_factor(weight, (E - 1) * stride + OC * C);
    cuda_expert_matmul_forward(out, inp, matrices, stride, expert_offsets, pairs, E, C, OC, stream_.get());
  }

  void expert_matmul_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp,
                              const float* weight, int64_t stride, const int64_t* expert_offsets,
                              int64_t pairs, int64_t E, int64_t C, int64_t OC) {
    const floatX* matrices = weight_factor(weight, (E - 1) * stride + OC * C);
    cuda_expert_matmul_backward(dinp, dweight, dout, inp, matrices, stride, expert_offsets, pairs, E, C, OC,
                                stream_.get());
  }

  void matmul_fp32_forward(float* out, const floatX* inp, const float* weight, int64_t n, int64_t C,
                           int64_t OC) {
    if (n == 0) return;
    matmul_(out, Factor<float>{widened(inp, n * C)}, Factor<float>{weight, true}, {n, OC, C});
  }

  void matmul_fp32_backward(floatX* dinp, float* dweight, const float* dout, const floatX* inp,
                            const float* weight, int64_t n, int64_t C, int64_t OC) {
    fp32_products(dinp, dweight, dout, inp, weight, n, C, OC, 0);
  }

  void matmul_fp32_add_backward(floatX* dinp, float* dweight, const float* dout, const floatX* inp,
                                const float* weight, int64_t n, int64_t C, int64_t OC) {
    fp32_products(dinp, dweight, dout, inp, weight, n, C, OC, 1);
  }

  // ------------------------------------------------------------------------------------------------
  // attention

  void qk_norm_rope_forward(floatX* q, floatX* k, float* rstd, const floatX* qkv, const float* q_weight,
                            const float* k_weight, const float* rope, const int32_t* position, int64_t n,
                            int64_t table_T, int64_t H, int64_t KV, int64_t hd, float eps) {
    const QkHeads heads = {H, KV, hd, q_weight, k_weight, rope, position, table_T};
    with_head(
        hd,
        [&](auto N, auto lanes) {
          if (n == 0) return;
          launch(qk_norm_rope_forward_kernel<N, lanes, floatX>, grid(n * (H + KV), kRowThreads / lanes),
                 kRowThreads, 0, stream_.get(), q, k, rstd, qkv, heads, n, eps);
        },
        q, k, qkv, q_weight, k_weight, rope);
  }

  void qk_norm_rope_backward(floatX* dqkv, float* dq_weight, float* dk_weight, const floatX* dq,
                             const floatX* dk, const floatX* qkv, const float* q_weight,
                             const float* k_weight, const float* rstd, const float* rope,
                             const int32_t* position, int64_t n, int64_t table_T, int64_t H, int64_t KV,
                             int64_t hd) {
    const QkHeads heads = {H, KV, hd, q_weight, k_weight, rope, position, table_T};
    with_head(
        hd,
        [&](auto N, auto lanes) {
          const QkNormRopeBackward<N, lanes, floatX> visit = {dqkv, dq_weight, dk_weight, dq,
                                                              dk,   qkv,       rstd,      heads};
          row_sums(stream_.get(), visit, n, 2 * hd);
        },
        dqkv, dq, dk, qkv, q_weight, k_weight, rope);
  }

  void attention_forward(floatX* out, float* lse, const floatX* q, const floatX* k, const floatX* v,
                         int64_t v_stride, const int32_t* own_key, const int64_t* q_offsets,
                         const int64_t* kv_offsets, int64_t nq, int64_t B, int64_t H, int64_t KV,
                         int64_t hd) {
    cuda_attention_forward(out, lse, q, k, v, v_stride, own_key, q_offsets, kv_offsets, nq, B, H, KV, hd,
                           stream_.get());
  }

  void attention_backward(floatX* dq, floatX* dk, floatX* dv, int64_t dv_stride, const floatX* dout,
                          const floatX* q, const floatX* k, const floatX* v, int64_t v_stride,
                          const floatX* out, const float* lse, const int32_t* own_key,
                          const int64_t* q_offsets, const int64_t* kv_offsets, int64_t nq, int64_t nk,
                          int64_t B, int64_t H, int64_t KV, int64_t hd) {
    cuda_attention_backward(dq, dk, dv, dv_stride, dout, q, k, v, v_stride, out, lse, own_key, q_offsets,
                            kv_offsets, nq, nk, B, H, KV, hd,
                            attention_.reserve(cuda_attention_workspace_bytes(nq, H)), stream_.get());
  }

  // ------------------------------------------------------------------------------------------------
  // FFN activation

  void swiglu_forward(floatX* act, const floatX* gate_up, int64_t n, int64_t F) {
    with_pack(
        F, [&](auto N) { each_row(stream_.get(), swiglu_forward_kernel<N, floatX>, n, act, gate_up, n, F); },
        act, gate_up);
  }

  void swiglu_backward(floatX* dgate_up, const floatX* dact, const floatX* gate_up, int64_t n, int64_t F) {
    with_pack(
        F,
        [&](auto N) {
          each_row(stream_.get(), swiglu_backward_kernel<N, floatX>, n, dgate_up, dact, gate_up, n, F);
        },
        dgate_up, dact, gate_up);
  }

  // ------------------------------------------------------------------------------------------------
  // loss

  // Leaves the logits as they were.
  void crossentropy_forward(float* losses, floatX* logits, const int32_t* targets, int64_t n, int64_t V) {
    crossentropy<false>(losses, logits, targets, 0, n, V);
  }

  void crossentropy_forward_backward(float* losses, floatX* logits, const int32_t* targets, float dloss,
                                     int64_t n, int64_t V) {
    crossentropy<true>(losses, logits, targets, dloss, n, V);
  }

  // ------------------------------------------------------------------------------------------------
  // sums over whole tensors, in double

  double mean(const float* inp, int64_t n) { return tensor_sum(inp, n, Value{}) / static_cast<double>(n); }

  double sum_of_squares(const float* inp, int64_t n) { return tensor_sum(inp, n, Square{}); }

  // ------------------------------------------------------------------------------------------------
  // optimizers

  void adamw_update(float* param, float* m, float* v, const float* grad, const AdamWStep& h, int64_t n) {
    each_number(stream_.get(), adamw_kernel, n, param, m, v, grad, h, n);
  }

  // As many matrices at a time as the scratch is to hold.
  void muon_update(float* params, float* momentum, const float* grads, const int64_t* offsets,
                   const int64_t* momentum_offsets, int64_t count, int64_t rows, int64_t cols,
                   const MuonStep& h) {
    constexpr int64_t kScratch = int64_t{1} << 25;  // numbers, of each of the two largest tensors
    const int64_t at_a_time = std::clamp<int64_t>(kScratch / (rows * cols), 1, count);
    int64_t* device_offsets = offsets_.reserve(2 * count);
    to_device(device_offsets, offsets, count);
    to_device(device_offsets + count, momentum_offsets, count);
    for (int64_t i = 0; i < count; i += at_a_time) {
      const MuonMatrices matrices = {device_offsets + i, device_offsets + count + i, rows * cols};
      muon_matrices(params, momentum, grads, matrices, std::min(at_a_time, count - i), rows, cols, h);
    }
  }

  // ------------------------------------------------------------------------------------------------
  // experts: grouped rows (from here on in the order of xmod/cpu_experts.h)

  // All on the device: the host goes on with the most pairs that there may be.
  int64_t group_by_expert(int32_t* row, int32_t* expert, int32_t* slot, int64_t* slot_offsets,
                          int64_t* expert_offsets, const uint8_t* chosen, int64_t n, int64_t E,
                          int64_t most_pairs) {
    if (most_pairs > 0)
      cuda_check(cudaMemsetAsync(row, 0xFF, static_cast<size_t>(most_pairs) * sizeof(*row), stream_.get()));
    const int64_t chunks = std::max<int64_t>(1, (n + kExpertChunk - 1) / kExpertChunk);
    int32_t* counts = counts_.reserve((chunks + 1) * E);
    const dim3 blocks(grid(E, kRowThreads), grid(chunks));
    launch(expert_counts_kernel, blocks, kRowThreads, 0, stream_.get(), counts, chosen, n, E);
    launch(expert_offsets_kernel, 1, kRowThreads, 0, stream_.get(), expert_offsets, counts,
           counts + chunks * E, chunks, E);
    launch(slot_offsets_kernel, 1, kSelectThreads, 0, stream_.get(), slot_offsets, chosen, n, E);
    launch(group_pairs_kernel, blocks, kRowThreads, 0, stream_.get(), row, expert, slot, slot_offsets, counts,
           chosen, n, E);
    return most_pairs;
  }

  void expert_weight_forward(floatX* out, const floatX* inp, const float* weight, const int32_t* row,
                             const int32_t* expert, int64_t pairs, int64_t E, int64_t width) {
    with_pack(
        width,
        [&](auto N) {
          each_row(stream_.get(), expert_weight_forward_kernel<N, floatX>, pairs, out, inp, weight, row,
                   expert, pairs, E, width);
        },
        out, inp);
  }

  void expert_weight_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp,
                              const float* weight, const int32_t* row, const int32_t* expert, int64_t pairs,
                              int64_t n, int64_t E, int64_t width) {
    zero(dweight, n * E);
    with_pack(
        width,
        [&](auto N) {
          each_row(stream_.get(), expert_weight_backward_kernel<N, floatX>, pairs, dinp, dweight, dout, inp,
                   weight, row, expert, pairs, E, width);
        },
        dinp, dout, inp);
  }

  void sum_pairs_add(float* out, const float* inp, const int32_t* slot, const int64_t* slot_offsets,
                     int64_t n, int64_t d) {
    sum_pairs_add_as(out, inp, slot, slot_offsets, n, d);
  }
  template <class Out>
  void sum_pairs_add(Out* out, const floatX* inp, const int32_t* slot, const int64_t* slot_offsets, int64_t n,
                     int64_t d) requires kMixed {
    sum_pairs_add_as(out, inp, slot, slot_offsets, n, d);
  }

  void add_expert_loads(float* loads, const int64_t* expert_offsets, int64_t E) {
    each_number(stream_.get(), add_expert_loads_kernel, E, loads, expert_offsets, E);
  }

  // ------------------------------------------------------------------------------------------------
  // MoE's router

  void moe_route_forward(uint8_t* chosen, float* weight, float* score, const float* bias, int64_t n,
                         int64_t E, int64_t k) {
    each_row(stream_.get(), moe_route_forward_kernel, n, chosen, weight, score, bias, n, E, k);
  }

  void moe_route_backward(float* dlogit, const float* dweight, const float* weight, const float* score,
                          const uint8_t* chosen, int64_t n, int64_t E) {
    each_row(stream_.get(), moe_route_backward_kernel, n, dlogit, dweight, weight, score, chosen, n, E);
  }

  void expert_bias_update(float* bias, const float* loads, float rate, int64_t E) {
    launch(expert_bias_update_kernel, 1, kRowThreads, 0, stream_.get(), bias, loads, rate, E);
  }

  // ------------------------------------------------------------------------------------------------
  // DECO's router

  void deco_route_forward(uint8_t* chosen, float* weight, float* entropy, const float* logit,
                          const float* scale, int64_t n, int64_t E) {
    each_row(stream_.get(), deco_route_forward_kernel, n, chosen, weight, entropy, logit, scale, n, E);
  }

  void deco_route_backward(float* dlogit, float* dscale, const float* dweight, const float* logit,
                           const float* scale, const float* lambda, float share, int64_t n, int64_t E) {
    row_sums(stream_.get(), DecoRouteBackward{dlogit, dscale, dweight, logit, scale, lambda, share, E}, n, E);
  }

  void entropy_weight_update(float* lambda, float factor, float least) {
    launch(entropy_weight_update_kernel, 1, 1, 0, stream_.get(), lambda, factor, least);
  }

  // ------------------------------------------------------------------------------------------------
  // DECO's activation

  void norm_silu_forward(floatX* act, float* rstd, const floatX* up, const float* mean, const float* weight,
                         const int32_t* row, int64_t pairs, int64_t width, float eps) {
    with_pack(
        width,
        [&](auto N) {
          each_row(stream_.get(), norm_silu_forward_kernel<N, floatX>, pairs, act, rstd, up, mean, weight,
                   row, pairs, width, eps);
        },
        act, up, weight);
  }

  void norm_silu_backward(floatX* dup, float* dpair_mean, float* dweight, const floatX* dact,
                          const floatX* up, const float* mean, const float* rstd, const float* weight,
                          const int32_t* row, int64_t pairs, int64_t width) {
    with_pack(
        width,
        [&](auto N) {
          const NormSiluBackward<N, floatX> visit = {dup,  dpair_mean, dweight, dact, up,
                                                     mean, rstd,       weight,  row,  width};
          row_sums(stream_.get(), visit, pairs, width);
        },
        dup, dact, up, weight);
  }

  // ------------------------------------------------------------------------------------------------
  // mean row of a matrix

  void column_mean(float* out, const float* inp, int64_t rows, int64_t d) {
    with_pack(
        d,
        [&](auto N) {
          row_sums(stream_.get(), ColumnMean<N>{out, inp, rows, d}, rows, d);
        },
        inp);
  }

  void column_mean_backward(float* dinp, const float* dout, int64_t rows, int64_t d) {
    with_pack(
        d,
        [&](auto N) {
          each_row(stream_.get(), column_mean_backward_kernel<N>, rows, dinp, dout,
                   1 / static_cast<float>(rows), rows, d);
        },
        dinp, dout);
  }

 private:
  static constexpr int64_t kRowsOfBlock = kRowThreads / kWarp;

  // ------------------------------------------------------------------------------------------------
  // launches

  static unsigned grid(int64_t n, int64_t of_block = 1) {
    return static_cast<unsigned>((n + of_block - 1) / of_block);
  }

  // A thread for each of n numbers.
  template <class... Parameters, class... Arguments>
  void each_number(LaunchStream stream, void (*kernel)(Parameters...), int64_t n, Arguments... arguments) {
    if (n > 0) launch(kernel, grid(n, kRowThreads), kRowThreads, 0, stream, arguments...);
  }

  // A warp for each of n rows.
  template <class... Parameters, class... Arguments>
  void each_row(LaunchStream stream, void (*kernel)(Parameters...), int64_t n, Arguments... arguments) {
    if (n > 0) launch(kernel, grid(n, kRowsOfBlock), kRowThreads, 0, stream, arguments...);
  }

  template <class Visit>
  void row_sums(LaunchStream stream, const Visit& visit, int64_t n, int64_t width) {
    if (n == 0) return;
    const SumScratch scratch = {row_sums_.reserve(SumScratch::floats(width)), counters_.reserve(0)};
    launch_row_sums(visit, scratch, n, width, stream);
  }

  template <class T>
  void transfer(T* to, const T* from, int64_t n, cudaMemcpyKind kind) {
    if (n > 0) cuda_check(cudaMemcpyAsync(to, from, static_cast<size_t>(n) * sizeof(T), kind, stream_.get()));
  }

  template <class Out, class Inp>
  void convert(Out* out, const Inp* inp, int64_t n) {
    with_pack(
        kPack,
        [&](auto N) {
          each_number(stream_.get(), convert_kernel<N, Out, Inp>, (n + N - 1) / N, out, inp, n);
        },
        out, inp);
  }

  // ------------------------------------------------------------------------------------------------
  // what passes have in common

  template <class Out, class Inp>
  void gather_as(Out* out, const Inp* inp, const int32_t* row, int64_t n, int64_t d) {
    with_pack(
        d, [&](auto N) { each_row(stream_.get(), gather_kernel<N, Out, Inp>, n, out, inp, row, n, d); }, out,
        inp);
  }

  template <class T>
  void scatter_as(T* out, const T* inp, int64_t stride, const int32_t* row, int64_t n, int64_t d) {
    // Every row of inp has to begin where a pack may.
    with_pack(
        stride % kPack == 0 ? d : 1,
        [&](auto N) { each_row(stream_.get(), scatter_kernel<N, T>, n, out, inp, stride, row, n, d); }, out,
        inp);
  }

  template <class T>
  void scatter_add_as(T* stream, const T* inp, const int32_t* row, int64_t n, int64_t d) {
    with_pack(
        d, [&](auto N) { each_row(stream_.get(), scatter_add_kernel<N, T>, n, stream, inp, row, n, d); },
        stream, inp);
  }

  template <class Out, class Inp>
  void sum_pairs_add_as(Out* out, const Inp* inp, const int32_t* slot, const int64_t* slot_offsets, int64_t n,
                        int64_t d) {
    with_pack(
        d,
        [&](auto N) {
          each_row(stream_.get(), sum_pairs_add_kernel<N, Out, Inp>, n, out, inp, slot, slot_offsets, n, d);
        },
        out, inp);
  }

  template <class Rows, class... T>
  void rmsnorm_forward_of(const Rows& rows, floatX* out, float* rstd, const float* weight, int64_t n,
                          int64_t d, float eps, const T*... aligned) {
    with_pack(
        d,
        [&](auto N) {
          each_row(stream_.get(), rmsnorm_forward_kernel<N, floatX, Rows>, n, out, rstd, rows, weight, n, d,
                   eps);
        },
        out, weight, aligned...);
  }

  template <class Write, class... T>
  void rmsnorm_backward_to(const Write& write, float* dweight, const floatX* dout, const float* inp,
                           const float* weight, const float* rstd, int64_t n, int64_t d,
                           const T*... aligned) {
    with_pack(
        d,
        [&](auto N) {
          const RmsnormBackward<N, floatX, Write> visit = {write, dweight, dout, inp, weight, rstd, d};
          row_sums(stream_.get(), visit, n, d);
        },
        dout, inp, weight, aligned...);
  }

  // Lanes and packs for a head of hd numbers: calls run(size of packs, lanes).
  template <class Run, class... T>
  void with_head(int64_t hd, Run run, const T*... aligned) {
    with_pack(
        hd,
        [&](auto pack) {
          if constexpr (pack == kPack) {
            if (hd == 64) return run(std::integral_constant<int, 4>{}, std::integral_constant<int, 8>{});
            if (hd == 128) return run(std::integral_constant<int, 4>{}, std::integral_constant<int, 16>{});
          }
          run(std::integral_constant<int, 1>{}, std::integral_constant<int, kWarp>{});
        },
        aligned...);
  }

  void scores_forward(float* score, float* u, const float* stream, const float* weight, const TokenBias& bias,
                      int64_t n, int64_t d, float eps) {
    with_pack(
        d,
        [&](auto N) {
          each_row(stream_.get(), router_forward_kernel<N>, n, score, u, stream, weight, bias, n, d, eps);
        },
        stream, weight);
  }

  void select_rows(const SelectedRows& rows, int64_t* offsets, float* kth, const float* u, int64_t B,
                   int64_t T, int64_t C) {
    launch(select_topk_kernel, grid(B), threads_for(T, kSelectItems, kSelectThreads), 0, stream_.get(), rows,
           offsets, kth, u, T, C);
  }

  // Whole warps of at most `most` threads for n numbers, of which each thread takes `each` at a time.
  static unsigned threads_for(int64_t n, int64_t each, int64_t most) {
    return static_cast<unsigned>(
        std::clamp<int64_t>((n + each * kWarp - 1) / (each * kWarp) * kWarp, kWarp, most));
  }

  template <bool kGradient>
  void crossentropy(float* losses, floatX* logits, const int32_t* targets, float dloss, int64_t n,
                    int64_t V) {
    if (n == 0) return;
    with_pack(
        V,
        [&](auto N) {
          launch(crossentropy_kernel<N, kGradient, floatX>, grid(n), threads_for(V, N, kLossThreads), 0,
                 stream_.get(), losses, logits, targets, dloss, V);
        },
        logits);
  }

  template <class Term>
  double tensor_sum(const float* inp, int64_t n, Term term) {
    constexpr int64_t kEach = 8;  // numbers of a thread, where there are not many
    if (n == 0) return 0;
    const int64_t blocks = std::min<int64_t>(grid(n, kEach * kRowThreads), kMostSumBlocks);
    double* sum = sum_.reserve(1);
    launch(tensor_sum_kernel<Term>, grid(blocks), kRowThreads, 0, stream_.get(), sum,
           partial_sums_.reserve(kMostSumBlocks), counters_.reserve(0), inp, n, term);
    double result = 0;
    to_host(&result, sum, 1);
    return result;
  }

  // ------------------------------------------------------------------------------------------------
  // products

  // Activations in fp32.
  const float* widened(const floatX* values, int64_t n) {
    if constexpr (kMixed) {
      float* out = widened_.reserve(n);
      convert(out, values, n);
      return out;
    } else {
      return values;
    }
  }

  const floatX* weight_factor(const float* weight, int64_t n) {
    if constexpr (kMixed) {
      if (const floatX* copy = bf16_weights_.find(weight)) return copy;
      floatX* out = weight_.reserve(n);
      convert(out, weight, n);
      return out;
    } else {
      return weight;
    }
  }

  template <class Out>
  void forward_product(Out* out, const floatX* inp, const float* weight, int64_t n, int64_t C, int64_t OC,
                       float beta) {
    if (n == 0) return;
    matmul_(out, Factor<floatX>{inp}, Factor<floatX>{weight_factor(weight, OC * C), true}, {n, OC, C}, 1,
            beta);
  }

  // dinp leaves fp32 behind its sums.
  void fp32_products(floatX* dinp, float* dweight, const float* dout, const floatX* inp, const float* weight,
                     int64_t n, int64_t C, int64_t OC, float beta) {
    if (n == 0) return;
    if constexpr (kMixed) {
      float* sums = widened_.reserve(n * C);
      if (beta != 0) convert(sums, dinp, n * C);
      matmul_(sums, Factor<float>{dout}, Factor<float>{weight}, {n, C, OC}, 1, beta);
      convert(dinp, sums, n * C);
    } else {
      matmul_(dinp, Factor<float>{dout}, Factor<float>{weight}, {n, C, OC}, 1, beta);
    }
    matmul_(dweight, Factor<float>{dout, true}, Factor<float>{widened(inp, n * C)}, {OC, C, n}, 1, 1);
  }

  // ------------------------------------------------------------------------------------------------
  // Muon

  void muon_matrices(float* params, float* momentum, const float* grads, const MuonMatrices& matrices,
                     int64_t count, int64_t rows, int64_t cols, const MuonStep& h) {
    const dim3 blocks(grid(MuonMatrices::parts(rows * cols)), grid(count));
    double* squares = muon_squares_.reserve(count * MuonMatrices::kMostParts);
    floatX* x = muon_x_.reserve(count * rows * cols);
    launch(muon_momentum_kernel, blocks, kRowThreads, 0, stream_.get(), momentum, squares, grads, matrices,
           h);
    launch(muon_normalise_kernel<floatX>, blocks, kRowThreads, 0, stream_.get(), x, squares, momentum, grads,
           matrices, h);
    const floatX* orthogonal = newton_schulz(x, count, rows, cols);
    const float rate = h.lr * h.rms_match * std::sqrt(static_cast<float>(std::max(rows, cols)));
    launch(muon_update_kernel<floatX>, blocks, kRowThreads, 0, stream_.get(), params, orthogonal, matrices,
           rate, 1 - h.lr * h.weight_decay);
  }

  // The steps of xmod/cpu_muon.h on all matrices x (count, rows, cols) together, but one by one on X itself.
  // (Among the Gram matrices there is less to do; how far bf16 rounds those was not tried.) Returns the
  // result.
  const floatX* newton_schulz(floatX* x, int64_t count, int64_t rows, int64_t cols) {
    constexpr float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    const bool tall = rows > cols;
    const int64_t R = std::min(rows, cols);
    floatX* next = muon_next_.reserve(count * rows * cols);
    floatX* gram = muon_gram_.reserve(count * R * R);
    floatX* polynomial = muon_polynomial_.reserve(count * R * R);
    for (int step = 0; step < 5; step++) {
      matmul_(gram, Factor<floatX>{x, tall}, Factor<floatX>{x, !tall}, {R, R, std::max(rows, cols)}, 1, 0,
              count);
      launch(muon_polynomial_kernel<floatX>, dim3(grid(MuonMatrices::parts(R * R)), grid(count)), kRowThreads,
             0, stream_.get(), polynomial, gram, a, b, R);
      matmul_(polynomial, Factor<floatX>{gram}, Factor<floatX>{gram}, {R, R, R}, c, 1, count);
      const Factor<floatX> left = {tall ? x : polynomial}, right = {tall ? polynomial : x};
      matmul_(next, left, right, {rows, cols, R}, 1, 0, count);
      std::swap(x, next);
    }
    return x;
  }

  // ------------------------------------------------------------------------------------------------

  int64_t allocations_ = 0;  // changes with them: a graph knows where memory lies
  CudaStream stream_;
  std::vector<std::unique_ptr<CudaMark>> marks_;
  CudaMatmul matmul_;
  CudaGraph graph_;
  std::vector<std::unique_ptr<CudaSparseMemory>> sparse_memory_;
  Bf16Weights bf16_weights_{allocations_};
  CudaScratch<unsigned> counters_{allocations_};  // (SumScratch::kCounters) 0 between kernels
  CudaScratch<float> row_sums_{allocations_};
  CudaScratch<double> sum_{allocations_}, partial_sums_{allocations_};
  CudaScratch<int32_t> order_{allocations_}, counts_{allocations_};
  CudaScratch<int64_t> offsets_{allocations_};
  CudaScratch<floatX> weight_{allocations_};  // weights outside of the parameters, as factors
  CudaScratch<float> widened_{allocations_};
  CudaScratch<unsigned char> attention_{allocations_};
  CudaScratch<double> muon_squares_{allocations_};
  CudaScratch<floatX> muon_x_{allocations_}, muon_next_{allocations_}, muon_gram_{allocations_},
      muon_polynomial_{allocations_};
};

}  // namespace xmod

#ifndef TESTING
#include "xmod/commands.h"

int main(int argc, char** argv) {
  return xmod::run_commands<xmod::CudaBackend<float>, xmod::CudaBackend<xmod::bf16>>(argc, argv);
}
#endif
