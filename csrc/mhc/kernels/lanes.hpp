// Vectors of `kLanes` FP32 lanes, as wide as the level that this file is compiled for, and the ways in and out of memory.
//
// Each kernel source is compiled once for each level, and everything in it lives in a namespace of that level's name: a
// function shared between two levels could be linked in from the wider one and fail on a smaller processor. For the same
// reason nothing here uses the standard library's templates.
//
// A lane never meets another but in a transpose or a shuffle, so its bits are those of scalar code: every multiply, add
// and divide rounds on its own (-ffp-contract=off).
#pragma once

#include <cfloat>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef __FAST_MATH__
#error "the order and rounding of every operation is part of the contract: build without -ffast-math"
#endif

#ifndef MHC_LEVEL
#error "compile this with -DMHC_LEVEL=<the namespace of the level>"
#endif

namespace mhc::MHC_LEVEL {

static_assert(FLT_EVAL_METHOD == 0, "each FP32 operation must round to FP32");

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

// Chains of a fold over K that run side by side in registers.
inline constexpr int kChains = kLanes == 16 ? 24 : 12;

#define MHC_INLINE inline __attribute__((always_inline))

template <int W>
struct Vectors {
  typedef float F __attribute__((vector_size(4 * W)));
  typedef std::uint32_t U __attribute__((vector_size(4 * W)));
  typedef std::int32_t I __attribute__((vector_size(4 * W)));
  typedef std::uint16_t H __attribute__((vector_size(2 * W)));
  typedef double D __attribute__((vector_size(8 * W)));
  typedef std::int64_t L __attribute__((vector_size(8 * W)));
};

typedef Vectors<kLanes>::F F32;
typedef Vectors<kLanes>::U U32;
typedef Vectors<kLanes>::H U16;

// BF16 storage; a struct, so that it is never taken for a number.
struct Bf16 {
  std::uint16_t bits;
};

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  typedef Indices<I...> type;
};

template <typename V, int... I>
MHC_INLINE V splat_as(float value, Indices<I...>) {
  return V{(static_cast<void>(I), value)...};
}

// `value` in each lane, its sign included where it is zero.
template <typename V = F32>
MHC_INLINE V splat(float value) {
  return splat_as<V>(value, typename MakeIndices<static_cast<int>(sizeof(V) / sizeof(float))>::type{});
}

template <typename To, typename From>
MHC_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

MHC_INLINE F32 load(const float* from) {
  F32 value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

MHC_INLINE F32 load(const Bf16* from) {
  U16 bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return bits_as<F32>(__builtin_convertvector(bits, U32) << 16);
}

MHC_INLINE void store(float* to, F32 value) { __builtin_memcpy(to, &value, sizeof(value)); }

// A store of a whole line that will not be read again soon, past the caches; `to` is aligned to it.
MHC_INLINE void store_past_caches(float* to, F32 value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, bits_as<__m512>(value));
#elif defined(__AVX2__)
  _mm256_stream_ps(to, bits_as<__m256>(value));
#else
  store(to, value);
#endif
}

// Before another thread may read what was stored past the caches.
MHC_INLINE void fence_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

MHC_INLINE bool is_aligned(const void* data) { return (reinterpret_cast<std::uintptr_t>(data) & (4 * kLanes - 1)) == 0; }

// Nearest even; subnormals kept, overflow to infinity, every NaN to 0x7fc0.
MHC_INLINE U16 to_bf16(F32 value) {
  const U32 bits = bits_as<U32>(value);
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32 number = bits_as<U32>(value == value);
  return __builtin_convertvector((rounded & number) | (0x7fc0u & ~number), U16);
}

MHC_INLINE void store(Bf16* to, F32 value) {
  const U16 bits = to_bf16(value);
  __builtin_memcpy(to, &bits, sizeof(bits));
}

MHC_INLINE void store_past_caches(Bf16* to, F32 low, F32 high) {
  const U16 halves[2] = {to_bf16(low), to_bf16(high)};
  F32 line;
  __builtin_memcpy(&line, halves, sizeof(line));
  store_past_caches(reinterpret_cast<float*>(to), line);
}

// The bits of 2 * kLanes numbers.
MHC_INLINE void copy_past_caches(Bf16* to, const Bf16* from) {
  F32 line;
  __builtin_memcpy(&line, from, sizeof(line));
  store_past_caches(reinterpret_cast<float*>(to), line);
}

// How many lanes of a row segment are there: all, or the first `count` of the last one.
struct Whole {
  static constexpr int lanes() { return kLanes; }
};
struct Part {
  int count;
  int lanes() const { return count; }
};

template <typename T>
MHC_INLINE F32 load(const T* from, Whole) {
  return load(from);
}

template <typename T>
MHC_INLINE F32 load(const T* from, Part part) {
  T copy[kLanes] = {};
  for (int i = 0; i < part.count; ++i) copy[i] = from[i];
  return load(copy);
}

template <typename T>
MHC_INLINE void store(T* to, F32 value, Whole) {
  store(to, value);
}

template <typename T>
MHC_INLINE void store(T* to, F32 value, Part part) {
  T copy[kLanes];
  store(copy, value);
  for (int i = 0; i < part.count; ++i) to[i] = copy[i];
}

// body(offset, Whole or Part) for the segments of a row in [begin, end).
template <typename Body>
MHC_INLINE void for_lanes(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t at = begin;
  for (; at + kLanes <= end; at += kLanes) body(at, Whole{});
  if (at < end) body(at, Part{static_cast<int>(end - at)});
}

