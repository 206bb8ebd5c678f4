// Muon, AdamW, clipping and the learning rate, against references in double precision and the oracle
// for the Newton-Schulz steps.
#include "xmod/optimizer.h"

#include <array>

#include "backend.h"
#include "round_to_bf16.h"
#include "xmod/schedule.h"

namespace xmod {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---------------------------------------------------------------------------------------------------
// matrices in double precision

struct Matrix {
  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols)) {}
  Matrix(int64_t rows, int64_t cols, Doubles values) : rows(rows), cols(cols), values(std::move(values)) {}

  double& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  double operator()(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
  double norm() const { return std::sqrt(dot(values, values)); }

  int64_t rows, cols;
  Doubles values;
};

Matrix transpose(const Matrix& a) {
  Matrix out(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; i++) {
    for (int64_t j = 0; j < a.cols; j++) out(j, i) = a(i, j);
  }
  return out;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; i++) {
    for (int64_t k = 0; k < a.cols; k++) {
      for (int64_t j = 0; j < b.cols; j++) out(i, j) += a(i, k) * b(k, j);
    }
  }
  return out;
}

Matrix operator*(double factor, Matrix a) {
  for (double& value : a.values) value *= factor;
  return a;
}

Matrix operator+(Matrix a, const Matrix& b) {
  a.values = plus(std::move(a.values), b.values);
  return a;
}

Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  return {rows, cols, doubles(normal_numbers(rows * cols, seed))};
}

Floats floats(const Matrix& a) {
  return Floats(a.values.begin(), a.values.end());
}

// a = u diag(sigma) v^T: column i of u and of v belong to sigma[i]; columns of u for sigma 0 are zero.
struct Svd {
  Matrix u, v;
  Doubles sigma;
};

// One-sided Jacobi rotations: turns pairs of columns until all are at right angles.
Svd svd(const Matrix& a) {
  if (a.rows < a.cols) {
    Svd t = svd(transpose(a));
    std::swap(t.u, t.v);
    return t;
  }
  Matrix u = a, v(a.cols, a.cols);
  for (int64_t i = 0; i < a.cols; i++) v(i, i) = 1;
  auto rotate = [](Matrix& m, int64_t p, int64_t q, double c, double s) {
    for (int64_t i = 0; i < m.rows; i++) {
      const double x = m(i, p), y = m(i, q);
      m(i, p) = c * x - s * y;
      m(i, q) = s * x + c * y;
    }
  };
  bool turned = true;
  for (int sweep = 0; sweep < 60 && turned; sweep++) {
    turned = false;
    for (int64_t p = 0; p < a.cols; p++) {
      for (int64_t q = p + 1; q < a.cols; q++) {
        double pp = 0, qq = 0, pq = 0;
        for (int64_t i = 0; i < a.rows; i++) {
          pp += u(i, p) * u(i, p), qq += u(i, q) * u(i, q), pq += u(i, p) * u(i, q);
        }
        if (std::abs(pq) <= 1e-14 * std::sqrt(pp * qq)) continue;
        turned = true;
        const double zeta = (qq - pp) / (2 * pq);
        const double t = (zeta < 0 ? -1 : 1) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta));
        const double c = 1 / std::sqrt(1 + t * t);
        rotate(u, p, q, c, c * t);
        rotate(v, p, q, c, c * t);
      }
    }
  }
  Doubles sigma;
  for (int64_t j = 0; j < a.cols; j++) {
    double square = 0;
    for (int64_t i = 0; i < a.rows; i++) square += u(i, j) * u(i, j);
    sigma.push_back(std::sqrt(square));
    for (int64_t i = 0; i < a.rows && square > 0; i++) u(i, j) /= sigma.back();
  }
  return {u, v, sigma};
}

