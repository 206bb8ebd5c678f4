// The CUDA kernels that work row by row: embedding, RMSNorm on its own and fused with what stands before it,
// QK-norm and RoPE, the residual update, the FFN's activation. A warp takes a row; a lane takes packs of N
// neighbours. What each computes stands with the pass of the same name in train_xmod.cpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/cuda_sums.h"

namespace xmod {

// Of a grid whose warps take a row each.
__device__ inline int64_t row_of_warp() {
  return int64_t{blockIdx.x} * warps_of_block() + warp_of_block();
}

// Of a grid whose threads take a number each.
__device__ inline int64_t index_of_thread() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// Calls visit(j) for the packs of this lane in a row of d numbers.
template <int N, class Visit>
__device__ inline void for_each_pack(int64_t d, Visit visit) {
  for (int64_t j = lane_of_warp() * N; j < d; j += kWarp * N) visit(j);
}

template <int N>
__device__ inline float squares(const Pack<N>& x) {
  float total = 0;
#pragma unroll
  for (int k = 0; k < N; k++) total += x[k] * x[k];
  return total;
}

template <int N>
__device__ inline Pack<N> operator+(Pack<N> a, const Pack<N>& b) {
#pragma unroll
  for (int k = 0; k < N; k++) a[k] += b[k];
  return a;
}

__device__ inline float rms_rstd_of(float sum_of_squares, int64_t d, float eps) {
  return 1 / sqrtf(sum_of_squares / static_cast<float>(d) + eps);
}

__device__ inline float sigmoid_of(float s) {
  return 1 / (1 + expf(-s));
}

// ---------------------------------------------------------------------------------------------------
// numbers one by one

template <class T>
__global__ void fill_kernel(T* out, T value, int64_t n) {
  const int64_t i = index_of_thread();
  if (i < n) out[i] = value;
}

__global__ void fill_sequence_kernel(int32_t* out, int64_t n) {
  const int64_t i = index_of_thread();
  if (i < n) out[i] = static_cast<int32_t>(i);
}

__global__ void uniform_offsets_kernel(int64_t* out, int64_t B, int64_t rows) {
  const int64_t b = index_of_thread();
  if (b <= B) out[b] = b * rows;
}

// A block takes a sequence.
__global__ void fill_positions_kernel(int32_t* position, const int64_t* offsets, const int32_t* start) {
  const int64_t b = blockIdx.x, begin = offsets[b], end = offsets[b + 1];
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
    position[i] = static_cast<int32_t>(i - begin) + (start ? start[b] : 0);
}

__global__ void gather_ints_kernel(int32_t* out, const int32_t* inp, const int32_t* row, int64_t n) {
  const int64_t i = index_of_thread();
  if (i < n) out[i] = inp[row[i]];
}

// To another format; a thread takes a pack of N, the last one what is left.
template <int N, class Out, class Inp>
__global__ void convert_kernel(Out* out, const Inp* inp, int64_t n) {
  const int64_t at = index_of_thread() * N;
  if (at + N <= n) {
    store(out + at, load<N>(inp + at));
  } else {
    for (int64_t i = at; i < n; i++) out[i] = from_float<Out>(to_float(inp[i]));
  }
}

// ---------------------------------------------------------------------------------------------------
// rows from one place to another

// out[i] = inp[row[i]]
template <int N, class Out, class Inp>
__global__ void gather_kernel(Out* out, const Inp* inp, const int32_t* row, int64_t n, int64_t d) {
  const int64_t i = row_of_warp();
  if (i >= n || row[i] < 0) return;
  const Inp* from = inp + row[i] * d;
  for_each_pack<N>(d, [&](int64_t j) { store(out + i * d + j, load<N>(from + j)); });
}

// out[row[i]] = inp[i]
template <int N, class T>
__global__ void scatter_kernel(T* out, const T* inp, int64_t stride, const int32_t* row, int64_t n,
                               int64_t d) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  T* to = out + row[i] * d;
  for_each_pack<N>(d, [&](int64_t j) { store(to + j, load<N>(inp + i * stride + j)); });
}

// stream[row[i]] += inp[i]
template <int N, class T>
__global__ void scatter_add_kernel(T* stream, const T* inp, const int32_t* row, int64_t n, int64_t d) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  T* to = stream + row[i] * d;
  for_each_pack<N>(d, [&](int64_t j) { store(to + j, load<N>(to + j) + load<N>(inp + i * d + j)); });
}

