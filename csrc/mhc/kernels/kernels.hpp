// What a level offers: one table of functions over ranges of tokens or columns. The core splits the work into ranges and
// spreads them over threads; how it splits them moves no bit.
#pragma once

#include <cstdint>

#include "mhc/abi.h"

namespace mhc {

inline constexpr std::int64_t kStreams = 4;
inline constexpr std::int64_t kController = 24;
inline constexpr std::int64_t kComb = 16;
inline constexpr std::int64_t kGates = 8;  // PRE and POST

typedef mhc_rows Rows;

struct Range {
  std::int64_t begin, end;
};

// The gradient of x in fixed_k_gemm, fp32_gemm_rms and the block, which differ in what is added to the fold over n.
struct InputGrad {
  std::int64_t tokens, n, k;
  Rows dy;               // [tokens, n], FP32 or BF16
  const float* packed;   // from pack_columns
  void* out;             // [tokens, k]
  std::int64_t out_dtype;
  // The RMS leg; r is NULL without it, q under rsqrt-mean-plus-eps.
  Rows x;
  const float *dr, *r, *q;
  // The block's legs; pre is NULL without the first, c without the second. k = 4 * hidden.
  std::int64_t hidden;
  const float *pre, *c;
  Rows dh, dr_new;
};

struct Kernels {
  std::int64_t lanes;    // tokens of a tile
  std::int64_t chains;   // chains of a packed group
  std::int64_t columns;  // columns of a packed panel

  // w[n, k] for the fold over k: [group][k][chains], zero-padded; elements of k in the range.
  void (*pack_chains)(Rows w, std::int64_t n, std::int64_t k, Range some, float* packed);
  // out[t, n] for tokens and chains in the ranges (chains: within one group, a multiple of half a group in begin).
  void (*fold_k)(Rows x, Range tokens, std::int64_t n, std::int64_t k, Range chains, const float* packed, float* out,
                 float* sumsq);
  // The same for a few tokens and chains begin .. begin + 8 of w itself.
  void (*fold_k_few)(Rows x, Range tokens, std::int64_t n, std::int64_t k, Range chains, Rows w, float* out,
                     float* sumsq);
  // w[n, k] for the fold over n: [panel][n][columns], zero-padded; panels in the range.
  void (*pack_columns)(Rows w, std::int64_t n, std::int64_t k, Range panels, float* packed);
  void (*fold_n)(const InputGrad& grad, Range tokens, Range panels);
  // dw[n, k] = fold_m dy x for columns in the range.
  void (*fold_m)(Rows dy, Rows x, std::int64_t m, std::int64_t n, std::int64_t k, Range columns, float* dw);
  // mean[t] = s[t] / K + eps.
  void (*gemm_rms_mean)(std::int64_t tokens, std::int64_t k, float eps, const float* s, float* mean);
  void (*gemm_rms_scale)(std::int64_t tokens, std::int64_t k, float eps, const float* norm, float* q, float* r);

  void (*controller_fwd)(Range tokens, const float* p, const float* r, const float* alpha3, const float* bias,
                         float* h);
  void (*controller_bwd)(Range tokens, const float* dh, const float* p, const float* r, const float* alpha3, float* dp,
                         float* dr);
  // dalpha[24] = fold_t dh*m, dbias[24] = fold_t dh.
  void (*controller_folds)(std::int64_t tokens, const float* dh, const float* p, const float* r, float* dalpha,
                           float* dbias);
  void (*split_shift)(Range tokens, const float* h, float* shifted);
  void (*split_fwd)(Range tokens, const float* sig, const float* exps, float* pre, float* post, float* c,
                    float* softmax);
  void (*split_bwd)(Range tokens, const float* dpre, const float* dpost, const float* dc, Rows sig_pre, Rows sig_post,
                    const float* softmax, float* dh);

  // past_caches: of outputs so large that they would only push each other out.
  void (*post_fwd)(Range tokens, std::int64_t hidden, Rows r_old, Rows y, const float* c, const float* post,
                   std::uint16_t* r_new, bool past_caches);
  void (*post_bwd)(Range tokens, std::int64_t hidden, Rows dr_new, Rows r_old, Rows y, const float* c,
                   const float* post, float* dr_old, void* dy, std::int64_t dy_dtype, float* dc, float* dpost);
  void (*aggregate_fwd)(Range tokens, std::int64_t hidden, const float* pre, Rows r_old, std::uint16_t* out);
  void (*aggregate_bwd)(Range tokens, std::int64_t hidden, Rows dh, const float* pre, Rows r_old, float* dr_old,
                        float* dpre);

  void (*rmsnorm_mean)(Range tokens, std::int64_t hidden, Rows x, float eps, float* mean);
  void (*rmsnorm_fwd)(Range tokens, std::int64_t hidden, Rows x, Rows gamma, const float* r, std::uint16_t* y,
                      std::uint16_t* residual, bool past_caches);
  void (*rmsnorm_dx)(Range tokens, std::int64_t hidden, Rows dy, Rows d_residual, Rows x, Rows gamma, const float* r,
                     float* dx);
  void (*rmsnorm_dgamma)(std::int64_t tokens, Range columns, Rows dy, Rows x, const float* r, float* dgamma);

  void (*elementary)(std::int32_t function, std::int64_t count, const float* x, float* y);
  float (*multiply_add)(std::int64_t steps);
  std::int64_t multiply_add_operations;  // per step
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}

}  // namespace mhc
