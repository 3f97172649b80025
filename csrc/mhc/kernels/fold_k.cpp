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

#if defined(__AVX512F__)
// Sixteen tokens of BF16, 32 steps at a time, with the transpose of the next steps between the multiplies and adds of these:
// a processor cannot look far enough ahead to overlap the two by itself.
//
// quarters[c][q] holds 16 bytes (eight steps) of the tokens q, 4 + q, 8 + q, 12 + q; pair i of the steps comes out of
// quarters[i / 4] by three shuffles within the quarters.
struct Interleaved {
  static constexpr int kAtOnce = 32;
  const Bf16* rows[16];
  alignas(64) U32 quarters[2][4][4];

  MHC_INLINE void gather(int which, int c, int q, std::int64_t at) {
    Vectors<4>::U part[4];
#pragma GCC unroll 4
    for (int l = 0; l < 4; ++l) {
      const Bf16* from = rows[4 * l + q] + at + 8 * c;
      __builtin_memcpy(&part[l], from, sizeof(part[l]));
      if (c == 0) prefetch_ahead(from, 4 * kAtOnce);
    }
#pragma GCC unroll 4
    for (int l = 0; l < 4; ++l) {
      __builtin_memcpy(reinterpret_cast<char*>(&quarters[which][c][q]) + 16 * l, &part[l], sizeof(part[l]));
    }
  }

  template <int J>
  MHC_INLINE U32 pair(int which, int c) const {
    const auto& z = quarters[which][c];
    typedef Vectors<8>::L Wide;
    constexpr int o = J / 2 * 2;
    const U32 a = __builtin_shufflevector(z[0], z[1], o, 16 + o, o + 1, 17 + o, 4 + o, 20 + o, 5 + o, 21 + o, 8 + o,
                                          24 + o, 9 + o, 25 + o, 12 + o, 28 + o, 13 + o, 29 + o);
    const U32 b = __builtin_shufflevector(z[2], z[3], o, 16 + o, o + 1, 17 + o, 4 + o, 20 + o, 5 + o, 21 + o, 8 + o,
                                          24 + o, 9 + o, 25 + o, 12 + o, 28 + o, 13 + o, 29 + o);
    constexpr int p = J % 2;
    return bits_as<U32>(__builtin_shufflevector(bits_as<Wide>(a), bits_as<Wide>(b), p, 8 + p, 2 + p, 10 + p, 4 + p,
                                                12 + p, 6 + p, 14 + p));
  }
};

template <int N, bool Squares, int J>
MHC_INLINE void interleaved_pair(Interleaved& in, int which, int c, std::int64_t next, const float* w, F32 (&a)[N],
                                 F32& s) {
  const U32 both = in.pair<J>(which, c);
  in.gather(which ^ 1, J, c, next);
  fold_step<N, Squares>(even_of(both), w, a, s);
  fold_step<N, Squares>(odd_of(both), w + kChains, a, s);
}

// The steps [0, count) with count a multiple of 32, at least 32.
template <int N, bool Squares>
MHC_INLINE void fold_interleaved(RowsOf<Bf16> x, std::int64_t token, std::int64_t count, const float* w, F32 (&acc)[N],
                                 F32& squares) {
  Interleaved in;
  for (int t = 0; t < 16; ++t) in.rows[t] = x.row(token + t);
  for (int i = 0; i < 16; ++i) in.gather(0, i % 4, i / 4, 0);
  F32 a[N], s = squares;
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) a[n] = acc[n];
  for (std::int64_t at = 0, which = 0; at < count; at += Interleaved::kAtOnce, which ^= 1) {
    // The last steps gather themselves once more, to no use, and nothing beyond the row.
    const std::int64_t next = at + Interleaved::kAtOnce < count ? at + Interleaved::kAtOnce : at;
    const int now = static_cast<int>(which);
    for (int c = 0; c < 4; ++c, w += 8 * kChains) {
      interleaved_pair<N, Squares, 0>(in, now, c, next, w, a, s);
      interleaved_pair<N, Squares, 1>(in, now, c, next, w + 2 * kChains, a, s);
      interleaved_pair<N, Squares, 2>(in, now, c, next, w + 4 * kChains, a, s);
      interleaved_pair<N, Squares, 3>(in, now, c, next, w + 6 * kChains, a, s);
    }
  }
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) acc[n] = a[n];
  squares = s;
}
#endif

template <int N, bool Squares, typename T>
void fold_tile(RowsOf<T> x, std::int64_t token, int tokens, std::int64_t k, const float* w, std::int64_t n_left,
               float* out, std::int64_t n, float* sumsq) {
  F32 acc[N] = {};
  F32 squares{};
  typename StepsOf<T>::Type lanes;
  std::int64_t at = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    if (tokens == kLanes) {
      at = k / Interleaved::kAtOnce * Interleaved::kAtOnce;
      if (at > 0) fold_interleaved<N, Squares>(x, token, at, w, acc, squares);
    }
  }
#endif
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