// ---------------------------------------------------------------------------------------------------
// embedding's gradient

// order (n): the rows sorted by their token, those of one token in their order. Every row counts the rows
// that come before it: n^2 comparisons, less work than what else a batch of n tokens needs.
__global__ void __launch_bounds__(kRowThreads)
    token_order_kernel(int32_t* order, const int32_t* tokens, int64_t n) {
  __shared__ int32_t tile[kRowThreads];
  const int64_t i = index_of_thread();
  const int32_t mine = i < n ? tokens[i] : 0;
  int32_t rank = 0;
  for (int64_t begin = 0; begin < n; begin += kRowThreads) {
    const int64_t count = n - begin < kRowThreads ? n - begin : kRowThreads;
    if (threadIdx.x < count) tile[threadIdx.x] = tokens[begin + threadIdx.x];
    __syncthreads();
    for (int64_t k = 0; k < count; k++) rank += tile[k] < mine || (tile[k] == mine && begin + k < i);
    __syncthreads();
  }
  if (i < n) order[rank] = static_cast<int32_t>(i);
}

// dembed[token] += the sum of the token's rows of dout. A warp takes the columns blockIdx.y of one token,
// the first of whose rows it stands at.
template <int N>
__global__ void encoder_backward_kernel(float* dembed, const float* dout, const int32_t* tokens,
                                        const int32_t* order, int64_t n, int64_t d) {
  const int64_t first = row_of_warp();
  if (first >= n) return;
  const int64_t token = tokens[order[first]];
  if (first > 0 && tokens[order[first - 1]] == token) return;
  const int64_t j = (int64_t{blockIdx.y} * kWarp + lane_of_warp()) * N;
  if (j >= d) return;
  Pack<N> sum = load<N>(dembed + token * d + j);
  for (int64_t p = first; p < n && tokens[order[p]] == token; p++)
    sum = sum + load<N>(dout + order[p] * d + j);
  store(dembed + token * d + j, sum);
}

// ---------------------------------------------------------------------------------------------------
// RMSNorm

// Where rmsnorm_forward_kernel finds its rows: first() reads them, and stores what is to be kept; again()
// gives the same numbers.
struct StoredRows {
  const float* inp;  // (n, d)

  template <int N>
  __device__ Pack<N> first(int64_t i, int64_t j, int64_t d) const {
    return load<N>(inp + i * d + j);
  }
  template <int N>
  __device__ Pack<N> again(int64_t i, int64_t j, int64_t d) const {
    return first<N>(i, j, d);
  }
};

struct GatheredRows {
  float* x;             // (n, d) = stream[row]
  const float* stream;  // (B*T, d)
  const int32_t* row;   // (n)

  template <int N>
  __device__ Pack<N> first(int64_t i, int64_t j, int64_t d) const {
    const Pack<N> out = again<N>(i, j, d);
    store(x + i * d + j, out);
    return out;
  }
  template <int N>
  __device__ Pack<N> again(int64_t i, int64_t j, int64_t d) const {
    return load<N>(stream + row[i] * d + j);
  }
};

struct ResidualRows {
  float* h;            // (n, d) = x + delta; may be x
  const float* x;      // (n, d)
  const float* delta;  // (n, d)

  template <int N>
  __device__ Pack<N> first(int64_t i, int64_t j, int64_t d) const {
    const Pack<N> sum = load<N>(x + i * d + j) + load<N>(delta + i * d + j);
    store(h + i * d + j, sum);
    return sum;
  }
  template <int N>
  __device__ Pack<N> again(int64_t i, int64_t j, int64_t d) const {
    return load<N>(h + i * d + j);
  }
};

template <int N, class Element, class Rows>
__global__ void __launch_bounds__(kRowThreads)
    rmsnorm_forward_kernel(Element* out, float* rstd, Rows rows, const float* weight, int64_t n, int64_t d,
                           float eps) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  float sum = 0;
  for_each_pack<N>(d, [&](int64_t j) { sum += squares(rows.template first<N>(i, j, d)); });
  const float scale = rms_rstd_of(lanes_sum(sum), d, eps);
  for_each_pack<N>(d, [&](int64_t j) {
    Pack<N> x = rows.template again<N>(i, j, d);
    const Pack<N> w = load<N>(weight + j);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= scale * w[k];
    store(out + i * d + j, x);
  });
  if (lane_of_warp() == 0) rstd[i] = scale;
}

