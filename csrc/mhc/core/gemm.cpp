// The folds over K, N and M of fp32_gemm_rms and fixed_k_gemm, spread over tokens, chains and columns.
#include "dispatch.hpp"

namespace mhc {

namespace {

constexpr std::int64_t kPackSteps = 1024;    // of K in a unit of packing
constexpr std::int64_t kFoldColumns = 128;   // of dw in a unit
constexpr std::int64_t kFewChains = 24;      // of a unit for few tokens
constexpr std::int64_t kFewAtOnce = 4;

}  // namespace

bool folds_few(const FoldK& fold) { return fold.m <= kFewTokens; }

std::int64_t packed_w_size(const Kernels& kernels, const FoldK& fold) {
  return ceil_div(fold.n, kernels.chains) * kernels.chains * fold.k;
}

void pack_w(const Kernels& kernels, std::int32_t threads, const FoldK& fold, float* packed) {
  parallel_ranges(fold.k, kPackSteps, threads,
                  [&](Range some) { kernels.pack_chains(fold.w, fold.n, fold.k, some, packed); });
}

namespace {

void fold_few(const Kernels& kernels, std::int32_t threads, const FoldK& fold) {
  const std::int64_t blocks = ceil_div(fold.m, kFewAtOnce);
  const bool idle = blocks * ceil_div(fold.n, kFewChains) < threads;
  const std::int64_t chains_each = idle ? kFewChains / 2 : kFewChains;
  const std::int64_t groups = ceil_div(fold.n, chains_each);
  parallel_for(groups * blocks, threads, [&](std::int64_t unit) {
    const std::int64_t token = unit / groups * kFewAtOnce, chain = unit % groups * chains_each;
    const Range tokens{token, token + kFewAtOnce < fold.m ? token + kFewAtOnce : fold.m};
    const Range chains{chain, chain + chains_each < fold.n ? chain + chains_each : fold.n};
    kernels.fold_k_few(fold.x, tokens, fold.n, fold.k, chains, fold.w, fold.out, chain == 0 ? fold.sumsq : nullptr);
  });
}

}  // namespace

void fold_k(const Kernels& kernels, std::int32_t threads, const FoldK& fold) {
  if (fold.n == 0) return;
  if (folds_few(fold)) return fold_few(kernels, threads, fold);
  const Floats packed(packed_w_size(kernels, fold));
  pack_w(kernels, threads, fold, packed.get());
  const std::int64_t tiles = ceil_div(fold.m, kernels.lanes), groups = ceil_div(fold.n, kernels.chains);
  // Half groups where whole ones would leave a thread idle.
  const std::int64_t parts = tiles * groups < 4 * threads && tiles * groups % threads != 0 ? 2 : 1;
  const std::int64_t chains = kernels.chains / parts, per_tile = groups * parts;
  parallel_for(tiles * per_tile, threads, [&](std::int64_t unit) {
    const std::int64_t token = unit / per_tile * kernels.lanes, chain = unit % per_tile * chains;
    if (chain >= fold.n) return;
    const Range tokens{token, token + kernels.lanes < fold.m ? token + kernels.lanes : fold.m};
    kernels.fold_k(fold.x, tokens, fold.n, fold.k, {chain, chain + chains}, packed.get(), fold.out,
                   chain == 0 ? fold.sumsq : nullptr);
  });
}

std::int64_t packed_columns_size(const Kernels& kernels, std::int64_t n, std::int64_t k) {
  return ceil_div(k, kernels.columns) * kernels.columns * n;
}

void pack_panels(const Kernels& kernels, std::int32_t threads, Rows w, std::int64_t n, std::int64_t k, float* packed) {
  parallel_ranges(ceil_div(k, kernels.columns), 8, threads,
                  [&](Range panels) { kernels.pack_columns(w, n, k, panels, packed); });
}

void fold_m(const Kernels& kernels, std::int32_t threads, Rows dy, Rows x, std::int64_t m, std::int64_t n,
            std::int64_t k, float* dw) {
  parallel_ranges(k, kFoldColumns, threads, [&](Range columns) { kernels.fold_m(dy, x, m, n, k, columns, dw); });
}

namespace {

void input_grad(const Kernels& kernels, std::int32_t threads, InputGrad grad, Rows w) {
  const Floats packed(packed_columns_size(kernels, grad.n, grad.k));
  pack_panels(kernels, threads, w, grad.n, grad.k, packed.get());
  grad.packed = packed.get();
  const Range panels{0, ceil_div(grad.k, kernels.columns)};
  parallel_ranges(grad.tokens, token_grain(kernels, grad.tokens, threads), threads,
                  [&](Range tokens) { kernels.fold_n(grad, tokens, panels); });
}

}  // namespace

}  // namespace mhc

using mhc::as_fp32;
using mhc::dispatch;
using mhc::InputGrad;
using mhc::Kernels;
using mhc::Rows;

int32_t mhc_fold_k(const mhc_call* call, int64_t m, int64_t n, int64_t k, mhc_rows x, mhc_rows w, float* out,
                   float* sumsq) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    mhc::fold_k(kernels, threads, {m, n, k, x, w, out, sumsq});
  });
}

int32_t mhc_fold_n(const mhc_call* call, int64_t m, int64_t n, int64_t k, mhc_rows dy, mhc_rows w, float* dx) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    InputGrad grad{};
    grad.tokens = m, grad.n = n, grad.k = k, grad.dy = dy;
    grad.out = dx, grad.out_dtype = MHC_FP32;
    mhc::input_grad(kernels, threads, grad, w);
  });
}

int32_t mhc_fold_m(const mhc_call* call, int64_t m, int64_t n, int64_t k, mhc_rows dy, mhc_rows x, float* dw) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    mhc::fold_m(kernels, threads, dy, x, m, n, k, dw);
  });
}

int32_t mhc_gemm_rms_mean(const mhc_call* call, int64_t tokens, int64_t k, double eps, const float* s, float* mean) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t) {
    kernels.gemm_rms_mean(tokens, k, as_fp32(eps), s, mean);
  });
}

int32_t mhc_gemm_rms_scale(const mhc_call* call, int64_t tokens, int64_t k, double eps, const float* norm, float* q,
                           float* r) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t) {
    kernels.gemm_rms_scale(tokens, k, as_fp32(eps), norm, q, r);
  });
}

int32_t mhc_gemm_rms_bwd(const mhc_call* call, int64_t tokens, int64_t k, const float* dp, const float* dr, mhc_rows x,
                         mhc_rows weight, const float* q, const float* r, float* dx, float* dw) {
  return dispatch(call, [&](const Kernels& kernels, std::int32_t threads) {
    const Rows dy{dp, mhc::kController, MHC_FP32};
    InputGrad grad{};
    grad.tokens = tokens, grad.n = mhc::kController, grad.k = k, grad.dy = dy;
    grad.out = dx, grad.out_dtype = MHC_FP32;
    grad.x = x, grad.dr = dr, grad.r = r, grad.q = q;
    mhc::input_grad(kernels, threads, grad, weight);
    if (dw != nullptr) mhc::fold_m(kernels, threads, dy, x, tokens, mhc::kController, k, dw);
  });
}
