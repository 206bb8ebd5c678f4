// The inner loop of a product, the packing that feeds it, and how threads share a product. No #pragma once:
// cpu_matmul.cpp includes this file once for each set of instructions, inside a namespace of its own, and
// the compiler makes of the vectors what that set offers.
//
// How it gets near the processor's peak:
//   A tile of C, some rows x some vectors, stays in registers while the inner loop runs down the reduction:
//   each step loads one row of a panel of B and multiplies it by one broadcast element of each row of A. B
//   is packed slab by slab into such panels, in the order the inner loop reads them. A is read where it lies
//   if it needs no conversion and its rows do not get in each other's way in the cache, and packed block by
//   block if not. Threads pack a slab of B together; then each multiplies blocks of A by it, from a workspace
//   of its own.

// Calls body with the constants 0 .. Count-1, so that arrays indexed by them can live in registers.
template <int Count, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }
  (std::make_integer_sequence<int, Count>{});
}

template <int Lanes>
struct Vectors {
  typedef float Floats __attribute__((vector_size(Lanes * sizeof(float))));
  typedef uint32_t Words __attribute__((vector_size(Lanes * sizeof(float))));

  template <class Vector = Floats>
  static Vector load(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  template <class Vector>
  static void store(void* to, const Vector& v) {
    std::memcpy(to, &v, sizeof v);
  }
};

// ---------------------------------------------------------------------------------------------------
// What the factors are: how they are packed into 32-bit elements, and what one multiply-add does.
// Lanes x Rows x Panel is the register tile: Rows x (Panel * Lanes) elements of C. Besides them the registers
// must hold one row of the panel of B and one element of A.

template <int Lanes, int Rows, int Panel>
struct Fp32 {
  static constexpr int kLanes = Lanes, kRows = Rows, kPanel = Panel;
  static constexpr int kTerms = 1;      // of the reduction in one element
  static constexpr int kDepthStep = 1;  // packed depths are a multiple of it, in terms
  static constexpr bool kConvertsA = false;
  using Element = float;
  using Floats = typename Vectors<Lanes>::Floats;
  using Elements = Floats;

  static Floats multiply_add(const Floats& sum, float a, const Floats& b) { return sum + a * b; }
  static Elements across(const Floats (&terms)[kTerms]) { return terms[0]; }
  static void along(float* to, const Floats& terms) { Vectors<Lanes>::store(to, terms); }
};

// Pairs of bf16 numbers, the term with the even index in the lower half, as every bf16 instruction wants
// them. Multiplied here with fp32 arithmetic on their exact values: slow, and right on every processor.
template <int Lanes, int Rows, int Panel>
struct Bf16 {
  static constexpr int kLanes = Lanes, kRows = Rows, kPanel = Panel;
  static constexpr int kTerms = 2;
  static constexpr int kDepthStep = 2;
  static constexpr bool kConvertsA = true;
  using Element = uint32_t;
  using V = Vectors<Lanes>;
  using Floats = typename V::Floats;
  using Elements = typename V::Words;

  static Floats multiply_add(const Floats& sum, uint32_t a, const Elements& b) {
    const Floats odd = std::bit_cast<float>(a & 0xffff0000u) * reinterpret_cast<Floats>(b & 0xffff0000u);
    return sum + odd + std::bit_cast<float>(a << 16) * reinterpret_cast<Floats>(b << 16);
  }

