// The elementary functions of portable-fp32-mhc-v1, one value at a time.
//
// exp, rsqrt and sqrt are the correctly rounded (nearest even) FP32 values; sigmoid is 1 / (1 + exp(-x)) with each step
// rounded; subnormals are kept; a NaN result is the canonical quiet NaN. Each result is brought to an unevaluated sum
// hi + lo of two doubles that is far more exact than the nearest that any FP32 input comes to a rounding boundary, and is
// rounded once: hi to odd, then to FP32.
//
// Contraction to FMA may change hi and lo, never the result: verify_elementary runs all 2^32 inputs in both builds.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "mhc/exp_table.hpp"

namespace mhc {

inline constexpr float kQuietNan = std::bit_cast<float>(std::uint32_t{0x7fc00000});

// hi + lo (hi > 0, |lo| at most half an ULP of it) rounded to FP32 once.
inline float round_once(double hi, double lo) {
  std::int64_t bits = std::bit_cast<std::int64_t>(hi);
  if (lo != 0.0) bits = (bits - (lo < 0.0 ? 1 : 0)) | 1;
  return static_cast<float>(std::bit_cast<double>(bits));
}

// e^x: x = k ln2/128 + r, e^x = 2^(k/128) e^r. The relative error of hi + lo is below 2^-59.
inline float exp_rn(float value) {
  if (std::isnan(value)) return kQuietNan;
  constexpr double kInverseStep = 0x1.71547652b82fep+7;  // 128 / ln 2
  constexpr double kStepHigh = 0x1.62e42fefa0000p-8;     // ln 2 / 128, 38 bits: its product with k is exact
  constexpr double kStepLow = 0x1.cf79abc9e3b3ap-47;
  double x = value;
  x = x < -104.0 ? -104.0 : x > 89.0 ? 89.0 : x;
  const std::int64_t k = std::llrint(x * kInverseStep);
  const double steps = static_cast<double>(k);
  const double a = x - steps * kStepHigh;  // exact
  const double b = steps * -kStepLow;
  const double r = a + b;
  const double shadow = r - a;
  const double r_low = (a - (r - shadow)) + (b - shadow);
  const double series = 1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720));
  const double tail = r_low + (r * r) * (0.5 + r * (1.0 / 6 + r * series));
  const ExpEntry entry = kExpTable[k & 127];
  const double rest = entry.high * r + (entry.high * tail + (entry.low + entry.low * r));
  const double hi = entry.high + rest;
  const double lo = rest - (hi - entry.high);
  const double scale = std::bit_cast<double>(((k >> 7) + 1023) << 52);
  return round_once(hi * scale, lo * scale);
}

// 1/sqrt(x): a value with 24 bits, its exact residual 1 - x y y, and two terms of the series in it.
inline float rsqrt_rn(float value) {
  if (std::isnan(value) || value < 0.0f) return kQuietNan;
  const double x = value;
  if (x == 0.0) return std::copysign(std::numeric_limits<float>::infinity(), value);
  if (std::isinf(x)) return 0.0f;
  const double y = static_cast<float>(1.0 / std::sqrt(x));
  const double square = y * y;
  // 24 and 29 bits of the square, so that both products with x are exact.
  const double high = std::bit_cast<double>(std::bit_cast<std::int64_t>(square) & -(std::int64_t{1} << 29));
  const double residual = (1.0 - x * high) - x * (square - high);
  const double correction = y * (residual * 0.5 + (residual * residual) * 0.375);
  const double hi = y + correction;
  return round_once(hi, correction - (hi - y));
}

inline float sqrt_rn(float value) {
  const float root = std::sqrt(value);
  return std::isnan(root) ? kQuietNan : root;
}

inline float sigmoid_rn(float value) { return 1.0f / (1.0f + exp_rn(-value)); }

// The IEEE quotient; which NaN the hardware makes of 0/0 differs between machines.
inline float div_rn(float dividend, float divisor) {
  const float quotient = dividend / divisor;
  return std::isnan(quotient) ? kQuietNan : quotient;
}

}  // namespace mhc