TEST(Svd, TakesMatricesApart) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{5, 5}, {3, 11}, {11, 3}, {1, 4}}) {
    const Matrix a = random_matrix(rows, cols, 1);
    const Svd s = svd(a);
    Matrix scaled = s.u;
    for (int64_t i = 0; i < scaled.rows; i++) {
      for (int64_t j = 0; j < scaled.cols; j++) scaled(i, j) *= s.sigma[j];
    }
    const Matrix difference = scaled * transpose(s.v) + -1.0 * a;
    const Matrix gram = transpose(s.v) * s.v;
    EXPECT_LE(difference.norm(), 1e-12 * a.norm());
    EXPECT_NEAR(gram.norm(), std::sqrt(static_cast<double>(gram.rows)), 1e-12);
  }
}

// A matrix with the given singular values.
Matrix with_spectrum(int64_t rows, int64_t cols, const Doubles& sigma) {
  const Svd random = svd(random_matrix(rows, cols, 1));
  Matrix scaled = random.u;
  for (int64_t i = 0; i < scaled.rows; i++) {
    for (int64_t j = 0; j < scaled.cols; j++) scaled(i, j) *= sigma[j];
  }
  return scaled * transpose(random.v);
}

// From 1 evenly down on a logarithmic scale.
Doubles geometric_spectrum(int64_t count, double smallest) {
  Doubles sigma;
  for (int64_t i = 0; i < count; i++)
    sigma.push_back(std::pow(smallest, static_cast<double>(i) / static_cast<double>(count - 1)));
  return sigma;
}

// ---------------------------------------------------------------------------------------------------
// Muon

Matrix exact(Matrix a) {
  return a;
}

// Five Newton-Schulz steps, as README.md writes them; `stored`: how matrices are kept between products.
Matrix newton_schulz_reference(const Matrix& u, Matrix (*stored)(Matrix) = exact) {
  if (u.rows > u.cols) return transpose(newton_schulz_reference(transpose(u), stored));
  Matrix x = stored(1 / (u.norm() + 1e-7) * u);
  for (int step = 0; step < 5; step++) {
    const Matrix a = stored(x * transpose(x));
    x = stored(3.4445 * x + stored(-4.7750 * a + 2.0315 * (a * a)) * x);
  }
  return x;
}

struct MuonReference {
  Matrix param, momentum;

  void step(const Matrix& gradient, double lr, double weight_decay, double grad_scale, double beta = 0.95) {
    const Matrix g = grad_scale * gradient;
    momentum = beta * momentum + (1 - beta) * g;
    const Matrix o = newton_schulz_reference((1 - beta) * g + beta * momentum);
    const double rate = lr * 0.2 * std::sqrt(static_cast<double>(std::max(g.rows, g.cols)));
    param = (1 - lr * weight_decay) * param + -rate * o;
  }
};

// O of a first step with this gradient, taken back out of the updated parameters.
Matrix orthogonalised(TestBackend& be, const Matrix& gradient) {
  const Floats zeros(gradient.values.size());
  const Guarded<float> param(be, zeros), momentum(be, zeros), grad(be, floats(gradient));
  const int64_t offset = 0;
  be.muon_update(param, momentum, grad, &offset, &offset, 1, gradient.rows, gradient.cols, {1, 0, 1});
  const double rate = 0.2 * std::sqrt(static_cast<double>(std::max(gradient.rows, gradient.cols)));
  return -1 / rate * Matrix(gradient.rows, gradient.cols, doubles(param.values()));
}

// Every singular value of at least 0.003 of the Frobenius norm lands in [0.68, 1.21], its vectors the same.
void check_oracle(TestBackend& be, const Matrix& gradient) {
  SCOPED_TRACE(std::to_string(gradient.rows) + " x " + std::to_string(gradient.cols));
  const Svd before = svd(gradient);
  const Matrix inside = transpose(before.u) * orthogonalised(be, gradient) * before.v;
  int64_t large = 0;
  for (int64_t i = 0; i < inside.rows; i++) {
    EXPECT_LE(inside(i, i), 1.21);
    if (before.sigma[i] < 0.003 * gradient.norm()) continue;
    large++;
    EXPECT_GE(inside(i, i), 0.68) << "from " << before.sigma[i] / gradient.norm();
  }
  EXPECT_GT(large, 0);
}

