// The two gradients of a GEMM. A lane is a column k in both, so rows are read as they lie.
//
// fold_n: dx[t, k] = fold_n dy[t, n] * w[n, k], four tokens by four vectors of columns in registers.
// fold_m: dw[n, k] = fold_m dy[m, n] * x[m, k], the chains of a group by one vector of columns in registers.
#include "rows.hpp"

namespace mhc::MHC_LEVEL {

namespace {

constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of columns in a panel
constexpr int kColumns = kVectors * kLanes;
constexpr int kTokens = kLanes == 16 ? 4 : 4;

// What a column segment of one token gets beyond the fold over n; all of it elementwise.
struct Leg {
  const InputGrad& grad;
  float scale, denominator, dr;  // of the token: -(r*r) and K*q or 1, or -((r*r)*r) and K; and dr
  std::int64_t token;

  explicit Leg(const InputGrad& g, std::int64_t t) : grad(g), scale(0), denominator(1), dr(0), token(t) {
    if (g.r == nullptr) return;
    const float r = g.r[t], width = static_cast<float>(g.k);
    dr = g.dr[t];
    if (g.q == nullptr) {
      scale = -((r * r) * r);
      denominator = width;
    } else {
      const float q = g.q[t];
      scale = -(r * r);
      denominator = q == 0.0f ? 1.0f : width * q;
    }
  }

  template <typename Some>
  MHC_INLINE F32 segment(const void* data, std::int64_t dtype, std::int64_t at, Some some) const {
    if (dtype == MHC_BF16) return load(static_cast<const Bf16*>(data) + at, some);
    return load(static_cast<const float*>(data) + at, some);
  }

  template <typename Some>
  MHC_INLINE F32 add(F32 folded, std::int64_t at, Some some) const {
    if (grad.r == nullptr) return folded;
    const F32 x = segment(grad.x.data, grad.x.dtype, token * grad.x.stride + at, some);
    const F32 dx = folded + splat(dr) * ((splat(scale) * x) / splat(denominator));
    if (grad.pre == nullptr) return dx;
    const std::int64_t stream = at / grad.hidden, d = at - stream * grad.hidden;
    const F32 dh = segment(grad.dh.data, grad.dh.dtype, token * grad.dh.stride + d, some);
    const F32 sum = splat(grad.pre[token * kStreams + stream]) * dh + dx;
    if (grad.c == nullptr) return sum;
    const float* c = grad.c + token * kComb + stream * kStreams;
    F32 part[kStreams];
    for (std::int64_t j = 0; j < kStreams; ++j) {
      const std::int64_t from = token * grad.dr_new.stride + j * grad.hidden + d;
      part[j] = splat(c[j]) * segment(grad.dr_new.data, grad.dr_new.dtype, from, some);
    }
    return sum + stream4(part[0], part[1], part[2], part[3]);
  }
};

// A segment of columns never crosses from one stream into the next.
template <typename Body>
MHC_INLINE void for_segments(const InputGrad& grad, std::int64_t begin, std::int64_t end, Body body) {
  const std::int64_t width = grad.pre == nullptr ? grad.k : grad.hidden;
  while (begin < end) {
    const std::int64_t stop = least(end, (begin / width + 1) * width);
    for_lanes(begin, stop, body);
    begin = stop;
  }
}

MHC_INLINE void prefetch_columns(Rows rows, std::int64_t token, std::int64_t at) {
  const int size = rows.dtype == MHC_BF16 ? 2 : 4;
  const char* from = static_cast<const char*>(rows.data) + (token * rows.stride + at) * size;
  for (int line = 0; line < kColumns * size; line += 64) __builtin_prefetch(from + line);
}

// What the legs will read when the fold over n is done.
MHC_INLINE void prefetch_legs(const InputGrad& grad, std::int64_t token, std::int64_t column) {
  if (grad.r == nullptr) return;
  prefetch_columns(grad.x, token, column);
  if (grad.pre == nullptr) return;
  const std::int64_t d = column % grad.hidden;
  prefetch_columns(grad.dh, token, d);
  if (grad.c == nullptr) return;
  for (std::int64_t j = 0; j < kStreams; ++j) prefetch_columns(grad.dr_new, token, j * grad.hidden + d);
}

MHC_INLINE void store_panel(float* to, const F32 (&sums)[kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) store_past_caches(to + v * kLanes, sums[v]);
}

MHC_INLINE void store_panel(Bf16* to, const F32 (&sums)[kVectors]) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2) store_past_caches(to + v * kLanes, sums[v], sums[v + 1]);
}

