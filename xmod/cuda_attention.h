// Attention on CUDA with grouped key/value heads, forward and backward, as in xmod/cpu_attention.h: sequences
// of any lengths, queries of all tokens or of some, causal. In bf16 the products run on tensor cores, and
// sums, softmax and lse are fp32; in fp32 everything is.
//
// FLASH ATTENTION. The scores of a sequence, one for each query row and key, would fill T x T floats, to be
// written, read, normalised and read again. They are never stored. A block owns the rows of one tile and
// walks over the keys, one tile after the other, in shared memory:
//
//                        keys of the sequence
//               +---------+---------+---------+---------+      of a row it keeps
//     query     | scores  | scores  | partly  |         |        m    the largest score so far
//     rows of   | of 32   | of the  | hidden: | not     |        sum  of exp(score - m)
//     a block   | rows a  | next    | behind  | looked  |        out  sum of exp(score - m) v
//               | warp    | tile    | the row | at      |
//               +---------+---------+---------+---------+      a new m scales both by exp(old m - new m)
//
// At the end out / sum is the attention, and lse = m + log(sum) is all that the backward pass needs to
// compute the weights anew. So memory is linear in T, and what a block reads of keys and values it uses for a
// hundred rows at once. A row is one query of one head; the rows of all heads that share keys and values
// follow each other in a tile. While the warps work on a tile, cp.async brings the next one.
//
//   cuda_attention_tiles.h      tiles, the registers of a warp, the two products
//   cuda_attention_rows.h       sequences, heads, and which keys a query sees
//   cuda_attention_forward.h    the walk above
//   cuda_attention_backward.h   two walks: for dq over the keys, for dk and dv over the query rows
//
// Every sum has one owner and one order, whatever else stands in the batch: results are equal bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "xmod/cuda_attention_backward.h"
#include "xmod/cuda_attention_forward.h"
#include "xmod/error.h"

namespace xmod {

namespace cuda_attention {

// With larger heads a strip's sums would not fit a warp's registers.
inline constexpr int64_t kLargestHead = 128;

struct HeadCounts {
  int64_t H, KV, hd;
};

template <class HeadRows>
Heads<HeadRows> make_heads(const HeadCounts& heads, const HeadRows& rows) {
  constexpr uint64_t kTwoTo32 = uint64_t{1} << 32;
  const uint64_t group = static_cast<uint64_t>(heads.H / heads.KV);
  const float scale = 1.0f / std::sqrt(static_cast<float>(heads.hd));
  return {static_cast<int>(heads.H),
          static_cast<int>(heads.KV),
          static_cast<uint32_t>(group),
          static_cast<uint32_t>((kTwoTo32 + group - 1) / group),
          rows,
          scale,
          scale * kLog2E};
}

// A block finds a row's query and head in 32 bits (query_of).
inline void check_sizes(const HeadCounts& heads, int64_t nq) {
  const int64_t group = heads.H / heads.KV;
  if (heads.hd > kLargestHead) {
    fail("attention on CUDA: a head has ", heads.hd, " channels, at most ", kLargestHead,
         " are possible: choose a smaller --head-dim, or train without a GPU (./train_xmod)");
  }
  if (nq * group >= (int64_t{1} << 32) / group) {
    fail("attention on CUDA: ", nq, " tokens with ", group,
         " query heads a key/value head are too many: use a ", "smaller --batch-size");
  }
}

// call(width, rows): the width of tiles that hold a head, and how its rows lie.
template <class Call>
void for_head_size(int64_t hd, bool aligned, Call call) {
  using std::integral_constant;
  if (aligned && hd == 64) return call(integral_constant<int, 64>(), WholeRows<64>());
  if (aligned && hd == 128) return call(integral_constant<int, 128>(), WholeRows<128>());
  const AnyRows rows = {static_cast<int>(hd), aligned};
  if (hd <= 32) return call(integral_constant<int, 32>(), rows);
  if (hd <= 64) return call(integral_constant<int, 64>(), rows);
  call(integral_constant<int, 128>(), rows);
}

// Whether rows of hd elements, those of v and dv with the strides, begin at multiples of 16 bytes.
template <class Element, class... Buffers>
bool rows_are_aligned(int64_t hd, int64_t v_stride, int64_t dv_stride, const Buffers*... buffers) {
  const auto aligned = [](int64_t bytes) { return bytes % 16 == 0; };
  const int64_t size = sizeof(Element);
  return aligned(hd * size) && aligned(v_stride * size) && aligned(dv_stride * size) &&
         (aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(buffers))) && ...);
}

}  // namespace cuda_attention

