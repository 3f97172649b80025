// rmsnorm_residual: y = (x * r) * gamma with r = rsqrt(fold_d(x * x) / D + eps), and its gradients.
#include "folds.hpp"

namespace mhc::MHC_LEVEL {

void rmsnorm_mean(Range tokens, std::int64_t hidden, Rows x, float eps, float* mean) {
  const auto rows = typed<Bf16>(x);
  for_tiles(tokens, [&](std::int64_t token, int count) {
    const F32 sum = fold_terms(count, hidden, [&](int t, std::int64_t at, auto some) {
      const F32 value = load(rows.row(token + t) + at, some);
      return value * value;
    });
    store(mean + token, sum / splat(static_cast<float>(hidden)) + splat(eps), Part{count});
  });
}

void rmsnorm_fwd(Range tokens, std::int64_t hidden, Rows x, Rows gamma, const float* r, std::uint16_t* y,
                 std::uint16_t* residual, bool past_caches) {
  const auto rows = typed<Bf16>(x);
  with_rows(gamma, [&](auto scale) {
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      const F32 rt = splat(r[t]);
      const Bf16* from = rows.row(t);
      Bf16 *to = bf16(y) + t * hidden, *copy = bf16(residual) + t * hidden;
      const auto normalized = [&](std::int64_t d, auto some) {
        return (load(from + d, some) * rt) * load(scale.data + d, some);
      };
      std::int64_t done = 0;
      if (past_caches && is_aligned(to) && is_aligned(copy) && hidden % (2 * kLanes) == 0) {
        for (; done < hidden; done += 2 * kLanes) {
          store_past_caches(to + done, normalized(done, Whole{}), normalized(done + kLanes, Whole{}));
          copy_past_caches(copy + done, from + done);
        }
      }
      for_lanes(done, hidden, [&](std::int64_t d, auto some) { store(to + d, normalized(d, some), some); });
      __builtin_memcpy(copy + done, from + done, static_cast<std::size_t>(hidden - done) * sizeof(Bf16));
    }
  });
  if (past_caches) fence_stores();
}

void rmsnorm_dx(Range tokens, std::int64_t hidden, Rows dy, Rows d_residual, Rows x, Rows gamma, const float* r,
                float* dx) {
  const auto rows = typed<Bf16>(x);
  const F32 width = splat(static_cast<float>(hidden));
  const auto tile = [&](auto grad, auto skip, auto scale, std::int64_t token, int count) {
    const F32 folded = fold_terms(count, hidden, [&](int t, std::int64_t at, auto some) {
      const F32 u = load(grad.row(token + t) + at, some) * load(scale.data + at, some);
      return u * load(rows.row(token + t) + at, some);
    });
    float q[kLanes];
    store(q, folded);
    for (int t = 0; t < count; ++t) {
      const std::int64_t row = token + t;
      const float rt = r[row];
      const F32 cube = splat((rt * rt) * rt);
      for_lanes(0, hidden, [&](std::int64_t d, auto some) {
        const F32 u = load(grad.row(row) + d, some) * load(scale.data + d, some);
        const F32 pull = ((load(rows.row(row) + d, some) * cube) * splat(q[t])) / width;
        store(dx + row * hidden + d, (splat(rt) * u - pull) + load(skip.row(row) + d, some), some);
      });
    }
  };
  with_rows(dy, [&](auto grad) {
    with_rows(d_residual, [&](auto skip) {
      with_rows(gamma, [&](auto scale) {
        for_tiles(tokens, [&](std::int64_t token, int count) { tile(grad, skip, scale, token, count); });
      });
    });
  });
}

void rmsnorm_dgamma(std::int64_t tokens, Range columns, Rows dy, Rows x, const float* r, float* dgamma) {
  constexpr int kSide = 4;  // vectors of columns side by side
  const auto rows = typed<Bf16>(x);
  with_rows(dy, [&](auto grad) {
    std::int64_t d = columns.begin;
    for (; d + kSide * kLanes <= columns.end; d += kSide * kLanes) {
      F32 acc[kSide] = {};
      for (std::int64_t t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < kSide; ++v) {
          const std::int64_t at = d + v * kLanes;
          acc[v] = acc[v] + (load(grad.row(t) + at) * load(rows.row(t) + at)) * splat(r[t]);
        }
      }
      for (int v = 0; v < kSide; ++v) store(dgamma + d + v * kLanes, acc[v]);
    }
    for_lanes(d, columns.end, [&](std::int64_t at, auto some) {
      F32 acc{};
      for (std::int64_t t = 0; t < tokens; ++t) {
        acc = acc + (load(grad.row(t) + at, some) * load(rows.row(t) + at, some)) * splat(r[t]);
      }
      store(dgamma + at, acc, some);
    });
  });
}

}  // namespace mhc::MHC_LEVEL
