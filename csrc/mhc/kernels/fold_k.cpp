// Folds over K: out[t, n] = fold_k x[t, k] * w[n, k], and the sum of squares of x beside them.
//
// Many tokens: a lane is a token, and the chains of a group are registers; w is repacked so that a step's weights are
// neighbours. Few tokens: a lane is a chain, and w is turned over on its way in. Both add k ascending from +0.
#include "rows.hpp"

namespace mhc::MHC_LEVEL {

namespace {

constexpr int kSteps = 128;  // x of a tile for so many steps stays in the first cache beside its weights

template <int N, bool Squares>
MHC_INLINE void fold_steps(const float* x, const float* w, int steps, F32 (&acc)[N], F32& squares) {
  F32 a[N];
  F32 s = squares;
#pragma GCC unroll 24
  for (int n = 0; n < N; ++n) a[n] = acc[n];
  for (int k = 0; k < steps; ++k) {
    const F32 xk = load(x + k * kLanes);
    if constexpr (Squares) s = s + xk * xk;
#pragma GCC unroll 24
    for (int n = 0; n < N; ++n) a[n] = a[n] + xk * splat(w[k * kChains + n]);
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
  alignas(64) float lanes[kSteps * kLanes];
  for (std::int64_t at = 0; at < k; at += kSteps) {
    const int steps = static_cast<int>(least(kSteps, k - at));
    tokens_to_lanes(x, token, tokens, at, steps, lanes);
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

// Lanes of the kernel for few tokens: the width at which four rows fit an in-lane transpose.
constexpr int kFew = kLanes >= 8 ? 8 : 4;
constexpr int kFewVectors = static_cast<int>(kController) / kFew;
constexpr int kFewSteps = 16;  // a cache line of a row of w
typedef Vectors<kFew>::F FewF;
typedef Vectors<4>::F Quad;

MHC_INLINE Quad quad(const float* from) {
  Quad value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

// w[4 rows (and 4 rows further)][4 steps] -> step[4], lanes in the order of the rows.
template <typename V>
MHC_INLINE void turn(const float* w, int row, V (&step)[4]) {
  V r[4];
  for (int q = 0; q < 4; ++q) {
    if constexpr (sizeof(V) == 32) {
      r[q] = __builtin_shufflevector(quad(w + (row + q) * kFewSteps), quad(w + (row + 4 + q) * kFewSteps), 0, 1, 2, 3,
                                     4, 5, 6, 7);
    } else {
      __builtin_memcpy(&r[q], w + (row + q) * kFewSteps, sizeof(V));
    }
  }
  if constexpr (sizeof(V) == 32) {
    const V low01 = __builtin_shufflevector(r[0], r[1], 0, 8, 1, 9, 4, 12, 5, 13);
    const V high01 = __builtin_shufflevector(r[0], r[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const V low23 = __builtin_shufflevector(r[2], r[3], 0, 8, 1, 9, 4, 12, 5, 13);
    const V high23 = __builtin_shufflevector(r[2], r[3], 2, 10, 3, 11, 6, 14, 7, 15);
    step[0] = __builtin_shufflevector(low01, low23, 0, 1, 8, 9, 4, 5, 12, 13);
    step[1] = __builtin_shufflevector(low01, low23, 2, 3, 10, 11, 6, 7, 14, 15);
    step[2] = __builtin_shufflevector(high01, high23, 0, 1, 8, 9, 4, 5, 12, 13);
    step[3] = __builtin_shufflevector(high01, high23, 2, 3, 10, 11, 6, 7, 14, 15);
  } else {
    transpose<4>(r);
    for (int q = 0; q < 4; ++q) step[q] = r[q];
  }
}

template <typename W>
MHC_INLINE void copy_lines(RowsOf<W> w, std::int64_t first, int rows, std::int64_t at, int steps, float* line) {
  for (int r = 0; r < rows; ++r) {
    const W* from = w.row(first + r) + at;
    float* to = line + r * kFewSteps;
    if (steps == kFewSteps) {
      for (int i = 0; i < kFewSteps; i += kLanes) store(to + i, load(from + i));
    } else {
      for (int i = 0; i < steps; ++i) to[i] = widen(from[i]);
    }
  }
}

template <int M, typename T, typename W>
void fold_few(RowsOf<T> x, std::int64_t token, std::int64_t k, RowsOf<W> w, std::int64_t first, int rows, float* out,
              std::int64_t n, float* sumsq) {
  FewF acc[M][kFewVectors] = {};
  float squares[M] = {};
  alignas(64) float lines[2][kController * kFewSteps] = {};
  alignas(64) float xs[M][kFewSteps] = {};
  copy_lines(w, first, rows, 0, static_cast<int>(least(kFewSteps, k)), lines[0]);
  for (std::int64_t at = 0; at < k; at += kFewSteps) {
    const int steps = static_cast<int>(least(kFewSteps, k - at));
    const float* line = lines[(at / kFewSteps) & 1];
    const std::int64_t next = at + kFewSteps;
    if (next < k) {
      copy_lines(w, first, rows, next, static_cast<int>(least(kFewSteps, k - next)), lines[(next / kFewSteps) & 1]);
    }
    for (int m = 0; m < M; ++m) {
      const T* row = x.row(token + m) + at;
      if (steps == kFewSteps) {
        for (int i = 0; i < kFewSteps; i += kLanes) store(&xs[m][i], load(row + i));
      } else {
        for (int i = 0; i < steps; ++i) xs[m][i] = widen(row[i]);
      }
    }
#pragma GCC unroll 4
    for (int four = 0; four < kFewSteps; four += 4) {
      FewF step[kFewVectors][4];
#pragma GCC unroll 6
      for (int v = 0; v < kFewVectors; ++v) turn(line + four, v * kFew, step[v]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (four + i >= steps) break;
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const float xk = xs[m][four + i];
          squares[m] = squares[m] + xk * xk;
#pragma GCC unroll 6
          for (int v = 0; v < kFewVectors; ++v) acc[m][v] = acc[m][v] + step[v][i] * (FewF{} + xk);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    float each[kController];
    __builtin_memcpy(each, acc[m], sizeof(each));
    for (int r = 0; r < rows; ++r) out[(token + m) * n + first + r] = each[r];
    if (sumsq != nullptr) sumsq[token + m] = squares[m];
  }
}

}  // namespace

void pack_chains(Rows w, std::int64_t n, std::int64_t k, Range some, float* packed) {
  with_rows(w, [&](auto rows) {
    for (std::int64_t group = 0; group * kChains < n; ++group) {
      float* to = packed + group * k * kChains;
      for (int first = 0; first < kChains; first += 4) {
        const std::int64_t row = group * kChains + first;
        const int have = static_cast<int>(row < n ? least(4, n - row) : 0);
        std::int64_t at = some.begin;
        for (; at + kLanes <= some.end; at += kLanes) {
          F32 lane[4] = {};
          for (int r = 0; r < have; ++r) lane[r] = load(rows.row(row + r) + at);
          float each[4][kLanes];
          for (int r = 0; r < 4; ++r) store(each[r], lane[r]);
          for (int i = 0; i < kLanes; ++i) {
            const Quad four = {each[0][i], each[1][i], each[2][i], each[3][i]};
            __builtin_memcpy(to + (at + i) * kChains + first, &four, sizeof(four));
          }
        }
        for (; at < some.end; ++at) {
          for (int r = 0; r < 4; ++r) to[at * kChains + first + r] = r < have ? widen(rows.row(row + r)[at]) : 0.0f;
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
      for (; token + 4 <= tokens.end; token += 4) fold_few<4>(xs, token, k, ws, chains.begin, rows, out, n, sumsq);
      for (; token + 2 <= tokens.end; token += 2) fold_few<2>(xs, token, k, ws, chains.begin, rows, out, n, sumsq);
      for (; token < tokens.end; ++token) fold_few<1>(xs, token, k, ws, chains.begin, rows, out, n, sumsq);
    });
  });
}

}  // namespace mhc::MHC_LEVEL
