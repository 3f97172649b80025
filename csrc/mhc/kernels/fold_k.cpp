// Folds over K: out[t, n] = fold_k x[t, k] * w[n, k], and the sum of squares of x beside them.
//
// A lane is a token, and the chains of a group are registers; w is repacked so that a step's weights are neighbours. Each
// chain adds k ascending from +0. Few tokens have a kernel of their own (fold_k_few.cpp).
#include "turn.hpp"

namespace mhc::MHC_LEVEL {

namespace {

constexpr int kPackSteps = 64;  // of a row of w that are turned over at a time
constexpr int kSteps = 128;     // x of a tile for so many steps stays in the first cache beside its weights

// A chunk of x with a token in each lane: FP32 step by step, BF16 in pairs of steps that are widened when they are used.
struct WideSteps {
  alignas(64) float lanes[kSteps * kLanes];
  MHC_INLINE void fill(RowsOf<float> x, std::int64_t token, int tokens, std::int64_t at, int steps) {
    tokens_to_lanes(x, token, tokens, at, steps, lanes);
  }
  MHC_INLINE void two(int k, F32& even, F32& odd) const {
    even = load(lanes + k * kLanes);
    odd = load(lanes + (k + 1) * kLanes);
  }
};

struct PairSteps {
  alignas(64) U32 lanes[kSteps / 2];
  MHC_INLINE void fill(RowsOf<Bf16> x, std::int64_t token, int tokens, std::int64_t at, int steps) {
    pairs_to_lanes(x, token, tokens, at, steps, [&](int pair, U32 both) { lanes[pair] = both; });
  }
  MHC_INLINE void two(int k, F32& even, F32& odd) const {
    even = even_of(lanes[k / 2]);
    odd = odd_of(lanes[k / 2]);
  }
};

template <typename T>
struct StepsOf {
  typedef WideSteps Type;
};
template <>
struct StepsOf<Bf16> {
  typedef PairSteps Type;
};

template <int N, bool Squares>
MHC_INLINE void fold_step(F32 xk, const float* w, F32 (&a)[N], F32& s) {
  if constexpr (Squares) s = s + xk * xk;
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) a[n] = a[n] + xk * splat(w[n]);
}

template <int N, bool Squares, typename Steps>
MHC_INLINE void fold_steps(const Steps& x, const float* w, int steps, F32 (&acc)[N], F32& squares) {
  F32 a[N], s = squares, even, odd;
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) a[n] = acc[n];
  int k = 0;
  for (; k + 2 <= steps; k += 2) {
    x.two(k, even, odd);
    fold_step<N, Squares>(even, w + k * kChains, a, s);
    fold_step<N, Squares>(odd, w + (k + 1) * kChains, a, s);
  }
  if (k < steps) {
    x.two(k, even, odd);
    fold_step<N, Squares>(even, w + k * kChains, a, s);
  }
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) acc[n] = a[n];
  squares = s;
}

// A whole tile of BF16, kAtOnce steps at a time, while the next as many are laid out between the multiplies and adds of
// these: a processor cannot look far enough ahead to overlap the two by itself. Widening and turning over are moves of 16
// bits into the upper halves of the lanes, so they leave the vector units, which are the limit, to the fold. Fewer chains
// or lanes would not cover as many moves.
constexpr bool kInterleaves = kLanes == 16;

struct Interleaved {
  static constexpr int kAtOnce = 2 * kLanes;
  static constexpr int kFour = 4;  // numbers that are moved from one register
  const Bf16* rows[kLanes];
  alignas(64) std::uint16_t halves[2][kAtOnce][kLanes][2] = {};  // little-endian FP32: the lower halves stay zero

  MHC_INLINE void lay_out(int which, int token, std::int64_t at) {
    const Bf16* from = rows[token] + at;
    prefetch_ahead(from, 4 * kAtOnce);
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; i += kFour) {
      std::uint64_t four;
      __builtin_memcpy(&four, from + i, sizeof(four));
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) {
        asm("" : "+r"(four));  // in a general register
        halves[which][i + j][token][1] = static_cast<std::uint16_t>(four);
        four >>= 16;
      }
    }
  }

  MHC_INLINE F32 step(int which, int i) const { return load(reinterpret_cast<const float*>(halves[which][i])); }
};

