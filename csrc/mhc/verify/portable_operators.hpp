// The six operators of the contract under portable-fp32-mhc-v1, one scalar at a time.
//
// Written from the contract's formulas as a witness for the torch reference: no code is shared with it, and nothing
// here is meant to be fast. Tensors are row-major vectors; every shape follows from tokens, hidden and the constants.
// Sizes must fit; callers check them. BF16 appears where the contract stores it, all else is FP32.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "mhc/bf16.hpp"
#include "mhc/reduction.hpp"

namespace mhc::portable {

using Floats = std::vector<float>;
using Bf16s = std::vector<Bf16>;

inline constexpr std::size_t kControllerN = 24;  // PRE[0:4], POST[4:8], COMB[8:24] (row-major 4x4)
inline constexpr std::size_t kPostBegin = 4;
inline constexpr std::size_t kCombBegin = 8;
inline constexpr std::size_t kSinkhornSteps = 39;  // column, then 19 times (row, column)
inline constexpr float kEps = 1e-6f;

struct Sizes {
  std::size_t tokens, hidden;
  std::size_t flat_k() const { return kStreams * hidden; }
};

// 1. hc_split_sinkhorn. What the forward saves is saved for each token.
using Vector4 = std::array<float, 4>;
using Matrix4 = std::array<Vector4, 4>;

struct SinkhornStep {
  Matrix4 input;
  Vector4 denominator;  // of column j or of row i, its eps included
};

struct SinkhornSaved {
  Vector4 sigmoid_pre, sigmoid_post;
  Matrix4 softmax;
  std::array<SinkhornStep, kSinkhornSteps> steps;
};

struct Split {
  Floats pre, post, c;  // [T, 4], [T, 4], [T, 4, 4]
  std::vector<SinkhornSaved> saved;
};

Split split_sinkhorn_fwd(const Floats& h);
Floats split_sinkhorn_bwd(const Floats& dpre, const Floats& dpost, const Floats& dc,
                          const std::vector<SinkhornSaved>& saved);  // dh[T, 24]

// 2. fp32_gemm_rms: x[T, K], weight[24, K]. The formula of r is the contract's controller_rms.
enum class ControllerRms { kInverseRmsPlusEps, kRsqrtMeanPlusEps };

struct GemmRms {
  ControllerRms formula;
  Floats p, r, q;  // [T, 24], [T], [T]; q is empty under rsqrt-mean-plus-eps
};

struct GemmGrads {
  Floats dx, dw;
};

GemmRms gemm_rms_fwd(const Floats& x, const Floats& weight, ControllerRms formula, Sizes sizes);
GemmGrads gemm_rms_bwd(const Floats& dp, const Floats& dr, const Floats& x, const Floats& weight, const GemmRms& saved,
                       Sizes sizes);

// 3. mhc_post: r_old[T, 4, D], y[T, D], c[T, 4, 4], post[T, 4].
struct PostGrads {
  Floats dr_old, dy, dc, dpost;
};

Bf16s post_fwd(const Bf16s& r_old, const Bf16s& y, const Floats& c, const Floats& post, Sizes sizes);
PostGrads post_bwd(const Bf16s& dr_new, const Bf16s& r_old, const Bf16s& y, const Floats& c, const Floats& post,
                   Sizes sizes);

// 4. h_aggregate; its composite mhc_pre is in portable_block.hpp.
struct AggregateGrads {
  Floats dr_old, dpre;
};

Bf16s aggregate_fwd(const Floats& pre, const Bf16s& r_old, Sizes sizes);
AggregateGrads aggregate_bwd(const Floats& dh, const Floats& pre, const Bf16s& r_old, Sizes sizes);

// 5. rmsnorm_residual: x[T, D], gamma[D] (widened, whatever its storage). The residual is x itself.
struct Norm {
  Bf16s y;
  Floats r;
};

struct NormGrads {
  Floats dx, dgamma;
};

Norm rmsnorm_fwd(const Bf16s& x, const Floats& gamma, Sizes sizes);
NormGrads rmsnorm_bwd(const Bf16s& dy, const Bf16s& d_residual, const Bf16s& x, const Floats& gamma, const Floats& r,
                      Sizes sizes);

// 6. fixed_k_gemm: x[M, K], w[N, K] to [M, N].
struct GemmSizes {
  std::size_t m, n, k;
};

Floats fixed_k_gemm_fwd(const Floats& x, const Floats& w, GemmSizes sizes);
GemmGrads fixed_k_gemm_bwd(const Floats& dy, const Floats& x, const Floats& w, GemmSizes sizes);

}  // namespace mhc::portable
