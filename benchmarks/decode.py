# SPDX-License-Identifier: Apache-2.0
"""Decoding by a Llama's layers, one token for each sequence at a time, in a CUDA graph: what the norms take of it.

The model has random weights, grouped heads and a cache of keys and values of fixed length. A replay of the graph embeds
the last tokens, runs all layers, and chooses the next tokens; so nothing but the device's time is measured. The ways
are Hugging Face's LlamaRMSNorm, torch.nn.functional.rms_norm, transformer_rtc.rms_norm, each behind a sum of its own,
and transformer_rtc.add_rms_norm. All ways of a batch share weights and cache, and take turns in a random order.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import whole_models
from tqdm import tqdm

import transformer_rtc

HUGGING_FACE, TORCH, OURS, FUSED = "LlamaRMSNorm", "F.rms_norm", "ours", "ours, sum included"
EPS = 1e-6
WARM_UP = 3
# Of the norm of the difference from torch's logits to their own: each way rounds its sums and products elsewhere. So
# much, or twice what LlamaRMSNorm has, which rounds once more.
TOLERANCES = {"bfloat16": 4e-2, "float32": 1e-4}

EXAMPLES = """examples:
  python3 benchmarks/decode.py --json decode.json --plot decode.png
  python3 benchmarks/decode.py --batches 1,8 --layers 4
  python3 benchmarks/decode.py --from-json decode.json --plot decode.png   # measures nothing
  python3 benchmarks/decode.py --tiny                                      # without a GPU, in the simulator
"""

# A pair: the sum of x and residual, and its norm. Without a residual, x and its norm.
Norm = Callable[[Any, Any, Any], tuple[Any, Any]]


class Sizes(NamedTuple):
    """Those of a model, its vocabulary, and the tokens that the cache has, of which the first half is there before."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    cached: int


# Llama 3's 8B, with half of its layers and a quarter of its vocabulary.
FULL = Sizes(4096, 14336, 16, 32, 8, 32000, 1024)
TINY = Sizes(32, 48, 2, 2, 1, 64, 16)


