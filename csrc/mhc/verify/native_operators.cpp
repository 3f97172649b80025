// The operators of portable_operators.hpp that the block is made of, each by the native backend's own entry for it.
#include "mhc/abi.h"
#include "native_call.hpp"
#include "portable_backend.hpp"

namespace mhc::portable {

namespace {

constexpr std::size_t kGates = kCombBegin;  // PRE and POST
constexpr std::size_t kComb = 16;

}  // namespace

std::vector<SinkhornSaved> saved_of(const Floats& sig, const Floats& softmax, std::size_t tokens) {
  std::vector<SinkhornSaved> saved(tokens);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t i = 0; i < 4; ++i) {
      saved[t].sigmoid_pre[i] = sig[t * kGates + i];
      saved[t].sigmoid_post[i] = sig[t * kGates + kPostBegin + i];
      for (std::size_t j = 0; j < 4; ++j) saved[t].softmax[i][j] = softmax[t * kComb + 4 * i + j];
    }
  }
  return saved;
}

SavedArrays arrays_of(const std::vector<SinkhornSaved>& saved) {
  SavedArrays arrays;
  for (const SinkhornSaved& token : saved) {
    arrays.sig_pre.insert(arrays.sig_pre.end(), token.sigmoid_pre.begin(), token.sigmoid_pre.end());
    arrays.sig_post.insert(arrays.sig_post.end(), token.sigmoid_post.begin(), token.sigmoid_post.end());
    for (const Vector4& row : token.softmax) arrays.softmax.insert(arrays.softmax.end(), row.begin(), row.end());
  }
  return arrays;
}

Split split_sinkhorn_fwd(const Floats& h) {
  const std::size_t tokens = h.size() / kControllerN;
  Floats gates, exps(tokens * kComb), softmax(tokens * kComb);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t n = 0; n < kGates; ++n) gates.push_back(h[t * kControllerN + n]);
  }
  elementary(Function::kSigmoid, gates, gates);
  check(mhc_split_shift(native_call(), count(tokens), h.data(), exps.data()));
  elementary(Function::kExp, exps, exps);
  Split out{Floats(tokens * kStreams), Floats(tokens * kStreams), Floats(tokens * kComb), {}};
  check(mhc_split_fwd(native_call(), count(tokens), gates.data(), exps.data(), out.pre.data(), out.post.data(),
                      out.c.data(), softmax.data()));
  out.saved = saved_of(gates, softmax, tokens);
  return out;
}

Floats split_sinkhorn_bwd(const Floats& dpre, const Floats& dpost, const Floats& dc,
                          const std::vector<SinkhornSaved>& saved) {
  const SavedArrays arrays = arrays_of(saved);
  Floats dh(saved.size() * kControllerN);
  check(mhc_split_bwd(native_call(), count(saved.size()), dpre.data(), dpost.data(), dc.data(),
                      rows(arrays.sig_pre, kStreams), rows(arrays.sig_post, kStreams), arrays.softmax.data(),
                      dh.data()));
  return dh;
}

GemmRms gemm_rms_fwd(const Floats& x, const Floats& weight, ControllerRms formula, Sizes sizes) {
  const std::size_t tokens = sizes.tokens, k = sizes.flat_k();
  GemmRms out{formula, Floats(tokens * kControllerN), Floats(tokens), {}};
  Floats norm(tokens);
  check(mhc_fold_k(native_call(), count(tokens), count(kControllerN), count(k), rows(x, k), rows(weight, k),
                   out.p.data(), norm.data()));
  if (formula == ControllerRms::kRsqrtMeanPlusEps) {
    check(mhc_gemm_rms_mean(native_call(), count(tokens), count(k), kEps, norm.data(), out.r.data()));
    elementary(Function::kRsqrt, out.r, out.r);
    return out;
  }
  out.q.resize(tokens);
  elementary(Function::kSqrt, norm, norm);
  check(mhc_gemm_rms_scale(native_call(), count(tokens), count(k), kEps, norm.data(), out.q.data(), out.r.data()));
  return out;
}