  // The nearest bf16 number, ties to even, in the upper half of each word; NaN stays NaN.
  static Elements rounded(const Floats& v) {
    const Elements bits = reinterpret_cast<Elements>(v);
    const Elements nearest = bits + (((bits >> 16) & 1u) + 0x7fffu);
    return (v == v ? nearest : bits | 0x400000u) & 0xffff0000u;
  }
  // Pairs of two rows: lane j holds terms[0][j] and terms[1][j].
  static Elements across(const Floats (&terms)[kTerms]) {
    return rounded(terms[0]) >> 16 | rounded(terms[1]);
  }
  // Pairs along one row, Lanes / 2 of them.
  static void along(uint32_t* to, const Floats& terms) {
    typedef uint16_t Halves __attribute__((vector_size(Lanes * sizeof(uint16_t))));
    const Halves halves = __builtin_convertvector(rounded(terms) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
  }
};

// ---------------------------------------------------------------------------------------------------
// The inner loop

// Asks for the tile of C, so that it has arrived when the sums are ready.
inline void prefetch(const CTile& c) {
  for (int64_t i = 0; i < c.rows; i++) {
    for (int64_t j = 0; j < c.cols; j += 16) __builtin_prefetch(c.data + i * c.stride + j, 1);
  }
}

// A row of sums, Width * Lanes floats, to its place in C.
template <int Lanes, int Width, class Floats>
[[gnu::always_inline]] inline void write_row(const CTile& c, float* to, const Floats (&sum)[Width]) {
  using V = Vectors<Lanes>;
  if (c.cols == Width * Lanes) {
    unrolled<Width>([&](auto j) {
      float* c_ij = to + j * Lanes;
      V::store(c_ij, c.accumulate ? V::load(c_ij) + sum[j] : sum[j]);
    });
    return;
  }
  float row[Width * Lanes];
  std::memcpy(row, sum, sizeof row);
  for (int64_t j = 0; j < c.cols; j++) to[j] = c.accumulate ? to[j] + row[j] : row[j];
}

// The tile of C in vector registers.
template <class Factors>
struct RegisterTile : Factors {
  using Factors::kLanes, Factors::kRows, Factors::kPanel;
  using typename Factors::Element, typename Factors::Elements, typename Factors::Floats;
  static constexpr bool kTakesColumnsOfA = true;

  static void begin() {}
  static void end() {}

