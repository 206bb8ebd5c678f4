// The matrix product against a plain one in double precision, and the promises it makes about bits: no
// dependence on threads, on other rows or on the place of a row, nothing skipped, nothing written beside C.
// For every set of instructions that runs here, and for AMX on tiles in plain C++.
#include "xmod/cpu_matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "round_to_bf16.h"
#include "xmod/cpu_instructions.h"
#include "xmod/cpu_matmul_blocks.h"
#include "xmod/error.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace xmod::detail::emulated {
#include "xmod/cpu_matmul_kernels.h"
// behind it
#include "xmod/cpu_matmul_amx.h"

// The tile instructions of AMX in plain C++.
struct EmulatedTiles {
  inline static thread_local uint32_t tile[8][16][16];  // rows of 16 fp32 sums, or of 16 pairs of bf16

  static void configure() {}
  static void release() {}
  template <int Tile>
  static void zero() {
    std::memset(tile[Tile], 0, sizeof tile[Tile]);
  }
  template <int Tile>
  static void load(const void* from, int64_t stride) {
    for (int64_t row = 0; row < 16; row++)
      std::memcpy(tile[Tile][row], static_cast<const char*>(from) + row * stride, 64);
  }
  template <int Tile>
  static void store(void* to, int64_t stride) {
    for (int64_t row = 0; row < 16; row++)
      std::memcpy(static_cast<char*>(to) + row * stride, tile[Tile][row], 64);
  }
  static float low(uint32_t pair) { return std::bit_cast<float>(pair << 16); }
  static float high(uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }
  template <int C, int A, int B>
  static void multiply_add() {
    for (int m = 0; m < 16; m++) {
      for (int n = 0; n < 16; n++) {
        float sum = std::bit_cast<float>(tile[C][m][n]);
        for (int k = 0; k < 16; k++) {
          sum += low(tile[A][m][k]) * low(tile[B][k][n]);
          sum += high(tile[A][m][k]) * high(tile[B][k][n]);
        }
        tile[C][m][n] = std::bit_cast<uint32_t>(sum);
      }
    }
  }
};

const MatmulKernel kAmx = kernel_of<AmxTile<EmulatedTiles>>("amx emulated", always, always);
}  // namespace xmod::detail::emulated

namespace xmod {
namespace {

std::vector<const MatmulKernel*> kernels_to_test() {
  std::vector<const MatmulKernel*> kernels = {&detail::emulated::kAmx};
  for (const MatmulKernel& kernel : matmul_kernels()) {
    if (kernel.runs_by_name()) kernels.push_back(&kernel);
  }
  return kernels;
}

std::string kernel_name(const ::testing::TestParamInfo<const MatmulKernel*>& info) {
  std::string name =
      info.param->name + std::string(info.param->precision == Precision::fp32 ? "_fp32" : "_bf16");
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == ' '; }, '_');
  return name;
}

// Against all ways of dealing the blocks out one by one.
TEST(EvenBlock, IsTheLargestThatLeavesTheBusiestThreadHardlyMoreThanNeedBe) {
  const auto good = [](int64_t total, int64_t size, int64_t threads) {
    std::vector<int64_t> load(threads);
    for (int64_t at = 0, turn = 0; at < total; at += size, turn++)
      load[turn % threads] += std::min(size, total - at);
    const int64_t least = (total + threads - 1) / threads;
    return *std::max_element(load.begin(), load.end()) * 64 <= least * 65;
  };
  for (int64_t total = 1; total < 400; total++) {
    for (int64_t threads = 1; threads < 9; threads++) {
      const int64_t most = std::array{2, 5, 8, 10}[(total + threads) % 4];
      int64_t expected = most;
      while (!good(total, expected, threads)) expected--;
      EXPECT_EQ(detail::even_block(total, most, threads), expected)
          << total << " things, " << threads << " threads";
    }
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kSentinel = 12345.0f;

// Beside the edges of tiles: more rows than a block of A or two, wider than a panel or two, deeper than a
// block of the reduction or two.
const std::vector<int64_t> kRows = {1, 2, 11, 12, 13, 33, 65, 135};
const std::vector<int64_t> kCols = {1, 3, 16, 17, 47, 49, 97, 150};
const std::vector<int64_t> kDepths = {1, 2, 15, 33, 300, 513, 1100};

std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// An operand in memory of its own; its padding is NaN, so that reading it shows.
struct Matrix {
  int64_t rows, cols;
  bool is_transposed;
  int64_t stride;
  std::vector<float> data;

  Matrix(int64_t rows, int64_t cols, bool is_transposed, int64_t padding, uint32_t seed)
      : rows(rows),
        cols(cols),
        is_transposed(is_transposed),
        stride((is_transposed ? rows : cols) + padding) {
    const std::vector<float> values = random_values(rows * cols, seed);
    data.assign((is_transposed ? cols : rows) * stride, kNan);
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t j = 0; j < cols; j++) at(i, j) = values[i * cols + j];
    }
  }
  float& at(int64_t i, int64_t j) { return data[is_transposed ? j * stride + i : i * stride + j]; }
  float at(int64_t i, int64_t j) const { return data[is_transposed ? j * stride + i : i * stride + j]; }
  Operand operand() const {
    return is_transposed ? transposed(data.data(), stride) : stored(data.data(), stride);
  }
};