// The steps [0, count) with count a multiple of kAtOnce, at least that.
template <int N, bool Squares>
MHC_INLINE void fold_interleaved(RowsOf<Bf16> x, std::int64_t token, std::int64_t count, const float* w, F32 (&acc)[N],
                                 F32& squares) {
  Interleaved in;
  for (int t = 0; t < kLanes; ++t) {
    in.rows[t] = x.row(token + t);
    in.lay_out(0, t, 0);
  }
  F32 a[N], s = squares;
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) a[n] = acc[n];
  for (std::int64_t at = 0, which = 0; at < count; at += Interleaved::kAtOnce, which ^= 1) {
    // The last steps are laid out once more, to no use, and nothing beyond the row.
    const std::int64_t next = at + Interleaved::kAtOnce < count ? at + Interleaved::kAtOnce : at;
    const int now = static_cast<int>(which);
    for (int t = 0; t < kLanes; ++t, w += 2 * kChains) {
      in.lay_out(now ^ 1, t, next);
      fold_step<N, Squares>(in.step(now, 2 * t), w, a, s);
      fold_step<N, Squares>(in.step(now, 2 * t + 1), w + kChains, a, s);
    }
  }
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) acc[n] = a[n];
  squares = s;
}

template <int N, bool Squares, typename T>
void fold_tile(RowsOf<T> x, std::int64_t token, int tokens, std::int64_t k, const float* w, std::int64_t n_left,
               float* out, std::int64_t n, float* sumsq) {
  F32 acc[N] = {};
  F32 squares{};
  typename StepsOf<T>::Type lanes;
  std::int64_t at = 0;
  if constexpr (kInterleaves && N == kChains && sizeof(T) == sizeof(Bf16)) {
    if (tokens == kLanes) {
      at = k / Interleaved::kAtOnce * Interleaved::kAtOnce;
      if (at > 0) fold_interleaved<N, Squares>(x, token, at, w, acc, squares);
    }
  }
  for (; at < k; at += kSteps) {
    const int steps = static_cast<int>(least(kSteps, k - at));
    lanes.fill(x, token, tokens, at, steps);
    fold_steps<N, Squares>(lanes, w + at * kChains, steps, acc, squares);
  }
  alignas(64) float each[kLanes];
  for (int i = 0; i < N && i < n_left; ++i) {
    store(each, acc[i]);
    for (int t = 0; t < tokens; ++t) out[(token + t) * n + i] = each[t];
  }
  if constexpr (Squares) {
    store(each, squares);
    for (int t = 0; t < tokens; ++t) sumsq[token + t] = each[t];
  }
}

}  // namespace

void pack_chains(Rows w, std::int64_t n, std::int64_t k, Range some, float* packed) {
  constexpr int kRows = kChains % 8 == 0 ? 8 : 4;  // never across two groups
  typedef Vectors<kRows>::F V;
  with_rows(w, [&](auto rows) {
    for (std::int64_t first = 0; first < ceil_to(n, kChains); first += kRows) {
      float* to = packed + first / kChains * k * kChains + first % kChains;
      const int have = static_cast<int>(first < n ? least(kRows, n - first) : 0);
      alignas(64) float lines[kRows * kPackSteps] = {};
      for (std::int64_t at = some.begin; at < some.end; at += kPackSteps) {
        const int steps = static_cast<int>(least(kPackSteps, some.end - at));
        for (int r = 0; r < have; ++r) {
          const auto* from = rows.row(first + r) + at;
          for_lanes(0, steps, [&](std::int64_t i, auto part) {
            store(lines + r * kPackSteps + i, load(from + i, part), part);
          });
        }
        for (int four = 0; four < steps; four += 4) {
          V step[4];
          turn(lines + four, kPackSteps, step);
          for (int i = 0; i < 4 && four + i < steps; ++i) {
            __builtin_memcpy(to + (at + four + i) * kChains, &step[i], sizeof(V));
          }
        }
      }
    }
  });
}

void fold_k(Rows x, Range tokens, std::int64_t n, std::int64_t k, Range chains, const float* packed, float* out,
            float* sumsq) {
  const std::int64_t inside = chains.begin % kChains;
  const float* w = packed + (chains.begin / kChains) * k * kChains + inside;
  const bool half = chains.end - chains.begin <= kChains / 2;
  with_rows(x, [&](auto rows) {
    for_tiles(tokens, [&](std::int64_t token, int count) {
      float* to = out + chains.begin;
      const std::int64_t left = n - chains.begin;
      if (half && sumsq != nullptr) {
        fold_tile<kChains / 2, true>(rows, token, count, k, w, left, to, n, sumsq);
      } else if (half) {
        fold_tile<kChains / 2, false>(rows, token, count, k, w, left, to, n, sumsq);
      } else if (sumsq != nullptr) {
        fold_tile<kChains, true>(rows, token, count, k, w, left, to, n, sumsq);
      } else {
        fold_tile<kChains, false>(rows, token, count, k, w, left, to, n, sumsq);
      }
    });
  });
}

}  // namespace mhc::MHC_LEVEL
