// Folds over K for up to eight tokens: a lane is a chain, in vectors of eight or four rows of w that are turned over in
// registers on their way in. Each chain adds k ascending from +0.
#include "turn.hpp"

namespace mhc::MHC_LEVEL {

namespace {

constexpr int kFewSteps = 64;  // of K in the first cache, while the next as many are on their way there

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
