#include "mhc/elementary.hpp"
#include "portable_operators.hpp"

namespace mhc::portable {

namespace {

bool is_column(std::size_t step) { return step % 2 == 0; }

// The element of m at position `along` of the normalized axis, in the line (column or row) `line`.
template <typename Matrix>
auto& at(Matrix& m, std::size_t step, std::size_t line, std::size_t along) {
  return is_column(step) ? m[along][line] : m[line][along];
}

Matrix4 softmax_rows(const float* logits) {
  Matrix4 result;
  for (std::size_t i = 0; i < 4; ++i) {
    const float* row = logits + 4 * i;
    const float top = stream4_max([&](std::size_t j) { return row[j]; });
    Vector4 power;
    for (std::size_t j = 0; j < 4; ++j) power[j] = exp_rn(row[j] - top);
    const float total = stream4_sum([&](std::size_t j) { return power[j]; });
    for (std::size_t j = 0; j < 4; ++j) result[i][j] = div_rn(power[j], total);
  }
  return result;
}

Matrix4 normalize(const Matrix4& m, std::size_t step, Vector4& denominator) {
  Matrix4 result;
  for (std::size_t line = 0; line < 4; ++line) {
    denominator[line] = stream4_sum([&](std::size_t along) { return at(m, step, line, along); }) + kEps;
    for (std::size_t along = 0; along < 4; ++along) {
      at(result, step, line, along) = div_rn(at(m, step, line, along), denominator[line]);
    }
  }
  return result;
}

Matrix4 normalize_bwd(const Matrix4& grad, const SinkhornStep& saved, std::size_t step) {
  Matrix4 result;
  for (std::size_t line = 0; line < 4; ++line) {
    const float den = saved.denominator[line];
    const float g = stream4_sum(
        [&](std::size_t along) { return at(grad, step, line, along) * at(saved.input, step, line, along); });
    const float spread = div_rn(g, den * den);
    for (std::size_t along = 0; along < 4; ++along) {
      at(result, step, line, along) = div_rn(at(grad, step, line, along), den) - spread;
    }
  }
  return result;
}

}  // namespace

Split split_sinkhorn_fwd(const Floats& h) {
  const std::size_t tokens = h.size() / kControllerN;
  Split out{Floats(tokens * 4), Floats(tokens * 4), Floats(tokens * 16), std::vector<SinkhornSaved>(tokens)};
  for (std::size_t t = 0; t < tokens; ++t) {
    const float* row = &h[t * kControllerN];
    SinkhornSaved& saved = out.saved[t];
    for (std::size_t i = 0; i < 4; ++i) {
      saved.sigmoid_pre[i] = sigmoid_rn(row[i]);
      saved.sigmoid_post[i] = sigmoid_rn(row[kPostBegin + i]);
      out.pre[t * 4 + i] = saved.sigmoid_pre[i] + kEps;
      out.post[t * 4 + i] = 2.0f * saved.sigmoid_post[i];
    }
    saved.softmax = softmax_rows(row + kCombBegin);
    Matrix4 m = saved.softmax;
    for (Vector4& line : m) {
      for (float& value : line) value = value + kEps;
    }
    for (std::size_t step = 0; step < kSinkhornSteps; ++step) {
      saved.steps[step].input = m;
      m = normalize(m, step, saved.steps[step].denominator);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      for (std::size_t j = 0; j < 4; ++j) out.c[t * 16 + i * 4 + j] = m[i][j];
    }
  }
  return out;
}

Floats split_sinkhorn_bwd(const Floats& dpre, const Floats& dpost, const Floats& dc,
                          const std::vector<SinkhornSaved>& saved) {
  Floats dh(saved.size() * kControllerN);
  for (std::size_t t = 0; t < saved.size(); ++t) {
    float* out = &dh[t * kControllerN];
    Matrix4 grad;
    for (std::size_t i = 0; i < 4; ++i) {
      for (std::size_t j = 0; j < 4; ++j) grad[i][j] = dc[t * 16 + i * 4 + j];
    }
    for (std::size_t step = kSinkhornSteps; step-- > 0;) grad = normalize_bwd(grad, saved[t].steps[step], step);
    for (std::size_t i = 0; i < 4; ++i) {
      const float pre = saved[t].sigmoid_pre[i], post = saved[t].sigmoid_post[i];
      out[i] = dpre[t * 4 + i] * (pre * (1.0f - pre));
      out[kPostBegin + i] = dpost[t * 4 + i] * (2.0f * (post * (1.0f - post)));
      const Vector4& s = saved[t].softmax[i];
      const float dot = stream4_sum([&](std::size_t j) { return grad[i][j] * s[j]; });
      for (std::size_t j = 0; j < 4; ++j) out[kCombBegin + i * 4 + j] = s[j] * (grad[i][j] - dot);
    }
  }
  return dh;
}

}  // namespace mhc::portable
