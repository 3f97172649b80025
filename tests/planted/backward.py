"""Backward passes that are wrong in their order, their formula or what they leave out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.mhc.contract import ResidualBatch
from tests.planted import arithmetic, kernels
from tests.planted.arithmetic import constant
from tests.planted.defect import OwnComposites, Planted, planted
from tests.planted.honest import Grads
from tests.planted.kernels import Saved, kernel

# --- post ---


@planted("bwd.d_r_old")
class TransposedCombBackward(Planted):
    """dR applies C transposed."""

    def mhc_post_bwd(self, dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> tuple[Tensor, ...]:
        d_r = kernels.mhc_post_bwd(dr_new, r_old, y, c.transpose(1, 2), post)[0]
        return d_r, *kernels.mhc_post_bwd(dr_new, r_old, y, c, post)[1:]


@planted("bwd.d_c")
class TransposedCombGradient(Planted):
    """dC comes transposed."""

    def mhc_post_bwd(self, dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> tuple[Tensor, ...]:
        d_r, dy, d_c, d_post = kernels.mhc_post_bwd(dr_new, r_old, y, c, post)
        return d_r, dy, d_c.transpose(1, 2).contiguous(), d_post


@planted("bwd.dy_sublayer", also=("bwd.d_r_old",))
class LeftFoldPostBackward(Planted):
    """dy and dR are added from the left and not as a tree."""

    mhc_post_bwd = kernel(kernels.mhc_post_bwd, tree=arithmetic.left4)


@planted("bwd.d_c")
class SplitCombGradient(Planted):
    """dC adds four partial sums over D."""

    mhc_post_bwd = kernel(kernels.mhc_post_bwd, comb_fold=arithmetic.split)


@planted("bwd.d_post")
class Bf16PostGradient(Planted):
    """dPOST is accumulated in BF16."""

    mhc_post_bwd = kernel(kernels.mhc_post_bwd, post_fold=arithmetic.bf16_accumulator)


def _one_stream(stream: int) -> Any:
    """``mhc_post_bwd`` whose dR of one stream has its tree from the left."""

    def mhc_post_bwd(dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> tuple[Tensor, ...]:
        d_r, *rest = kernels.mhc_post_bwd(dr_new, r_old, y, c, post)
        d_r[:, stream] = kernels.mhc_post_bwd(dr_new, r_old, y, c, post, tree=arithmetic.left4)[0][:, stream]
        return d_r, *rest

    return kernel(mhc_post_bwd)


@planted("bwd.d_r_old", also=("bwd.d_stream0",))
class FirstStreamGradient(Planted):
    """The first stream's gradient alone has another order."""

    mhc_post_bwd = _one_stream(0)


@planted("bwd.d_r_old", also=("bwd.d_stream1",))
class SecondStreamGradient(Planted):
    """The second stream's gradient alone has another order."""

    mhc_post_bwd = _one_stream(1)


@planted("bwd.d_r_old", also=("bwd.d_stream2",))
class ThirdStreamGradient(Planted):
    """The third stream's gradient alone has another order."""

    mhc_post_bwd = _one_stream(2)


@planted("bwd.d_r_old", also=("bwd.d_stream3",))
class LastStreamGradient(Planted):
    """The last stream's gradient alone has another order."""

    mhc_post_bwd = _one_stream(3)


# --- the norm ---


@planted("bwd.d_hidden")
class NoResidualLeg(Planted):
    """dX forgets the gradient that arrives at the residual."""

    rmsnorm_residual_bwd = kernel(kernels.rmsnorm_residual_bwd, residual_leg=torch.zeros_like)


@planted("bwd.d_hidden", case="odd_hidden", hidden_in="packed_t7_odd")
class ReciprocalWidthBackward(Planted):
    """The division by D in the backward became a product with 1/D."""

    rmsnorm_residual_bwd = kernel(
        kernels.rmsnorm_residual_bwd, mean=lambda x, d: x * (constant(1.0, x) / constant(d, x))
    )


@planted("bwd.d_hidden")
class Bf16NormBackward(Planted):
    """The dot product over D in the norm's backward is accumulated in BF16."""

    rmsnorm_residual_bwd = kernel(kernels.rmsnorm_residual_bwd, over_d=arithmetic.bf16_accumulator)


@planted("bwd.d_gamma")
class GammaTree(Planted):
    """dgamma adds the tokens in a balanced tree."""

    rmsnorm_residual_bwd = kernel(kernels.rmsnorm_residual_bwd, over_t=arithmetic.pairwise)


@planted("bwd.d_gamma")
class GammaGradientScaled(Planted):
    """dgamma is the mean over tokens and not their sum."""

    rmsnorm_residual_bwd = kernel(
        kernels.rmsnorm_residual_bwd, over_t=lambda a, b: arithmetic.ascending(a, b) / constant(len(a), a)
    )


@planted("bwd.d_gamma")
class GammaGradientGone(Planted):
    """dgamma is None: a broken graph."""

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Saved
    ) -> tuple[Tensor, None]:
        return kernels.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)[0], None


