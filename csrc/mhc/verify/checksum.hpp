// A checksum over (input, result) pairs that does not depend on the order in which they are visited.
#pragma once

#include <cstdint>

namespace mhc {

// Summed modulo 2^64. The Python tests compute the same number.
constexpr std::uint64_t mix(std::uint32_t input, std::uint32_t output) {
  return ((input * 0x9e3779b97f4a7c15ULL) ^ output) * 0xbf58476d1ce4e5b9ULL;
}

}  // namespace mhc
