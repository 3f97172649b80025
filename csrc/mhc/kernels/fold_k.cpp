// Folds over K: out[t, n] = fold_k x[t, k] * w[n, k], and the sum of squares of x beside them.
//
// Many tokens: a lane is a token, and the chains of a group are registers; w is repacked so that a step's weights are
// neighbours. Few tokens: a lane is a chain, and w is turned over on its way in. Both add k ascending from +0.
#include "rows.hpp"

namespace mhc::MHC_LEVEL {

namespace {

constexpr int kSteps = 128;  // x of a tile for so many steps stays in the first cache beside its weights

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

// The kernel for few tokens: a lane is a chain, in vectors of eight or four rows of w that are turned over in registers.
constexpr int kFewSteps = 64;  // of K in the first cache, while the next as many are on their way there
typedef Vectors<4>::F Quad;
typedef Vectors<8>::F Octet;

MHC_INLINE Quad quad(const float* from) {
  Quad value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

// Eight lanes from two places in memory. The second half is inserted by the load itself, which a shuffle would not be.
MHC_INLINE Octet octet(const float* low, const float* high) {
#if defined(__AVX2__)
  const __m256 half = _mm256_castps128_ps256(_mm_loadu_ps(low));
  return bits_as<Octet>(_mm256_insertf128_ps(half, _mm_loadu_ps(high), 1));
#else
  return __builtin_shufflevector(quad(low), quad(high), 0, 1, 2, 3, 4, 5, 6, 7);
#endif
}

// Four steps of eight rows that lie `stride` apart: step[i] has the rows' element i. In-lane shuffles only.
MHC_INLINE void turn(const float* w, std::int64_t stride, Octet (&step)[4]) {
  Octet r[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    r[q] = octet(w + q * stride, w + (q + 4) * stride);
  }
  const Octet low01 = __builtin_shufflevector(r[0], r[1], 0, 8, 1, 9, 4, 12, 5, 13);
  const Octet high01 = __builtin_shufflevector(r[0], r[1], 2, 10, 3, 11, 6, 14, 7, 15);
  const Octet low23 = __builtin_shufflevector(r[2], r[3], 0, 8, 1, 9, 4, 12, 5, 13);
  const Octet high23 = __builtin_shufflevector(r[2], r[3], 2, 10, 3, 11, 6, 14, 7, 15);
  step[0] = __builtin_shufflevector(low01, low23, 0, 1, 8, 9, 4, 5, 12, 13);
  step[1] = __builtin_shufflevector(low01, low23, 2, 3, 10, 11, 6, 7, 14, 15);
  step[2] = __builtin_shufflevector(high01, high23, 0, 1, 8, 9, 4, 5, 12, 13);
  step[3] = __builtin_shufflevector(high01, high23, 2, 3, 10, 11, 6, 7, 14, 15);
}

MHC_INLINE void turn(const float* w, std::int64_t stride, Quad (&step)[4]) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) step[q] = quad(w + q * stride);
  transpose<4>(step);
}

// Rows of w, a chunk of kFewSteps at a time, each line read whole and once: rows that lie a power of two apart would
// push each other out of a cache between two visits.
template <typename W, int Rows>
struct Chunks {
  static constexpr int kPerRow = kFewSteps / kLanes;
  static constexpr int kPerFour = Rows * 4 / kLanes;  // vectors to copy in four steps, so that all are in a chunk's time
  RowsOf<W> w;
  std::int64_t first;
  int rows;  // at most Rows; the others stay zero
  alignas(64) float buffer[2][Rows * kFewSteps] = {};

  MHC_INLINE void copy_vector(std::int64_t at, int which, int vector) {
    const int row = vector / kPerRow, column = vector % kPerRow * kLanes;
    const W* from = w.row(first + row) + at + column;
    store(buffer[which] + row * kFewSteps + column, load(from));
    if (column * sizeof(W) % 64 == 0) __builtin_prefetch(from + kFewSteps, 0, 2);
  }

  MHC_INLINE void copy_part(std::int64_t at, int steps, int which) {
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < steps; ++i) buffer[which][row * kFewSteps + i] = widen(w.row(first + row)[at + i]);
    }
  }
};

