// Matrix multiplication in fp32 on the CPU: C = alpha A B, or C += alpha A B.
//
// Each element of C is one chain of fused multiply-adds per block of the reduction, k upwards, and the blocks
// depend on K alone. So a result is the same bit for bit whatever the number of threads, of other rows in
// the matrix, or the place of the row in it. Nothing is skipped: 0 * NaN is NaN here too.
//
// How it gets near the processor's peak:
//   B is packed once into panels of three vectors' width, laid out in the order the inner loop reads them;
//   a tile of rows x panel of C stays in registers while the inner loop runs down k: each step loads one row
//   of the panel and multiplies it by one broadcast element of each row of A; a panel of one K block stays in
//   the first-level cache while the tiles of a block of rows pass by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace xmod {

// A matrix in memory as a product reads it: element (i, j) is data[i * row_stride + j * col_stride].
struct Operand {
  const float* data;
  int64_t row_stride;
  int64_t col_stride;

  const float* at(int64_t i, int64_t j) const { return data + i * row_stride + j * col_stride; }
  Operand from(int64_t i, int64_t j) const { return {at(i, j), row_stride, col_stride}; }
  Operand transpose() const { return {data, col_stride, row_stride}; }
};

// Stored row by row, `stride` floats from one row to the next: used as it is, or as its transpose.
inline Operand stored(const float* data, int64_t stride) {
  return {data, stride, 1};
}
inline Operand transposed(const float* data, int64_t stride) {
  return {data, 1, stride};
}

// What happens to C: C = alpha A B, or with accumulate C += alpha A B.
struct MatmulUpdate {
  float alpha = 1.0f;
  bool accumulate = false;
};

// Memory on a cache line's border that grows on demand and forgets what it held.
class AlignedBuffer {
 public:
  float* at_least(int64_t floats) {
    if (floats > capacity_) {
      data_.reset();
      data_.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)));
      capacity_ = floats;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

// Working memory of products that run one after the other. Callers that run side by side need one each.
struct MatmulScratch {
  AlignedBuffer packed_b;
  std::vector<AlignedBuffer> packed_a;  // one per thread
};

namespace detail {

// Calls body with the constants 0 .. Count-1, so that arrays indexed by them can live in registers.
template <int Count, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }
  (std::make_integer_sequence<int, Count>{});
}

// `total` things dealt to `parts` neighbours as evenly as can be.
struct Shares {
  int64_t total;
  int64_t parts;
  int64_t begin(int64_t part) const { return part * total / parts; }
  int64_t end(int64_t part) const { return begin(part + 1); }
  int64_t size(int64_t part) const { return end(part) - begin(part); }
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The part of C that one call of a micro-kernel computes, within one block of the reduction.
struct CTile {
  float* data;
  int64_t stride;
  int64_t rows;
  int64_t cols;
  float alpha;
  bool overwrite;
};

// The register tile: kRows x (up to kVectors * Lanes) elements of C. It leaves registers for one row of the
// panel of B and for one element of A: 24 + 3 + 1 of the 32 of AVX-512 and NEON, 12 + 3 + 1 of 16 elsewhere.
template <int Lanes, int Rows>
struct MatmulKernel {
  static constexpr int kLanes = Lanes;
  static constexpr int kRows = Rows;
  static constexpr int kVectors = 3;
  typedef float Vector __attribute__((vector_size(Lanes * sizeof(float))));

