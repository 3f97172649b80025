// mhc_post: mix the old streams with C and add the sublayer's output with POST; and its gradients.
#include "folds.hpp"

namespace mhc::MHC_LEVEL {

namespace {

template <typename G, typename R, typename Y>
MHC_INLINE void fold_tile(RowsOf<G> g, RowsOf<R> r, RowsOf<Y> y, std::int64_t token, int tokens, std::int64_t hidden,
                          float* dc, float* dpost) {
  alignas(64) LaneRows left[kStreams + 1], right[kStreams];
  F32 acc[(kStreams + 1) * kStreams] = {};
  for (std::int64_t at = 0; at < hidden; at += kFoldSteps) {
    const int steps = static_cast<int>(least(kFoldSteps, hidden - at));
    for (int i = 0; i < kStreams; ++i) {
      tokens_to_lanes(r, token, tokens, i * hidden + at, steps, left[i]);
      tokens_to_lanes(g, token, tokens, i * hidden + at, steps, right[i]);
    }
    tokens_to_lanes(y, token, tokens, at, steps, left[kStreams]);
    if constexpr (kLanes == 16) {
      fold_products<kStreams + 1, kStreams>(left, right, steps, acc);
    } else {
      for (int a = 0; a <= kStreams; ++a) fold_products<1, kStreams>(left + a, right, steps, acc + a * kStreams);
    }
  }
  F32 by_token[kComb];
  for (int i = 0; i < kComb; ++i) by_token[i] = acc[i];
  lanes_to_tokens<kComb>(by_token, tokens, dc + token * kComb, kComb);
  F32 last[kStreams];
  for (int i = 0; i < kStreams; ++i) last[i] = acc[kComb + i];
  lanes_to_tokens<kStreams>(last, tokens, dpost + token * kStreams, kStreams);
}

// A token's new streams from its old ones and the sublayer's output.
struct Mix {
  const Bf16 *r, *y;
  std::int64_t hidden;
  F32 c[kComb], gate[kStreams];

  template <typename Some>
  MHC_INLINE void at(std::int64_t d, Some some, F32 (&out)[kStreams]) const {
    F32 old[kStreams];
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; ++i) old[i] = load(r + i * hidden + d, some);
    const F32 sublayer = load(y + d, some);
#pragma GCC unroll 4
    for (int j = 0; j < kStreams; ++j) {
      out[j] = stream4(c[j] * old[0], c[4 + j] * old[1], c[8 + j] * old[2], c[12 + j] * old[3]) + gate[j] * sublayer;
    }
  }
};

}  // namespace

void post_fwd(Range tokens, std::int64_t hidden, Rows r_old, Rows y, const float* c, const float* post,
              std::uint16_t* r_new, bool past_caches) {
  const auto streams = typed<Bf16>(r_old), sublayer = typed<Bf16>(y);
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    Mix mix{streams.row(t), sublayer.row(t), hidden, {}, {}};
    for (int i = 0; i < kComb; ++i) mix.c[i] = splat(c[t * kComb + i]);
    for (int j = 0; j < kStreams; ++j) mix.gate[j] = splat(post[t * kStreams + j]);
    Bf16* to = bf16(r_new) + t * kStreams * hidden;
    std::int64_t done = 0;
    if (past_caches && is_aligned(to) && hidden % (2 * kLanes) == 0) {
      for (; done < hidden; done += 2 * kLanes) {
        F32 low[kStreams], high[kStreams];
        mix.at(done, Whole{}, low);
        mix.at(done + kLanes, Whole{}, high);
#pragma GCC unroll 4
        for (int j = 0; j < kStreams; ++j) store_past_caches(to + j * hidden + done, low[j], high[j]);
      }
    }
    for_lanes(done, hidden, [&](std::int64_t d, auto some) {
      F32 out[kStreams];
      mix.at(d, some, out);
#pragma GCC unroll 4
      for (int j = 0; j < kStreams; ++j) store(to + j * hidden + d, out[j], some);
    });
  }
  if (past_caches) fence_stores();
}

void post_bwd(Range tokens, std::int64_t hidden, Rows dr_new, Rows r_old, Rows y, const float* c, const float* post,
              float* dr_old, void* dy, std::int64_t dy_dtype, float* dc, float* dpost) {
  const auto r = typed<Bf16>(r_old), sublayer = typed<Bf16>(y);
  const auto each = [&](auto grad, auto* to) {
    for_tiles(tokens, [&](std::int64_t token, int count) {
      fold_tile(grad, r, sublayer, token, count, hidden, dc, dpost);
    });
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      const auto* g = grad.row(t);
      const float *mix = c + t * kComb, *gate = post + t * kStreams;
      for_lanes(0, hidden, [&](std::int64_t d, auto some) {
        F32 in[kStreams];
#pragma GCC unroll 4
        for (int j = 0; j < kStreams; ++j) in[j] = load(g + j * hidden + d, some);
        const F32 out = stream4(splat(gate[0]) * in[0], splat(gate[1]) * in[1], splat(gate[2]) * in[2],
                                splat(gate[3]) * in[3]);
        store(to + t * hidden + d, out, some);
        if (dr_old == nullptr) return;
#pragma GCC unroll 4
        for (int i = 0; i < kStreams; ++i) {
          const float* row = mix + i * kStreams;
          const F32 sum = stream4(splat(row[0]) * in[0], splat(row[1]) * in[1], splat(row[2]) * in[2],
                                  splat(row[3]) * in[3]);
          store(dr_old + (t * kStreams + i) * hidden + d, sum, some);
        }
      });
    }
  };
  with_rows(dr_new, [&](auto grad) {
    if (dy_dtype == MHC_BF16) {
      each(grad, static_cast<Bf16*>(dy));
    } else {
      each(grad, static_cast<float*>(dy));
    }
  });
}

}  // namespace mhc::MHC_LEVEL