MHC_INLINE F32 select(U32 mask, F32 yes, F32 no) {
  return bits_as<F32>((bits_as<U32>(yes) & mask) | (bits_as<U32>(no) & ~mask));
}

// The contract's four-element tree.
template <typename V>
MHC_INLINE V stream4(V a0, V a1, V a2, V a3) {
  return (a0 + a1) + (a2 + a3);
}

// a0 b0 a1 b1 ... of the lower, or the upper, halves of two vectors.
template <int W, typename V, int... I>
MHC_INLINE V interleave_low(V a, V b, Indices<I...>) {
  return __builtin_shufflevector(a, b, ((I & 1) ? W + I / 2 : I / 2)...);
}
template <int W, typename V, int... I>
MHC_INLINE V interleave_high(V a, V b, Indices<I...>) {
  return __builtin_shufflevector(a, b, ((I & 1) ? W + W / 2 + I / 2 : W / 2 + I / 2)...);
}

// rows[i] lane j <-> rows[j] lane i, W x W.
template <int W, typename V>
MHC_INLINE void transpose(V (&rows)[W]) {
  typedef typename MakeIndices<W>::type Each;
#pragma GCC unroll 4
  for (int step = 1; step < W; step *= 2) {
    V next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = interleave_low<W>(rows[i], rows[i + W / 2], Each{});
      next[2 * i + 1] = interleave_high<W>(rows[i], rows[i + W / 2], Each{});
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = next[i];
  }
}

template <typename Row>
MHC_INLINE void transpose_rows(Row row, U32 (&columns)[kLanes]) {
#pragma GCC unroll 16
  for (int t = 0; t < kLanes; ++t) __builtin_memcpy(&columns[t], row(t), sizeof(U32));
  transpose<kLanes>(columns);
}

template <typename T>
struct RowsOf {
  const T* data;
  std::int64_t stride;
  MHC_INLINE const T* row(std::int64_t t) const { return data + t * stride; }
};

// The line of a row that a later step will read: rows lie kilobytes apart, a pattern that processors do not foresee.
template <typename T>
MHC_INLINE void prefetch_ahead(const T* from, int elements) {
  __builtin_prefetch(reinterpret_cast<const char*>(from + elements));
}

// Segments [begin, begin + count) of `tokens` <= kLanes rows, as to[i][lane]: lane is the token, those beyond `tokens` are
// zero. `count` is at most what `to` has room for, rounded up to kLanes (BF16: to twice that).
MHC_INLINE void tokens_to_lanes(RowsOf<float> rows, std::int64_t token, int tokens, std::int64_t begin, int count,
                                float* to) {
  for (int at = 0; at < count; at += kLanes) {
    U32 tile[kLanes] = {};
    if (count - at >= kLanes && tokens == kLanes) {
      transpose_rows(
          [&](int t) {
            const float* from = rows.row(token + t) + begin + at;
            prefetch_ahead(from, 2 * kLanes);
            return from;
          },
          tile);
    } else {
      const Part part{count - at < kLanes ? count - at : kLanes};
      for (int t = 0; t < tokens; ++t) tile[t] = bits_as<U32>(load(rows.row(token + t) + begin + at, part));
      transpose<kLanes>(tile);
    }
    for (int i = 0; i < kLanes; ++i) store(to + (at + i) * kLanes, bits_as<F32>(tile[i]));
  }
}

// Two neighbours travel through the transpose as one 32-bit lane: emit(pair, lanes) for each pair of the segment, the even
// neighbour in the lower half.
template <typename Emit>
MHC_INLINE void pairs_to_lanes(RowsOf<Bf16> rows, std::int64_t token, int tokens, std::int64_t begin, int count,
                               Emit emit) {
  constexpr int kPairs = 2 * kLanes;
  for (int at = 0; at < count; at += kPairs) {
    U32 tile[kLanes] = {};
    const int rest = count - at;
    if (rest >= kPairs && tokens == kLanes) {
      transpose_rows(
          [&](int t) {
            const Bf16* from = rows.row(token + t) + begin + at;
            prefetch_ahead(from, 2 * kPairs);
            return from;
          },
          tile);
    } else {
      for (int t = 0; t < tokens; ++t) {
        Bf16 copy[kPairs] = {};
        const Bf16* from = rows.row(token + t) + begin + at;
        for (int i = 0; i < kPairs && i < rest; ++i) copy[i] = from[i];
        __builtin_memcpy(&tile[t], copy, sizeof(U32));
      }
      transpose<kLanes>(tile);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) emit(at / 2 + i, tile[i]);
  }
}

MHC_INLINE F32 even_of(U32 pair) { return bits_as<F32>(pair << 16); }
MHC_INLINE F32 odd_of(U32 pair) { return bits_as<F32>(pair & 0xffff0000u); }

MHC_INLINE void tokens_to_lanes(RowsOf<Bf16> rows, std::int64_t token, int tokens, std::int64_t begin, int count,
                                float* to) {
  pairs_to_lanes(rows, token, tokens, begin, count, [&](int pair, U32 lanes) {
    store(to + 2 * pair * kLanes, even_of(lanes));
    store(to + (2 * pair + 1) * kLanes, odd_of(lanes));
  });
}

}  // namespace mhc::MHC_LEVEL
