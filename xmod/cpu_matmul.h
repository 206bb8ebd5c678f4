// Matrix multiplication in fp32 on the CPU: C = A (alpha B), or C += A (alpha B).
//
// Each element of C is one chain of fused multiply-adds per block of the reduction, k upwards, and the blocks
// depend on K alone. So a result is the same bit for bit whatever the number of threads, of other rows in
// the matrix, or the place of the row in it. Nothing is skipped: 0 * NaN is NaN here too.
//
// How it gets near the processor's peak:
//   A tile of C, some rows x three vectors, stays in registers while the inner loop runs down k: each step
//   loads one row of a panel of B and multiplies it by one broadcast element of each row of A. B is packed
//   slab by slab into such panels, in the order the inner loop reads them. A is read where it lies if its
//   rows are contiguous along k, and packed block by block if not. Threads share nothing: each multiplies
//   rectangles of C by itself, from workspaces of its own.
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

// What happens to C: C = A (alpha B), or with accumulate C += A (alpha B).
struct MatmulUpdate {
  float alpha = 1.0f;
  bool accumulate = false;
};

namespace detail {

// How a product is cut up. A slab of B (one block of the reduction deep) and a block of A stay in the
// second-level cache, and the panels of the slab stream through the first.
constexpr int64_t kMaxDepth = 512;
constexpr int64_t kSlabCols = 768;
constexpr int64_t kBlockRows = 64;

struct alignas(64) MatmulWorkspace {
  float packed_a[kBlockRows * kMaxDepth];
  float packed_b[kMaxDepth * kSlabCols];
};

}  // namespace detail

// Working memory of products: a workspace for each thread, made when first needed. The threads of a parallel
// region may share a scratch that was reserved for all of them before; other callers that run side by side
// need one each.
class MatmulScratch {
 public:
  // Each is written by its thread first, so that it lies near it, and whole: what is planned is what is
  // taken.
  void reserve(int threads) {
    const int before = int(of_thread_.size());
    while (int(of_thread_.size()) < threads) of_thread_.emplace_back(new detail::MatmulWorkspace);
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (before < threads)
    for (int i = before; i < threads; i++)
      std::memset(of_thread_[i].get(), 0, sizeof(detail::MatmulWorkspace));
  }
  static int64_t bytes(int64_t threads) {
    return threads * static_cast<int64_t>(sizeof(detail::MatmulWorkspace));
  }
  detail::MatmulWorkspace& of_thread(int thread) {
    return *of_thread_[thread];
  }

 private:
  std::vector<std::unique_ptr<detail::MatmulWorkspace>> of_thread_;
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
  bool accumulate;
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

    prefetch(c);
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

  // Asks for the tile of C, so that it has arrived when the sums are ready.
  static void prefetch(const CTile& c) {
    for (int64_t i = 0; i < c.rows; i++) {
      for (int64_t j = 0; j < c.cols; j += Lanes) __builtin_prefetch(c.data + i * c.stride + j, 1);
    }
  }

