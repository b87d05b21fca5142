# SPDX-License-Identifier: Apache-2.0
"""Models on several ranks: DistributedDataParallel, fully_shard (FSDP2) and SequenceParallel.

A model of this package's norms trains as the same one of torch's does. The cases run in two processes.
"""

from __future__ import annotations

import functools

import pytest
import ranks

import transformer_rtc

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

from torch import distributed, nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

RANKS = 2
HIDDEN = 64
EPS = 1e-5


class Block(nn.Module):
    """What a transformer's layer has, without attention; on the ranks of tensor parallelism, too."""

    def __init__(self, rms_norm, layer_norm) -> None:
        super().__init__()
        self.first, self.second = rms_norm(HIDDEN, eps=EPS), layer_norm(HIDDEN, eps=EPS)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.second(x + self.down(torch.tanh(self.up(self.first(x)))))


class Model(nn.Module):
    def __init__(self, rms_norm=nn.RMSNorm, layer_norm=nn.LayerNorm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rms_norm, layer_norm) for _ in range(2))
        self.last = rms_norm(HIDDEN, eps=EPS)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


Ours = functools.partial(Model, transformer_rtc.torch.RMSNorm, transformer_rtc.torch.LayerNorm)


def with_random_weights(model):
    """Have a model's norms be other than they are at first."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5, 0.5)
    return model


@functools.cache
def mesh():
    return init_device_mesh("cpu", (RANKS,))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, x, target, steps: int = 3) -> tuple[list, dict]:
    """Return the losses of some steps, on all ranks, and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (whole(model(x)) - target).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
    return losses, {
        name.removeprefix("module."): whole(parameter.grad).clone() for name, parameter in model.named_parameters()
    }


def agree(found, expected) -> None:
    """Check losses and gradients: of float32, after steps, of sums in other orders."""
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6)


def batches() -> tuple:
    """Return random x and target of all ranks, and this rank's part of them."""
    x, target = torch.randn(2 * RANKS, 5, HIDDEN), torch.randn(2 * RANKS, 5, HIDDEN)
    rank = distributed.get_rank()
    return (x, target), (x[2 * rank : 2 * rank + 2], target[2 * rank : 2 * rank + 2])


def mean(losses: list) -> list:
    """Return the means over ranks."""
    for loss in losses:
        distributed.all_reduce(loss)
    return [loss / RANKS for loss in losses]


def in_parallel(wrap, make, *, patched: str = "") -> None:
    """Check a wrapped model against torch's on one rank that has all rows.

    Parameters
    ----------
    wrap : callable
        Wraps a model.
    make : callable
        Returns the model.
    patched : {"", "before", "after"}
        When `patch` swaps its norms, if it does.
    """
    everything, mine = batches()
    plain = with_random_weights(Model())
    model = make()
    model.load_state_dict(plain.state_dict())
    expected = train(plain, *everything)
    if patched == "before":
        transformer_rtc.torch.patch(model)
    model = wrap(model)
    if patched == "after":
        transformer_rtc.torch.patch(model)
    norms = [module for module in model.modules() if isinstance(module, (nn.RMSNorm, nn.LayerNorm))]
    assert len(norms) == 5 and all(isinstance(norm, transformer_rtc.torch.modules.Norm) for norm in norms)
    losses, gradients = train(model, *mine)
    agree((mean(losses), gradients), expected)


def sharded(model, **others):
    for block in model.blocks:
        fully_shard(block, mesh=mesh(), **others)
    fully_shard(model.last, mesh=mesh(), **others)  # a norm on its own
    return fully_shard(model, mesh=mesh(), **others)


def case_ddp():
    in_parallel(DistributedDataParallel, Ours)
    in_parallel(DistributedDataParallel, Model, patched="before")
    in_parallel(DistributedDataParallel, Model, patched="after")


def case_fsdp():
    in_parallel(sharded, Ours)
    in_parallel(sharded, Model, patched="before")
    in_parallel(sharded, Model, patched="after")


def case_fsdp_on_the_meta_device():
    """As large models are made: without memory, sharded, and only then initialised."""
    with torch.device("meta"):
        model = Ours()
    sharded(model)
    model.to_empty(device="cpu")
    for norm in model.modules():
        if hasattr(norm, "reset_parameters"):
            norm.reset_parameters()
    for name, parameter in model.named_parameters():
        if "first" in name or "second" in name or "last" in name:
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), torch.full((HIDDEN,), float("weight" in name)))
    assert model(torch.randn(2, HIDDEN)).isfinite().all()


def case_fsdp_with_mixed_precision():
    """The norms see parameters and x in bfloat16, and gradients are reduced in float32."""
    (x, target), (mine, my_target) = batches()
    plain = with_random_weights(Model())
    model = Ours()
    model.load_state_dict(plain.state_dict())
    sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    y = model(mine)
    assert y.dtype == torch.bfloat16
    (y.float() - my_target).square().mean().backward()
    (plain(x) - target).square().mean().backward()
    for (name, found), right in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        error = (found.grad.full_tensor() - right.grad).norm() / right.grad.norm()
        assert error < 2.0**-4, (name, error)  # some ten roundings to 8 bits, of elements that cancel


def case_tensor_parallel():
    """Rows of a sequence lie on ranks, and the linear layers' columns do."""
    x, target = torch.randn(2, 6, HIDDEN), torch.randn(2, 6, HIDDEN)
    plain = with_random_weights(Model())
    for make, patched in ((Ours, ""), (Model, "before"), (Model, "after")):
        reference, model = Model(), make()
        reference.load_state_dict(plain.state_dict())
        model.load_state_dict(plain.state_dict())
        if patched == "before":
            transformer_rtc.torch.patch(model)
        for block in model.blocks:
            parallelize_module(
                block,
                mesh(),
                {
                    "first": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                    "second": SequenceParallel(),
                },
            )
        parallelize_module(model, mesh(), {"last": SequenceParallel()})
        if patched == "after":
            transformer_rtc.torch.patch(model)
        assert isinstance(model.last, transformer_rtc.torch.modules.Norm)
        rows = distribute_tensor(x, mesh(), [Shard(1)])
        assert model(rows).placements == (Shard(1),)
        assert model.last.weight.placements == (Replicate(),)
        agree(train(model, rows, target), train(reference, x, target))


def test_data_parallel(tmp_path):
    ranks.run_cases(__file__, RANKS, tmp_path)


if __name__ == "__main__":
    ranks.serve(globals())
