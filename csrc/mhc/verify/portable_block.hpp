// The block boundary: pre, norm, (sublayer), post, and back, out of the operators of portable_operators.hpp.
#pragma once

#include "portable_operators.hpp"

namespace mhc::portable {

struct Batch {
  Sizes sizes;
  ControllerRms formula;
  Bf16s r_old, y_sublayer;  // [T, 4, D], [T, D]
  Floats weight;            // [24, K]
  float alpha_pre, alpha_post, alpha_res;
  Floats bias;   // [24]
  Floats gamma;  // [D], widened
};

struct ArrivingGrads {
  Bf16s d_r_new, d_normalized, d_residual;  // [T, 4, D], [T, D], [T, D]
};

struct PreForward {
  Floats x_flat, m, h;
  GemmRms gemm;
  Split split;
  Bf16s hidden;
};

struct PreGrads {
  Floats d_r_old, d_weight;
  float d_alpha_pre, d_alpha_post, d_alpha_res;
  Floats d_bias;
};

struct Forward {
  PreForward pre;
  Norm norm;
  Bf16s r_new;
};

struct Backward {
  PreGrads pre;  // its d_r_old is that of the whole block
  Floats dy_sublayer, d_hidden, d_gamma, d_c, d_post;
};

PreForward pre_fwd(const Batch& batch);
PreGrads pre_bwd(const Floats& dhidden, const Floats& dpost, const Floats& dc, const Batch& batch,
                 const PreForward& saved);

// fused-pre-norm is defined as the unfused chain, and mixer-frozen leaves out gradients, so neither appears here.
Forward block_forward(const Batch& batch);
Backward block_backward(const Batch& batch, const Forward& saved, const ArrivingGrads& grads);

}  // namespace mhc::portable
