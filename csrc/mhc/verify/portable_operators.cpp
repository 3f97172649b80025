#include "portable_operators.hpp"

#include <cmath>

#include "mhc/elementary.hpp"

namespace mhc::portable {

Floats fixed_k_gemm_fwd(const Floats& x, const Floats& w, GemmSizes sizes) {
  const std::size_t m = sizes.m, n = sizes.n, k = sizes.k;
  Floats out(m * n);
  for (std::size_t row = 0; row < m; ++row) {
    for (std::size_t column = 0; column < n; ++column) {
      const float *a = x.data() + row * k, *b = w.data() + column * k;
      out[row * n + column] = fixed_sum(k, [&](std::size_t i) { return a[i] * b[i]; });
    }
  }
  return out;
}

GemmGrads fixed_k_gemm_bwd(const Floats& dy, const Floats& x, const Floats& w, GemmSizes sizes) {
  const std::size_t m = sizes.m, n = sizes.n, k = sizes.k;
  GemmGrads grads{Floats(m * k), Floats(n * k)};
  for (std::size_t i = 0; i < k; ++i) {
    for (std::size_t row = 0; row < m; ++row) {
      grads.dx[row * k + i] = fixed_sum(n, [&](std::size_t c) { return dy[row * n + c] * w[c * k + i]; });
    }
    for (std::size_t column = 0; column < n; ++column) {
      grads.dw[column * k + i] = fixed_sum(m, [&](std::size_t r) { return dy[r * n + column] * x[r * k + i]; });
    }
  }
  return grads;
}

GemmRms gemm_rms_fwd(const Floats& x, const Floats& weight, ControllerRms formula, Sizes sizes) {
  const std::size_t k = sizes.flat_k();
  const float root_of_k = static_cast<float>(std::sqrt(static_cast<double>(k)));
  GemmRms out{formula, fixed_k_gemm_fwd(x, weight, {sizes.tokens, kControllerN, k}), {}, {}};
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    const float* row = &x[t * k];
    const float s = fixed_sum(k, [&](std::size_t i) { return row[i] * row[i]; });
    if (formula == ControllerRms::kRsqrtMeanPlusEps) {
      out.r.push_back(rsqrt_rn(div_rn(s, static_cast<float>(k)) + kEps));
    } else {
      out.q.push_back(div_rn(sqrt_rn(s), root_of_k));
      out.r.push_back(div_rn(1.0f, out.q[t] + kEps));
    }
  }
  return out;
}

GemmGrads gemm_rms_bwd(const Floats& dp, const Floats& dr, const Floats& x, const Floats& weight, const GemmRms& saved,
                       Sizes sizes) {
  const std::size_t k = sizes.flat_k();
  const auto k_rounded = static_cast<float>(k);
  GemmGrads grads = fixed_k_gemm_bwd(dp, x, weight, {sizes.tokens, kControllerN, k});
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    const float r = saved.r[t];
    float slope = -(r * r * r), denominator = k_rounded;
    if (saved.formula == ControllerRms::kInverseRmsPlusEps) {
      slope = -(r * r);
      denominator = saved.q[t] == 0.0f ? 1.0f : k_rounded * saved.q[t];
    }
    for (std::size_t i = t * k; i < (t + 1) * k; ++i) {
      grads.dx[i] = grads.dx[i] + dr[t] * div_rn(slope * x[i], denominator);
    }
  }
  return grads;
}

Bf16s post_fwd(const Bf16s& r_old, const Bf16s& y, const Floats& c, const Floats& post, Sizes sizes) {
  const std::size_t hidden = sizes.hidden;
  Bf16s r_new(r_old.size());
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    for (std::size_t j = 0; j < kStreams; ++j) {
      for (std::size_t d = 0; d < hidden; ++d) {
        const float mixed = stream4_sum(
            [&](std::size_t i) { return c[(t * 4 + i) * 4 + j] * widen(r_old[(t * 4 + i) * hidden + d]); });
        r_new[(t * 4 + j) * hidden + d] = to_bf16(mixed + post[t * 4 + j] * widen(y[t * hidden + d]));
      }
    }
  }
  return r_new;
}

