// Causal attention on the GPU, as plain as it can be: a thread takes a query head, or a key/value head, and
// walks over all that it meets. Right for every size, and slow.
#pragma once

#include <cmath>
#include <cstdint>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/cuda_rows.h"

namespace xmod {

template <class Element>
struct AttentionRows {
  const Element* q;  // (nq, H*hd)
  const Element* k;  // (nk, KV*hd)
  const Element* v;  // (nk, KV*hd), rows v_stride apart
  int64_t v_stride;
  const int32_t* own_key;  // (nq), or null
  const int64_t *q_offsets, *kv_offsets;
  int64_t nq, nk, H, KV, hd;

  struct Keys {
    int64_t begin, end;
  };

  // That query i sees.
  __device__ Keys keys_of(int64_t i) const {
    int64_t b = 0;
    while (q_offsets[b + 1] <= i) b++;
    return {kv_offsets[b], own_key ? own_key[i] + 1 : kv_offsets[b] + i - q_offsets[b] + 1};
  }
  __device__ int64_t kv_head(int64_t head) const { return head / (H / KV); }
  __device__ const Element* query(int64_t i, int64_t head) const { return q + (i * H + head) * hd; }
  __device__ const Element* key(int64_t j, int64_t head) const { return k + (j * KV + kv_head(head)) * hd; }
  __device__ const Element* value(int64_t j, int64_t head) const {
    return v + j * v_stride + kv_head(head) * hd;
  }
  __device__ float product(const Element* a, const Element* b) const {
    float sum = 0;
    for (int64_t e = 0; e < hd; e++) sum += to_float(a[e]) * to_float(b[e]);
    return sum;
  }
  __device__ float score(int64_t i, int64_t j, int64_t head) const {
    return product(query(i, head), key(j, head)) / sqrtf(static_cast<float>(hd));
  }
};

template <class Element>
__global__ void attention_forward_kernel(Element* out, float* lse, AttentionRows<Element> rows) {
  const int64_t at = index_of_thread(), i = at / rows.H, head = at % rows.H;
  if (i >= rows.nq) return;
  const auto keys = rows.keys_of(i);
  float peak = -kInfinite, sum = 0;
  for (int64_t j = keys.begin; j < keys.end; j++) peak = fmaxf(peak, rows.score(i, j, head));
  for (int64_t j = keys.begin; j < keys.end; j++) sum += expf(rows.score(i, j, head) - peak);
  lse[at] = peak + logf(sum);
  for (int64_t e = 0; e < rows.hd; e++) {
    float total = 0;
    for (int64_t j = keys.begin; j < keys.end; j++)
      total += expf(rows.score(i, j, head) - peak) * to_float(rows.value(j, head)[e]);
    out[at * rows.hd + e] = from_float<Element>(total / sum);
  }
}

template <class Element>
struct AttentionGradients {
  const Element *dout, *out;  // (nq, H*hd)
  const float* lse;           // (nq, H)

  __device__ float probability(const AttentionRows<Element>& rows, int64_t i, int64_t j, int64_t head) const {
    return expf(rows.score(i, j, head) - lse[i * rows.H + head]);
  }
  // Of the score. The softmax over one key is constant: exactly 0, since Muon normalises every gradient.
  __device__ float dscore(const AttentionRows<Element>& rows, int64_t i, int64_t j, int64_t head) const {
    const auto keys = rows.keys_of(i);
    if (keys.end - keys.begin == 1) return 0;
    const int64_t at = (i * rows.H + head) * rows.hd;
    const float dp = rows.product(dout + at, rows.value(j, head)) - rows.product(dout + at, out + at);
    return probability(rows, i, j, head) * dp / sqrtf(static_cast<float>(rows.hd));
  }
};

template <class Element>
__global__ void attention_dq_kernel(Element* dq, AttentionRows<Element> rows, AttentionGradients<Element> d) {
  const int64_t at = index_of_thread(), i = at / rows.H, head = at % rows.H;
  if (i >= rows.nq) return;
  const auto keys = rows.keys_of(i);
  for (int64_t e = 0; e < rows.hd; e++) {
    float sum = 0;
    for (int64_t j = keys.begin; j < keys.end; j++)
      sum += d.dscore(rows, i, j, head) * to_float(rows.key(j, head)[e]);
    dq[at * rows.hd + e] = from_float<Element>(sum);
  }
}

template <class Element>
__global__ void attention_dkv_kernel(Element* dk, Element* dv, int64_t dv_stride, AttentionRows<Element> rows,
                                     AttentionGradients<Element> d) {
  const int64_t at = index_of_thread(), j = at / rows.KV, kv_head = at % rows.KV, group = rows.H / rows.KV;
  if (j >= rows.nk) return;
  for (int64_t e = 0; e < rows.hd; e++) {
    float dkey = 0, dvalue = 0;
    for (int64_t i = 0; i < rows.nq; i++) {
      const auto keys = rows.keys_of(i);
      if (j < keys.begin || j >= keys.end) continue;
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const int64_t place = (i * rows.H + head) * rows.hd + e;
        dkey += d.dscore(rows, i, j, head) * to_float(rows.q[place]);
        dvalue += d.probability(rows, i, j, head) * to_float(d.dout[place]);
      }
    }
    dk[at * rows.hd + e] = from_float<Element>(dkey);
    dv[j * dv_stride + kv_head * rows.hd + e] = from_float<Element>(dvalue);
  }
}

template <class Element>
void cuda_attention_forward(Element* out, float* lse, const Element* q, const Element* k, const Element* v,
                            int64_t v_stride, const int32_t* own_key, const int64_t* q_offsets,
                            const int64_t* kv_offsets, int64_t nq, int64_t nk, int64_t /*B*/, int64_t H,
                            int64_t KV, int64_t hd, cudaStream_t stream) {
  const AttentionRows<Element> rows = {q, k, v, v_stride, own_key, q_offsets, kv_offsets, nq, nk, H, KV, hd};
  if (nq == 0) return;
  launch(attention_forward_kernel<Element>, static_cast<unsigned>((nq * H + kWarp - 1) / kWarp), kWarp, 0,
         stream, out, lse, rows);
}

template <class Element>
void cuda_attention_backward(Element* dq, Element* dk, Element* dv, int64_t dv_stride, const Element* dout,
                             const Element* q, const Element* k, const Element* v, int64_t v_stride,
                             const Element* out, const float* lse, const int32_t* own_key,
                             const int64_t* q_offsets, const int64_t* kv_offsets, int64_t nq, int64_t nk,
                             int64_t /*B*/, int64_t H, int64_t KV, int64_t hd, cudaStream_t stream) {
  const AttentionRows<Element> rows = {q, k, v, v_stride, own_key, q_offsets, kv_offsets, nq, nk, H, KV, hd};
  const AttentionGradients<Element> gradients = {dout, out, lse};
  if (nq > 0) {
    launch(attention_dq_kernel<Element>, static_cast<unsigned>((nq * H + kWarp - 1) / kWarp), kWarp, 0,
           stream, dq, rows, gradients);
  }
  if (nk > 0) {
    launch(attention_dkv_kernel<Element>, static_cast<unsigned>((nk * KV + kWarp - 1) / kWarp), kWarp, 0,
           stream, dk, dv, dv_stride, rows, gradients);
  }
}

}  // namespace xmod
