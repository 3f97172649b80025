// The whole block: tokens tile by tile through all stages, so that a tile's streams are read from memory once.
#include "dispatch.hpp"

namespace mhc {

namespace {

enum Stage : std::int64_t { kFold = 0, kControl = 1, kMix = 2, kNormalize = 3 };

constexpr std::int64_t kNormColumns = 256;
constexpr std::int64_t kWeightColumns = 128;

struct Forward {
  const Kernels& kernels;
  const mhc_block_forward_args& a;
  const float* packed;  // NULL: the fold is done
  float alpha3[3];

  Rows hidden() const { return {a.hidden_out, a.hidden, MHC_BF16}; }
  std::int64_t k() const { return kStreams * a.hidden; }
  bool runs(Stage stage) const { return a.first <= stage && stage <= a.last; }

  void elementary(std::int32_t function, std::int64_t count, const float* x, float* y) const {
    if (a.portable) kernels.elementary(function, count, x, y);
  }

  void fold(Range some) const {
    for (std::int64_t chain = 0; chain < kController; chain += kernels.chains) {
      kernels.fold_k(a.r_old, some, kController, k(), {chain, chain + kernels.chains}, packed, a.p,
                     chain == 0 ? a.s : nullptr);
    }
  }

  bool released() const { return a.q == nullptr; }

  void mean(Range some) const {
    const float eps = as_fp32(a.mhc_eps);
    if (released()) kernels.gemm_rms_mean(some.end - some.begin, k(), eps, a.s + some.begin, a.norm + some.begin);
  }

  void control(Range some) const {
    const std::int64_t t = some.begin, count = some.end - some.begin;
    if (released()) {
      elementary(MHC_RSQRT, count, a.norm + t, a.r + t);
    } else {
      elementary(MHC_SQRT, count, a.s + t, a.norm + t);
      kernels.gemm_rms_scale(count, k(), as_fp32(a.mhc_eps), a.norm + t, a.q + t, a.r + t);
    }
    kernels.controller_fwd(some, a.p, a.r, alpha3, a.bias, a.h);
    kernels.split_shift(some, a.h, a.exps);
  }

  void gates(Range some) const {
    if (!a.portable) return;
    for (std::int64_t t = some.begin; t < some.end; ++t) {
      kernels.elementary(MHC_SIGMOID, kGates, a.h + t * kController, a.sig + t * kGates);
    }
    float* exps = a.exps + some.begin * kComb;
    kernels.elementary(MHC_EXP, (some.end - some.begin) * kComb, exps, exps);
  }

  void mix(Range some) const {
    gates(some);
    kernels.split_fwd(some, a.sig, a.exps, a.pre, a.post, a.c, a.softmax);
    kernels.aggregate_fwd(some, a.hidden, a.pre, a.r_old, a.hidden_out);
    if (a.normalized != nullptr) {
      kernels.rmsnorm_mean(some, a.hidden, hidden(), as_fp32(a.rmsnorm_eps), a.mean);
    }
    if (a.r_new != nullptr) kernels.post_fwd(some, a.hidden, a.r_old, a.y, a.c, a.post, a.r_new, past_caches(a.tokens, a.hidden));
  }

  void normalize(Range some) const {
    if (a.normalized == nullptr) return;
    elementary(MHC_RSQRT, some.end - some.begin, a.mean + some.begin, a.inv_rms + some.begin);
    kernels.rmsnorm_fwd(some, a.hidden, hidden(), a.gamma, a.inv_rms, a.normalized, a.residual,
                        past_caches(a.tokens, a.hidden));
  }

  void run(Range some) const {
    if (packed != nullptr) {
      fold(some);
      mean(some);
    }
    if (runs(kControl)) control(some);
    if (runs(kMix)) mix(some);
    if (runs(kNormalize)) normalize(some);
  }
};

void forward(const Kernels& kernels, std::int32_t threads, const mhc_block_forward_args& a) {
  Forward block{kernels, a, nullptr, {*a.alpha_pre, *a.alpha_post, *a.alpha_res}};
  const FoldK fold{a.tokens, kController, block.k(), a.r_old, {a.weight, block.k(), MHC_FP32}, a.p, a.s};
  const bool folds = block.runs(kFold);
  // With few tiles the fold is spread over chains as well, and what follows it over single tokens.
  if (folds && a.tokens < kernels.lanes * 2 * threads) {
    fold_k(kernels, threads, fold);
    block.mean({0, a.tokens});
    if (a.last == kFold) return;
  } else if (folds) {
    const Floats packed(packed_w_size(kernels, fold));
    pack_w(kernels, threads, fold, packed.get());
    block.packed = packed.get();
    parallel_ranges(a.tokens, kernels.lanes, threads, [&](Range some) { block.run(some); });
    return;
  }
  parallel_ranges(a.tokens, token_grain(kernels, a.tokens, threads), threads, [&](Range some) { block.run(some); });
}

struct Backward {
  const Kernels& kernels;
  const mhc_block_backward_args& a;
  float alpha3[3];
  float *dpre, *dh, *dp, *dr;
  InputGrad grad;

