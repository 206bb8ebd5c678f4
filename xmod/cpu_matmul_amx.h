// The inner loop on AMX: eight tile registers of 16 rows of 64 bytes. A tile of A holds 16 rows x 32 terms in
// bf16, a tile of B 16 pairs of terms x 16 columns, a tile of C 16 x 16 fp32 sums; one instruction multiplies
// them. Four tiles of C, two of A and two of B use all eight registers:
//
//             B6   B7
//     A4      C0   C1        32 rows x 32 columns of C, 32 terms of the reduction a step
//     A5      C2   C3
//
// Tiles: the instructions (HardwareTiles), or the same in plain C++ (the tests, which so run everywhere).
// Included inside the namespace of the AMX kernel by cpu_matmul.cpp, behind cpu_matmul_kernels.h.

template <class Tiles>
struct AmxTile : Bf16<16, 32, 2> {
  static constexpr int kDepthStep = 32;
  static constexpr bool kTakesColumnsOfA = false;

  static void begin() { Tiles::configure(); }
  static void end() { Tiles::release(); }

  // As RegisterTile::tile; a holds kRows rows, zeros beyond those of C, and depth is a multiple of 16.
  template <int Width, bool ByColumns>
  static void tile(const CTile& c, const uint32_t* a, int64_t a_stride, const uint32_t* panel,
                   int64_t depth) {
    static_assert(!ByColumns);
    constexpr int64_t kElement = sizeof(uint32_t), kStride = Width * kLanes;  // of the panel and of `sums`
    prefetch(c);
    unrolled<4>([](auto t) { Tiles::template zero<t>(); });
    for (int64_t k = 0; k < depth; k += 16) {
      Tiles::template load<4>(a + k, a_stride * kElement);
      Tiles::template load<5>(a + 16 * a_stride + k, a_stride * kElement);
      unrolled<Width>([&](auto j) {
        Tiles::template load<6 + j>(panel + k * kStride + j * kLanes, kStride * kElement);
        Tiles::template multiply_add<j, 4, 6 + j>();
        Tiles::template multiply_add<2 + j, 5, 6 + j>();
      });
    }
    alignas(64) float sums[kRows * kStride];
    unrolled<Width>([&](auto j) {
      Tiles::template store<j>(sums + j * kLanes, kStride * kElement);
      Tiles::template store<2 + j>(sums + 16 * kStride + j * kLanes, kStride * kElement);
    });
    for (int64_t i = 0; i < c.rows; i++) {
      Floats row[Width];
      std::memcpy(row, sums + i * kStride, sizeof row);
      write_row<kLanes, Width>(c, c.data + i * c.stride, row);
    }
  }
};