// What becomes of RMSNorm's gradient.
struct WrittenGradient {
  float* dinp;  // (n, d)

  template <int N>
  __device__ void operator()(int64_t at, const Pack<N>& gradient) const {
    store(dinp + at, gradient);
  }
};

struct AddedGradient {
  float* dinp;  // (n, d)

  template <int N>
  __device__ void operator()(int64_t at, const Pack<N>& gradient) const {
    store(dinp + at, load<N>(dinp + at) + gradient);
  }
};

template <class Element>
struct ResidualGradient {
  float* dx;        // (n, d) written
  Element* ddelta;  // (n, d) added to

  template <int N>
  __device__ void operator()(int64_t at, const Pack<N>& gradient) const {
    store(dx + at, gradient);
    store(ddelta + at, load<N>(ddelta + at) + gradient);
  }
};

template <int N, class Element, class Write>
struct RmsnormBackward {
  static constexpr int kSums = 1;

  Write write;
  float* dweight;       // (d) added to
  const Element* dout;  // (n, d)
  const float* inp;     // (n, d)
  const float* weight;  // (d)
  const float* rstd;    // (n)
  int64_t d;

  __device__ void row(int64_t i, float* sums) const {
    const float scale = rstd[i];
    float product = 0;
    for_each_pack<N>(d, [&](int64_t j) {
      const Pack<N> dy = load<N>(dout + i * d + j), x = load<N>(inp + i * d + j), w = load<N>(weight + j);
      Pack<N> sum = load<N>(sums + j);
#pragma unroll
      for (int k = 0; k < N; k++) {
        const float xhat = x[k] * scale;
        product += dy[k] * w[k] * xhat;
        sum[k] += dy[k] * xhat;
      }
      store(sums + j, sum);
    });
    const float shrink = lanes_sum(product) / static_cast<float>(d) * scale;
    for_each_pack<N>(d, [&](int64_t j) {
      const Pack<N> dy = load<N>(dout + i * d + j), x = load<N>(inp + i * d + j), w = load<N>(weight + j);
      Pack<N> gradient;
#pragma unroll
      for (int k = 0; k < N; k++) gradient[k] = (dy[k] * w[k] - x[k] * shrink) * scale;
      write(i * d + j, gradient);
    });
  }

  __device__ void add(int64_t j, float sum) const {
    dweight[j] += sum;
  }
};

// ---------------------------------------------------------------------------------------------------
// QK-norm and RoPE. kLanes lanes take a head, of which each has packs of N in both halves.

// The heads of a row of qkv that are normalised, and what belongs to them.
struct QkHeads {
  int64_t H, KV, hd;
  const float* q_weight;    // (hd)
  const float* k_weight;    // (hd)
  const float* rope;        // (2, table_T, hd/2)
  const int32_t* position;  // (n)
  int64_t table_T;

  __device__ int64_t count() const { return H + KV; }
  __device__ const float* weight(int64_t head) const { return head < H ? q_weight : k_weight; }
  // Of a (q or k) head among the heads of its kind, in rows of as many.
  template <class T>
  __device__ T* of_kind(T* q, T* k, int64_t i, int64_t head) const {
    return head < H ? q + (i * H + head) * hd : k + (i * KV + head - H) * hd;
  }
  __device__ int64_t in_qkv(int64_t i, int64_t head) const { return (i * (H + 2 * KV) + head) * hd; }
  __device__ const float* cosine(int64_t i) const { return rope + position[i] * (hd / 2); }
  __device__ const float* sine(int64_t i) const { return cosine(i) + table_T * (hd / 2); }
};