  Rows d_hidden() const {
    return a.with_norm ? Rows{a.d_hidden, a.hidden, MHC_FP32} : a.d_hidden_in;
  }

  Rows hidden() const {
    return a.hidden_again != nullptr ? Rows{a.hidden_again, a.hidden, MHC_BF16} : a.hidden_saved;
  }

  void run(Range some) const {
    if (a.post_part == MHC_POST) {
      kernels.post_bwd(some, a.hidden, a.d_r_new, a.r_old, a.y, a.c, a.post, nullptr, a.dy, a.streams_dtype, a.d_c,
                       a.d_post);
    }
    if (a.hidden_again != nullptr) kernels.aggregate_fwd(some, a.hidden, a.pre, a.r_old, a.hidden_again);
    if (a.with_norm) {
      kernels.rmsnorm_dx(some, a.hidden, a.d_normalized, a.d_residual, hidden(), a.gamma, a.inv_rms, a.d_hidden);
    }
    kernels.aggregate_bwd(some, a.hidden, d_hidden(), a.pre, a.r_old, nullptr, dpre);
    kernels.split_bwd(some, dpre, a.d_post, a.d_c, a.sig_pre, a.sig_post, a.softmax, dh);
    kernels.controller_bwd(some, dh, a.p, a.r, alpha3, dp, dr);
    kernels.fold_n(grad, some, {0, ceil_div(grad.k, kernels.columns)});
  }

  // What folds over tokens, and so needs them all.
  void parameters(std::int32_t threads) const {
    const Rows dy{dp, kController, MHC_FP32};
    if (a.with_norm) {
      parallel_ranges(a.hidden, kNormColumns, threads, [&](Range columns) {
        kernels.rmsnorm_dgamma(a.tokens, columns, a.d_normalized, hidden(), a.inv_rms, a.d_gamma);
      });
    }
    if (a.d_weight == nullptr) return;
    parallel_ranges(grad.k, kWeightColumns, threads, [&](Range columns) {
      kernels.fold_m(dy, a.r_old, a.tokens, kController, grad.k, columns, a.d_weight);
    });
    float dalpha[kController];
    kernels.controller_folds(a.tokens, dh, a.p, a.r, dalpha, a.d_bias);
    const struct {
      std::int64_t begin, end;
      float* to;
    } segments[] = {{0, 4, a.d_alpha_pre}, {4, 8, a.d_alpha_post}, {8, 24, a.d_alpha_res}};
    for (const auto& segment : segments) {
      float sum = 0.0f;
      for (std::int64_t n = segment.begin; n < segment.end; ++n) sum = sum + dalpha[n];
      *segment.to = sum;
    }
  }
};

void backward(const Kernels& kernels, std::int32_t threads, const mhc_block_backward_args& a) {
  const std::int64_t k = kStreams * a.hidden;
  const Floats scratch(a.tokens * (kStreams + 2 * kController + 1) + 1);
  const Floats packed(packed_columns_size(kernels, kController, k));
  float* dpre = scratch.get();
  float* dh = dpre + a.tokens * kStreams;
  float* dp = dh + a.tokens * kController;
  float* dr = dp + a.tokens * kController;
  Backward block{kernels, a, {*a.alpha_pre, *a.alpha_post, *a.alpha_res}, dpre, dh, dp, dr, {}};
  InputGrad& grad = block.grad;
  grad.tokens = a.tokens, grad.n = kController, grad.k = k, grad.hidden = a.hidden;
  grad.dy = {dp, kController, MHC_FP32}, grad.packed = packed.get();
  grad.out = a.d_r_old, grad.out_dtype = a.streams_dtype;
  grad.x = a.r_old, grad.dr = dr, grad.r = a.r, grad.q = a.q;
  grad.pre = a.pre, grad.dh = block.d_hidden();
  if (a.post_part != MHC_NO_POST) grad.c = a.c, grad.dr_new = a.d_r_new;
  pack_panels(kernels, threads, {a.weight, k, MHC_FP32}, kController, k, packed.get());
  parallel_ranges(a.tokens, token_grain(kernels, a.tokens, threads), threads, [&](Range some) { block.run(some); });
  block.parameters(threads);
}

}  // namespace

}  // namespace mhc

int32_t mhc_block_forward(const mhc_call* call, const mhc_block_forward_args* args) {
  return mhc::dispatch(call, [&](const mhc::Kernels& kernels, std::int32_t threads) {
    mhc::forward(kernels, threads, *args);
  });
}

int32_t mhc_block_backward(const mhc_call* call, const mhc_block_backward_args* args) {
  return mhc::dispatch(call, [&](const mhc::Kernels& kernels, std::int32_t threads) {
    mhc::backward(kernels, threads, *args);
  });
}