// C with sentinels before and after it and between its rows.
struct Guarded {
  static constexpr int64_t kGuard = 64;
  int64_t rows, cols, stride;
  std::vector<float> data;

  Guarded(int64_t rows, int64_t cols, int64_t padding, const std::vector<float>& values)
      : rows(rows), cols(cols), stride(cols + padding), data(rows * stride + 2 * kGuard, kSentinel) {
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t j = 0; j < cols; j++) at(i, j) = values[i * cols + j];
    }
  }
  float* c() { return data.data() + kGuard; }
  float& at(int64_t i, int64_t j) { return data[kGuard + i * stride + j]; }

  void expect_untouched_outside(const std::string& where) const {
    for (int64_t i = 0; i < int64_t(data.size()); i++) {
      const int64_t offset = i - kGuard;
      const bool inside = offset >= 0 && offset < rows * stride && offset % stride < cols;
      if (!inside) {
        ASSERT_EQ(data[i], kSentinel) << where << ": offset " << offset << " was written";
      }
    }
  }
};

// Bitwise, NaN included.
void expect_same_bits(const float* x, const float* y, int64_t count, const std::string& what) {
  EXPECT_EQ(std::memcmp(x, y, count * sizeof(float)), 0) << what;
}

class CpuMatmul : public ::testing::TestWithParam<const MatmulKernel*> {
 protected:
  MatmulScratch new_scratch() const { return MatmulScratch(*GetParam()); }

  // A factor as the kernel sees it.
  double factor(float value) const {
    return GetParam()->precision == Precision::bf16 ? round_to_bf16(value) : value;
  }

  std::vector<float> multiply(const Matrix& a, const Matrix& b) const {
    std::vector<float> c(a.rows * b.cols, kNan);
    MatmulScratch scratch = new_scratch();
    matmul(c.data(), b.cols, a.operand(), b.operand(), a.rows, b.cols, a.cols, scratch);
    return c;
  }

  void check_against_double(int64_t M, int64_t N, int64_t K, bool a_transposed, bool b_transposed,
                            float alpha, bool accumulate, MatmulScratch& scratch) const;
};

INSTANTIATE_TEST_SUITE_P(Kernels, CpuMatmul, ::testing::ValuesIn(kernels_to_test()), kernel_name);

