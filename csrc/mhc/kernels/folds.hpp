// Folds over D with a token in each lane: of terms formed row by row, and of the products of two groups of rows.
#pragma once

#include "rows.hpp"

namespace mhc::MHC_LEVEL {

// fold_d term(t, at, some) for the tokens of a tile, d ascending from +0; term gives the segment of d at `at` of token t,
// already rounded.
template <typename Term>
MHC_INLINE F32 fold_terms(int tokens, std::int64_t hidden, Term term) {
  F32 acc{};
  if (tokens == 1) {
    float sum = 0.0f;
    for_lanes(0, hidden, [&](std::int64_t at, auto some) {
      float each[kLanes];
      store(each, term(0, at, some));
      for (int i = 0; i < some.lanes(); ++i) sum = sum + each[i];
    });
    acc[0] = sum;
    return acc;
  }
  for_lanes(0, hidden, [&](std::int64_t at, auto some) {
    F32 tile[kLanes] = {};
    for (int t = 0; t < tokens; ++t) tile[t] = term(t, at, some);
    transpose<kLanes>(tile);
    for (int i = 0; i < some.lanes(); ++i) acc = acc + tile[i];
  });
  return acc;
}

inline constexpr int kFoldSteps = 32;  // a multiple of 2 * kLanes
static_assert(kFoldSteps % (2 * kLanes) == 0);
typedef float LaneRows[kFoldSteps * kLanes];

// acc[a][b] += left[a] * right[b] over `steps` of d.
template <int A, int B>
MHC_INLINE void fold_products(const LaneRows* left, const LaneRows* right, int steps, F32* acc) {
  F32 sum[A][B];
#pragma GCC unroll 5
  for (int a = 0; a < A; ++a) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sum[a][b] = acc[a * B + b];
  }
  for (int i = 0; i < steps; ++i) {
    F32 r[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) r[b] = load(right[b] + i * kLanes);
#pragma GCC unroll 5
    for (int a = 0; a < A; ++a) {
      const F32 l = load(left[a] + i * kLanes);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) sum[a][b] = sum[a][b] + l * r[b];
    }
  }
#pragma GCC unroll 5
  for (int a = 0; a < A; ++a) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) acc[a * B + b] = sum[a][b];
  }
}

}  // namespace mhc::MHC_LEVEL