  static Vector load(const float* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(float* to, const Vector& v) { std::memcpy(to, &v, sizeof v); }

  // C tile <- A rows (kRows, depth) times the panel (depth, Width * Lanes). A is read where it lies, its rows
  // `a_stride` floats apart, or (Packed) as a panel (depth, kRows). Where the tile hangs over C's lower
  // edge the last row is computed again and not stored: every row takes the same path.
  template <int Width, bool Packed>
  static void tile(const CTile& c, const float* a, int64_t a_stride, const float* panel, int64_t depth) {
    const float* row[kRows];
    for (int i = 0; i < kRows; i++) row[i] = a + (Packed ? i : std::min<int64_t>(i, c.rows - 1) * a_stride);

    Vector sum[kRows][Width] = {};
    for (int64_t k = 0; k < depth; k++) {
      Vector b[Width];
      unrolled<Width>([&](auto j) { b[j] = load(panel + (k * Width + j) * Lanes); });
      unrolled<kRows>([&](auto i) {
        const float a_ik = Packed ? a[k * kRows + i] : row[i][k];
        unrolled<Width>([&](auto j) { sum[i][j] += a_ik * b[j]; });
      });
    }
    unrolled<kRows>([&](auto i) {
      if (i < c.rows) write_row<Width>(c, c.data + i * c.stride, sum[i]);
    });
  }

  template <int Width>
  static void write_row(const CTile& c, float* to, const Vector (&sum)[Width]) {
    if (c.cols == Width * Lanes) {
      unrolled<Width>([&](auto j) {
        float* c_ij = to + j * Lanes;
        store(c_ij, c.overwrite ? c.alpha * sum[j] : load(c_ij) + c.alpha * sum[j]);
      });
      return;
    }
    float row[Width * Lanes];
    std::memcpy(row, sum, sizeof row);
    for (int64_t j = 0; j < c.cols; j++) to[j] = c.overwrite ? c.alpha * row[j] : to[j] + c.alpha * row[j];
  }
};

#if defined(__AVX512F__)
using NativeMatmulKernel = MatmulKernel<16, 8>;
#elif defined(__AVX__)
using NativeMatmulKernel = MatmulKernel<8, 4>;
#elif defined(__aarch64__)
using NativeMatmulKernel = MatmulKernel<4, 8>;
#else
using NativeMatmulKernel = MatmulKernel<4, 4>;
#endif

// Transposes a Lanes x Lanes tile in registers: step by step, the off-diagonal blocks of Step lanes trade
// places.
template <int Step, class Vector, int Lanes, int... J>
[[gnu::always_inline]] inline void trade_blocks(Vector (&tile)[Lanes], std::integer_sequence<int, J...>) {
  unrolled<Lanes>([&](auto i) {
    if constexpr ((i & Step) == 0) {
      const Vector top = tile[i], bottom = tile[i + Step];
      tile[i] = __builtin_shufflevector(top, bottom, (J & Step ? Lanes + J - Step : J)...);
      tile[i + Step] = __builtin_shufflevector(top, bottom, (J & Step ? Lanes + J : J + Step)...);
    }
  });
  if constexpr (Step > 1) trade_blocks<Step / 2>(tile, std::integer_sequence<int, J...>{});
}

// Copies a (depth, cols) matrix into a panel of Width floats a row, zeros beyond cols.
template <class Kernel, int Width>
void pack_panel(float* panel, Operand from, int64_t depth, int64_t cols) {
  constexpr int L = Kernel::kLanes;
  int64_t k = 0;
  if (cols == Width && from.col_stride == 1) {
    for (; k < depth; k++) std::memcpy(panel + k * Width, from.at(k, 0), Width * sizeof(float));
  }
  if constexpr (Width % L == 0) {
    if (cols == Width && from.row_stride == 1) {
      for (; k + L <= depth; k += L) {
        for (int j = 0; j < Width; j += L) {
          typename Kernel::Vector tile[L];
          unrolled<L>([&](auto i) { tile[i] = Kernel::load(from.at(k, j + i)); });
          trade_blocks<L / 2>(tile, std::make_integer_sequence<int, L>{});
          unrolled<L>([&](auto i) { Kernel::store(panel + (k + i) * Width + j, tile[i]); });
        }
      }
    }
  }
  for (; k < depth; k++) {
    for (int64_t j = 0; j < Width; j++) panel[k * Width + j] = j < cols ? *from.at(k, j) : 0.0f;
  }
}

// One product, cut up. B is packed slab by slab: some whole blocks of K times some columns.
template <class Kernel>
class Matmul {
 public:
  Matmul(float* c, int64_t c_stride, Operand a, Operand b, int64_t M, int64_t N, int64_t K,
         MatmulUpdate update, MatmulScratch& scratch)
      : c_(c),
        c_stride_(c_stride),
        a_(a),
        b_(b),
        M_(M),
        N_(N),
        update_(update),
        scratch_(scratch),
        k_blocks_{K, ceil_div(K, kMaxDepth)},
        pack_a_(a.col_stride != 1) {}

  void run(int threads) {
    const int64_t slab_cols = std::min(N_, kMaxSlabCols);
    const int64_t slab_blocks =
        std::min(k_blocks_.parts, std::max<int64_t>(1, kMaxSlabFloats / (kMaxDepth * slab_cols)));
    const int64_t slab_floats =
        slab_blocks * kMaxDepth * ceil_div(slab_cols, Kernel::kLanes) * Kernel::kLanes;
    packed_b_ = scratch_.packed_b.at_least(slab_floats);
    reserve_packed_a(threads);
    for (int64_t n = 0; n < N_; n += slab_cols) {
      for (int64_t block = 0; block < k_blocks_.parts; block += slab_blocks) {
        multiply_slab(
            make_slab(n, std::min(N_, n + slab_cols), block, std::min(k_blocks_.parts, block + slab_blocks)),
            threads);
      }
    }
  }