void CpuMatmul::check_against_double(int64_t M, int64_t N, int64_t K, bool a_transposed, bool b_transposed,
                                     float alpha, bool accumulate, MatmulScratch& scratch) const {
  const std::string where = "M " + std::to_string(M) + " N " + std::to_string(N) + " K " + std::to_string(K) +
                            (a_transposed ? " A^T" : " A") + (b_transposed ? " B^T" : " B") + " alpha " +
                            std::to_string(alpha) + (accumulate ? " accumulate" : "");
  const Matrix a(M, K, a_transposed, M % 4, 1), b(K, N, b_transposed, N % 3, 2);
  const std::vector<float> before = accumulate ? random_values(M * N, 3) : std::vector<float>(M * N, kNan);
  Guarded c(M, N, K % 5, before);
  matmul(c.c(), c.stride, a.operand(), b.operand(), M, N, K, scratch, {alpha, accumulate});
  std::vector<double> row_of_b(N);
  std::vector<double> sums(M * N), magnitudes(M * N);
  for (int64_t k = 0; k < K; k++) {
    for (int64_t j = 0; j < N; j++) row_of_b[j] = factor(alpha * b.at(k, j));
    for (int64_t i = 0; i < M; i++) {
      const double a_ik = factor(a.at(i, k));
      for (int64_t j = 0; j < N; j++) {
        sums[i * N + j] += a_ik * row_of_b[j];
        magnitudes[i * N + j] += std::abs(a_ik * row_of_b[j]);
      }
    }
  }
  for (int64_t i = 0; i < M; i++) {
    for (int64_t j = 0; j < N; j++) {
      const double start = accumulate ? before[i * N + j] : 0.0;
      const double bound = 1e-6 * (magnitudes[i * N + j] + std::abs(start));
      ASSERT_NEAR(c.at(i, j), start + sums[i * N + j], bound) << where << " at " << i << ", " << j;
    }
  }
  c.expect_untouched_outside(where);
}

TEST_P(CpuMatmul, EqualsADoubleProductInEveryLayoutAndShape) {
  MatmulScratch scratch = new_scratch();  // one for all: it must not remember earlier shapes
  int64_t turn = 0;
  for (int64_t M : kRows) {
    for (int64_t N : kCols) {
      for (int64_t K : kDepths) {
        const int64_t layout = turn++ % 4;
        check_against_double(M, N, K, layout & 1, layout & 2, turn % 3 ? 1.0f : -0.75f, turn % 2, scratch);
      }
    }
  }
  for (int layout = 0; layout < 4; layout++) {
    for (bool accumulate : {false, true}) {
      for (float alpha : {1.0f, -2.5f}) {
        check_against_double(37, 77, 290, layout & 1, layout & 2, alpha, accumulate, scratch);
        check_against_double(144, 128, 384, layout & 1, layout & 2, alpha, accumulate, scratch);
      }
    }
  }
}

// More columns than two slabs of packed B hold.
TEST_P(CpuMatmul, EqualsADoubleProductWhereBIsPackedInSeveralSlabs) {
  MatmulScratch scratch = new_scratch();
  for (int layout = 0; layout < 4; layout++) {
    check_against_double(5, 2 * detail::kSlabCols + 65, 600, layout & 1, layout & 2, 1.0f, layout & 2,
                         scratch);
  }
}

// A's rows a multiple of 4 KiB apart, which are packed first, or its columns.
TEST_P(CpuMatmul, EqualsADoubleProductWhereRowsMeetInTheCache) {
  MatmulScratch scratch = new_scratch();
  for (int layout = 0; layout < 4; layout++) {
    const bool transposed = layout & 1;  // check_against_double pads A by M % 4
    check_against_double(transposed ? detail::kConflictStride : 40, 50,
                         transposed ? 40 : detail::kConflictStride, transposed, layout & 2, 1.0f, layout & 2,
                         scratch);
  }
}

#ifdef __linux__
// A copy that ends where memory ends: reading on is a fault.
class BeforeUnreadable {
 public:
  explicit BeforeUnreadable(const std::vector<float>& values) {
    const size_t page = sysconf(_SC_PAGESIZE), bytes = values.size() * sizeof(float);
    bytes_ = (bytes + page - 1) / page * page + page;
    memory_ =
        static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    EXPECT_EQ(mprotect(memory_ + bytes_ - page, page, PROT_NONE), 0);
    data_ = reinterpret_cast<float*>(memory_ + bytes_ - page - bytes);
    std::memcpy(data_, values.data(), bytes);
  }
  BeforeUnreadable(const BeforeUnreadable&) = delete;
  ~BeforeUnreadable() { munmap(memory_, bytes_); }
  float* data() { return data_; }

 private:
  size_t bytes_;
  char* memory_;
  float* data_;
};

