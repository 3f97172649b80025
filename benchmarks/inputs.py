"""What every implementation is given: one batch, the gradients that arrive at it, and slices of both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from rl_engine.mhc.contract import GradBoundary, LayerContract, ResidualBatch
from rl_engine.mhc.fixture_inputs import draw_batch, draw_grads


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch of T tokens and the gradients of its three outputs."""

    batch: ResidualBatch
    grads: GradBoundary

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    def tensors(self) -> list[Tensor]:
        """Every tensor that goes in, but for token ids, which are labels."""
        batch, grads = self.batch, self.grads
        tensors = [batch.r_old, batch.y_sublayer, batch.norm.gamma, batch.controller.weight, batch.controller.bias]
        tensors += [*batch.controller.alphas, grads.d_r_new, grads.d_normalized, grads.d_residual]
        return tensors

    @property
    def nbytes(self) -> int:
        """What the peak memory is compared with."""
        return sum(t.nbytes for t in self.tensors())

    def first(self, tokens: int) -> Inputs:
        """The first rows, as views. No operator mixes rows, so their results are the first rows of the results."""
        batch = dataclasses.replace(
            self.batch,
            r_old=self.batch.r_old[:tokens],
            y_sublayer=self.batch.y_sublayer[:tokens],
            token_id=self.batch.token_id[:tokens],
        )
        grads = dataclasses.replace(
            self.grads,
            d_r_new=self.grads.d_r_new[:tokens],
            d_normalized=self.grads.d_normalized[:tokens],
            d_residual=self.grads.d_residual[:tokens],
        )
        return Inputs(batch, grads)

    def under(self, profile: str) -> Inputs:
        """The same tensors under another numeric profile."""
        contract = self.batch.contract.with_mode("numeric_profile", profile)
        return Inputs(dataclasses.replace(self.batch, contract=contract, weight_fingerprint=""), self.grads)


def draw(hidden: int, tokens: int) -> Inputs:
    """Seeded inputs of one width. Unsealed: a sealed batch is hashed at every forward, which no peer does."""
    name = f"benchmark.{hidden}"
    batch = draw_batch(name, tokens, LayerContract(hidden=hidden))
    return Inputs(dataclasses.replace(batch, weight_fingerprint=""), draw_grads(name, batch))