GemmGrads gemm_rms_bwd(const Floats& dp, const Floats& dr, const Floats& x, const Floats& weight, const GemmRms& saved,
                       Sizes sizes) {
  const std::size_t k = sizes.flat_k();
  GemmGrads grads{Floats(sizes.tokens * k), Floats(kControllerN * k)};
  check(mhc_gemm_rms_bwd(native_call(), count(sizes.tokens), count(k), dp.data(), dr.data(), rows(x, k),
                         rows(weight, k), q_of(saved), saved.r.data(), grads.dx.data(), grads.dw.data()));
  return grads;
}

Bf16s post_fwd(const Bf16s& r_old, const Bf16s& y, const Floats& c, const Floats& post, Sizes sizes) {
  Bf16s r_new(r_old.size());
  check(mhc_post_fwd(native_call(), count(sizes.tokens), count(sizes.hidden), rows(r_old, sizes.flat_k()),
                     rows(y, sizes.hidden), c.data(), post.data(), bits(r_new)));
  return r_new;
}

PostGrads post_bwd(const Bf16s& dr_new, const Bf16s& r_old, const Bf16s& y, const Floats& c, const Floats& post,
                   Sizes sizes) {
  PostGrads grads{Floats(r_old.size()), Floats(y.size()), Floats(c.size()), Floats(post.size())};
  check(mhc_post_bwd(native_call(), count(sizes.tokens), count(sizes.hidden), rows(dr_new, sizes.flat_k()),
                     rows(r_old, sizes.flat_k()), rows(y, sizes.hidden), c.data(), post.data(), grads.dr_old.data(),
                     grads.dy.data(), MHC_FP32, grads.dc.data(), grads.dpost.data()));
  return grads;
}

Bf16s aggregate_fwd(const Floats& pre, const Bf16s& r_old, Sizes sizes) {
  Bf16s out(sizes.tokens * sizes.hidden);
  check(mhc_aggregate_fwd(native_call(), count(sizes.tokens), count(sizes.hidden), pre.data(),
                          rows(r_old, sizes.flat_k()), bits(out)));
  return out;
}

AggregateGrads aggregate_bwd(const Floats& dh, const Floats& pre, const Bf16s& r_old, Sizes sizes) {
  AggregateGrads grads{Floats(r_old.size()), Floats(pre.size())};
  check(mhc_aggregate_bwd(native_call(), count(sizes.tokens), count(sizes.hidden), rows(dh, sizes.hidden), pre.data(),
                          rows(r_old, sizes.flat_k()), grads.dr_old.data(), grads.dpre.data()));
  return grads;
}

Norm rmsnorm_fwd(const Bf16s& x, const Floats& gamma, Sizes sizes) {
  const std::int64_t tokens = count(sizes.tokens), hidden = count(sizes.hidden);
  Norm out{Bf16s(x.size()), Floats(sizes.tokens)};
  Bf16s residual(x.size());
  check(mhc_rmsnorm_mean(native_call(), tokens, hidden, rows(x, sizes.hidden), kEps, out.r.data()));
  elementary(Function::kRsqrt, out.r, out.r);
  check(mhc_rmsnorm_fwd(native_call(), tokens, hidden, rows(x, sizes.hidden), rows(gamma, sizes.hidden), out.r.data(),
                        bits(out.y), bits(residual)));
  return out;
}

NormGrads rmsnorm_bwd(const Bf16s& dy, const Bf16s& d_residual, const Bf16s& x, const Floats& gamma, const Floats& r,
                      Sizes sizes) {
  const std::size_t hidden = sizes.hidden;
  NormGrads grads{Floats(x.size()), Floats(hidden)};
  check(mhc_rmsnorm_bwd(native_call(), count(sizes.tokens), count(hidden), rows(dy, hidden), rows(d_residual, hidden),
                        rows(x, hidden), rows(gamma, hidden), r.data(), grads.dx.data(), grads.dgamma.data()));
  return grads;
}

}  // namespace mhc::portable