TEST_P(CpuMatmul, ReadsNothingBehindItsFactors) {
  MatmulScratch scratch = new_scratch();
  for (int layout = 0; layout < 4; layout++) {
    for (int64_t M : {1, 12, 13, 32, 40}) {
      const Matrix a(M, 37, layout & 1, 0, 1), b(37, 41, layout & 2, 0, 2);
      BeforeUnreadable a_data(a.data), b_data(b.data);
      Operand left = a.operand(), right = b.operand();
      left.data = a_data.data();
      right.data = b_data.data();
      std::vector<float> c(M * 41);
      matmul(c.data(), 41, left, right, M, 41, 37, scratch);
      expect_same_bits(c.data(), multiply(a, b).data(), M * 41, "layout " + std::to_string(layout));
    }
  }
}
#endif

TEST_P(CpuMatmul, ReadsOperandsOfAnyStrides) {
  const Matrix wide_a(19, 3 * 40, false, 0, 1), wide_b(40, 2 * 50, false, 0, 2);
  Matrix a(19, 40, false, 0, 1), b(40, 50, false, 0, 2);
  for (int64_t i = 0; i < 19; i++) {
    for (int64_t k = 0; k < 40; k++) a.at(i, k) = wide_a.at(i, 3 * k);
  }
  for (int64_t k = 0; k < 40; k++) {
    for (int64_t j = 0; j < 50; j++) b.at(k, j) = wide_b.at(k, 2 * j);
  }
  std::vector<float> c(19 * 50, kNan);
  MatmulScratch scratch = new_scratch();
  matmul(c.data(), 50, {wide_a.data.data(), wide_a.stride, 3}, {wide_b.data.data(), wide_b.stride, 2}, 19, 50,
         40, scratch);
  expect_same_bits(c.data(), multiply(a, b).data(), 19 * 50, "every third and every second column");
}

TEST_P(CpuMatmul, LayoutDoesNotChangeABit) {
  const Matrix a(45, 700, false, 3, 1), b(700, 130, false, 5, 2);
  const Matrix at(45, 700, true, 1, 1), bt(700, 130, true, 2, 2);
  const std::vector<float> expected = multiply(a, b);
  expect_same_bits(multiply(at, b).data(), expected.data(), 45 * 130, "A^T B");
  expect_same_bits(multiply(a, bt).data(), expected.data(), 45 * 130, "A B^T");
  expect_same_bits(multiply(at, bt).data(), expected.data(), 45 * 130, "A^T B^T");
}

// K = 1 routing must equal a dense layer, and a batch its rows: a row's result is its own.
TEST_P(CpuMatmul, ARowDoesNotDependOnOtherRowsNorOnItsPlace) {
  struct Width {
    int64_t N, K;
  };
  const int64_t M = 261;
  MatmulScratch scratch = new_scratch();
  for (const MatmulUpdate& update : {MatmulUpdate{}, MatmulUpdate{0.3f, true}}) {
    for (bool a_transposed : {false, true}) {
      for (const auto& [N, K] :
           {Width{16, 600}, Width{47, 600}, Width{130, 600}, Width{47, detail::kConflictStride}}) {
        const Matrix a(M, K, a_transposed, 0, 1), b(K, N, true, 0, 2);
        const std::vector<float> before = random_values(M * N, 3);
        std::vector<float> all = before;
        matmul(all.data(), N, a.operand(), b.operand(), M, N, K, scratch, update);
        for (int64_t first : {0, 1, 5, 8, 63, 100, 255, 260}) {
          for (int64_t wanted : {1, 3, 8, 13}) {
            const int64_t rows = std::min(wanted, M - first);
            std::vector<float> some(&before[first * N], &before[first * N] + rows * N);
            matmul(some.data(), N, a.operand().from(first, 0), b.operand(), rows, N, K, scratch, update);
            expect_same_bits(some.data(), &all[first * N], rows * N,
                             "rows " + std::to_string(first) + " + " + std::to_string(rows));
          }
        }
      }
    }
  }
}