 private:
  static constexpr int64_t kPanelCols = Kernel::kVectors * Kernel::kLanes;
  static constexpr int64_t kMaxDepth = 256;  // of a K block
  static constexpr int64_t kMaxRows = 128;   // of a task: its rows of a K block fit the second-level cache
  static constexpr int64_t kMaxSlabCols = 4096;
  static constexpr int64_t kMaxSlabFloats = 4 << 20;

  // Columns [n_begin, n_end) of B, K blocks [block_begin, block_end). Its panels are two or three vectors
  // wide, never one (unless there is only one), because a narrow tile cannot hide the latency of its sums.
  struct Slab {
    int64_t n_begin, n_end, block_begin, block_end;
    Shares panels;  // of the slab's width in vectors
  };

  static Slab make_slab(int64_t n_begin, int64_t n_end, int64_t block_begin, int64_t block_end) {
    const int64_t vectors = ceil_div(n_end - n_begin, Kernel::kLanes);
    return {n_begin, n_end, block_begin, block_end, {vectors, ceil_div(vectors, Kernel::kVectors)}};
  }

  void reserve_packed_a(int threads) {
    if (!pack_a_) return;
    if (scratch_.packed_a.size() < size_t(threads)) scratch_.packed_a.resize(threads);
    for (AlignedBuffer& buffer : scratch_.packed_a) buffer.at_least(kMaxRows * kMaxDepth);
  }

