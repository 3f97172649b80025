// From a call of the C interface to the kernels of its level, inside a default floating-point mode.
#pragma once

#include <new>

#include "../kernels/kernels.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace mhc {

// The kernels of a level, or NULL where this build has none or the processor lacks the instructions.
const Kernels* kernels_of(std::int32_t isa);

// body(kernels, threads) as the call asks for; no exception leaves.
template <typename Body>
std::int32_t dispatch(const mhc_call* call, Body body) {
  if (call == nullptr || call->version != MHC_ABI_VERSION) return MHC_WRONG_VERSION;
  const Kernels* kernels = kernels_of(call->isa);
  if (kernels == nullptr) return MHC_NO_SUCH_ISA;
  if (call->threads < 1 || call->reserved != 0) return MHC_BAD_ARGUMENT;
  try {
    const DefaultFloatMode mode;
    body(*kernels, call->threads);
    return MHC_OK;
  } catch (const std::bad_alloc&) {
    return MHC_NO_MEMORY;
  }
}

// An eps of the interface, rounded here and now: an ordinary conversion may be moved to where the caller's mode is set.
inline float as_fp32(double eps) {
  const volatile double here = eps;
  return static_cast<float>(here);
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// body(Range) over [0, total) in pieces of `grain`, the last one shorter.
template <typename Body>
void parallel_ranges(std::int64_t total, std::int64_t grain, std::int32_t threads, Body body) {
  parallel_for(ceil_div(total, grain), threads, [&](std::int64_t i) {
    const std::int64_t begin = i * grain;
    body(Range{begin, begin + grain < total ? begin + grain : total});
  });
}

// Outputs of so many tokens are more than the caches near a thread hold.
inline bool past_caches(std::int64_t tokens, std::int64_t hidden) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 22;
  return tokens * kStreams * hidden * 2 >= kBytes;
}

// A grain of tokens that gives each thread something, in whole tiles where there are enough of them.
inline std::int64_t token_grain(const Kernels& kernels, std::int64_t tokens, std::int32_t threads) {
  const std::int64_t share = ceil_div(tokens, threads);
  return share < kernels.lanes ? (share > 0 ? share : 1) : kernels.lanes;
}

// out[m, n] = fold_k x w, sumsq[m] = fold_k x x or NULL; w as [n, k].
struct FoldK {
  std::int64_t m, n, k;
  Rows x, w;
  float *out, *sumsq;
};
constexpr std::int64_t kFewTokens = 8;
// packed: from pack_w, unused for few tokens.
bool folds_few(const FoldK& fold);
void pack_w(const Kernels& kernels, std::int32_t threads, const FoldK& fold, float* packed);
std::int64_t packed_w_size(const Kernels& kernels, const FoldK& fold);
void fold_k(const Kernels& kernels, std::int32_t threads, const FoldK& fold);

// The panels of w for fold_n.
std::int64_t packed_columns_size(const Kernels& kernels, std::int64_t n, std::int64_t k);
void pack_panels(const Kernels& kernels, std::int32_t threads, Rows w, std::int64_t n, std::int64_t k, float* packed);
void fold_m(const Kernels& kernels, std::int32_t threads, Rows dy, Rows x, std::int64_t m, std::int64_t n,
            std::int64_t k, float* dw);

}  // namespace mhc