PostGrads post_bwd(const Bf16s& dr_new, const Bf16s& r_old, const Bf16s& y, const Floats& c, const Floats& post,
                   Sizes sizes) {
  const std::size_t hidden = sizes.hidden;
  PostGrads grads{Floats(r_old.size()), Floats(y.size()), Floats(c.size()), Floats(post.size())};
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    const float* mixing = &c[t * 16];
    const auto stream = [&](const Bf16s& x, std::size_t i, std::size_t d) { return widen(x[(t * 4 + i) * hidden + d]); };
    for (std::size_t d = 0; d < hidden; ++d) {
      for (std::size_t i = 0; i < kStreams; ++i) {
        grads.dr_old[(t * 4 + i) * hidden + d] =
            stream4_sum([&](std::size_t j) { return mixing[i * 4 + j] * stream(dr_new, j, d); });
      }
      grads.dy[t * hidden + d] =
          stream4_sum([&](std::size_t j) { return post[t * 4 + j] * stream(dr_new, j, d); });
    }
    for (std::size_t j = 0; j < kStreams; ++j) {
      for (std::size_t i = 0; i < kStreams; ++i) {
        grads.dc[t * 16 + i * 4 + j] =
            fixed_sum(hidden, [&](std::size_t d) { return stream(r_old, i, d) * stream(dr_new, j, d); });
      }
      grads.dpost[t * 4 + j] =
          fixed_sum(hidden, [&](std::size_t d) { return widen(y[t * hidden + d]) * stream(dr_new, j, d); });
    }
  }
  return grads;
}

Bf16s aggregate_fwd(const Floats& pre, const Bf16s& r_old, Sizes sizes) {
  Bf16s hidden(sizes.tokens * sizes.hidden);
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    for (std::size_t d = 0; d < sizes.hidden; ++d) {
      hidden[t * sizes.hidden + d] = to_bf16(stream4_sum(
          [&](std::size_t i) { return pre[t * 4 + i] * widen(r_old[(t * 4 + i) * sizes.hidden + d]); }));
    }
  }
  return hidden;
}

AggregateGrads aggregate_bwd(const Floats& dh, const Floats& pre, const Bf16s& r_old, Sizes sizes) {
  AggregateGrads grads{Floats(r_old.size()), Floats(pre.size())};
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    const float* row = dh.data() + t * sizes.hidden;
    for (std::size_t i = 0; i < kStreams; ++i) {
      const std::size_t first = (t * 4 + i) * sizes.hidden;
      for (std::size_t d = 0; d < sizes.hidden; ++d) grads.dr_old[first + d] = pre[t * 4 + i] * row[d];
      grads.dpre[t * 4 + i] = fixed_sum(sizes.hidden, [&](std::size_t d) { return row[d] * widen(r_old[first + d]); });
    }
  }
  return grads;
}

Norm rmsnorm_fwd(const Bf16s& x, const Floats& gamma, Sizes sizes) {
  Norm out{Bf16s(x.size()), Floats(sizes.tokens)};
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    const Bf16* row = &x[t * sizes.hidden];
    const float squares = fixed_sum(sizes.hidden, [&](std::size_t d) { return widen(row[d]) * widen(row[d]); });
    const float r = rsqrt_rn(div_rn(squares, static_cast<float>(sizes.hidden)) + kEps);
    for (std::size_t d = 0; d < sizes.hidden; ++d) {
      out.y[t * sizes.hidden + d] = to_bf16((widen(row[d]) * r) * gamma[d]);
    }
    out.r[t] = r;
  }
  return out;
}

NormGrads rmsnorm_bwd(const Bf16s& dy, const Bf16s& d_residual, const Bf16s& x, const Floats& gamma, const Floats& r,
                      Sizes sizes) {
  const std::size_t hidden = sizes.hidden;
  NormGrads grads{Floats(x.size()), Floats(hidden)};
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    const std::size_t first = t * hidden;
    const auto u = [&](std::size_t d) { return widen(dy[first + d]) * gamma[d]; };
    const float q = fixed_sum(hidden, [&](std::size_t d) { return u(d) * widen(x[first + d]); });
    const float cube = (r[t] * r[t]) * r[t];
    for (std::size_t d = 0; d < hidden; ++d) {
      const float pull = div_rn((widen(x[first + d]) * cube) * q, static_cast<float>(hidden));
      grads.dx[first + d] = (r[t] * u(d) - pull) + widen(d_residual[first + d]);
    }
  }
  for (std::size_t d = 0; d < hidden; ++d) {
    grads.dgamma[d] = fixed_sum(sizes.tokens, [&](std::size_t t) {
      return (widen(dy[t * hidden + d]) * widen(x[t * hidden + d])) * r[t];
    });
  }
  return grads;
}

}  // namespace mhc::portable
