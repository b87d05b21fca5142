# SPDX-License-Identifier: Apache-2.0
"""A Llama with our norms on several GPUs: DDP and FSDP2 beside one GPU, and what a step takes.

Each process trains on its part of a batch. The first gradients, and the loss of every step, have to be those of a
process that trains on the whole batch, in float32; and after DDP's last step all processes have to have the
same parameters. What a step takes is measured in bfloat16, of the model with its own norms and with ours, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import whole_models

MODEL = "llama"
ALONE, DDP, FSDP = "alone", "DDP", "FSDP2"
CHECKED_STEPS = 5
UNTIMED_STEPS = 3
# Of the norm of the difference to the norm, and of a loss: sums over the batch are in another order.
GRADIENT_TOLERANCE, LOSS_TOLERANCE = 1e-4, 1e-4

EXAMPLES = """examples:
  python3 benchmarks/two_gpus.py --json two_gpus.json
  python3 benchmarks/two_gpus.py --compile --rounds 5
  python3 benchmarks/two_gpus.py --from-json two_gpus.json   # measures nothing
  python3 benchmarks/two_gpus.py --tiny                      # two processes without a GPU, in the simulator
"""


class Setting:
    """What a process knows of the run."""

    def __init__(self, rank: int, processes: int, tiny: bool) -> None:
        self.rank, self.processes, self.tiny = rank, processes, tiny

    def mean(self, value: Any) -> float:
        """Return the mean of a number of each process."""
        import torch.distributed as distributed

        found = value.detach().double().clone()
        distributed.all_reduce(found)
        return float(found) / self.processes


def layers_of(model: Any) -> Any:
    return model.model.layers


def distributed_model(model: Any, wrapper: str, compiled: bool, setting: Setting) -> Any:
    """Return the model as the processes train it together."""
    import torch

    backend = "aot_eager" if setting.tiny else "inductor"
    if wrapper == DDP:
        model = torch.nn.parallel.DistributedDataParallel(model)
        return torch.compile(model, backend=backend) if compiled else model
    if wrapper == FSDP:
        from torch.distributed.fsdp import fully_shard

        for layer in layers_of(model):
            if compiled:
                # By layer: what FSDP2 does between layers stays outside of the graphs.
                layer.compile(backend=backend)
            fully_shard(layer)
        fully_shard(model)
        return model
    return torch.compile(model, backend=backend) if compiled else model


def trained(
    wrapper: str, way: str, compiled: bool, dtype: Any, setting: Setting
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the parameters' owner, the model, its optimizer, and the batch of this process, or the whole one."""
    model = whole_models.build(MODEL, setting.tiny, dtype)
    rows = whole_models.shape_of(MODEL, setting.tiny)[0] * setting.processes
    batch = whole_models.random_batch(MODEL, model, setting.tiny, rows)
    if wrapper != ALONE:
        batch = {key: ids.chunk(setting.processes)[setting.rank] for key, ids in batch.items()}
    whole_models.import_way(way)
    whole_models.prepare(way, model, setting.tiny)
    network = distributed_model(model, wrapper, compiled, setting)
    return model, network, whole_models.optimizer_of(model), batch


