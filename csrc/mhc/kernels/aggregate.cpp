// h_aggregate: the four streams into the sublayer's input with PRE, and its gradients.
#include "folds.hpp"

namespace mhc::MHC_LEVEL {

void aggregate_fwd(Range tokens, std::int64_t hidden, const float* pre, Rows r_old, std::uint16_t* out) {
  const auto streams = typed<Bf16>(r_old);
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    const Bf16* r = streams.row(t);
    const float* gate = pre + t * kStreams;
    for_lanes(0, hidden, [&](std::int64_t d, auto some) {
      const F32 sum = stream4(splat(gate[0]) * load(r + d, some), splat(gate[1]) * load(r + hidden + d, some),
                              splat(gate[2]) * load(r + 2 * hidden + d, some),
                              splat(gate[3]) * load(r + 3 * hidden + d, some));
      store(bf16(out) + t * hidden + d, sum, some);
    });
  }
}

void aggregate_bwd(Range tokens, std::int64_t hidden, Rows dh, const float* pre, Rows r_old, float* dr_old,
                   float* dpre) {
  const auto r = typed<Bf16>(r_old);
  with_rows(dh, [&](auto grad) {
    for_tiles(tokens, [&](std::int64_t token, int count) {
      alignas(64) LaneRows left[kStreams], right[1];
      F32 acc[kStreams] = {};
      for (std::int64_t at = 0; at < hidden; at += kFoldSteps) {
        const int steps = static_cast<int>(least(kFoldSteps, hidden - at));
        for (int i = 0; i < kStreams; ++i) tokens_to_lanes(r, token, count, i * hidden + at, steps, left[i]);
        tokens_to_lanes(grad, token, count, at, steps, right[0]);
        fold_products<kStreams, 1>(left, right, steps, acc);
      }
      lanes_to_tokens<kStreams>(acc, count, dpre + token * kStreams, kStreams);
    });
    if (dr_old == nullptr) return;
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      for_lanes(0, hidden, [&](std::int64_t d, auto some) {
        const F32 in = load(grad.row(t) + d, some);
#pragma GCC unroll 4
        for (int i = 0; i < kStreams; ++i) {
          store(dr_old + (t * kStreams + i) * hidden + d, splat(pre[t * kStreams + i]) * in, some);
        }
      });
    }
  });
}

}  // namespace mhc::MHC_LEVEL
