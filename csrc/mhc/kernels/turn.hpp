// Four steps of several rows into four vectors whose lanes are the rows, by shuffles that stay within 128 bits.
#pragma once

#include "rows.hpp"

namespace mhc::MHC_LEVEL {

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

}  // namespace mhc::MHC_LEVEL