template <int N, int kLanes, class Element>
__global__ void __launch_bounds__(kRowThreads)
    qk_norm_rope_forward_kernel(Element* q, Element* k, float* rstd, const Element* qkv, QkHeads heads,
                                int64_t n, float eps) {
  const int64_t index = index_of_thread() / kLanes, half = heads.hd / 2;
  const bool valid = index < n * heads.count();  // lanes without a head stay: the sum is a whole warp's
  const int64_t i = valid ? index / heads.count() : 0, head = index - i * heads.count();
  const int64_t first = threadIdx.x % kLanes * N;
  const Element* inp = qkv + heads.in_qkv(i, head);
  float sum = 0;
  if (valid) {
    for (int64_t j = first; j < half; j += kLanes * N)
      sum += squares(load<N>(inp + j)) + squares(load<N>(inp + half + j));
  }
  const float scale = rms_rstd_of(lanes_sum<kLanes>(sum), heads.hd, eps);
  if (!valid) return;
  const float* weight = heads.weight(head);
  Element* out = heads.of_kind(q, k, i, head);
  for (int64_t j = first; j < half; j += kLanes * N) {
    Pack<N> a = load<N>(inp + j), b = load<N>(inp + half + j);
    const Pack<N> w_a = load<N>(weight + j), w_b = load<N>(weight + half + j);
    const Pack<N> cosine = load<N>(heads.cosine(i) + j), sine = load<N>(heads.sine(i) + j);
#pragma unroll
    for (int e = 0; e < N; e++) {
      const float x = a[e] * scale * w_a[e], y = b[e] * scale * w_b[e];
      a[e] = x * cosine[e] - y * sine[e];
      b[e] = y * cosine[e] + x * sine[e];
    }
    store(out + j, a);
    store(out + half + j, b);
  }
  if (first == 0) rstd[i * heads.count() + head] = scale;
}

// Sums over rows: the gradient of q_weight, then that of k_weight.
template <int N, int kLanes, class Element>
struct QkNormRopeBackward {
  static constexpr int kSums = kWarp / kLanes;  // heads that a warp works on at the same time

  Element* dqkv;       // (n, (H+2KV)*hd)
  float* dq_weight;    // (hd) added to, or null
  float* dk_weight;    // (hd) added to, or null
  const Element* dq;   // (n, H*hd)
  const Element* dk;   // (n, KV*hd)
  const Element* qkv;  // (n, (H+2KV)*hd)
  const float* rstd;   // (n, H+KV)
  QkHeads heads;

  __device__ void row(int64_t i, float* sums) const {
    const int64_t group = lane_of_warp() / kLanes;
    for (int64_t h = 0; h < heads.count(); h += kSums)
      head_backward(i, h + group, sums + group * 2 * heads.hd);
  }

  __device__ void add(int64_t j, float sum) const {
    float* dweight = j < heads.hd ? dq_weight : dk_weight;
    if (dweight) dweight[j % heads.hd] += sum;
  }

 private:
  __device__ void head_backward(int64_t i, int64_t head, float* sums) const {
    const int64_t half = heads.hd / 2, first = lane_of_warp() % kLanes * N;
    const bool valid = head < heads.count();
    const float scale = valid ? rstd[i * heads.count() + head] : 0;
    const Element* inp = qkv + heads.in_qkv(i, head);
    const Element* dout = heads.of_kind(dq, dk, i, head);
    const float* weight = heads.weight(head);
    float* sum_of_kind = sums + (head < heads.H ? 0 : heads.hd);
    float product = 0;
    for (int64_t j = first; valid && j < half; j += kLanes * N) {
      const Halves dy = rotated_back(dout, i, j), x = halves(inp, j), w = halves(weight, j);
      Halves sum = halves(sum_of_kind, j);
#pragma unroll
      for (int e = 0; e < N; e++) {
        const float a = x.a[e] * scale, b = x.b[e] * scale;
        product += dy.a[e] * w.a[e] * a + dy.b[e] * w.b[e] * b;
        sum.a[e] += dy.a[e] * a;
        sum.b[e] += dy.b[e] * b;
      }
      store(sum_of_kind + j, sum.a);
      store(sum_of_kind + half + j, sum.b);
    }
    const float shrink = lanes_sum<kLanes>(product) / static_cast<float>(heads.hd) * scale;
    for (int64_t j = first; valid && j < half; j += kLanes * N) {
      const Halves dy = rotated_back(dout, i, j), x = halves(inp, j), w = halves(weight, j);
      Halves gradient;
#pragma unroll
      for (int e = 0; e < N; e++) {
        gradient.a[e] = (dy.a[e] * w.a[e] - x.a[e] * shrink) * scale;
        gradient.b[e] = (dy.b[e] * w.b[e] - x.b[e] * shrink) * scale;
      }
      store(dqkv + heads.in_qkv(i, head) + j, gradient.a);
      store(dqkv + heads.in_qkv(i, head) + half + j, gradient.b);
    }
  }