  void multiply_slab(const Slab& slab, int threads) {
    const int64_t packs = (slab.block_end - slab.block_begin) * slab.panels.parts;
    const int64_t row_tiles = ceil_div(M_, Kernel::kRows);
    // Small tasks only where there would be too few for all threads.
    Shares rows{row_tiles, ceil_div(row_tiles, kMaxRows / Kernel::kRows)};
    Shares cols{slab.panels.parts, 1};
    const int64_t wanted = threads == 1 ? 1 : 4 * threads;
    while (rows.parts * cols.parts < wanted && rows.parts < row_tiles)
      rows.parts = std::min(2 * rows.parts, row_tiles);
    while (rows.parts * cols.parts < wanted && cols.parts < cols.total)
      cols.parts = std::min(2 * cols.parts, cols.total);

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < packs; i++)
        pack_b(slab, slab.block_begin + i / slab.panels.parts, i % slab.panels.parts);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < rows.parts * cols.parts; i++)
        multiply_task(slab, rows, i / cols.parts, cols, i % cols.parts);
    }
  }

  float* panel_of(const Slab& slab, int64_t block, int64_t panel) const {
    const int64_t above = k_blocks_.begin(block) - k_blocks_.begin(slab.block_begin);
    const int64_t left = slab.panels.begin(panel);
    return packed_b_ + (above * slab.panels.total + k_blocks_.size(block) * left) * Kernel::kLanes;
  }

  void pack_b(const Slab& slab, int64_t block, int64_t panel) const {
    const int64_t n = slab.n_begin + slab.panels.begin(panel) * Kernel::kLanes;
    const int64_t cols = std::min(slab.n_end - n, slab.panels.size(panel) * Kernel::kLanes);
    const Operand from = b_.from(k_blocks_.begin(block), n);
    float* to = panel_of(slab, block, panel);
    const int64_t depth = k_blocks_.size(block);
    switch (slab.panels.size(panel)) {
      case 1:
        return pack_panel<Kernel, 1 * Kernel::kLanes>(to, from, depth, cols);
      case 2:
        return pack_panel<Kernel, 2 * Kernel::kLanes>(to, from, depth, cols);
      case 3:
        return pack_panel<Kernel, 3 * Kernel::kLanes>(to, from, depth, cols);
    }
  }

  void multiply_task(const Slab& slab, Shares row_tiles, int64_t row_task, Shares panels,
                     int64_t panel_task) const {
    const int64_t m_begin = row_tiles.begin(row_task) * Kernel::kRows;
    const int64_t m_end = std::min(M_, row_tiles.end(row_task) * Kernel::kRows);
    for (int64_t block = slab.block_begin; block < slab.block_end; block++) {
      const float* a = pack_a_ ? pack_a(m_begin, m_end, block) : a_.at(m_begin, k_blocks_.begin(block));
      for (int64_t panel = panels.begin(panel_task); panel < panels.end(panel_task); panel++) {
        multiply_panel(slab, block, panel, a, m_begin, m_end);
      }
    }
  }

  // A's rows [m_begin, m_end) of one K block, as panels (depth, kRows) one after the other.
  const float* pack_a(int64_t m_begin, int64_t m_end, int64_t block) const {
    float* packed = scratch_.packed_a[thread()].at_least(0);
    const int64_t depth = k_blocks_.size(block);
    for (int64_t m = m_begin; m < m_end; m += Kernel::kRows) {
      const Operand columns = a_.from(m, k_blocks_.begin(block)).transpose();
      const int64_t rows = std::min<int64_t>(Kernel::kRows, m_end - m);
      pack_panel<Kernel, Kernel::kRows>(packed + (m - m_begin) * depth, columns, depth, rows);
    }
    return packed;
  }

  void multiply_panel(const Slab& slab, int64_t block, int64_t panel, const float* a, int64_t m_begin,
                      int64_t m_end) const {
    const int64_t depth = k_blocks_.size(block);
    const int64_t n = slab.n_begin + slab.panels.begin(panel) * Kernel::kLanes;
    const int64_t cols = std::min(slab.n_end - n, slab.panels.size(panel) * Kernel::kLanes);
    const float* b = panel_of(slab, block, panel);
    for (int64_t m = m_begin; m < m_end; m += Kernel::kRows) {
      const CTile c{c_ + m * c_stride_ + n,
                    c_stride_,
                    std::min<int64_t>(Kernel::kRows, m_end - m),
                    cols,
                    update_.alpha,
                    block == 0 && !update_.accumulate};
      const float* rows = a + (m - m_begin) * (pack_a_ ? depth : a_.row_stride);
      switch (slab.panels.size(panel)) {
        case 1:
          tile<1>(c, rows, b, depth);
          break;
        case 2:
          tile<2>(c, rows, b, depth);
          break;
        case 3:
          tile<3>(c, rows, b, depth);
          break;
      }
    }
  }

  template <int Width>
  void tile(const CTile& c, const float* a, const float* panel, int64_t depth) const {
    if (pack_a_) {
      Kernel::template tile<Width, true>(c, a, 0, panel, depth);
    } else {
      Kernel::template tile<Width, false>(c, a, a_.row_stride, panel, depth);
    }
  }

  static int thread() {
#ifdef _OPENMP
    return omp_get_num_threads() > 1 ? omp_get_thread_num() : 0;
#else
    return 0;
#endif
  }

  float* c_;
  int64_t c_stride_;
  Operand a_, b_;
  int64_t M_, N_;
  MatmulUpdate update_;
  MatmulScratch& scratch_;
  Shares k_blocks_;
  bool pack_a_;
  float* packed_b_ = nullptr;
};

// Threads worth waking for a product of that many multiply-adds; one inside a parallel region.
inline int matmul_threads(int64_t multiply_adds) {
#ifdef _OPENMP
  constexpr int64_t kTooFewToShare = 1 << 17;
  return omp_in_parallel() || multiply_adds < kTooFewToShare ? 1 : omp_get_max_threads();
#else
  (void)multiply_adds;
  return 1;
#endif
}

}  // namespace detail

// c (M, N), rows c_stride apart, = [c +] alpha * a (M, K) * b (K, N). c must not overlap a or b.
//
//   out = inp weight^T      matmul(out, OC, stored(inp, C), transposed(weight, C), n, OC, C, scratch)
//   dinp = dout weight      matmul(dinp, C, stored(dout, OC), stored(weight, C), n, C, OC, scratch)
//   dweight += dout^T inp   matmul(dweight, C, transposed(dout, OC), stored(inp, C), OC, C, n, scratch,
//   {.accumulate = true})
inline void matmul(float* c, int64_t c_stride, Operand a, Operand b, int64_t M, int64_t N, int64_t K,
                   MatmulScratch& scratch, MatmulUpdate update = {}) {
  if (M == 0 || N == 0) return;
  if (K == 0) {
    if (update.accumulate) return;
    for (int64_t m = 0; m < M; m++) std::fill_n(c + m * c_stride, N, 0.0f);
    return;
  }
  detail::Matmul<detail::NativeMatmulKernel>(c, c_stride, a, b, M, N, K, update, scratch)
      .run(detail::matmul_threads(M * N * K));
}

}  // namespace xmod
