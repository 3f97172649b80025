// The operators whose work is spread over tokens alone: split, post, aggregate, rmsnorm, and the elementary functions.
#include "dispatch.hpp"

using mhc::as_fp32;
using mhc::dispatch;
using mhc::Kernels;
using mhc::Range;

namespace {

constexpr std::int64_t kNormColumns = 256;      // of dgamma in a unit
constexpr std::int64_t kSplitTokens = 64;       // of the split in a unit
constexpr std::int64_t kElements = 1 << 14;     // of an elementary function in a unit

// body(kernels, Range) over tiles of tokens.
template <typename Body>
int32_t over_tokens(const mhc_call* call, int64_t tokens, Body body) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    mhc::parallel_ranges(tokens, mhc::token_grain(kernels, tokens, threads), threads,
                         [&](Range some) { body(kernels, some); });
  });
}

// The same in larger pieces, for operators of some hundred numbers a token.
template <typename Body>
int32_t over_rows(const mhc_call* call, int64_t tokens, Body body) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    mhc::parallel_ranges(tokens, kSplitTokens, threads, [&](Range some) { body(kernels, some); });
  });
}

}  // namespace

int32_t mhc_elementary(const mhc_call* call, int32_t function, int64_t count, const float* x, float* y) {
  if (function < MHC_EXP || function > MHC_SQRT) return MHC_BAD_ARGUMENT;
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    mhc::parallel_ranges(count, kElements, threads, [&](Range some) {
      kernels.elementary(function, some.end - some.begin, x + some.begin, y + some.begin);
    });
  });
}

int32_t mhc_split_shift(const mhc_call* call, int64_t tokens, const float* h, float* shifted) {
  return over_rows(call, tokens, [&](const Kernels& kernels, Range some) { kernels.split_shift(some, h, shifted); });
}

int32_t mhc_split_fwd(const mhc_call* call, int64_t tokens, const float* sig, const float* exps, float* pre, float* post,
                      float* c, float* softmax) {
  return over_rows(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.split_fwd(some, sig, exps, pre, post, c, softmax);
  });
}

int32_t mhc_split_bwd(const mhc_call* call, int64_t tokens, const float* dpre, const float* dpost, const float* dc,
                      mhc_rows sig_pre, mhc_rows sig_post, const float* softmax, float* dh) {
  return over_rows(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.split_bwd(some, dpre, dpost, dc, sig_pre, sig_post, softmax, dh);
  });
}

int32_t mhc_post_fwd(const mhc_call* call, int64_t tokens, int64_t hidden, mhc_rows r_old, mhc_rows y, const float* c,
                     const float* post, uint16_t* r_new) {
  return over_tokens(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.post_fwd(some, hidden, r_old, y, c, post, r_new, mhc::past_caches(tokens, hidden));
  });
}

int32_t mhc_post_bwd(const mhc_call* call, int64_t tokens, int64_t hidden, mhc_rows dr_new, mhc_rows r_old, mhc_rows y,
                     const float* c, const float* post, float* dr_old, void* dy, int64_t dy_dtype, float* dc, float* dpost) {
  return over_tokens(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.post_bwd(some, hidden, dr_new, r_old, y, c, post, dr_old, dy, dy_dtype, dc, dpost);
  });
}

int32_t mhc_aggregate_fwd(const mhc_call* call, int64_t tokens, int64_t hidden, const float* pre, mhc_rows r_old,
                          uint16_t* out) {
  return over_tokens(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.aggregate_fwd(some, hidden, pre, r_old, out);
  });
}

int32_t mhc_aggregate_bwd(const mhc_call* call, int64_t tokens, int64_t hidden, mhc_rows dh, const float* pre,
                          mhc_rows r_old, float* dr_old, float* dpre) {
  return over_tokens(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.aggregate_bwd(some, hidden, dh, pre, r_old, dr_old, dpre);
  });
}

int32_t mhc_rmsnorm_mean(const mhc_call* call, int64_t tokens, int64_t hidden, mhc_rows x, double eps,
                         float* mean) {
  return over_tokens(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.rmsnorm_mean(some, hidden, x, as_fp32(eps), mean);
  });
}

int32_t mhc_rmsnorm_fwd(const mhc_call* call, int64_t tokens, int64_t hidden, mhc_rows x, mhc_rows gamma,
                        const float* r, uint16_t* y, uint16_t* residual) {
  return over_tokens(call, tokens, [&](const Kernels& kernels, Range some) {
    kernels.rmsnorm_fwd(some, hidden, x, gamma, r, y, residual, mhc::past_caches(tokens, hidden));
  });
}

int32_t mhc_rmsnorm_bwd(const mhc_call* call, int64_t tokens, int64_t hidden, mhc_rows dy, mhc_rows d_residual,
                        mhc_rows x, mhc_rows gamma, const float* r, float* dx, float* dgamma) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    mhc::parallel_ranges(tokens, mhc::token_grain(kernels, tokens, threads), threads, [&](Range some) {
      kernels.rmsnorm_dx(some, hidden, dy, d_residual, x, gamma, r, dx);
    });
    mhc::parallel_ranges(hidden, kNormColumns, threads,
                         [&](Range columns) { kernels.rmsnorm_dgamma(tokens, columns, dy, x, r, dgamma); });
  });
}