def whole(tensor: Any) -> Any:
    """Return all of a tensor that may be sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def curve(wrapper: str, compiled: bool, setting: Setting) -> tuple[dict[str, Any], list[float], bool | None]:
    """Return the first gradients, the losses, and whether all processes have the same parameters at the end.

    FSDP2's processes have no parameters in common.
    """
    import torch
    import torch.distributed as distributed

    model, network, optimizer, batch = trained(wrapper, whole_models.OURS, compiled, torch.float32, setting)
    gradients: dict[str, Any] = {}
    losses = []
    for step in range(CHECKED_STEPS):
        loss = network(**batch).loss
        loss.backward()
        if step == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        losses.append(loss.item() if wrapper == ALONE else setting.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    if wrapper != DDP:
        return gradients, losses, None
    same = torch.ones(1, device=loss.device)
    for parameter in model.parameters():
        first = parameter.detach().clone()
        distributed.broadcast(first, 0)
        same *= torch.equal(first, parameter)
    return gradients, losses, setting.mean(same) == 1.0


def check(wrappers: Sequence[str], compiled: bool, setting: Setting) -> list[dict[str, Any]]:
    """Return how far each wrapper is from one process that trains on the whole batch."""
    expected, expected_losses, _ = curve(ALONE, False, setting)
    found = []
    for wrapper in wrappers:
        gradients, losses, same = curve(wrapper, compiled, setting)
        errors = {
            name: float((gradients[name] - gradient).norm() / gradient.norm()) for name, gradient in expected.items()
        }
        worst = max(errors, key=lambda name: errors[name])
        one = {"wrapper": wrapper, "compiled": compiled, "gradient_error": errors[worst], "of": worst}
        one["loss_error"] = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
        found.append({**one, "losses": losses, "same_parameters": same})
    return found


def measure_steps(wrapper: str, compiled: bool, rounds: int, steps: int, setting: Setting) -> dict[str, Any]:
    """Return the times of a step with the model's own norms and with ours, in turns."""
    import torch
    import torch.distributed as distributed

    def step(network: Any, optimizer: Any, batch: Mapping[str, Any]) -> None:
        network(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ways = (whole_models.EAGER, whole_models.OURS)
    running = {way: trained(wrapper, way, compiled, torch.bfloat16, setting)[1:] for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(UNTIMED_STEPS):
        for one in running.values():
            step(*one)
    order = random.Random(0)  # the same in all processes
    for _ in range(rounds):
        for way in order.sample(ways, len(ways)):
            whole_models.synchronize(setting.tiny)
            distributed.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step(*running[way])
            whole_models.synchronize(setting.tiny)
            distributed.barrier()
            times[way].append((time.perf_counter() - start) * 1e3 / steps)
    return {"wrapper": wrapper, "compiled": compiled, "ms": times}


@contextlib.contextmanager
def process_group(rank: int, processes: int, store: str, tiny: bool) -> Iterator[Setting]:
    import torch
    import torch.distributed as distributed

    if not tiny:
        torch.cuda.set_device(rank)
    options = {} if tiny else {"device_id": torch.device("cuda", rank)}
    distributed.init_process_group(
        "gloo" if tiny else "nccl", init_method=f"file://{store}", rank=rank, world_size=processes, **options
    )
    try:
        yield Setting(rank, processes, tiny)
    finally:
        distributed.destroy_process_group()


def work(rank: int, processes: int, store: str, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Do what one of the processes does; the first one writes what was found by now after each part."""
    with process_group(rank, processes, store, arguments.tiny) as setting, whole_models.kernels_on(arguments.tiny):
        for compiled in [False, True] if arguments.compile else [False]:
            result["checks"] += check((DDP, FSDP), compiled, setting)
            for wrapper in (DDP, FSDP):
                result["steps"].append(measure_steps(wrapper, compiled, arguments.rounds, arguments.steps, setting))
                if rank == 0:
                    common.write_json(arguments.json, result)


def report(result: Mapping[str, Any]) -> None:
    common.print_environment(result["environment"])
    print(f"{MODEL}, {result['processes']} processes, float32, with our norms: the difference to one process")
    rows: list[tuple[object, ...]] = [
        (
            found["wrapper"] + (", compiled" if found["compiled"] else ""),
            f"{found['gradient_error']:.1e}",
            found["of"],
            f"{found['loss_error']:.1e}",
            {True: "yes", False: "no", None: None}[found["same_parameters"]],
        )
        for found in result["checks"]
    ]
    print(common.table(("", "first gradients", "the worst", "losses", "same parameters"), rows))
    print(f"\nmedian step in bfloat16, ms, {result['steps_of_a_turn']} steps of a turn")
    rows = []
    for found in result["steps"]:
        spreads = {way: common.spread(times) for way, times in found["ms"].items()}
        eager, ours = spreads[whole_models.EAGER], spreads[whole_models.OURS]
        cells = [f"{one['median']:.2f} ({one['p10']:.2f}-{one['p90']:.2f})" for one in (eager, ours)]
        name = found["wrapper"] + (", compiled" if found["compiled"] else "")
        rows.append((name, *cells, f"{ours['median'] / eager['median']:.3f}"))
    print(common.table(("", "eager norms", "ours", "ours / eager"), rows))


def wrong_in(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each check that failed."""
    found = []
    for one in result["checks"]:
        if not one["gradient_error"] <= GRADIENT_TOLERANCE:
            found.append(f"{one['wrapper']}: the gradient of {one['of']} differs by {one['gradient_error']:.1e}")
        if not one["loss_error"] <= LOSS_TOLERANCE:
            found.append(f"{one['wrapper']}: the losses differ by {one['loss_error']:.1e}")
        if one["same_parameters"] is False:
            found.append(f"{one['wrapper']}: the processes have different parameters")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=common.positive, default=2, help="one for each GPU (default: 2)")
    parser.add_argument("--compile", action="store_true", help="again with torch.compile")
    parser.add_argument("--rounds", type=common.positive, default=10, help="turns of each way (default: 10)")
    parser.add_argument("--steps", type=common.positive, default=4, help="of a turn (default: 4)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, in the simulator")
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    parser.add_argument("--from-json", metavar="FILE", help="report on what --json wrote, and measure nothing")
    arguments = parser.parse_args()
    if arguments.from_json:
        report(json.loads(Path(arguments.from_json).read_text(encoding="utf-8")))
        return
    if not arguments.tiny:
        torch = common.torch_on_gpu()
        if torch.cuda.device_count() < arguments.processes:
            parser.error(f"{arguments.processes} processes need as many GPUs; there are {torch.cuda.device_count()}")
    import torch.multiprocessing

    result: dict[str, Any] = {"environment": common.environment(), "processes": arguments.processes}
    result |= {"steps_of_a_turn": arguments.steps, "checks": [], "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        arguments.json = arguments.json or os.path.join(folder, "result.json")
        given = (arguments.processes, os.path.join(folder, "store"), arguments, result)
        torch.multiprocessing.spawn(work, given, arguments.processes)
        result = json.loads(Path(arguments.json).read_text(encoding="utf-8"))
    report(result)
    wrong = wrong_in(result)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
