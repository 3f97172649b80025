// The two reduction trees of the contract, over terms that are already rounded to FP32.
//
// They are only what they say where the compiler neither reassociates nor fuses a multiply and an add: build with
// -ffp-contract=off and without -ffast-math.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>

#ifdef __FAST_MATH__
#error "the reduction order is part of the contract: build without -ffast-math"
#endif

namespace mhc {

static_assert(FLT_EVAL_METHOD == 0, "each FP32 operation must round to FP32");

inline constexpr std::size_t kStreams = 4;

// Long reductions: term(0), term(1), ... added to one accumulator that starts at +0.
template <typename Term>
float fixed_sum(std::size_t length, Term term) {
  float acc = 0.0f;
  for (std::size_t i = 0; i < length; ++i) acc = acc + term(i);
  return acc;
}

// Four-element stream reductions.
template <typename Term>
float stream4_sum(Term term) {
  return (term(0) + term(1)) + (term(2) + term(3));
}

// A NaN wins, as it would in a sum. Of two zeros either may come out.
inline float max_of(float a, float b) { return std::isnan(a) || a > b ? a : b; }

template <typename Term>
float stream4_max(Term term) {
  return max_of(max_of(term(0), term(1)), max_of(term(2), term(3)));
}

}  // namespace mhc