def norms() -> dict[str, Norm]:
    """Return the ways to add and to normalise."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        module = LlamaRMSNorm(1, EPS)

    def added(norm: Callable[[Any, Any], Any]) -> Norm:
        def run(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
            s = x if residual is None else x + residual
            return s, norm(s, weight)

        return run

    def hugging_face(x: Any, weight: Any) -> Any:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    def fused(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        if residual is None:
            return x, transformer_rtc.rms_norm(x, weight, EPS)
        y, s = transformer_rtc.add_rms_norm(x, residual, weight, EPS)
        return s, y

    return {
        HUGGING_FACE: added(hugging_face),
        TORCH: added(lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)),
        OURS: added(lambda x, weight: transformer_rtc.rms_norm(x, weight, EPS)),
        FUSED: fused,
    }


class Decoder:
    """The weights of a model, and the state of a batch of sequences."""

    def __init__(self, sizes: Sizes, batch: int, dtype: Any, tiny: bool) -> None:
        import torch

        self.sizes, self.batch, self._torch = sizes, batch, torch
        self._depth = sizes.hidden // sizes.heads
        generator = torch.Generator(whole_models.device_of(tiny)).manual_seed(0)

        def drawn(*shape: int, scale: float = 0.02) -> Any:
            found = torch.empty(shape, dtype=dtype, device=generator.device)
            return found.normal_(std=scale, generator=generator)

        packed = (sizes.heads + 2 * sizes.key_heads) * self._depth
        self._embedding = drawn(sizes.vocabulary, sizes.hidden, scale=1.0)
        self._head = drawn(sizes.vocabulary, sizes.hidden)
        self._layers = [
            {
                "qkv": drawn(packed, sizes.hidden),
                "out": drawn(sizes.hidden, sizes.hidden),
                "gate_up": drawn(2 * sizes.intermediate, sizes.hidden),
                "down": drawn(sizes.hidden, sizes.intermediate),
                "norms": 1 + drawn(2, sizes.hidden),
            }
            for _ in range(sizes.layers)
        ]
        self._last_norm = 1 + drawn(sizes.hidden)
        shape = (sizes.layers, 2, batch, sizes.key_heads, sizes.cached, self._depth)
        self._cache = torch.empty(shape, dtype=dtype, device=generator.device).normal_(generator=generator)
        self._places = torch.arange(sizes.cached, device=generator.device)
        frequencies = 10000.0 ** (-torch.arange(0, self._depth, 2, device=generator.device) / self._depth)
        angles = torch.outer(self._places, frequencies).repeat(1, 2)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.tokens = torch.empty(batch, dtype=torch.int64, device=generator.device)
        self.position = torch.empty(1, dtype=torch.int64, device=generator.device)
        self.start()

    def start(self) -> None:
        """Go back to the first token that is decoded."""
        self.tokens.copy_(self._torch.arange(self.batch) % self.sizes.vocabulary)
        self.position.fill_(self.sizes.cached // 2)

    def step(self, norm: Norm) -> Any:
        """Decode a token of each sequence; return the logits."""
        F = self._torch.nn.functional  # noqa: N806
        cos, sin = self._cos[self.position], self._sin[self.position]
        seen = (self._places <= self.position)[None, None, None]
        x, residual = F.embedding(self.tokens, self._embedding), None
        for layer, cache in zip(self._layers, self._cache, strict=True):
            residual, y = norm(x, residual, layer["norms"][0])
            x = F.linear(self._attention(F.linear(y, layer["qkv"]), cache, cos, sin, seen), layer["out"])
            residual, y = norm(x, residual, layer["norms"][1])
            gate, up = F.linear(y, layer["gate_up"]).chunk(2, -1)
            x = F.linear(F.silu(gate) * up, layer["down"])
        logits = F.linear(norm(x, residual, self._last_norm)[1], self._head)
        self.tokens.copy_(logits.argmax(-1))
        self.position.add_(1)
        return logits

    def _attention(self, qkv: Any, cache: Any, cos: Any, sin: Any, seen: Any) -> Any:
        heads, key_heads = self.sizes.heads, self.sizes.key_heads
        q, k, v = qkv.view(self.batch, -1, 1, self._depth).split((heads, key_heads, key_heads), 1)
        q, k = (self._rotated(part, cos, sin) for part in (q, k))
        for kept, new in zip(cache, (k, v), strict=True):
            kept.index_copy_(2, self.position, new)
        # The queries that share a head of keys come as one sequence: no kernel of torch takes grouped heads and a mask.
        q = q.reshape(self.batch, key_heads, heads // key_heads, self._depth)
        y = self._torch.nn.functional.scaled_dot_product_attention(q, *cache, attn_mask=seen)
        return y.reshape(self.batch, -1)

    def _rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + self._torch.cat((-second, first), -1) * sin


def captured(decoder: Decoder, norm: Norm) -> Callable[[], None]:
    """Return what replays a step from a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            decoder.step(norm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(norm)
    replay: Callable[[], None] = graph.replay
    return replay


def microseconds(decoder: Decoder, replay: Callable[[], None], steps: int) -> float:
    """Return the device's time of a step, of so many in turn."""
    import torch

    decoder.start()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        replay()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed * 1e3 / steps


def measure(batch: int, sizes: Sizes, dtype: str, rounds: int, tiny: bool) -> dict[str, Any]:
    """Return the error of each way's first logits, and on a GPU the times of its turns."""
    import torch

    ways = norms()
    decoder = Decoder(sizes, batch, getattr(torch, dtype), tiny)
    expected: Any = None  # torch's
    result: dict[str, Any] = {"batch": batch, "dtype": dtype, "errors": {}, "us": {}}
    with torch.no_grad(), whole_models.kernels_on(tiny):
        for name in (TORCH, *ways):
            decoder.start()
            logits = decoder.step(ways[name]).double()
            expected = logits if expected is None else expected
            result["errors"][name] = ((logits - expected).norm() / expected.norm()).item()
        if tiny:
            return result
        steps = sizes.cached // 2 - WARM_UP - 1
        replays = {}
        for name, norm in ways.items():
            decoder.start()
            replays[name] = captured(decoder, norm)
        result["us"] = {name: [] for name in ways}
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(list(ways), len(ways)):
                result["us"][name].append(microseconds(decoder, replays[name], min(steps, 100)))
    return result


def report(results: Sequence[Mapping[str, Any]], plot_path: str | None) -> None:
    for result in results:
        common.print_environment(result["environment"])
        print(f"{', '.join(f'{name} {value}' for name, value in result['sizes'].items())}\n")
    batches = [found for result in results for found in result["batches"]]
    rows: list[tuple[object, ...]] = []
    for found in batches:
        for name, error in found["errors"].items():
            times = found["us"].get(name)
            if not times:
                rows.append((found["batch"], name, None, None, None, None, f"{error:.1e}"))
                continue
            spread, slowest = common.spread(times), common.spread(found["us"][HUGGING_FACE])
            rows.append(
                (
                    found["batch"],
                    name,
                    f"{spread['median']:.0f}",
                    f"{spread['p10']:.0f}-{spread['p90']:.0f}",
                    f"{found['batch'] / spread['median'] * 1e6:.0f}",
                    f"{spread['median'] / slowest['median']:.3f}",
                    f"{error:.1e}",
                )
            )
    print(common.table(("batch", "norms", "us", "p10-p90", "tokens/s", f"/ {HUGGING_FACE}", "difference"), rows))
    if plot_path:
        plot(batches, plot_path)


def plot(batches: Sequence[Mapping[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 6))
    sizes = [found["batch"] for found in batches]
    for name in (HUGGING_FACE, TORCH, OURS, FUSED):
        times = [(found["batch"], common.spread(found["us"][name])["median"]) for found in batches if found["us"]]
        if times:
            axis.plot(*zip(*times, strict=True), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set(xlabel="sequences of the batch", ylabel="us of a step, in a CUDA graph", ylim=(0, None))
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def batches_from(text: str) -> list[int]:
    return [common.positive(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=batches_from, default=[1, 2, 4, 8, 16, 32, 64], help="default: 1 to 64")
    parser.add_argument("--layers", type=common.positive, help=f"default: {FULL.layers}")
    parser.add_argument("--rounds", type=common.positive, default=7, help="turns of each way (default: 7)")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on the CPU, in the simulator; nothing is timed"
    )
    parser.add_argument("--json", metavar="FILE", help="write every measurement there")
    parser.add_argument("--plot", metavar="FILE", help="draw the times; needs matplotlib")
    parser.add_argument("--from-json", nargs="+", metavar="FILE", help="report on what --json wrote; measure nothing")
    arguments = parser.parse_args()
    if arguments.from_json:
        results = [json.loads(Path(file).read_text(encoding="utf-8")) for file in arguments.from_json]
        report(results, arguments.plot)
        return
    if not arguments.tiny:
        common.torch_on_gpu()
    sizes = TINY if arguments.tiny else FULL
    sizes = sizes._replace(layers=arguments.layers or sizes.layers)
    dtype = "float32" if arguments.tiny else "bfloat16"
    result: dict[str, Any] = {"environment": common.environment(), "sizes": sizes._asdict(), "batches": []}
    for batch in tqdm(arguments.batches, unit="batch"):
        result["batches"].append(measure(batch, sizes, dtype, arguments.rounds, arguments.tiny))
        common.write_json(arguments.json, result)
    report([result], arguments.plot)
    wrong = [
        f"batch {found['batch']}: the logits of {name} differ by {error:.1e} of their norm"
        for found in result["batches"]
        for name, error in found["errors"].items()
        if not error <= max(TOLERANCES[dtype], 2 * found["errors"][HUGGING_FACE])
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