const std::vector<std::array<int64_t, 2>> kShapes = {{1, 1},  {1, 17},  {17, 1},   {5, 70},
                                                     {70, 5}, {33, 33}, {48, 131}, {131, 48}};

TEST_F(PassTest, MuonMeetsTheOracleForRandomMatrices) {
  for (const auto& [rows, cols] : kShapes) check_oracle(be_, random_matrix(rows, cols, 2));
}

TEST_F(PassTest, MuonMeetsTheOracleDownToThreeThousandths) {
  Doubles sigma = geometric_spectrum(23, 0.01);  // and one that is just 0.003 of all together
  sigma.push_back(0.00301 * std::sqrt(dot(sigma, sigma)));
  const Matrix wide = with_spectrum(24, 67, sigma);
  EXPECT_GT(sigma.back(), 0.003 * wide.norm());
  check_oracle(be_, wide);
  check_oracle(be_, transpose(wide));
}

// However the steps are computed: what rounding does to small singular values must not grow.
TEST_F(PassTest, MuonIsExactForBadlyConditionedMatrices) {
  for (double smallest : {1e-2, 1e-4, 1e-6}) {
    const Matrix wide = with_spectrum(48, 130, geometric_spectrum(48, smallest));
    for (const Matrix& gradient : {wide, transpose(wide)}) {
      const Matrix expected = newton_schulz_reference(gradient);
      EXPECT_LE(normalised_error(floats(orthogonalised(be_, gradient)), expected.values), 3e-5) << smallest;
    }
  }
}

#ifndef XMOD_TEST_CUDA  // CUDA's is in test_cuda_passes_bf16.cpp
// A few large singular values, and rows whose scales differ: rounding must not grow from step to step.
Matrix with_scaled_rows(int64_t rows, int64_t cols, double noise, double power, uint64_t seed) {
  Matrix m = random_matrix(rows, 1, seed) * random_matrix(1, cols, seed + 1) +
             noise * random_matrix(rows, cols, seed + 2);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < cols; j++) m(i, j) /= std::pow(1.0 + static_cast<double>(i), power);
  }
  return m;
}

TEST(Bf16Muon, ErrsAboutAsMuchAsFivePlainStepsInBf16) {
  const auto in_bf16 = [](Matrix a) {
    for (double& value : a.values) value = round_to_bf16(value);
    return a;
  };
  std::vector<Matrix> gradients;
  for (const auto& [rows, cols] : {std::array<int64_t, 2>{48, 48}, {48, 130}, {64, 128}}) {
    for (double smallest : {1.0, 1e-1, 1e-2, 1e-4})
      gradients.push_back(with_spectrum(rows, cols, geometric_spectrum(rows, smallest)));
    for (double power : {0.5, 1.0}) {
      for (uint64_t seed : {1, 4, 7}) gradients.push_back(with_scaled_rows(rows, cols, 0.1, power, seed));
    }
  }
  TestBackend be({.precision = Precision::bf16, .instructions = "portable"});
  for (size_t i = 0; i < gradients.size(); i++) {
    for (const Matrix& gradient : {gradients[i], transpose(gradients[i])}) {
      SCOPED_TRACE(std::to_string(i) + ": " + std::to_string(gradient.rows) + " x " +
                   std::to_string(gradient.cols));
      const Doubles expected = newton_schulz_reference(gradient).values;
      const Matrix ours = orthogonalised(be, gradient);
      const double error = normalised_error(floats(ours), expected);
      EXPECT_LE(error,
                2 * normalised_error(floats(newton_schulz_reference(gradient, in_bf16)), expected) + 0.02);
      EXPECT_GT(error, 1e-4) << "this is no bf16";
      EXPECT_LE(svd(ours).sigma.front(), 1.25);
    }
  }
}
#endif

TEST_F(PassTest, MuonMeetsTheOracleForMatricesWithoutFullRank) {
  check_oracle(be_, random_matrix(30, 2, 1) * random_matrix(2, 41, 2));
  check_oracle(be_, random_matrix(30, 1, 1) * random_matrix(1, 30, 2));
}