template <int M, typename T, typename O>
MHC_INLINE void fold_n_block(const InputGrad& grad, RowsOf<T> dy, O* out, std::int64_t token, std::int64_t column,
                             const float* w) {
  F32 acc[M][kVectors] = {};
  const T* rows[M];
  for (int m = 0; m < M; ++m) {
    rows[m] = dy.row(token + m);
    prefetch_legs(grad, token + m, column);
  }
  for (std::int64_t n = 0; n < grad.n; ++n) {
    F32 wn[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) wn[v] = load(w + n * kColumns + v * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const F32 factor = splat(widen(rows[m][n]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[m][v] = acc[m][v] + factor * wn[v];
    }
  }
  const std::int64_t end = least(column + kColumns, grad.k);
  for (int m = 0; m < M; ++m) {
    const Leg leg(grad, token + m);
    O* to = out + (token + m) * grad.k;
    const std::int64_t width = grad.pre == nullptr ? grad.k : grad.hidden;
    if (end - column == kColumns && column / width == (end - 1) / width) {
      F32 sums[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[v] = leg.add(acc[m][v], column + v * kLanes, Whole{});
      if (is_aligned(to + column)) {
        store_panel(to + column, sums);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(to + column + v * kLanes, sums[v]);
      }
    } else {
      float folded[kColumns + kLanes];
      __builtin_memcpy(folded, acc[m], sizeof(acc[m]));
      for_segments(grad, column, end, [&](std::int64_t at, auto some) {
        store(to + at, leg.add(load(folded + (at - column), some), at, some), some);
      });
    }
  }
}

constexpr int kFoldRows = 32;  // rows and columns of x that are widened into the first cache at a time
constexpr int kFoldColumns = 128;
static_assert(kFoldColumns % kLanes == 0);

template <typename D>
MHC_INLINE void fold_m_rows(RowsOf<D> dy, std::int64_t first, int rows, std::int64_t chain, int chains, const float* x,
                            float* acc) {
  float factors[kFoldRows][kChains];
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < kChains; ++n) factors[r][n] = n < chains ? widen(dy.row(first + r)[chain + n]) : 0.0f;
  }
  for (int at = 0; at < kFoldColumns; at += kLanes) {
    F32 a[kChains];
#pragma GCC unroll 24
    for (int n = 0; n < kChains; ++n) a[n] = load(acc + n * kFoldColumns + at);
    for (int r = 0; r < rows; ++r) {
      const F32 xr = load(x + r * kFoldColumns + at);
#pragma GCC unroll 24
      for (int n = 0; n < kChains; ++n) a[n] = a[n] + splat(factors[r][n]) * xr;
    }
#pragma GCC unroll 24
    for (int n = 0; n < kChains; ++n) store(acc + n * kFoldColumns + at, a[n]);
  }
}

template <typename D, typename T>
void fold_m_columns(RowsOf<D> dy, RowsOf<T> x, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t column,
                    int width, float* dw) {
  alignas(64) float wide[kFoldRows * kFoldColumns] = {};
  alignas(64) float acc[kChains * kFoldColumns];
  for (std::int64_t chain = 0; chain < n; chain += kChains) {
    const int chains = static_cast<int>(least(kChains, n - chain));
    __builtin_memset(acc, 0, sizeof(acc));
    for (std::int64_t first = 0; first < m; first += kFoldRows) {
      const int rows = static_cast<int>(least(kFoldRows, m - first));
      for (int r = 0; r < rows; ++r) {
        const T* from = x.row(first + r) + column;
        if (first + kFoldRows + r < m) {
          const char* ahead = reinterpret_cast<const char*>(x.row(first + kFoldRows + r) + column);
          for (int line = 0; line < width * static_cast<int>(sizeof(T)); line += 64) __builtin_prefetch(ahead + line);
        }
        for_lanes(0, width, [&](std::int64_t at, auto some) {
          store(wide + r * kFoldColumns + at, load(from + at, some), some);
        });
      }
      fold_m_rows(dy, first, rows, chain, chains, wide, acc);
    }
    for (int i = 0; i < chains; ++i) {
      __builtin_memcpy(dw + (chain + i) * k + column, acc + i * kFoldColumns, static_cast<std::size_t>(width) * 4);
    }
  }
}

}  // namespace

void pack_columns(Rows w, std::int64_t n, std::int64_t k, Range panels, float* packed) {
  with_rows(w, [&](auto rows) {
    for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const std::int64_t column = panel * kColumns, width = least(kColumns, k - column);
      for (std::int64_t i = 0; i < n; ++i) {
        float* to = packed + (panel * n + i) * kColumns;
        for (int at = 0; at < kColumns; ++at) to[at] = 0.0f;
        for_lanes(0, width, [&](std::int64_t at, auto some) {
          store(to + at, load(rows.row(i) + column + at, some), some);
        });
      }
    }
  });
}

void fold_n(const InputGrad& grad, Range tokens, Range panels) {
  // The block's legs read the same columns of dr_new for each of the four streams: those panels go one after another.
  const std::int64_t count = panels.end - panels.begin;
  const bool by_stream = grad.pre != nullptr && grad.hidden % kColumns == 0 && count * kColumns == grad.k;
  const auto each = [&](auto dy, auto* out) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t panel =
          by_stream ? (i % kStreams) * (count / kStreams) + i / kStreams : panels.begin + i;
      const float* w = grad.packed + panel * grad.n * kColumns;
      const std::int64_t column = panel * kColumns;
      std::int64_t t = tokens.begin;
      for (; t + kTokens <= tokens.end; t += kTokens) fold_n_block<kTokens>(grad, dy, out, t, column, w);
      for (; t < tokens.end; ++t) fold_n_block<1>(grad, dy, out, t, column, w);
    }
  };
  with_rows(grad.dy, [&](auto dy) {
    if (grad.out_dtype == MHC_BF16) {
      each(dy, static_cast<Bf16*>(grad.out));
    } else {
      each(dy, static_cast<float*>(grad.out));
    }
  });
  fence_stores();
}

void fold_m(Rows dy, Rows x, std::int64_t m, std::int64_t n, std::int64_t k, Range columns, float* dw) {
  with_rows(dy, [&](auto factors) {
    with_rows(x, [&](auto rows) {
      for (std::int64_t column = columns.begin; column < columns.end; column += kFoldColumns) {
        const int width = static_cast<int>(least(kFoldColumns, columns.end - column));
        fold_m_columns(factors, rows, m, n, k, column, width, dw);
      }
    });
  });
}

std::int64_t panel_columns() { return kColumns; }

}  // namespace mhc::MHC_LEVEL
