"""Two processes with a tensor of which each has a part: what tests/with_torch/test_distributed.py runs.

``python ranks.py STORE`` runs the functions of `CASES` in each, prints those that passed, and fails with the first that
fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import transformer_rtc
from transformer_rtc import add_rms_norm, layer_norm, rms_norm, softmax, using

RANKS = 2
HIDDEN = 40


def spread(mesh: Any, tensor: torch.Tensor | None, *placements: Any) -> Any:
    """Return a distributed tensor that requires grad if the whole one does."""
    if tensor is None:
        return None
    made = distribute_tensor(tensor.detach(), mesh, placements)
    return made.requires_grad_() if tensor.requires_grad else made


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    mesh: Any,
    call: Callable[..., Any],
    arguments: dict[str, torch.Tensor],
    placements: dict[str, Any],
    expected: list[Any],
) -> None:
    """Compare a call's results and gradients with those of whole tensors, and the results' placements."""
    parts = {name: spread(mesh, one, placements.get(name, Replicate())) for name, one in arguments.items()}
    found, right = call(**parts), call(**arguments)
    found, right = (one if isinstance(one, tuple) else (one,) for one in (found, right))
    assert [one.placements for one in found] == [(placement,) for placement in expected], [
        one.placements for one in found
    ]
    for one, other in zip(found, right, strict=True):
        assert torch.equal(whole(one), other)
    gradients = [torch.randn_like(one) for one in right if one.requires_grad]
    torch.autograd.backward([one for one in right if one.requires_grad], gradients)
    weights = [distribute_tensor(one, mesh, [Replicate()]) for one in gradients]
    torch.autograd.backward([one for one in found if one.requires_grad], weights)
    for name, one in arguments.items():
        if one.requires_grad:
            torch.testing.assert_close(
                whole(parts[name].grad), one.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            one.grad = None


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def norms(mesh: Any) -> None:
    """Rows that are shared out evenly and not, some of which have nothing; and columns, which are brought together."""
    weight, bias = leaf(HIDDEN), leaf(HIDDEN)
    x = leaf(1, 4, HIDDEN)  # torch shards no dimension that not all ranks have a part of
    compare(mesh, lambda x, weight: rms_norm(x, weight), {"x": x, "weight": weight}, {"x": Shard(0)}, [Replicate()])
    for dim, shape in ((0, (4, 3)), (0, (3, 2)), (1, (2, 5))):
        x = leaf(*shape, HIDDEN)
        rows = Shard(dim)
        compare(mesh, lambda x, weight: rms_norm(x, weight), {"x": x, "weight": weight}, {"x": rows}, [rows])
        given = {"x": x, "residual": leaf(*shape, HIDDEN), "weight": weight}
        # The residual is placed as x is.
        compare(mesh, lambda **given: add_rms_norm(**given), given, {"x": rows}, [rows, rows])

        def statistics(x: Any, weight: Any, bias: Any) -> Any:
            y, mean, rstd = layer_norm(x, weight, bias, return_mean=True, return_rstd=True)
            return y, mean.detach(), rstd.detach()

        given = {"x": x, "weight": weight, "bias": bias}
        compare(mesh, statistics, given, {"x": rows}, [rows, rows, rows])
    x = leaf(4, HIDDEN)
    compare(mesh, lambda x, weight: rms_norm(x, weight), {"x": x, "weight": weight}, {"x": Shard(1)}, [Replicate()])
    # A weight of each head goes where its head goes.
    given = {"x": leaf(3, 4, HIDDEN), "weight": leaf(4, HIDDEN)}
    compare(mesh, lambda x, weight: rms_norm(x, weight), given, {"x": Shard(1), "weight": Shard(0)}, [Shard(1)])
    compare(mesh, lambda x, weight: rms_norm(x, weight), given, {"x": Shard(1)}, [Shard(1)])
    compare(mesh, lambda x, weight: rms_norm(x, weight), given, {"x": Shard(0)}, [Shard(0)])
    scale, amax = torch.full((1,), 2.0), torch.zeros(1)
    parts = spread(mesh, x.detach(), Shard(0)), spread(mesh, scale, Replicate()), spread(mesh, amax, Replicate())
    options = {"out_dtype": torch.float8_e4m3fn}
    found = rms_norm(parts[0], scale=parts[1], amax=parts[2], **options)
    assert whole(found).float().equal(rms_norm(x.detach(), scale=scale, amax=amax, **options).float())
    assert whole(parts[2]).equal(amax) and amax > 0


def scores(mesh: Any) -> None:
    """Heads and queries are shared out where nothing tells them apart, or with what does."""
    x, mask, sink = leaf(2, 4, 6, 7), leaf(4, 6, 7), leaf(4)
    for dim in range(3):
        rows = Shard(dim)
        compare(mesh, lambda x: softmax(x, scale=0.5), {"x": x}, {"x": rows}, [rows])
        given = {"x": x, "mask": mask, "sink": sink}
        compare(mesh, lambda x, mask, sink: softmax(x, mask=mask, sink=sink), given, {"x": rows}, [rows])
        causal = Replicate() if dim == 2 else rows
        compare(mesh, lambda x: softmax(x, causal="aligned"), {"x": x}, {"x": rows}, [causal])


def planes(_: Any) -> None:
    """A mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (1, RANKS))
    x, weight = leaf(4, 6, HIDDEN), leaf(HIDDEN)
    parts = spread(mesh, x, Shard(0), Shard(1)), spread(mesh, weight, Replicate(), Replicate())
    found, right = rms_norm(*parts), rms_norm(x, weight)
    assert found.placements == (Shard(0), Shard(1)) and whole(found).equal(right)
    found.sum().backward()
    right.sum().backward()
    torch.testing.assert_close(whole(parts[0].grad), x.grad)
    torch.testing.assert_close(whole(parts[1].grad), weight.grad, rtol=1e-5, atol=1e-5)