TEST_F(PassTest, MuonDoesNotDependOnTheGradientsScale) {
  const Matrix gradient = random_matrix(20, 31, 1);
  const Matrix expected = orthogonalised(be_, gradient);
  for (double scale : {1e-3, 1e10, 1e30}) {
    check_oracle(be_, scale * gradient);
    EXPECT_LE(normalised_error(floats(orthogonalised(be_, scale * gradient)), expected.values), 1e-3)
        << scale;
  }
  // Far below the 1e-7 of the formula the update fades away.
  for (double scale : {1e-12, 1e-20, 1e-36}) {
    const Matrix faded = orthogonalised(be_, scale * gradient);
    EXPECT_TRUE(std::isfinite(faded.norm())) << scale;
    EXPECT_LE(faded.norm(), 0.02) << scale;
  }
}

TEST_F(PassTest, MuonOfAZeroGradientOnlyDecaysWeights) {
  for (const auto& [rows, cols] : kShapes) {
    const int64_t n = rows * cols, offset = 0;
    const Floats before = normal_numbers(n, 1), zeros(static_cast<size_t>(n));
    auto param = holding(before), momentum = holding(zeros);
    be_.muon_update(param, momentum, holding(zeros), &offset, &offset, 1, rows, cols, {0.5f, 0.25f, 1});
    Floats expected = before;
    for (float& value : expected) value *= 0.875f;
    EXPECT_EQ(param.values(), expected);
    EXPECT_EQ(momentum.values(), zeros);
  }
}

TEST_F(PassTest, MuonOverSeveralSteps) {
  for (const auto& [rows, cols] : kShapes) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const int64_t n = rows * cols, offset = 0;
    MuonReference expected{0.1 * random_matrix(rows, cols, 1), Matrix(rows, cols)};
    auto param = holding(floats(expected.param)), momentum = holding(Floats(static_cast<size_t>(n)));
    for (uint64_t step = 1; step <= 4; step++) {
      const Matrix gradient = random_matrix(rows, cols, 10 + step);
      const MuonStep h{0.05f, 0.3f, 0.5f};
      be_.muon_update(param, momentum, holding(floats(gradient)), &offset, &offset, 1, rows, cols, h);
      expected.step(gradient, h.lr, h.weight_decay, h.grad_scale);
      EXPECT_LE(normalised_error(momentum.values(), expected.momentum.values), 1e-5);
      EXPECT_LE(normalised_error(param.values(), expected.param.values), 1e-5);
    }
  }
}

struct MuonState {
  Floats params, momentum;
};

// Seven matrices with gaps of NaN between them, updated `at_a_time` at a time.
MuonState update_batch(TestBackend& be, int64_t rows, int64_t cols, int64_t at_a_time) {
  const int64_t count = 7, stride = rows * cols + 16;
  Floats params = normal_numbers(count * stride, 1), grads = normal_numbers(count * stride, 2);
  Floats momentum = normal_numbers(count * stride, 3);
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < count; i++) {
    offsets.push_back(i * stride);
    for (Floats* all : {&params, &grads, &momentum}) {
      std::fill_n(all->begin() + (i + 1) * stride - 16, 16, Guarded<float>::guard());
    }
  }
  const Guarded<float> p(be, params), m(be, momentum), g(be, grads);
  for (int64_t i = 0; i < count; i += at_a_time) {
    be.muon_update(p, m, g, offsets.data() + i, offsets.data() + i, std::min(at_a_time, count - i), rows,
                   cols, {0.05f, 0.1f, 1.5f});
  }
  const MuonState after = {p.values(), m.values()};
  for (int64_t i = 0; i < count; i++) {
    EXPECT_TRUE(
        same_bits(row_of(after.params, (i + 1) * stride / 16 - 1, 16), Floats(16, Guarded<float>::guard())))
        << "the gap behind matrix " << i;
  }
  return after;
}