// As attention_forward of xmod/cpu_attention.h; all pointers are the device's. nq: rows of q
template <class Element>
void cuda_attention_forward(Element* out,      // (nq, H, hd)
                            float* lse,        // (nq, H)
                            const Element* q,  // (nq, H, hd)
                            const Element* k,  // (nk, KV, hd)
                            const Element* v,  // (nk, KV, hd), rows v_stride apart
                            int64_t v_stride,
                            const int32_t* own_key,     // (nq) row of k, or null
                            const int64_t* q_offsets,   // (B+1)
                            const int64_t* kv_offsets,  // (B+1)
                            int64_t nq, int64_t B, int64_t H, int64_t KV, int64_t hd, LaunchStream stream) {
  using namespace cuda_attention;
  const HeadCounts counts = {H, KV, hd};
  check_sizes(counts, nq);
  if (nq == 0) return;
  const ForwardBuffers<Element> at = {out, lse, q, k, v, v_stride};
  const Sequences sequences = {own_key, q_offsets, kv_offsets, B};
  for_head_size(hd, rows_are_aligned<Element>(hd, v_stride, 0, out, q, k, v), [&](auto width, auto rows) {
    using Tiling = ForwardTiling<Element, width>;
    const int64_t tiles = most_tiles(nq * (H / KV), Tiling::kRows, B);
    launch(forward_kernel<Element, width, decltype(rows)>, static_cast<unsigned>(tiles * KV), kThreads,
           Tiling::kSharedBytes, stream, at, sequences, make_heads(counts, rows));
  });
}

// Of the workspace of cuda_attention_backward, which begins at a multiple of 16 bytes.
inline int64_t cuda_attention_workspace_bytes(int64_t nq, int64_t H) {
  return nq * H * static_cast<int64_t>(sizeof(cuda_attention::RowRecord));
}

// As attention_backward of xmod/cpu_attention.h; nq, nk: rows of q and of k
template <class Element>
void cuda_attention_backward(Element* dq,  // (nq, H, hd)
                             Element* dk,  // (nk, KV, hd)
                             Element* dv,  // (nk, KV, hd), rows dv_stride apart
                             int64_t dv_stride,
                             const Element* dout,  // (nq, H, hd)
                             const Element* q,     // (nq, H, hd)
                             const Element* k,     // (nk, KV, hd)
                             const Element* v,     // (nk, KV, hd), rows v_stride apart
                             int64_t v_stride,
                             const Element* out,         // (nq, H, hd)
                             const float* lse,           // (nq, H)
                             const int32_t* own_key,     // (nq) row of k, or null
                             const int64_t* q_offsets,   // (B+1)
                             const int64_t* kv_offsets,  // (B+1)
                             int64_t nq, int64_t nk, int64_t B, int64_t H, int64_t KV, int64_t hd,
                             void* workspace, LaunchStream stream) {
  using namespace cuda_attention;
  const HeadCounts counts = {H, KV, hd};
  check_sizes(counts, nq);
  const BackwardBuffers<Element> at = {dq, dk, dv,       dv_stride, dout, q,
                                       k,  v,  v_stride, out,       lse,  static_cast<RowRecord*>(workspace)};
  const Sequences sequences = {own_key, q_offsets, kv_offsets, B};
  const bool aligned = rows_are_aligned<Element>(hd, v_stride, dv_stride, dq, dk, dv, dout, q, k, v, out);
  for_head_size(hd, aligned, [&](auto width, auto rows) {
    using QueryTiling = QueryGradientTiling<Element, width>;
    using KeyTiling = KeyGradientTiling<Element, width>;
    const auto heads = make_heads(counts, rows);
    const int64_t query_tiles = most_tiles(nq * (H / KV), QueryTiling::kRows, B);
    const int64_t key_tiles = most_tiles(nk, KeyTiling::kKeys, B);
    if (nq > 0) {
      launch(query_gradient_kernel<Element, width, decltype(rows)>, static_cast<unsigned>(query_tiles * KV),
             kThreads, QueryTiling::kSharedBytes, stream, at, sequences, heads);
    }
    if (nk > 0) {
      launch(key_gradient_kernel<Element, width, decltype(rows)>, static_cast<unsigned>(key_tiles * KV),
             kThreads, KeyTiling::kSharedBytes, stream, at, sequences, heads);
    }
  });
}

}  // namespace xmod