  // C tile <- A rows (kRows, depth) times the panel (depth, Width * Lanes), depth in elements. A's rows lie
  // `a_stride` elements apart, or (ByColumns) its columns, of kRows elements side by side. Where the tile
  // hangs over C's lower edge rows are computed that are not stored: every row takes the same path. A
  // function on its own: inside a larger one compilers run out of registers.
  template <int Width, bool ByColumns>
  [[gnu::noinline]] static void tile(const CTile& c, const Element* a, int64_t a_stride, const Element* panel,
                                     int64_t depth) {
    const Element* row[kRows];
    for (int i = 0; i < kRows; i++)
      row[i] = a + (ByColumns ? i : std::min<int64_t>(i, c.rows - 1) * a_stride);

    prefetch(c);
    Floats sum[kRows][Width] = {};
    for (int64_t k = 0; k < depth; k++) {
      Elements b[Width];
      unrolled<Width>(
          [&](auto j) { b[j] = Vectors<kLanes>::template load<Elements>(panel + (k * Width + j) * kLanes); });
      unrolled<kRows>([&](auto i) {
        const Element a_ik = ByColumns ? a[k * a_stride + i] : row[i][k];
        unrolled<Width>([&](auto j) { sum[i][j] = Factors::multiply_add(sum[i][j], a_ik, b[j]); });
      });
    }
    unrolled<kRows>([&](auto i) {
      if (i < c.rows) write_row<kLanes, Width>(c, c.data + i * c.stride, sum[i]);
    });
  }
};

// ---------------------------------------------------------------------------------------------------
// Packing

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

// tile[i][j] = from(i, j); zeros from row `rows` and from column `cols` on.
template <int Lanes, class Floats>
[[gnu::always_inline]] inline void load_square(Floats (&tile)[Lanes], Operand from, int64_t rows,
                                               int64_t cols) {
  using V = Vectors<Lanes>;
  if (rows >= Lanes && cols >= Lanes && from.col_stride == 1) {
    unrolled<Lanes>([&](auto i) { tile[i] = V::load(from.at(i, 0)); });
  } else if (rows >= Lanes && cols >= Lanes && from.row_stride == 1) {
    unrolled<Lanes>([&](auto j) { tile[j] = V::load(from.at(0, j)); });
    trade_blocks<Lanes / 2>(tile, std::make_integer_sequence<int, Lanes>{});
  } else {
    float values[Lanes][Lanes] = {};
    for (int64_t i = 0; i < std::min<int64_t>(rows, Lanes); i++) {
      for (int64_t j = 0; j < std::min<int64_t>(cols, Lanes); j++) values[i][j] = *from.at(i, j);
    }
    unrolled<Lanes>([&](auto i) { tile[i] = V::load(values[i]); });
  }
}

// The first `width` columns of a (depth, cols) matrix, its rows along the reduction, times alpha: into a
// panel of as many elements a row, with zeros beyond cols and beyond depth up to `padded`. Rest: `width`
// modulo the lanes, known here so that a row's last elements are stored without a call.
template <class Tile, int Rest = 0>
void pack_panel(typename Tile::Element* panel, int64_t width, Operand from, float alpha, int64_t depth,
                int64_t padded, int64_t cols) {
  constexpr int L = Tile::kLanes, T = Tile::kTerms;
  for (int64_t k = 0; k < padded; k += L) {
    for (int64_t j = 0; j < width; j += L) {
      typename Tile::Floats tile[L];
      load_square<L>(tile, from.from(k, j), depth - k, cols - j);
      typename Tile::Element* to = panel + k / T * width + j;
      unrolled<L / T>([&](auto element) {
        if (k + element * T >= padded) return;
        typename Tile::Floats terms[T];
        unrolled<T>([&](auto t) { terms[t] = tile[element * T + t] * alpha; });
        const auto row = Tile::across(terms);
        if (Rest == 0 || j + L <= width) {
          Vectors<L>::store(to + element * width, row);
        } else {
          std::memcpy(to + element * width, &row, Rest * sizeof *to);
        }
      });
    }
  }
}

// A (rows, depth) matrix, row by row, `stride` elements apart, with zeros beyond it up to padded_rows and
// padded (a multiple of the lanes in terms is written).
template <class Tile>
void pack_rows(typename Tile::Element* to, int64_t stride, Operand from, int64_t rows, int64_t padded_rows,
               int64_t depth, int64_t padded) {
  constexpr int L = Tile::kLanes, T = Tile::kTerms;
  for (int64_t i = 0; i < padded_rows; i += L) {
    for (int64_t k = 0; k < padded; k += L) {
      typename Tile::Floats tile[L];
      load_square<L>(tile, from.from(i, k), rows - i, depth - k);
      unrolled<L>([&](auto row) {
        if (i + row < padded_rows) Tile::along(to + (i + row) * stride + k / T, tile[row]);
      });
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// A product, slab of B by slab of B. The threads of a parallel region pack a slab together, then take blocks
// of A to multiply it by as they come free: one that is held up does not hold up the others.

template <class Tile>
class SlabProduct {
 public:
  // Each thread calls it, with a workspace of its own for A and the same one for B.
  static void run(const Product& whole, MatmulWorkspace& own, MatmulWorkspace& shared, int threads) {
    const Product p = whole.part(0, whole.M, 0, whole.needed_cols());
    Tile::begin();
    const Shares slabs{ceil_div(p.N, kLanes), ceil_div(p.N, kSlabCols)};
    const Shares blocks{ceil_div(p.K, kStep), ceil_div(ceil_div(p.K, kTerms), kMaxDepth)};
    for (int64_t slab = 0; slab < slabs.parts; slab++) {
      const Product columns =
          p.part(0, p.M, slabs.begin(slab) * kLanes, std::min(p.N, slabs.end(slab) * kLanes));
      for (int64_t block = 0; block < blocks.parts; block++) {
        const Product terms =
            columns.terms(blocks.begin(block) * kStep, std::min(p.K, blocks.end(block) * kStep));
        SlabProduct(terms, own, shared, threads).multiply_slab();
      }
    }
    Tile::end();
  }

 private:
  using Element = typename Tile::Element;
  static constexpr int64_t kLanes = Tile::kLanes, kRows = Tile::kRows, kTerms = Tile::kTerms;
  static constexpr int64_t kStep = Tile::kDepthStep;
  static constexpr int64_t kBlockTiles = kMostBlockRows / kRows;

  SlabProduct(const Product& p, MatmulWorkspace& own, MatmulWorkspace& shared, int threads)
      : p_(p),
        threads_(threads),
        packed_a_(reinterpret_cast<Element*>(own.packed_a)),
        packed_b_(reinterpret_cast<Element*>(shared.packed_b)),
        padded_(ceil_div(p.K, kStep) * kStep),
        depth_(padded_ / kTerms),
        panels_{ceil_div(p.N, kLanes), ceil_div(ceil_div(p.N, kLanes), Tile::kPanel)} {}

  // Both loops end with all threads: B is whole before it is used, and used before the next slab takes its
  // place.
  void multiply_slab() {
    pack_b();

    // Where A is too low for several blocks a thread, each is multiplied by some of the panels at a time.
    const int64_t wanted = threads_ == 1 ? 1 : 4 * threads_;
    const int64_t rows = even_block(ceil_div(p_.M, kRows), kBlockTiles, threads_) * kRows;
    const int64_t blocks = ceil_div(p_.M, rows);
    const Shares groups{panels_.parts, std::min(panels_.parts, ceil_div(wanted, blocks))};
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < blocks * groups.parts; i++) {
      const int64_t first = i / groups.parts * rows, group = i % groups.parts;
      multiply_block(first, std::min(p_.M, first + rows), groups.begin(group), groups.end(group));
    }
  }

  // Some rows of A as the tiles take them. That of the row m begins at data + m * row_step; stride as there.
  struct Left {
    const Element* data;
    int64_t row_step, stride;
  };

  // The rows first .. last of A with the panels begin .. end of B.
  void multiply_block(int64_t first, int64_t last, int64_t begin, int64_t end) {
    if constexpr (Tile::kTakesColumnsOfA) {
      if (p_.a.col_stride != 1) return multiply_columns(first, last, begin, end);
    }
    const Product rows = p_.part(first, last, 0, p_.N);
    if constexpr (!Tile::kConvertsA) {
      const int64_t stride = rows.a.row_stride;
      const bool in_conflict = stride % kConflictStride == 0 && rows.M >= kRows;
      if (!in_conflict) return multiply_panels<false>(rows, begin, end, {rows.a.data, stride, stride});
    }
    pack_rows<Tile>(packed_a_, kPackedStride, rows.a, rows.M, ceil_div(rows.M, kRows) * kRows, p_.K, padded_);
    multiply_panels<false>(rows, begin, end, {packed_a_, kPackedStride, kPackedStride});
  }

  // The same where A's columns are contiguous, or neither columns nor rows. A tile that hangs over the lower
  // edge is packed: what lies behind A is not ours to read.
  void multiply_columns(int64_t first, int64_t last, int64_t begin, int64_t end) {
    int64_t packed = first;
    if constexpr (!Tile::kConvertsA) {
      if (p_.a.row_stride == 1) {
        packed = first + (last - first) / kRows * kRows;
        const Product rows = p_.part(first, packed, 0, p_.N);
        multiply_panels<true>(rows, begin, end, {rows.a.data, 1, rows.a.col_stride});
      }
    }
    pack_a_panels(packed, last);
    multiply_panels<true>(p_.part(packed, last, 0, p_.N), begin, end, {packed_a_, depth_, kRows});
  }

  // Rows that are contiguous in memory are read in short stretches of k across all panels, along the rows.
  static int64_t stretch(const Operand& from, int64_t depth) {
    return from.col_stride == 1 ? std::max<int64_t>(16, kStep) : depth;
  }

  void pack_b() {
    const int64_t step = stretch(p_.b, padded_), panels = panels_.parts;
    [[maybe_unused]] const int64_t at_a_time = step < padded_ ? panels : 1;
#pragma omp for schedule(dynamic, at_a_time)
    for (int64_t i = 0; i < ceil_div(padded_, step) * panels; i++) {
      const int64_t k = i / panels * step, panel = i % panels;
      const int64_t n = panels_.begin(panel) * kLanes, width = panels_.size(panel) * kLanes;
      pack_panel<Tile>(packed_b_ + n * depth_ + k / kTerms * width, width, p_.b.from(k, n), p_.update.alpha,
                       p_.K - k, std::min(step, padded_ - k), std::min(p_.N - n, width));
    }
  }

  // The rows first .. last in panels (depth_, kRows), one for each kRows of them.
  void pack_a_panels(int64_t first, int64_t last) {
    const Operand columns = p_.a.transpose();
    const int64_t step = stretch(columns, padded_);
    for (int64_t k = 0; k < padded_; k += step) {
      for (int64_t m = first; m < last; m += kRows) {
        Element* const to = packed_a_ + (m - first) * depth_ + k / kTerms * kRows;
        pack_panel<Tile, kRows % kLanes>(to, kRows, columns.from(k, m), 1, p_.K - k,
                                         std::min(step, padded_ - k), p_.M - m);
      }
    }
  }

  template <bool ByColumns>
  void multiply_panels(const Product& rows, int64_t begin, int64_t end, const Left& a) const {
    for (int64_t panel = begin; panel < end; panel++) {
      unrolled<Tile::kPanel>([&](auto narrower) {
        if (panels_.size(panel) == narrower + 1) multiply_panel<narrower + 1, ByColumns>(rows, panel, a);
      });
    }
  }

  template <int Width, bool ByColumns>
  void multiply_panel(const Product& rows, int64_t panel, const Left& a) const {
    const int64_t n = panels_.begin(panel) * kLanes;
    const int64_t cols = std::min<int64_t>(p_.N - n, Width * kLanes);
    for (int64_t m = rows.first_row(n) / kRows * kRows; m < rows.M; m += kRows) {
      const CTile c{rows.c + m * rows.c_stride + n, rows.c_stride, std::min<int64_t>(kRows, rows.M - m), cols,
                    p_.update.accumulate};
      Tile::template tile<Width, ByColumns>(c, a.data + m * a.row_step, a.stride, packed_b_ + n * depth_,
                                            depth_);
    }
  }

  static constexpr int64_t kPackedStride = kMaxDepth + kRowPadding;

  Product p_;
  int threads_;
  Element* packed_a_;
  Element* packed_b_;
  int64_t padded_;  // terms of the reduction, rounded up to whole steps
  int64_t depth_;   // the same in elements
  // Of the slab's width in vectors, as even as can be: a narrow tile has too few sums to hide their latency.
  Shares panels_;
};

// Rows `row` .. row + kLanes of C, right of its diagonal, from the columns below it, square by square.
template <class Tile>
void mirror(const Product& p, int64_t row) {
  constexpr int L = Tile::kLanes;
  const int64_t rows = std::min<int64_t>(L, p.M - row);
  for (int64_t column = row; column < p.N; column += L) {
    const int64_t cols = std::min<int64_t>(L, p.N - column);
    typename Tile::Floats above[L];
    load_square<L>(above, transposed(p.c + column * p.c_stride + row, p.c_stride), rows, cols);
    float* to = p.c + row * p.c_stride + column;
    if (column > row && rows == L && cols == L) {
      unrolled<L>([&](auto i) { Vectors<L>::store(to + i * p.c_stride, above[i]); });
      continue;
    }
    float values[L][L];
    std::memcpy(values, above, sizeof above);
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t j = column > row ? 0 : i + 1; j < cols; j++) to[i * p.c_stride + j] = values[i][j];
    }
  }
}

template <class Tile>
MatmulKernel kernel_of(const char* name, bool (*runs_here)(), bool (*runs_by_name)(), bool slow = false) {
  const Precision precision = Tile::kTerms == 1 ? Precision::fp32 : Precision::bf16;
  return {name, precision, runs_here, runs_by_name, slow, Tile::kLanes, SlabProduct<Tile>::run, mirror<Tile>};
}
