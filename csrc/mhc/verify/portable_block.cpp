#include "portable_block.hpp"

#include <utility>

namespace mhc::portable {

namespace {

float alpha_of(const Batch& batch, std::size_t n) {
  return n < kPostBegin ? batch.alpha_pre : n < kCombBegin ? batch.alpha_post : batch.alpha_res;
}

float fold_segment(const Floats& values, std::size_t begin, std::size_t end) {
  return fixed_sum(end - begin, [&](std::size_t i) { return values[begin + i]; });
}

}  // namespace

PreForward pre_fwd(const Batch& batch) {
  PreForward out;
  out.x_flat.reserve(batch.r_old.size());
  for (const Bf16 value : batch.r_old) out.x_flat.push_back(widen(value));
  out.gemm = gemm_rms_fwd(out.x_flat, batch.weight, batch.formula, batch.sizes);
  const std::size_t logits = batch.sizes.tokens * kControllerN;
  out.m.resize(logits);
  out.h.resize(logits);
  for (std::size_t i = 0; i < logits; ++i) {
    const std::size_t n = i % kControllerN;
    out.m[i] = out.gemm.r[i / kControllerN] * out.gemm.p[i];
    out.h[i] = out.m[i] * alpha_of(batch, n) + batch.bias[n];
  }
  out.split = split_sinkhorn_fwd(out.h);
  out.hidden = aggregate_fwd(out.split.pre, batch.r_old, batch.sizes);
  return out;
}

PreGrads pre_bwd(const Floats& dhidden, const Floats& dpost, const Floats& dc, const Batch& batch,
                 const PreForward& saved) {
  const std::size_t tokens = batch.sizes.tokens;
  AggregateGrads aggregate = aggregate_bwd(dhidden, saved.split.pre, batch.r_old, batch.sizes);
  const Floats dh = split_sinkhorn_bwd(aggregate.dpre, dpost, dc, saved.split.saved);
  PreGrads grads;
  grads.d_bias.resize(kControllerN);
  Floats dalpha(kControllerN);
  for (std::size_t n = 0; n < kControllerN; ++n) {
    grads.d_bias[n] = fixed_sum(tokens, [&](std::size_t t) { return dh[t * kControllerN + n]; });
    dalpha[n] = fixed_sum(
        tokens, [&](std::size_t t) { return dh[t * kControllerN + n] * saved.m[t * kControllerN + n]; });
  }
  grads.d_alpha_pre = fold_segment(dalpha, 0, kPostBegin);
  grads.d_alpha_post = fold_segment(dalpha, kPostBegin, kCombBegin);
  grads.d_alpha_res = fold_segment(dalpha, kCombBegin, kControllerN);
  Floats dp(dh.size()), dr(tokens);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t row = t * kControllerN;
    const auto dm = [&](std::size_t n) { return dh[row + n] * alpha_of(batch, n); };
    for (std::size_t n = 0; n < kControllerN; ++n) dp[row + n] = dm(n) * saved.gemm.r[t];
    dr[t] = fixed_sum(kControllerN, [&](std::size_t n) { return dm(n) * saved.gemm.p[row + n]; });
  }
  GemmGrads gemm = gemm_rms_bwd(dp, dr, saved.x_flat, batch.weight, saved.gemm, batch.sizes);
  grads.d_weight = std::move(gemm.dw);
  grads.d_r_old = std::move(aggregate.dr_old);
  for (std::size_t i = 0; i < gemm.dx.size(); ++i) grads.d_r_old[i] = grads.d_r_old[i] + gemm.dx[i];
  return grads;
}

Forward block_forward(const Batch& batch) {
  Forward out;
  out.pre = pre_fwd(batch);
  out.norm = rmsnorm_fwd(out.pre.hidden, batch.gamma, batch.sizes);
  out.r_new = post_fwd(batch.r_old, batch.y_sublayer, out.pre.split.c, out.pre.split.post, batch.sizes);
  return out;
}

Backward block_backward(const Batch& batch, const Forward& saved, const ArrivingGrads& grads) {
  const Split& split = saved.pre.split;
  PostGrads post = post_bwd(grads.d_r_new, batch.r_old, batch.y_sublayer, split.c, split.post, batch.sizes);
  NormGrads norm = rmsnorm_bwd(grads.d_normalized, grads.d_residual, saved.pre.hidden, batch.gamma, saved.norm.r,
                               batch.sizes);
  Backward out;
  out.pre = pre_bwd(norm.dx, post.dpost, post.dc, batch, saved.pre);
  for (std::size_t i = 0; i < post.dr_old.size(); ++i) out.pre.d_r_old[i] = out.pre.d_r_old[i] + post.dr_old[i];
  out.dy_sublayer = std::move(post.dy);
  out.d_hidden = std::move(norm.dx);
  out.d_gamma = std::move(norm.dgamma);
  out.d_c = std::move(post.dc);
  out.d_post = std::move(post.dpost);
  return out;
}

}  // namespace mhc::portable
