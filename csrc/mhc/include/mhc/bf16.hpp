// BF16 as storage: widened exactly, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace mhc {

// The encoding; a struct, so that it is never taken for a number.
struct Bf16 {
  std::uint16_t bits;
};

inline constexpr std::uint16_t kBf16Nan = 0x7fc0;

constexpr float widen(Bf16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }
constexpr float widen(float value) { return value; }

// Subnormals are kept, overflow goes to infinity, every NaN becomes kBf16Nan.
constexpr Bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {kBf16Nan};
  const std::uint32_t kept = bits >> 16, dropped = bits & 0xffffu;
  const bool up = dropped > 0x8000u || (dropped == 0x8000u && (kept & 1u) != 0);
  return {static_cast<std::uint16_t>(kept + (up ? 1u : 0u))};
}

}  // namespace mhc