TEST_F(PassTest, MuonOfABatchEqualsOneByOneForAnyThreadCount) {
  for (const auto& shape : {std::array<int64_t, 2>{16, 40}, {80, 64}, {72, 200}, {200, 72}}) {
    const int64_t rows = shape[0], cols = shape[1];
    for (int64_t at_a_time : {1, 2, 7}) {
      const MuonState one_by_one = update_batch(be_, rows, cols, 1);
      expect_same_bits_for_any_threads([&](TestBackend& be) {
        const MuonState batch = update_batch(be, rows, cols, at_a_time);
        EXPECT_TRUE(same_bits(batch.params, one_by_one.params));
        EXPECT_TRUE(same_bits(batch.momentum, one_by_one.momentum));
        return batch.params;
      });
    }
  }
}

TEST_F(PassTest, MuonOfNanIsNan) {
  Matrix gradient = random_matrix(8, 9, 1);
  gradient(3, 4) = kNan;
  EXPECT_TRUE(std::isnan(orthogonalised(be_, gradient).norm()));
}

// ---------------------------------------------------------------------------------------------------
// AdamW

struct AdamWReference {
  Doubles param, m, v;

  void step(const Doubles& gradient, int64_t step, double lr, double weight_decay, double grad_scale) {
    const double correction1 = 1 - std::pow(0.9, static_cast<double>(step));
    const double correction2 = 1 - std::pow(0.95, static_cast<double>(step));
    for (size_t i = 0; i < param.size(); i++) {
      const double g = gradient[i] * grad_scale;
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.95 * v[i] + 0.05 * g * g;
      param[i] -= lr * weight_decay * param[i];
      param[i] -= lr * (m[i] / correction1) / (std::sqrt(v[i] / correction2) + 1e-8);
    }
  }
};

AdamWStep adamw_step(int64_t step, float lr, float weight_decay, float grad_scale) {
  return {lr, weight_decay, grad_scale, static_cast<float>(1 - std::pow(0.9, static_cast<double>(step))),
          static_cast<float>(1 - std::pow(0.95, static_cast<double>(step)))};
}

TEST_F(PassTest, AdamWOverSeveralSteps) {
  for (int64_t n : {0, 1, 7, 1003}) {
    const Floats before = normal_numbers(n, 1), zeros(static_cast<size_t>(n));
    AdamWReference expected{doubles(before), doubles(zeros), doubles(zeros)};
    auto param = holding(before), m = holding(zeros), v = holding(zeros);
    for (int64_t step = 1; step <= 5; step++) {
      const Floats gradient = normal_numbers(n, 10 + static_cast<uint64_t>(step));
      const AdamWStep h = adamw_step(step, 0.05f, 0.3f, 0.5f);
      be_.adamw_update(param, m, v, holding(gradient), h, n);
      expected.step(doubles(gradient), step, h.lr, h.weight_decay, h.grad_scale);
      EXPECT_LE(normalised_error(param.values(), expected.param), 2e-6) << "n " << n << ", step " << step;
      EXPECT_LE(normalised_error(m.values(), expected.m), 2e-6) << "n " << n << ", step " << step;
      EXPECT_LE(normalised_error(v.values(), expected.v), 2e-6) << "n " << n << ", step " << step;
    }
  }
}

TEST_F(PassTest, AdamWOfAZeroGradientOnlyDecaysWeights) {
  const Floats before = normal_numbers(100, 1), zeros(100);
  auto param = holding(before), m = holding(zeros), v = holding(zeros);
  be_.adamw_update(param, m, v, holding(zeros), adamw_step(1, 0.5f, 0.25f, 1), 100);
  Floats expected = before;
  for (float& value : expected) value *= 0.875f;
  EXPECT_EQ(param.values(), expected);
}

// ---------------------------------------------------------------------------------------------------
// a step over the parameter table