def compiled(mesh: Any) -> None:
    x, weight = (spread(mesh, leaf(4, HIDDEN), Shard(0)), spread(mesh, leaf(HIDDEN), Replicate()))
    call = torch.compile(lambda x, weight: rms_norm(x, weight) * 2, fullgraph=True, backend="aot_eager")
    y = call(x, weight)
    assert y.placements == (Shard(0),) and whole(y).equal(whole(rms_norm(x, weight) * 2))
    y.sum().backward()
    assert whole(weight.grad).isfinite().all()


class Model(torch.nn.Module):
    """A little transformer block without attention, of whichever norms."""

    def __init__(self, rms: type, layer: type) -> None:
        super().__init__()
        self.first, self.second = rms(HIDDEN, eps=1e-6), layer(HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, 2 * HIDDEN), torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.down(torch.relu(self.up(self.first(x)))))


def models(*kinds: str) -> list[Model]:
    """Return models of torch's norms, of ours, and of torch's that were patched, with the same parameters."""
    ours = transformer_rtc.torch
    made = {
        "torch": lambda: Model(torch.nn.RMSNorm, torch.nn.LayerNorm),
        "ours": lambda: Model(ours.RMSNorm, ours.LayerNorm),
        "patched": lambda: Model(torch.nn.RMSNorm, torch.nn.LayerNorm),
    }
    found = [made[kind]() for kind in kinds]
    for kind, model in zip(kinds, found, strict=True):
        model.load_state_dict(found[0].state_dict())
        if kind == "patched":
            ours.patch(model)
    return found


def losses(model: torch.nn.Module) -> list[float]:
    """Train on this rank's part of data that all ranks draw alike."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(4):
        x, target = torch.randn(2, RANKS, 3, HIDDEN, generator=generator).unbind(0)
        loss = (model(x[dist.get_rank()]) - target[dist.get_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        found.append(loss.item())
    return found


def data_parallel(_: Any) -> None:
    """DDP and FSDP2 train our modules as they train torch's."""
    from torch.distributed.fsdp import fully_shard

    def sharded(model: torch.nn.Module) -> torch.nn.Module:
        for part in (model.first, model.second, model.up, model.down):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    mesh = init_device_mesh("cpu", (RANKS,))
    for wrap in (torch.nn.parallel.DistributedDataParallel, sharded):
        expected, *others = [losses(wrap(model)) for model in models("torch", "ours", "patched")]
        assert expected[-1] < expected[0]
        for found in others:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def sequence_parallel(mesh: Any) -> None:
    """torch's SequenceParallel shards the rows of our modules as it does those of torch's."""
    found = []
    for model in models("torch", "ours"):
        parallelize_module(model, mesh, {"first": SequenceParallel(), "second": SequenceParallel()})
        torch.manual_seed(3)
        x = leaf(2, 6, HIDDEN)
        y = model.second(model.first(spread(mesh, x, Shard(1))))
        y.square().sum().backward()
        found.append([whole(y), whole(model.first.weight.grad), whole(model.second.bias.grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


CASES = {one.__name__: one for one in (norms, scores, planes, compiled, data_parallel, sequence_parallel)}


def run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with using("simulator"):
        for name, case in CASES.items():
            torch.manual_seed(0)
            case(init_device_mesh("cpu", (RANKS,)))
            if rank == 0:
                print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, args=(sys.argv[1],), nprocs=RANKS)