  // Places j and hd/2 + j of a head.
  struct Halves {
    Pack<N> a, b;
  };

  template <class T>
  __device__ Halves halves(const T* head, int64_t j) const {
    return {load<N>(head + j), load<N>(head + heads.hd / 2 + j)};
  }

  __device__ Halves rotated_back(const Element* dout, int64_t i, int64_t j) const {
    const Halves dy = halves(dout, j);
    const Pack<N> cosine = load<N>(heads.cosine(i) + j), sine = load<N>(heads.sine(i) + j);
    Halves out;
#pragma unroll
    for (int e = 0; e < N; e++) {
      out.a[e] = dy.a[e] * cosine[e] + dy.b[e] * sine[e];
      out.b[e] = dy.b[e] * cosine[e] - dy.a[e] * sine[e];
    }
    return out;
  }
};

// ---------------------------------------------------------------------------------------------------
// residual update

template <int N>
__global__ void gated_scatter_forward_kernel(float* stream, const float* delta, const float* logit,
                                             const float* alpha, const int32_t* row, int64_t n, int64_t d) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  const float gate = logit ? (alpha ? *alpha : 1) * 2 * sigmoid_of(logit[i]) : 1;
  float* out = stream + row[i] * d;
  for_each_pack<N>(d, [&](int64_t j) {
    Pack<N> x = load<N>(out + j);
    const Pack<N> update = load<N>(delta + i * d + j);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] += gate * update[k];
    store(out + j, x);
  });
}

// Sums over rows: the gradient of alpha.
template <int N, class Element>
struct GatedScatterBackward {
  static constexpr int kSums = 1;

  Element* ddelta;       // (n, d)
  float* dlogit;         // (n)
  float* dalpha;         // (1) added to, or null
  const float* dstream;  // (B*T, d)
  const float* delta;    // (n, d)
  const float* logit;    // (n)
  const float* alpha;    // (1), or null
  const int32_t* rows;   // (n)
  int64_t d;

  __device__ void row(int64_t i, float* sums) const {
    const float sigma = sigmoid_of(logit[i]), a = alpha ? *alpha : 1, gate = a * 2 * sigma;
    const float* dout = dstream + rows[i] * d;
    float product = 0;
    for_each_pack<N>(d, [&](int64_t j) {
      Pack<N> dy = load<N>(dout + j);
      const Pack<N> update = load<N>(delta + i * d + j);
#pragma unroll
      for (int k = 0; k < N; k++) {
        product += dy[k] * update[k];
        dy[k] *= gate;
      }
      store(ddelta + i * d + j, dy);
    });
    product = lanes_sum(product);
    if (lane_of_warp() != 0) return;
    dlogit[i] = product * a * 2 * sigma * (1 - sigma);
    sums[0] += product * 2 * sigma;
  }

  __device__ void add(int64_t, float sum) const {
    if (dalpha) *dalpha += sum;
  }
};

// ---------------------------------------------------------------------------------------------------
// FFN activation

template <int N, class Element>
__global__ void swiglu_forward_kernel(Element* act, const Element* gate_up, int64_t n, int64_t F) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  const Element* gate = gate_up + i * 2 * F;
  for_each_pack<N>(F, [&](int64_t j) {
    Pack<N> g = load<N>(gate + j);
    const Pack<N> up = load<N>(gate + F + j);
#pragma unroll
    for (int k = 0; k < N; k++) g[k] *= sigmoid_of(g[k]) * up[k];
    store(act + i * F + j, g);
  });
}

template <int N, class Element>
__global__ void swiglu_backward_kernel(Element* dgate_up, const Element* dact, const Element* gate_up,
                                       int64_t n, int64_t F) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  const Element* gate = gate_up + i * 2 * F;
  Element* dgate = dgate_up + i * 2 * F;
  for_each_pack<N>(F, [&](int64_t j) {
    const Pack<N> g = load<N>(gate + j), up = load<N>(gate + F + j), dout = load<N>(dact + i * F + j);
    Pack<N> dg, dup;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float s = sigmoid_of(g[k]);
      dup[k] = dout[k] * g[k] * s;
      dg[k] = dout[k] * up[k] * s * (1 + g[k] * (1 - s));
    }
    store(dgate + j, dg);
    store(dgate + F + j, dup);
  });
}

}  // namespace xmod