ModelConfig small_model() {
  ModelConfig c;
  c.vocab_size = 29;
  c.dim = 12;
  c.active_layers = 3;
  c.head_dim = 6;
  c.ffn_dim = 20;
  c.seq_len = 8;
  c.token_sparsity = 2;
  c.dense_prefix = 1;
  c.tie_word_embeddings = false;
  return c;
}

class OptimizerTest : public ::testing::Test {
 protected:
  OptimizerTest() : table_(make_parameter_table(small_model(), make_layer_plan(small_model()))) {}

  // Normal numbers in every tensor, zero between them.
  Floats random_table(uint64_t seed) const {
    Floats out(static_cast<size_t>(table_.total));
    for (const Parameter& p : table_.entries) {
      const Floats values = normal_numbers(p.size, seed + stream_of(p.name));
      std::copy(values.begin(), values.end(), out.begin() + p.offset);
    }
    return out;
  }

  static Floats slice(const Floats& all, const Parameter& p) {
    return Floats(all.begin() + p.offset, all.begin() + p.offset + p.size);
  }

  Floats moment(const OptimizerState<TestBackend>& state) {
    return download(be_, state.first_moment(), table_.total);
  }

  TestBackend be_;
  ParameterTable table_;
};

bool ends_with_any(const std::string& name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const std::string& e) { return name.ends_with(e); });
}

const std::vector<std::string> kMatrices = {"q_proj.weight",   "k_proj.weight",  "v_proj.weight",
                                            "o_proj.weight",   "up_proj.weight", "gate_proj.weight",
                                            "down_proj.weight"};
const std::vector<std::string> kVocabulary = {"embed_tokens.weight", "lm_head.weight"};

TEST_F(OptimizerTest, MuonTakesTheMatricesAndAdamWTheRest) {
  const OptimizerTable table = make_optimizer_table(table_, Optimizer::muon);
  int64_t matrices = 0;
  for (size_t i = 0; i < table_.entries.size(); i++) {
    const bool matrix = ends_with_any(table_.entries[i].name, kMatrices);
    matrices += matrix;
    EXPECT_EQ(table.optimizer[i], matrix ? Optimizer::muon : Optimizer::adamw) << table_.entries[i].name;
    EXPECT_EQ(table.second_moment_offset[i] < 0, matrix) << table_.entries[i].name;
  }
  EXPECT_EQ(matrices, 7 * 4);  // D S S D
}

TEST_F(OptimizerTest, SecondMomentsDoNotOverlap) {
  for (Optimizer choice : {Optimizer::muon, Optimizer::adamw}) {
    const OptimizerTable table = make_optimizer_table(table_, choice);
    int64_t end = 0;
    for (size_t i = 0; i < table_.entries.size(); i++) {
      if (table.second_moment_offset[i] < 0) continue;
      EXPECT_GE(table.second_moment_offset[i], end);
      end = table.second_moment_offset[i] + table_.entries[i].size;
    }
    EXPECT_LE(end, table.second_moment_total);
  }
}

// Against the two passes on their own: q, k and v, and gate and up, lie in one matrix each but are
// orthogonalised one by one; equal shapes of different layers go to the backend together.
TEST_F(OptimizerTest, UpdatesEveryTensorOnItsOwn) {
  for (Optimizer choice : {Optimizer::muon, Optimizer::adamw}) {
    OptimizerConfig config;
    config.choice = choice;
    config.weight_decay = 0.3;
    config.grad_clip = 0;
    OptimizerState<TestBackend> state(be_, table_, config);
    const double lr = 0.05, adamw_lr = 0.02;
    const Floats before = random_table(1);
    Guarded<float> params(be_, before);
    for (int64_t step = 1; step <= 3; step++) {
      const Guarded<float> grads(be_, random_table(10 + static_cast<uint64_t>(step)));
      state.update(params, grads, state.gradient_norm(grads), step, lr, adamw_lr);
    }

    Floats expected = before;  // what lies between tensors stays
    for (const Parameter& p : table_.entries) {
      const bool matrix = ends_with_any(p.name, kMatrices), muon = matrix && choice == Optimizer::muon;
      const bool decays = matrix || ends_with_any(p.name, kVocabulary);
      const Floats zeros(static_cast<size_t>(p.size));
      const Guarded<float> param(be_, slice(before, p)), m(be_, zeros), v(be_, zeros);
      for (int64_t step = 1; step <= 3; step++) {
        const Guarded<float> grad(be_, slice(random_table(10 + static_cast<uint64_t>(step)), p));
        const int64_t offset = 0;
        if (muon) {
          be_.muon_update(param, m, grad, &offset, &offset, 1, p.shape[0], p.shape[1],
                          {static_cast<float>(lr), 0.3f, 1});
        } else {
          be_.adamw_update(param, m, v, grad,
                           adamw_step(step, static_cast<float>(adamw_lr), decays ? 0.3f : 0, 1), p.size);
        }
      }
      const Floats after = param.values();
      EXPECT_LE(normalised_error(slice(params.values(), p), after), muon ? 0 : 1e-6) << p.name;
      std::copy_n(params.values().begin() + p.offset, p.size, expected.begin() + p.offset);
    }
    EXPECT_TRUE(same_bits(params.values(), expected));
  }
}