// Steps [0, steps) of the chunk in `line`, with the accumulators in registers; between groups of four steps, next(group).
template <typename V, int Count, int M, bool All, typename Next>
MHC_INLINE void few_steps(const float* line, const float (&xs)[M][kFewSteps], int steps, V (&acc)[M][Count],
                          float (&squares)[M], Next next) {
  V a[M][Count];
  float s[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    s[m] = squares[m];
#pragma GCC unroll 6
    for (int v = 0; v < Count; ++v) a[m][v] = acc[m][v];
  }
  constexpr int kWidth = static_cast<int>(sizeof(V) / sizeof(float));
  for (int four = 0; four < (All ? kFewSteps : steps); four += 4) {
    next(four / 4);
    V step[Count][4];
#pragma GCC unroll 6
    for (int v = 0; v < Count; ++v) turn(line + four + v * kWidth * kFewSteps, kFewSteps, step[v]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (!All && four + i >= steps) break;
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const float xk = xs[m][four + i];
        s[m] = s[m] + xk * xk;
#pragma GCC unroll 6
        for (int v = 0; v < Count; ++v) a[m][v] = a[m][v] + step[v][i] * splat<V>(xk);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    squares[m] = s[m];
#pragma GCC unroll 6
    for (int v = 0; v < Count; ++v) acc[m][v] = a[m][v];
  }
}

template <typename V, int Count, int M, typename T, typename W>
void fold_few(RowsOf<T> x, std::int64_t token, std::int64_t k, RowsOf<W> w, std::int64_t first, int rows, float* out,
              std::int64_t n, float* sumsq) {
  constexpr int kRows = Count * static_cast<int>(sizeof(V) / sizeof(float));
  typedef Chunks<W, kRows> Lines;
  V acc[M][Count] = {};
  float squares[M] = {};
  alignas(64) float xs[M][kFewSteps];
  Lines chunks{w, first, rows};
  chunks.copy_part(0, static_cast<int>(least(kFewSteps, k)), 0);
  int which = 0;
  for (std::int64_t at = 0; at < k; at += kFewSteps, which ^= 1) {
    const int steps = static_cast<int>(least(kFewSteps, k - at));
    const std::int64_t next = at + kFewSteps;
    const bool flows = next + kFewSteps <= k && rows == kRows;
    if (!flows && next < k) chunks.copy_part(next, static_cast<int>(least(kFewSteps, k - next)), which ^ 1);
    for (int m = 0; m < M; ++m) {
      const T* row = x.row(token + m) + at;
      for_lanes(0, steps, [&](std::int64_t i, auto some) { store(&xs[m][i], load(row + i, some), some); });
    }
    const float* line = chunks.buffer[which];
    const auto copy = [&](int group) {
#pragma GCC unroll 24
      for (int i = 0; i < Lines::kPerFour; ++i) chunks.copy_vector(next, which ^ 1, group * Lines::kPerFour + i);
    };
    const auto nothing = [](int) {};
    if (flows) {
      few_steps<V, Count, M, true>(line, xs, steps, acc, squares, copy);
    } else {
      few_steps<V, Count, M, false>(line, xs, steps, acc, squares, nothing);
    }
  }
  for (int m = 0; m < M; ++m) {
    float each[kRows];
    __builtin_memcpy(each, acc[m], sizeof(each));
    for (int r = 0; r < rows; ++r) out[(token + m) * n + first + r] = each[r];
    if (sumsq != nullptr) sumsq[token + m] = squares[m];
  }
}

template <int M, typename T, typename W>
MHC_INLINE void fold_few_of(RowsOf<T> x, std::int64_t token, std::int64_t k, RowsOf<W> w, std::int64_t first, int rows,
                            float* out, std::int64_t n, float* sumsq) {
  if (rows <= kController / 2) {
    fold_few<Quad, 3, M>(x, token, k, w, first, rows, out, n, sumsq);
  } else if constexpr (kLanes >= 8) {
    fold_few<Octet, 3, M>(x, token, k, w, first, rows, out, n, sumsq);
  } else {
    fold_few<Quad, 6, M>(x, token, k, w, first, rows, out, n, sumsq);
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
      alignas(64) float lines[kRows * kFewSteps] = {};
      for (std::int64_t at = some.begin; at < some.end; at += kFewSteps) {
        const int steps = static_cast<int>(least(kFewSteps, some.end - at));
        for (int r = 0; r < have; ++r) {
          const auto* from = rows.row(first + r) + at;
          for_lanes(0, steps, [&](std::int64_t i, auto part) {
            store(lines + r * kFewSteps + i, load(from + i, part), part);
          });
        }
        for (int four = 0; four < steps; four += 4) {
          V step[4];
          turn(lines + four, kFewSteps, step);
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

void fold_k_few(Rows x, Range tokens, std::int64_t n, std::int64_t k, Range chains, Rows w, float* out, float* sumsq) {
  const int rows = static_cast<int>(least(kController, chains.end - chains.begin));
  with_rows(x, [&](auto xs) {
    with_rows(w, [&](auto ws) {
      std::int64_t token = tokens.begin;
      for (; token + 4 <= tokens.end; token += 4) fold_few_of<4>(xs, token, k, ws, chains.begin, rows, out, n, sumsq);
      for (; token + 2 <= tokens.end; token += 2) fold_few_of<2>(xs, token, k, ws, chains.begin, rows, out, n, sumsq);
      for (; token < tokens.end; ++token) fold_few_of<1>(xs, token, k, ws, chains.begin, rows, out, n, sumsq);
    });
  });
}

}  // namespace mhc::MHC_LEVEL
