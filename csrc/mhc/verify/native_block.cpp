// The block boundary by the native backend's entries for the whole of it, in which the operators are fused.
// native_operators_driver has portable_block.cpp in the place of this file, and so runs one operator after another.
#include "native_call.hpp"
#include "portable_block.hpp"

namespace mhc::portable {

Forward block_forward(const Batch& batch) {
  const std::size_t tokens = batch.sizes.tokens, d = batch.sizes.hidden, k = batch.sizes.flat_k();
  const auto floats = [tokens](std::size_t width) { return Floats(tokens * width); };
  Forward out;
  PreForward& pre = out.pre;
  const bool with_q = batch.formula == ControllerRms::kInverseRmsPlusEps;
  pre.gemm = {batch.formula, floats(kControllerN), floats(1), floats(with_q ? 1 : 0)};
  pre.h = floats(kControllerN);
  pre.split = {floats(kStreams), floats(kStreams), floats(16), {}};
  pre.hidden.resize(tokens * d);
  out.norm = {Bf16s(tokens * d), floats(1)};
  out.r_new.resize(tokens * k);
  Floats s = floats(1), norm = floats(1), mean = floats(1), sig = floats(8), exps = floats(16), softmax = floats(16);
  Bf16s residual(tokens * d);

  mhc_block_forward_args args{};
  args.tokens = count(tokens), args.hidden = count(d);
  args.first = 0, args.last = 3, args.portable = 1;
  args.mhc_eps = args.rmsnorm_eps = static_cast<double>(kEps);
  args.r_old = rows(batch.r_old, k), args.y = rows(batch.y_sublayer, d), args.gamma = rows(batch.gamma, d);
  args.weight = batch.weight.data(), args.bias = batch.bias.data();
  args.alpha_pre = &batch.alpha_pre, args.alpha_post = &batch.alpha_post, args.alpha_res = &batch.alpha_res;
  args.p = pre.gemm.p.data(), args.q = with_q ? pre.gemm.q.data() : nullptr, args.r = pre.gemm.r.data();
  args.s = s.data(), args.norm = norm.data(), args.h = pre.h.data();
  args.sig = sig.data(), args.exps = exps.data(), args.softmax = softmax.data();
  args.pre = pre.split.pre.data(), args.post = pre.split.post.data(), args.c = pre.split.c.data();
  args.mean = mean.data(), args.inv_rms = out.norm.r.data();
  args.hidden_out = bits(pre.hidden), args.normalized = bits(out.norm.y), args.residual = bits(residual);
  args.r_new = bits(out.r_new);
  check(mhc_block_forward(native_call(), &args));
  pre.split.saved = saved_of(sig, softmax, tokens);
  return out;
}

Backward block_backward(const Batch& batch, const Forward& saved, const ArrivingGrads& grads) {
  const std::size_t tokens = batch.sizes.tokens, d = batch.sizes.hidden, k = batch.sizes.flat_k();
  const PreForward& pre = saved.pre;
  const SavedArrays arrays = arrays_of(pre.split.saved);
  Backward out;
  out.pre.d_r_old.resize(tokens * k);
  out.pre.d_weight.resize(kControllerN * k);
  out.pre.d_bias.resize(kControllerN);
  out.dy_sublayer.resize(tokens * d);
  out.d_hidden.resize(tokens * d);
  out.d_gamma.resize(d);
  out.d_c.resize(tokens * 16);
  out.d_post.resize(tokens * kStreams);

  mhc_block_backward_args args{};
  args.tokens = count(tokens), args.hidden = count(d);
  args.post_part = MHC_POST, args.with_norm = 1, args.streams_dtype = MHC_FP32;
  args.r_old = rows(batch.r_old, k), args.y = rows(batch.y_sublayer, d), args.gamma = rows(batch.gamma, d);
  args.d_r_new = rows(grads.d_r_new, k), args.d_normalized = rows(grads.d_normalized, d);
  args.d_residual = rows(grads.d_residual, d), args.hidden_saved = rows(pre.hidden, d);
  args.weight = batch.weight.data();
  args.alpha_pre = &batch.alpha_pre, args.alpha_post = &batch.alpha_post, args.alpha_res = &batch.alpha_res;
  args.p = pre.gemm.p.data(), args.q = q_of(pre.gemm), args.r = pre.gemm.r.data();
  args.softmax = arrays.softmax.data();
  args.sig_pre = rows(arrays.sig_pre, kStreams), args.sig_post = rows(arrays.sig_post, kStreams);
  args.pre = pre.split.pre.data(), args.post = pre.split.post.data(), args.c = pre.split.c.data();
  args.inv_rms = saved.norm.r.data();
  args.d_r_old = out.pre.d_r_old.data(), args.dy = out.dy_sublayer.data(), args.d_hidden = out.d_hidden.data();
  args.d_gamma = out.d_gamma.data(), args.d_c = out.d_c.data(), args.d_post = out.d_post.data();
  args.d_weight = out.pre.d_weight.data(), args.d_bias = out.pre.d_bias.data();
  args.d_alpha_pre = &out.pre.d_alpha_pre, args.d_alpha_post = &out.pre.d_alpha_post;
  args.d_alpha_res = &out.pre.d_alpha_res;
  check(mhc_block_backward(native_call(), &args));
  return out;
}

}  // namespace mhc::portable