  template <int Width>
  static void write_row(const CTile& c, float* to, const Vector (&sum)[Width]) {
    if (c.cols == Width * Lanes) {
      unrolled<Width>([&](auto j) {
        float* c_ij = to + j * Lanes;
        store(c_ij, c.accumulate ? load(c_ij) + sum[j] : sum[j]);
      });
      return;
    }
    float row[Width * Lanes];
    std::memcpy(row, sum, sizeof row);
    for (int64_t j = 0; j < c.cols; j++) to[j] = c.accumulate ? to[j] + row[j] : row[j];
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

// C (M, N) = [C +] A (M, K) * (alpha * B (K, N))
struct Product {
  float* c;
  int64_t c_stride;
  Operand a, b;
  int64_t M, N, K;
  MatmulUpdate update;

  Product part(int64_t m_begin, int64_t m_end, int64_t n_begin, int64_t n_end) const {
    return {c + m_begin * c_stride + n_begin,
            c_stride,
            a.from(m_begin, 0),
            b.from(0, n_begin),
            m_end - m_begin,
            n_end - n_begin,
            K,
            update};
  }
  // The terms k_begin .. k_end of the sum; all but the first add to what is there.
  Product terms(int64_t k_begin, int64_t k_end) const {
    return {c, c_stride, a.from(0, k_begin), b.from(k_begin, 0),
            M, N,        k_end - k_begin,    {update.alpha, update.accumulate || k_begin > 0}};
  }
};

// A product on one thread, slab of B by slab of B.
template <class Kernel>
class SlabProduct {
 public:
  static void run(const Product& p, MatmulWorkspace& workspace) {
    const Shares slabs{ceil_div(p.N, kLanes), ceil_div(p.N, kSlabCols)};
    const Shares blocks{p.K, ceil_div(p.K, kMaxDepth)};
    for (int64_t slab = 0; slab < slabs.parts; slab++) {
      const Product columns =
          p.part(0, p.M, slabs.begin(slab) * kLanes, std::min(p.N, slabs.end(slab) * kLanes));
      for (int64_t block = 0; block < blocks.parts; block++) {
        SlabProduct(columns.terms(blocks.begin(block), blocks.end(block)), workspace).multiply_slab();
      }
    }
  }

 private:
  static constexpr int kLanes = Kernel::kLanes;
  static constexpr int kRows = Kernel::kRows;

  SlabProduct(const Product& p, MatmulWorkspace& workspace)
      : p_(p),
        packed_a_(workspace.packed_a),
        packed_b_(workspace.packed_b),
        pack_a_(p.a.col_stride != 1),
        panels_{ceil_div(p.N, kLanes), ceil_div(ceil_div(p.N, kLanes), Kernel::kVectors)} {}

  void multiply_slab() {
    pack_b();
    for (int64_t m = 0; m < p_.M; m += kBlockRows) {
      const Product rows = p_.part(m, std::min(p_.M, m + kBlockRows), 0, p_.N);
      if (pack_a_) pack_a(rows);
      for (int64_t panel = 0; panel < panels_.parts; panel++) {
        with_width(panels_.size(panel), [&](auto width) {
          pack_a_ ? multiply_panel<width, true>(rows, panel) : multiply_panel<width, false>(rows, panel);
        });
      }
    }
  }

  // Calls body with the width of a panel, in vectors, as a constant.
  template <class Body>
  static void with_width(int64_t vectors, Body&& body) {
    if (vectors == 1) body(std::integral_constant<int, 1>{});
    if (vectors == 2) body(std::integral_constant<int, 2>{});
    if (vectors == 3) body(std::integral_constant<int, 3>{});
  }

  // Rows that are contiguous in memory are read in short stretches of k across all panels, along the rows.
  static int64_t stretch(const Operand& from, int64_t depth) { return from.col_stride == 1 ? 16 : depth; }

  void pack_b() {
    const int64_t step = stretch(p_.b, p_.K);
    for (int64_t k = 0; k < p_.K; k += step) {
      for (int64_t panel = 0; panel < panels_.parts; panel++) {
        const int64_t n = panels_.begin(panel) * kLanes;
        const int64_t cols = std::min(p_.N - n, panels_.size(panel) * kLanes);
        const int64_t depth = std::min(step, p_.K - k);
        float* to = packed_b_ + n * p_.K + k * panels_.size(panel) * kLanes;
        with_width(panels_.size(panel),
                   [&](auto width) { pack_panel<Kernel, width * kLanes>(to, p_.b.from(k, n), depth, cols); });
        scale(to, depth * panels_.size(panel) * kLanes);
      }
    }
  }

  // Alpha goes in here and not where C is written: there a compiler would be free to fuse it with the
  // addition in one copy of the code and not in another, and bits would depend on which one a row or a thread
  // meets.
  void scale(float* packed, int64_t count) const {
    if (p_.update.alpha == 1.0f) return;
    for (int64_t i = 0; i < count; i++) packed[i] *= p_.update.alpha;
  }

  // Panels (K, kRows), one for each kRows rows.
  void pack_a(const Product& rows) {
    const Operand columns = rows.a.transpose();
    const int64_t step = stretch(columns, p_.K);
    for (int64_t k = 0; k < p_.K; k += step) {
      for (int64_t m = 0; m < rows.M; m += kRows) {
        pack_panel<Kernel, kRows>(packed_a_ + m * p_.K + k * kRows, columns.from(k, m),
                                  std::min(step, p_.K - k), std::min<int64_t>(kRows, rows.M - m));
      }
    }
  }

  template <int Width, bool Packed>
  void multiply_panel(const Product& rows, int64_t panel) const {
    const int64_t n = panels_.begin(panel) * kLanes;
    const int64_t cols = std::min<int64_t>(p_.N - n, Width * kLanes);
    const float* b = packed_b_ + n * p_.K;
    for (int64_t m = 0; m < rows.M; m += kRows) {
      const CTile c{rows.c + m * rows.c_stride + n, rows.c_stride, std::min<int64_t>(kRows, rows.M - m), cols,
                    p_.update.accumulate};
      const float* a = Packed ? packed_a_ + m * p_.K : rows.a.at(m, 0);
      Kernel::template tile<Width, Packed>(c, a, rows.a.row_stride, b, p_.K);
    }
  }

  Product p_;
  float* packed_a_;
  float* packed_b_;
  bool pack_a_;
  // Of the slab's width in vectors: two or three each, never one (unless there is only one), because a narrow
  // tile has too few sums to hide their latency.
  Shares panels_;
};

inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// C cut into a grid of rectangles, each a product of its own.
struct Grid {
  Shares rows, cols;  // of C's rows and columns in register tiles
};

// The grid, with a rectangle for each thread, whose largest is done soonest: multiplying takes rows *
// cols, packing about 10 * (rows + cols). Tall ones are cut further, so that a thread that is held up does
// not hold up the others.
template <class Kernel>
Grid grid_for(int64_t M, int64_t N, int threads) {
  const int64_t row_tiles = ceil_div(M, Kernel::kRows), col_tiles = ceil_div(N, Kernel::kLanes);
  Grid best{{row_tiles, 1}, {col_tiles, 1}};
  int64_t best_cost = INT64_MAX;
  for (int64_t rows = 1; rows <= std::min<int64_t>(threads, row_tiles); rows++) {
    const int64_t cols = std::min(threads / rows, col_tiles);
    const int64_t m = ceil_div(row_tiles, rows) * Kernel::kRows,
                  n = ceil_div(col_tiles, cols) * Kernel::kLanes;
    const int64_t cost = m * n + 10 * (m + n);
    if (cost < best_cost) best_cost = cost, best.rows.parts = rows, best.cols.parts = cols;
  }
  if (threads > 1 && M / best.rows.parts >= 2048) best.rows.parts *= 4;
  return best;
}

template <class Kernel>
void multiply(const Product& p, int threads, MatmulScratch& scratch) {
  const Grid grid = grid_for<Kernel>(p.M, p.N, threads);
  const int caller = thread_number();  // of a parallel region around this call
  scratch.reserve(caller + threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < grid.rows.parts * grid.cols.parts; i++) {
    const int64_t row = i / grid.cols.parts, col = i % grid.cols.parts;
    const Product part =
        p.part(grid.rows.begin(row) * Kernel::kRows, std::min(p.M, grid.rows.end(row) * Kernel::kRows),
               grid.cols.begin(col) * Kernel::kLanes, std::min(p.N, grid.cols.end(col) * Kernel::kLanes));
    SlabProduct<Kernel>::run(part, scratch.of_thread(threads > 1 ? thread_number() : caller));
  }
}

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

// c (M, N), rows c_stride apart, = [c +] a (M, K) * (alpha * b (K, N)). c must not overlap a or b.
//
//   out = inp weight^T      matmul(out, OC, stored(inp, C), transposed(weight, C), n, OC, C, scratch)
//   dinp = dout weight      matmul(dinp, C, stored(dout, OC), stored(weight, C), n, C, OC, scratch)
//   dweight += dout^T inp   matmul(dweight, C, transposed(dout, OC), stored(inp, C), OC, C, n, scratch,
//                                  {.accumulate = true})
inline void matmul(float* c, int64_t c_stride, Operand a, Operand b, int64_t M, int64_t N, int64_t K,
                   MatmulScratch& scratch, MatmulUpdate update = {}) {
  if (M == 0 || N == 0) return;
  if (K == 0) {
    if (update.accumulate) return;
    for (int64_t m = 0; m < M; m++) std::fill_n(c + m * c_stride, N, 0.0f);
    return;
  }
  const detail::Product product{c, c_stride, a, b, M, N, K, update};
  detail::multiply<detail::NativeMatmulKernel>(product, detail::matmul_threads(M * N * K), scratch);
}

}  // namespace xmod