TEST_P(CpuMatmul, NanAndInfinityReachExactlyTheirRowAndColumn) {
  const int64_t M = 21, N = 53, K = 770;
  for (int layout = 0; layout < 4; layout++) {
    Matrix a(M, K, layout & 1, 2, 1), b(K, N, layout & 2, 2, 2);
    for (int64_t j = 0; j < N; j++) b.at(130, j) = 0.0f;
    for (int64_t i = 0; i < M; i++) a.at(i, 769) = 0.0f;
    a.at(20, 130) = kNan;  // times zero
    b.at(769, 52) = kInf;  // zero times it
    const std::vector<float> c = multiply(a, b);
    for (int64_t i = 0; i < M; i++) {
      for (int64_t j = 0; j < N; j++) {
        EXPECT_EQ(std::isnan(c[i * N + j]), i == 20 || j == 52)
            << "layout " << layout << " at " << i << ", " << j;
      }
    }
  }
  Matrix a(M, K, false, 0, 1), b(K, N, false, 0, 2);
  for (int64_t j = 0; j < N; j++) b.at(0, j) = 1.0f;
  a.at(3, 0) = -kInf;
  const std::vector<float> c = multiply(a, b);
  for (int64_t j = 0; j < N; j++) EXPECT_EQ(c[3 * N + j], -kInf);
}

TEST_P(CpuMatmul, AccumulatingKeepsANanThatWasThere) {
  const Matrix a(9, 20, false, 0, 1), b(20, 33, false, 0, 2);
  std::vector<float> c(9 * 33, 0.0f);
  c[8 * 33 + 32] = kNan;
  MatmulScratch scratch = new_scratch();
  matmul(c.data(), 33, a.operand(), b.operand(), 9, 33, 20, scratch, {.accumulate = true});
  for (int64_t i = 0; i < 9 * 33; i++) EXPECT_EQ(std::isnan(c[i]), i == 8 * 33 + 32) << i;
}

TEST_P(CpuMatmul, AnEmptyReductionGivesZeroOrLeavesCAsItWas) {
  MatmulScratch scratch = new_scratch();
  Guarded overwritten(3, 5, 2, std::vector<float>(15, kNan));
  matmul(overwritten.c(), 7, stored(nullptr, 0), stored(nullptr, 5), 3, 5, 0, scratch);
  Guarded kept(3, 5, 2, std::vector<float>(15, 4.0f));
  matmul(kept.c(), 7, stored(nullptr, 0), stored(nullptr, 5), 3, 5, 0, scratch, {.accumulate = true});
  for (int64_t i = 0; i < 3; i++) {
    for (int64_t j = 0; j < 5; j++) {
      EXPECT_EQ(overwritten.at(i, j), 0.0f);
      EXPECT_EQ(kept.at(i, j), 4.0f);
    }
  }
  overwritten.expect_untouched_outside("K = 0");
  matmul(nullptr, 5, stored(nullptr, 3), stored(nullptr, 5), 0, 5, 3, scratch);
  matmul(nullptr, 0, stored(nullptr, 3), stored(nullptr, 0), 4, 0, 3, scratch);
}

#ifdef _OPENMP
class Threads {
 public:
  explicit Threads(int count) : before_(omp_get_max_threads()) { omp_set_num_threads(count); }
  ~Threads() { omp_set_num_threads(before_); }

 private:
  int before_;
};

TEST_P(CpuMatmul, TheNumberOfThreadsDoesNotChangeABit) {
  struct Shape {
    int64_t M, N, K;
  };
  for (const Shape& s : {Shape{300, 130, 520}, Shape{20, 2000, 130}, Shape{130, 70, 3000}}) {
    for (int layout = 0; layout < 4; layout++) {
      const Matrix a(s.M, s.K, layout & 1, 0, 1), b(s.K, s.N, layout & 2, 0, 2);
      const std::vector<float> before = random_values(s.M * s.N, 3);
      std::vector<float> one;
      for (int threads : {1, 2, 3, 16}) {
        Threads scope(threads);
        std::vector<float> c = before;
        MatmulScratch scratch = new_scratch();
        matmul(c.data(), s.N, a.operand(), b.operand(), s.M, s.N, s.K, scratch, {0.3f, true});
        if (threads == 1) one = c;
        expect_same_bits(c.data(), one.data(), s.M * s.N, std::to_string(threads) + " threads");
      }
    }
  }
}

