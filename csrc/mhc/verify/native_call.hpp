// How native_*.cpp call the C interface of the native backend.
#pragma once

#include <cstdint>
#include <vector>

#include "mhc/abi.h"
#include "portable_operators.hpp"

namespace mhc::portable {

// The chosen level, and more than one thread, so that the work is split as in use.
const mhc_call* native_call();
// std::runtime_error where `status` is not MHC_OK.
void check(std::int32_t status);

inline std::int64_t count(std::size_t value) { return static_cast<std::int64_t>(value); }

inline mhc_rows rows(const Floats& data, std::size_t stride) { return {data.data(), count(stride), MHC_FP32}; }
inline mhc_rows rows(const Bf16s& data, std::size_t stride) { return {data.data(), count(stride), MHC_BF16}; }

inline std::uint16_t* bits(Bf16s& data) {
  static_assert(sizeof(Bf16) == sizeof(std::uint16_t));
  return reinterpret_cast<std::uint16_t*>(data.data());
}

// NULL, which is how the C interface is told of rsqrt-mean-plus-eps, or q.
inline const float* q_of(const GemmRms& saved) {
  return saved.formula == ControllerRms::kRsqrtMeanPlusEps ? nullptr : saved.q.data();
}

// What the driver hands from a forward to its backward, from and to the arrays of the C interface: sig[T, 8] is the
// sigmoids of PRE and POST, softmax[T, 16]. The backend recomputes the steps, so those stay zero.
std::vector<SinkhornSaved> saved_of(const Floats& sig, const Floats& softmax, std::size_t tokens);
struct SavedArrays {
  Floats sig_pre, sig_post, softmax;
};
SavedArrays arrays_of(const std::vector<SinkhornSaved>& saved);

}  // namespace mhc::portable
