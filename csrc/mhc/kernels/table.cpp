// The table of this level, and its measure of the processor's peak.
#include "rows.hpp"

namespace mhc::MHC_LEVEL {

void pack_chains(Rows, std::int64_t, std::int64_t, Range, float*);
void fold_k(Rows, Range, std::int64_t, std::int64_t, Range, const float*, float*, float*);
void fold_k_few(Rows, Range, std::int64_t, std::int64_t, Range, Rows, float*, float*);
void pack_columns(Rows, std::int64_t, std::int64_t, Range, float*);
void fold_n(const InputGrad&, Range, Range);
void fold_m(Rows, Rows, std::int64_t, std::int64_t, std::int64_t, Range, float*);
std::int64_t panel_columns();
void gemm_rms_mean(std::int64_t, std::int64_t, float, const float*, float*);
void gemm_rms_scale(std::int64_t, std::int64_t, float, const float*, float*, float*);
void controller_fwd(Range, const float*, const float*, const float*, const float*, float*);
void controller_bwd(Range, const float*, const float*, const float*, const float*, float*, float*);
void controller_folds(std::int64_t, const float*, const float*, const float*, float*, float*);
void split_shift(Range, const float*, float*);
void split_fwd(Range, const float*, const float*, float*, float*, float*, float*);
void split_bwd(Range, const float*, const float*, const float*, Rows, Rows, const float*, float*);
void post_fwd(Range, std::int64_t, Rows, Rows, const float*, const float*, std::uint16_t*, bool);
void post_bwd(Range, std::int64_t, Rows, Rows, Rows, const float*, const float*, float*, void*, std::int64_t, float*,
              float*);
void aggregate_fwd(Range, std::int64_t, const float*, Rows, std::uint16_t*);
void aggregate_bwd(Range, std::int64_t, Rows, const float*, Rows, float*, float*);
void rmsnorm_mean(Range, std::int64_t, Rows, float, float*);
void rmsnorm_fwd(Range, std::int64_t, Rows, Rows, const float*, std::uint16_t*, std::uint16_t*, bool);
void rmsnorm_dx(Range, std::int64_t, Rows, Rows, Rows, Rows, const float*, float*);
void rmsnorm_dgamma(std::int64_t, Range, Rows, Rows, const float*, float*);
void elementary(std::int32_t, std::int64_t, const float*, float*);

namespace {

// Chains enough to hide the latency of an addition, and few enough to leave registers for the products.
constexpr int kIndependent = kLanes == 16 ? 16 : 8;

#if defined(__x86_64__)
#define MHC_IN_REGISTER "+v"
#else
#define MHC_IN_REGISTER "+w"
#endif

// Unfused multiply-adds on registers alone.
float multiply_add(std::int64_t steps) {
  F32 acc[kIndependent] = {};
  F32 x = splat(0.5f), y = splat(0.25f);
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int n = 0; n < kIndependent; ++n) {
      asm("" : MHC_IN_REGISTER(x));  // as if x had changed, so that each product is computed
      acc[n] = acc[n] + x * y;
    }
  }
  F32 sum{};
  for (int n = 0; n < kIndependent; ++n) sum = sum + acc[n];
  return sum[0];
}

}  // namespace

const Kernels kKernels = {
    kLanes,         kChains,          panel_columns(), pack_chains,   fold_k,      fold_k_few,
    pack_columns,   fold_n,           fold_m,          gemm_rms_mean, gemm_rms_scale, controller_fwd,
    controller_bwd, controller_folds, split_shift,     split_fwd,     split_bwd,      post_fwd,
    post_bwd,       aggregate_fwd,    aggregate_bwd,   rmsnorm_mean,  rmsnorm_fwd,    rmsnorm_dx,
    rmsnorm_dgamma, elementary,     multiply_add,     std::int64_t{2} * kIndependent * kLanes};

}  // namespace mhc::MHC_LEVEL