@planted("bwd.d_hidden")
class Bf16HiddenGradient(Planted):
    """d_hidden leaves the operator in BF16."""

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        dx, dgamma = kernels.rmsnorm_residual_bwd(dy, d_residual, x, gamma, saved)
        return dx.to(torch.bfloat16), dgamma


# --- aggregate ---


@planted("grad.d_bias")
class SplitPreGradient(Planted):
    """dPRE adds four partial sums over D."""

    h_aggregate_bwd = kernel(kernels.h_aggregate_bwd, fold=arithmetic.split)


@planted("bwd.d_r_old")
class NoPreInAggregateBackward(Planted):
    """dR of the aggregate is dH alone, without PRE."""

    def h_aggregate_bwd(self, dh: Tensor, pre: Tensor, r_old: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.h_aggregate_bwd(dh, torch.ones_like(pre), r_old)[0], kernels.h_aggregate_bwd(dh, pre, r_old)[1]


# --- the projection ---


@planted("grad.d_controller_weight")
class ReversedTokenFold(Planted):
    """dW adds the tokens from the last."""

    fp32_gemm_rms_bwd = kernel(kernels.fp32_gemm_rms_bwd, over_t=arithmetic.descending)


@planted("bwd.d_r_old")
class SplitProjectionBackward(Planted):
    """dX adds four partial sums over n."""

    fp32_gemm_rms_bwd = kernel(kernels.fp32_gemm_rms_bwd, over_n=arithmetic.split)


@planted("bwd.d_r_old", case="zero_row", hidden_in="packed_t7_odd", says=("NaN against a number",))
class UnguardedZeroRow(Planted):
    """A zero row divides 0 by 0 in the RMS leg."""

    fp32_gemm_rms_bwd = kernel(kernels.fp32_gemm_rms_bwd, guard=lambda k_times_q, q: k_times_q)


@planted("fp32_gemm_rms_bwd.dX", "operators", "gemm_rms_tiny", hidden_in="packed_t7_odd")
class EpsAsGuard(Planted):
    """The RMS leg adds eps to every denominator, where only a zero row needs a guard."""

    fp32_gemm_rms_bwd = kernel(kernels.fp32_gemm_rms_bwd, guard=lambda k_times_q, q: kernels.plus_eps(k_times_q))


# --- the controller's gradients ---


@planted("grad.d_bias", case="mixer_frozen", also=("grad.d_alpha_pre", "grad.d_controller_weight"))
class ZerosWhenFrozen(OwnComposites):
    """Under mixer-frozen the controller's gradients are zeros and not None."""

    def controller_grads(self, batch: ResidualBatch, grads: Grads) -> Grads:
        frozen = batch.contract.trainability == "mixer-frozen"
        return {name: torch.zeros_like(g) for name, g in grads.items()} if frozen else grads


@planted("grad.d_bias", "modes")
class TrainedWhenFrozen(OwnComposites):
    """Trainability is ignored: under mixer-frozen the controller still gets its gradients."""

    def controller_grads(self, batch: ResidualBatch, grads: Grads) -> Grads:
        return grads


@planted("grad.d_bias", also=("grad.d_alpha_res", "grad.d_controller_weight"))
class NoneWhenTrained(OwnComposites):
    """The controller never gets a gradient."""

    def controller_grads(self, batch: ResidualBatch, grads: Grads) -> Grads:
        return dict.fromkeys(grads)


@planted("grad.d_alpha_pre", also=("grad.d_alpha_post", "grad.d_alpha_res"))
class MeanAlpha(OwnComposites):
    """Each alpha's gradient is the mean over its segment and not the sum."""

    def segment(self, part: Tensor) -> Tensor:
        return arithmetic.ascending(part, torch.ones_like(part)).reshape(1) / constant(len(part), part)


@planted("grad.d_alpha_res", case="odd_hidden")
class TreeAlphaRes(OwnComposites):
    """The gradient of alpha_res adds its sixteen parts in a tree."""

    def segment(self, part: Tensor) -> Tensor:
        fold = arithmetic.pairwise if len(part) == 16 else arithmetic.ascending
        return fold(part, torch.ones_like(part)).reshape(1)


@planted("grad.d_alpha_post")
class ScaledAlphaPost(OwnComposites):
    """The gradient of alpha_post is scaled by the number of streams."""

    def mhc_pre_bwd(
        self, dhidden: Tensor, dpost: Tensor, dc: Tensor, batch: ResidualBatch, saved: Saved, ops: Any = None
    ) -> Grads:
        grads = super().mhc_pre_bwd(dhidden, dpost, dc, batch, saved, ops)
        scaled = grads["d_alpha_post"]
        return {**grads, "d_alpha_post": None if scaled is None else scaled * constant(4.0, scaled)}


@planted("grad.d_bias")
class BiasTree(OwnComposites):
    """dbias adds the tokens in a balanced tree."""

    def over_tokens(self, dh: Tensor) -> Tensor:
        return arithmetic.pairwise(dh, torch.ones_like(dh))
