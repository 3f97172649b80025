"""The modules under DistributedDataParallel, one process: no byte moves, the dtypes of parameters stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from rl_engine.mhc.nn import HyperHead
from tests.nn.support import assert_same, contract_says, drawn, module_of, result


@pytest.fixture
def _one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("as_views", [False, True])
def test_the_bytes_are_those_of_the_module_itself(as_views: bool) -> None:
    """FP32 parameters of the controller and a BF16 gamma go through buckets of their own dtype."""
    batch, grad = drawn(9)
    module = module_of(batch)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=as_views)
    for _ in range(2):  # the buckets are ordered anew after the first step
        assert_same(result(module, batch.r_old, grad, wrapped), contract_says(batch, grad))


@pytest.mark.usefixtures("_one_process")
def test_blocks_and_head_accumulate_over_two_steps() -> None:
    batch, grad = drawn(6)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = module_of(batch), HyperHead(64)

        def forward(self, streams: Tensor) -> Tensor:
            out: Tensor = self.head(self.first(streams))
            return out

    model = Model()
    wrapped = DistributedDataParallel(model)

    def gradients(run: nn.Module, accumulating: bool) -> dict[str, Tensor]:
        model.zero_grad()
        with wrapped.no_sync() if accumulating else torch.enable_grad():
            run(batch.r_old).backward(grad[:, 0])
        run(batch.r_old.flip(0)).backward(grad[:, 1])
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    alone = gradients(model, accumulating=False)
    assert len(alone) == 9
    assert_same(gradients(wrapped, accumulating=True), alone)