TEST_F(OptimizerTest, WeightDecayPullsOnMatricesEmbeddingAndHeadOnly) {
  for (Optimizer choice : {Optimizer::muon, Optimizer::adamw}) {
    OptimizerConfig config;
    config.choice = choice;
    config.weight_decay = 0.25;
    OptimizerState<TestBackend> state(be_, table_, config);
    const Floats before = random_table(1);
    const Guarded<float> params(be_, before), grads(be_, Floats(before.size()));
    state.update(params, grads, 0, 1, 0.5, 0.5);
    for (const Parameter& p : table_.entries) {
      const bool decays = ends_with_any(p.name, kMatrices) || ends_with_any(p.name, kVocabulary);
      Floats expected = slice(before, p);
      for (float& value : expected) value *= decays ? 0.875f : 1;
      EXPECT_EQ(slice(params.values(), p), expected) << p.name;
    }
  }
}

TEST_F(OptimizerTest, EachOptimizerHasItsLearningRate) {
  const Floats before = random_table(1);
  for (bool muon_only : {true, false}) {
    OptimizerState<TestBackend> state(be_, table_, {});
    const Guarded<float> params(be_, before), grads(be_, random_table(2));
    state.update(params, grads, state.gradient_norm(grads), 1, muon_only ? 0.1 : 0, muon_only ? 0 : 0.1);
    for (const Parameter& p : table_.entries) {
      const bool moved = !same_bits(slice(params.values(), p), slice(before, p));
      EXPECT_EQ(moved, ends_with_any(p.name, kMatrices) == muon_only) << p.name;
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// clipping

TEST_F(OptimizerTest, GradientNormIsThatOfAllTensors) {
  const Floats gradient = random_table(1);
  OptimizerState<TestBackend> state(be_, table_, {});
  const double expected = std::sqrt(dot(doubles(gradient), doubles(gradient)));
  EXPECT_NEAR(state.gradient_norm(Guarded<float>(be_, gradient)), expected, 1e-9 * expected);
}

// The factor that reached the optimizers: after one step the first moment is (1 - beta) * factor * gradient.
TEST_F(OptimizerTest, ClipsOnlyAboveTheLimit) {
  const Floats gradient = random_table(1);
  struct Case {
    double clip, norm, factor;
  };
  for (const auto& [clip, norm, factor] :
       {Case{1, 4, 0.25}, {1, 1, 1}, {1, 0.5, 1}, {2, 2.0000001, 2 / 2.0000001}, {0, 1e6, 1}, {1, 0, 1}}) {
    SCOPED_TRACE("clip " + std::to_string(clip) + ", norm " + std::to_string(norm));
    OptimizerConfig config;
    config.grad_clip = clip;
    OptimizerState<TestBackend> state(be_, table_, config);
    const Guarded<float> params(be_, random_table(2)), grads(be_, gradient);
    state.update(params, grads, norm, 1, 0.1, 0.1);
    const Floats moments = moment(state);
    for (const Parameter& p : table_.entries) {
      const double share = ends_with_any(p.name, kMatrices) ? 0.05 : 0.1;
      Doubles expected;
      for (float g : slice(gradient, p)) expected.push_back(share * factor * g);
      EXPECT_LE(normalised_error(slice(moments, p), expected), 1e-6) << p.name;
    }
    EXPECT_TRUE(same_bits(grads.values(), gradient));
  }
}

// ---------------------------------------------------------------------------------------------------
// learning rate

constexpr std::array kSchedules = {LrSchedule::cosine, LrSchedule::linear, LrSchedule::wsd,
                                   LrSchedule::constant};

// 111 steps, 10 of them warm-up; the rest ends at a tenth.
double factor(LrSchedule schedule, int64_t step) {
  return schedule_factor(schedule, step, 111, 10, 0.1);
}

TEST(Schedule, WarmsUpInEqualSteps) {
  for (LrSchedule schedule : kSchedules) {
    for (int64_t step = 0; step <= 10; step++) {
      EXPECT_NEAR(factor(schedule, step), static_cast<double>(step + 1) / 11, 1e-12);
    }
  }
}

TEST(Schedule, Constant) {
  for (int64_t step = 10; step <= 110; step++) EXPECT_EQ(factor(LrSchedule::constant, step), 1);
}

TEST(Schedule, Linear) {
  EXPECT_NEAR(factor(LrSchedule::linear, 35), 0.775, 1e-12);
  EXPECT_NEAR(factor(LrSchedule::linear, 60), 0.55, 1e-12);
  EXPECT_NEAR(factor(LrSchedule::linear, 110), 0.1, 1e-12);
}

TEST(Schedule, Cosine) {
  EXPECT_NEAR(factor(LrSchedule::cosine, 35), 0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5)), 1e-12);
  EXPECT_NEAR(factor(LrSchedule::cosine, 60), 0.55, 1e-12);
  EXPECT_NEAR(factor(LrSchedule::cosine, 110), 0.1, 1e-12);
}

TEST(Schedule, WsdFallsOverTheLastFifth) {
  for (int64_t step = 10; step <= 90; step++) EXPECT_NEAR(factor(LrSchedule::wsd, step), 1, 1e-12);
  EXPECT_LT(factor(LrSchedule::wsd, 91), 1);
  EXPECT_NEAR(factor(LrSchedule::wsd, 100), 0.55, 1e-12);
  EXPECT_NEAR(factor(LrSchedule::wsd, 110), 0.1, 1e-12);
}

TEST(Schedule, RisesThenFallsAndIsNeverZero) {
  for (LrSchedule schedule : kSchedules) {
    for (int64_t steps : {1, 2, 3, 11, 12, 500}) {
      for (int64_t warmup : {0, 1, 10, 600}) {
        for (int64_t step = 0; step < steps; step++) {
          const double now = schedule_factor(schedule, step, steps, warmup, 0.1);
          EXPECT_GT(now, 0);
          EXPECT_LE(now, 1);
          if (step == 0) continue;
          const double before = schedule_factor(schedule, step - 1, steps, warmup, 0.1);
          EXPECT_TRUE(step <= warmup ? now > before : now <= before + 1e-12) << "step " << step;
        }
      }
    }
  }
}

TEST(Schedule, MayEndAtZeroButNotBefore) {
  for (LrSchedule schedule : {LrSchedule::cosine, LrSchedule::linear, LrSchedule::wsd}) {
    EXPECT_NEAR(schedule_factor(schedule, 99, 100, 0, 0), 0, 1e-12);
    EXPECT_GT(schedule_factor(schedule, 98, 100, 0, 0), 1e-4);
  }
}

TEST(Schedule, ARunOfOneStepHasTheFullRate) {
  for (LrSchedule schedule : kSchedules) EXPECT_EQ(schedule_factor(schedule, 0, 1, 0, 0.1), 1);
}

}  // namespace
}  // namespace xmod
