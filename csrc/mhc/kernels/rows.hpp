// From the untyped rows of the C interface to typed ones.
#pragma once

#include "kernels.hpp"
#include "lanes.hpp"

namespace mhc::MHC_LEVEL {

template <typename T>
MHC_INLINE RowsOf<T> typed(Rows rows) {
  return {static_cast<const T*>(rows.data), rows.stride};
}

// body(RowsOf<float>) or body(RowsOf<Bf16>).
template <typename Body>
MHC_INLINE void with_rows(Rows rows, Body body) {
  if (rows.dtype == MHC_BF16) {
    body(typed<Bf16>(rows));
  } else {
    body(typed<float>(rows));
  }
}

MHC_INLINE float widen(float value) { return value; }
MHC_INLINE float widen(Bf16 value) { return bits_as<float>(static_cast<std::uint32_t>(value.bits) << 16); }

MHC_INLINE std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

MHC_INLINE std::int64_t ceil_to(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

MHC_INLINE Bf16* bf16(std::uint16_t* to) { return reinterpret_cast<Bf16*>(to); }

// body(token, tokens) for tiles of up to kLanes tokens.
template <typename Body>
MHC_INLINE void for_tiles(Range tokens, Body body) {
  for (std::int64_t t = tokens.begin; t < tokens.end; t += kLanes) {
    body(t, static_cast<int>(least(kLanes, tokens.end - t)));
  }
}

// table[token][item] from lanes[item][lane].
template <int N>
MHC_INLINE void lanes_to_tokens(const F32 (&lanes)[N], int tokens, float* table, std::int64_t stride) {
  for (int i = 0; i < N; ++i) {
    float each[kLanes];
    store(each, lanes[i]);
    for (int t = 0; t < tokens; ++t) table[t * stride + i] = each[t];
  }
}

// lanes[item][lane] from table[token][item]; lanes beyond `tokens` are zero.
template <int N>
MHC_INLINE void lanes_from_tokens(const float* table, std::int64_t stride, int tokens, F32 (&lanes)[N]) {
  for (int i = 0; i < N; ++i) {
    float each[kLanes] = {};
    for (int t = 0; t < tokens; ++t) each[t] = table[t * stride + i];
    lanes[i] = load(each);
  }
}

}  // namespace mhc::MHC_LEVEL
