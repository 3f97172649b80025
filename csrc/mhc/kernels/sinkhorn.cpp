// The controller and hc_split_sinkhorn, a token in each lane; the 39 matrices of the backward are computed anew.
#include "rows.hpp"

namespace mhc::MHC_LEVEL {

namespace {

constexpr int kSteps = 39;           // a column, then 19 times (row, column)
constexpr float kEps = 1e-6f;

constexpr bool is_column(int step) { return step % 2 == 0; }

// The maximum as the contract has it: a NaN wins, and of two equal values the later.
MHC_INLINE F32 larger(F32 a, F32 b) { return select(bits_as<U32>(a > b) | bits_as<U32>(a != a), a, b); }

// Element `at` of the row or column `line` of a 4x4 matrix.
MHC_INLINE int element(bool column, int line, int at) { return column ? at * 4 + line : line * 4 + at; }

MHC_INLINE void denominators(const F32 (&m)[kComb], bool column, F32 (&den)[kStreams]) {
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    den[line] = stream4(m[element(column, line, 0)], m[element(column, line, 1)], m[element(column, line, 2)],
                        m[element(column, line, 3)]) + splat(kEps);
  }
}

MHC_INLINE void normalize(F32 (&m)[kComb], bool column, const F32 (&den)[kStreams]) {
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
#pragma GCC unroll 4
    for (int at = 0; at < 4; ++at) m[element(column, line, at)] = m[element(column, line, at)] / den[line];
  }
}

MHC_INLINE void start(const F32 (&softmax)[kComb], F32 (&m)[kComb]) {
#pragma GCC unroll 16
  for (int i = 0; i < kComb; ++i) m[i] = softmax[i] + splat(kEps);
}

// One step back: g = tree(dN * M), dM = dN / den - g / (den * den).
MHC_INLINE void step_back(const F32 (&m)[kComb], bool column, F32 (&grad)[kComb]) {
  F32 den[kStreams];
  denominators(m, column, den);
  for (int line = 0; line < 4; ++line) {
    F32 part[4];
    for (int at = 0; at < 4; ++at) part[at] = grad[element(column, line, at)] * m[element(column, line, at)];
    const F32 spread = stream4(part[0], part[1], part[2], part[3]) / (den[line] * den[line]);
    for (int at = 0; at < 4; ++at) {
      F32& g = grad[element(column, line, at)];
      g = g / den[line] - spread;
    }
  }
}

MHC_INLINE const float* alpha_of(const float* alpha3, int n) { return alpha3 + (n < 4 ? 0 : n < 8 ? 1 : 2); }

}  // namespace

void controller_fwd(Range tokens, const float* p, const float* r, const float* alpha3, const float* bias, float* h) {
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    for (int n = 0; n < kController; ++n) {
      const float m = r[t] * p[t * kController + n];
      h[t * kController + n] = m * *alpha_of(alpha3, n) + bias[n];
    }
  }
}

void controller_bwd(Range tokens, const float* dh, const float* p, const float* r, const float* alpha3, float* dp,
                    float* dr) {
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    float sum = 0.0f;
    for (int n = 0; n < kController; ++n) {
      const std::int64_t at = t * kController + n;
      const float dm = dh[at] * *alpha_of(alpha3, n);
      dp[at] = dm * r[t];
      sum = sum + dm * p[at];
    }
    dr[t] = sum;
  }
}

void controller_folds(std::int64_t tokens, const float* dh, const float* p, const float* r, float* dalpha,
                      float* dbias) {
  for (int n = 0; n < kController; ++n) dalpha[n] = dbias[n] = 0.0f;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int n = 0; n < kController; ++n) {
      const std::int64_t at = t * kController + n;
      dalpha[n] = dalpha[n] + dh[at] * (r[t] * p[at]);
      dbias[n] = dbias[n] + dh[at];
    }
  }
}

void split_shift(Range tokens, const float* h, float* shifted) {
  for_tiles(tokens, [&](std::int64_t token, int count) {
    F32 logit[kComb];
    lanes_from_tokens<kComb>(h + token * kController + kGates, kController, count, logit);
    for (int i = 0; i < kComb; i += 4) {
      const F32 most = larger(larger(logit[i], logit[i + 1]), larger(logit[i + 2], logit[i + 3]));
      for (int j = 0; j < 4; ++j) logit[i + j] = logit[i + j] - most;
    }
    lanes_to_tokens<kComb>(logit, count, shifted + token * kComb, kComb);
  });
}

void split_fwd(Range tokens, const float* sig, const float* exps, float* pre, float* post, float* c, float* softmax) {
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    for (int i = 0; i < kStreams; ++i) {
      pre[t * kStreams + i] = sig[t * kGates + i] + kEps;
      post[t * kStreams + i] = 2.0f * sig[t * kGates + kStreams + i];
    }
  }
  for_tiles(tokens, [&](std::int64_t token, int count) {
    F32 m[kComb], soft[kComb];
    lanes_from_tokens<kComb>(exps + token * kComb, kComb, count, soft);
    for (int i = 0; i < kComb; i += 4) {
      const F32 sum = stream4(soft[i], soft[i + 1], soft[i + 2], soft[i + 3]);
      for (int j = 0; j < 4; ++j) soft[i + j] = soft[i + j] / sum;
    }
    lanes_to_tokens<kComb>(soft, count, softmax + token * kComb, kComb);
    start(soft, m);
    for (int step = 0; step < kSteps; step += 2) {
      F32 den[kStreams];
      denominators(m, true, den);
      normalize(m, true, den);
      if (step + 1 == kSteps) break;
      denominators(m, false, den);
      normalize(m, false, den);
    }
    lanes_to_tokens<kComb>(m, count, c + token * kComb, kComb);
  });
}

void split_bwd(Range tokens, const float* dpre, const float* dpost, const float* dc, Rows sig_pre, Rows sig_post,
               const float* softmax, float* dh) {
  for_tiles(tokens, [&](std::int64_t token, int count) {
    F32 soft[kComb], grad[kComb];
    F32 steps[kSteps + 1][kComb];
    lanes_from_tokens<kComb>(softmax + token * kComb, kComb, count, soft);
    lanes_from_tokens<kComb>(dc + token * kComb, kComb, count, grad);
    start(soft, steps[0]);
    for (int step = 0; step + 1 < kSteps; ++step) {
      F32 den[kStreams];
      __builtin_memcpy(steps[step + 1], steps[step], sizeof(steps[step]));
      denominators(steps[step], is_column(step), den);
      normalize(steps[step + 1], is_column(step), den);
    }
    for (int step = kSteps - 1; step >= 0; --step) step_back(steps[step], is_column(step), grad);
    for (int i = 0; i < kComb; i += 4) {
      F32 part[4];
      for (int j = 0; j < 4; ++j) part[j] = grad[i + j] * soft[i + j];
      const F32 sum = stream4(part[0], part[1], part[2], part[3]);
      for (int j = 0; j < 4; ++j) grad[i + j] = soft[i + j] * (grad[i + j] - sum);
    }
    lanes_to_tokens<kComb>(grad, count, dh + token * kController + kGates, kController);
  });
  const auto pre = typed<float>(sig_pre), post = typed<float>(sig_post);
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    for (int i = 0; i < kStreams; ++i) {
      const float s = pre.row(t)[i], z = post.row(t)[i];
      dh[t * kController + i] = dpre[t * kStreams + i] * (s * (1.0f - s));
      dh[t * kController + kStreams + i] = dpost[t * kStreams + i] * (2.0f * (z * (1.0f - z)));
    }
  }
}

}  // namespace mhc::MHC_LEVEL