// The lower half has the bits of a plain product, the upper half is its mirror image.
TEST_P(CpuMatmul, ASymmetricProductIsThePlainOneMirrored) {
  for (int64_t R : {1, 5, 16, 33, 65, 130, 300}) {
    for (const bool is_transposed : {false, true}) {
      for (const MatmulUpdate& update : {MatmulUpdate{}, MatmulUpdate{0.3f, true}}) {
        const Matrix a(R, 2 * R + 3, is_transposed, 1, 1);
        std::vector<float> before = random_values(R * R, 3);
        for (int64_t i = 0; i < R; i++) {
          for (int64_t j = 0; j < i; j++) before[j * R + i] = before[i * R + j];
        }
        MatmulScratch scratch = new_scratch();
        std::vector<float> plain = before;
        matmul(plain.data(), R, a.operand(), a.operand().transpose(), R, R, a.cols, scratch, update);
        for (int threads : {1, 2, 16}) {
          Threads scope(threads);
          const std::string where = "R " + std::to_string(R) + ", " + std::to_string(threads) + " threads";
          Guarded c(R, R, 3, before);
          MatmulUpdate symmetric = update;
          symmetric.symmetric = true;
          matmul(c.c(), c.stride, a.operand(), a.operand().transpose(), R, R, a.cols, scratch, symmetric);
          for (int64_t i = 0; i < R; i++) {
            for (int64_t j = 0; j <= i; j++) {
              ASSERT_EQ(c.at(i, j), plain[i * R + j]) << where << ": " << i << ", " << j;
              ASSERT_EQ(c.at(j, i), c.at(i, j)) << where << ": " << j << ", " << i;
            }
          }
          c.expect_untouched_outside(where);
        }
      }
    }
  }
}

// The optimizer multiplies many small matrices at a time, one a thread.
TEST_P(CpuMatmul, RunsSeriallyInsideAParallelRegion) {
  const int64_t M = 128, N = 128, K = 384, count = 6;
  std::vector<std::vector<float>> results(count, std::vector<float>(M * N, kNan));
  const Matrix a(M, K, true, 0, 1), b(K, N, true, 0, 2);
  const std::vector<float> expected = multiply(a, b);
  Threads scope(3);
#pragma omp parallel
  {
    MatmulScratch scratch = new_scratch();
#pragma omp for
    for (int64_t i = 0; i < count; i++) {
      matmul(results[i].data(), N, a.operand(), b.operand(), M, N, K, scratch);
    }
  }
  for (const std::vector<float>& c : results) expect_same_bits(c.data(), expected.data(), M * N, "nested");
}
#endif

TEST(MatmulKernels, Avx2AndAvx512GiveTheSameBits) {
  std::vector<const MatmulKernel*> both;
  for (const MatmulKernel& kernel : matmul_kernels()) {
    if (std::string(kernel.name).starts_with("avx") && kernel.precision == Precision::fp32 &&
        kernel.runs_here())
      both.push_back(&kernel);
  }
  if (both.size() < 2) GTEST_SKIP() << "this processor has but one of them";
  const Matrix a(45, 700, false, 3, 1), b(700, 130, true, 5, 2);
  std::vector<std::vector<float>> results;
  for (const MatmulKernel* kernel : both) {
    MatmulScratch scratch(*kernel);
    results.emplace_back(45 * 130);
    matmul(results.back().data(), 130, a.operand(), b.operand(), 45, 130, 700, scratch);
  }
  expect_same_bits(results[0].data(), results[1].data(), 45 * 130, "avx512 against avx2");
}

TEST(MatmulKernels, TheChoiceIsTheFastestThatRunsHereAndNeverASlowOne) {
  const MatmulKernel& fp32 = choose_matmul_kernel(Precision::fp32);
  EXPECT_EQ(fp32.precision, Precision::fp32);
  EXPECT_TRUE(fp32.runs_here());
  for (const MatmulKernel& kernel : matmul_kernels()) {
    if (&kernel == &fp32) break;
    EXPECT_TRUE(kernel.precision != Precision::fp32 || !kernel.runs_here()) << kernel.name << " comes first";
  }
  try {
    EXPECT_FALSE(choose_matmul_kernel(Precision::bf16).slow);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("use fp32"), std::string::npos) << error.what();
  }
}

TEST(MatmulKernels, ANameThatThePrecisionLacksIsAUsageError) {
  for (const auto& [precision, name] :
       {std::pair{Precision::bf16, "avx2"}, std::pair{Precision::fp32, "sse"}}) {
    try {
      choose_matmul_kernel(precision, name);
      ADD_FAILURE() << name << " was found";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code, 2);
      EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace xmod
