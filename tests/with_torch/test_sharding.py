# SPDX-License-Identifier: Apache-2.0
"""DTensors: operators compute what they compute of the whole, each rank its rows, without more communication than that.

The cases run in four processes, `ranks` starts them. Shapes are such that a rank may have fewer rows than the others,
or none.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import ranks
from processes import output, shared

import transformer_rtc
from transformer_rtc.declaration import declarations
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

RANKS = 4
HIDDEN = 64
FORWARD = [name for name, declaration in declarations().items() if declaration.gradient]
NORMS = [name for name in FORWARD if "norm" in name]
SOFTMAX = [name for name in FORWARD if "softmax" in name]
BACKWARD = [name for name in declarations() if name.endswith("_backward")]
WHOLE, SUM = Replicate(), Partial()


@functools.cache  # torch 2.13 does not compile what it has seen with an equal mesh that is another object
def mesh(*shape: int):
    return init_device_mesh("cpu", shape or (RANKS,))


def several(found) -> tuple:
    return found if isinstance(found, tuple) else (found,)


def same(found, expected) -> None:
    """Check what is no sum over rows: not one bit depends on the ranks."""
    found = found.full_tensor()
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def close(found, expected) -> None:
    """Check a sum over rows, whose order depends on the ranks: some 60 roundings of numbers that are about 10."""
    torch.testing.assert_close(found.full_tensor(), expected, rtol=2.0**-18, atol=2.0**-18)


def check(name, on, arrays: dict, placements: dict, expected: dict, **others) -> None:
    """Check a call and its gradients against those of the whole tensors.

    Parameters
    ----------
    name : str
        The function's.
    on : DeviceMesh
        The ranks.
    arrays : dict
        Tensors by their names; those of floats require grad.
    placements : dict
        How each of them lies; replicated where that does not say.
    expected : dict
        How each gradient lies, and `y` itself.
    **others
        Further arguments.
    """
    call = getattr(transformer_rtc, name)
    plain = {key: value.clone().requires_grad_(value.is_floating_point()) for key, value in arrays.items()}
    lying = {key: placements.get(key, [WHOLE] * on.ndim) for key in arrays}
    dtensors = {
        key: distribute_tensor(value, on, lying[key]).requires_grad_(value.is_floating_point())
        for key, value in arrays.items()
    }
    found, right = several(call(**dtensors, **others)), several(call(**plain, **others))
    assert len(found) == len(right)
    gradients = [torch.randn(one.shape) for one in right]
    for one, exact in zip(found, right, strict=True):
        same(one, exact.detach())
        assert one.placements == tuple(expected["y"]), (name, one.placements)
    torch.autograd.backward(right, gradients)
    torch.autograd.backward(found, [distribute_tensor(one, on, expected["y"]) for one in gradients])
    for key, value in dtensors.items():
        if value.requires_grad:
            close(value.grad, plain[key].grad)
            if key in expected:
                assert value.grad.placements == tuple(expected[key]), (name, key, value.grad.placements)


def given_to(name: str, *shape: int, heads: tuple[int, ...] = ()) -> dict:
    """Return random arguments of a norm."""
    arrays = {"x": torch.randn(shape), "weight": torch.randn(*heads, shape[-1]), "bias": torch.randn(*heads, shape[-1])}
    return arrays | ({"residual": torch.randn(shape)} if "add" in name else {})


def case_norms():
    on = mesh()
    for name in NORMS:
        for rows in (8, 5, 7):  # each rank has two; 2, 2, 1, 0; 2, 2, 2, 1
            rows_sharded = {"x": [Shard(0)], "residual": [Shard(0)]}
            expected = rows_sharded | {"y": [Shard(0)], "weight": [SUM], "bias": [SUM]}
            check(name, on, given_to(name, rows, HIDDEN), rows_sharded, expected)
    # Fewer rows than ranks are not sharded.
    check("rms_norm", on, given_to("rms_norm", 3, HIDDEN), {"x": [Shard(0)]}, {"y": [WHOLE]})


def case_norms_on_two_dimensions():
    on = mesh(2, 2)
    for lying in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [WHOLE, Shard(1)]):
        for name in ("layer_norm", "add_rms_norm"):
            sums = [WHOLE if one == WHOLE else SUM for one in lying]
            expected = {"y": lying, "x": lying, "residual": lying, "weight": sums, "bias": sums}
            check(name, on, given_to(name, 5, 3, HIDDEN), {"x": lying, "residual": lying}, expected)


def case_heads_with_weights_of_their_own():
    on = mesh(2, 2)
    for heads in (2, 3):
        arrays = given_to("rms_norm", 5, heads, HIDDEN, heads=(heads,))
        for of_weight in ([WHOLE, WHOLE], [WHOLE, Shard(0)], [Shard(0), WHOLE]):
            check(
                "rms_norm",
                on,
                arrays,
                {"x": [Shard(0), Shard(1)], "weight": of_weight},
                {
                    "y": [Shard(0), Shard(1)],
                    "x": [Shard(0), Shard(1)],
                    "weight": [SUM, Shard(0)],
                    "bias": [SUM, Shard(0)],
                },
            )


def case_softmax():
    on = mesh(2, 2)
    lying = [Shard(0), Shard(1)]
    for name in SOFTMAX:
        x = torch.randn(3, 3, 5, 9)
        check(name, on, {"x": x}, {"x": lying}, {"y": lying, "x": lying})
        arrays = {"x": x, "mask": torch.randn(3, 1, 5, 9), "sink": torch.randn(3)}
        expected = {"y": lying, "x": lying, "mask": [Shard(0), SUM], "sink": [SUM, Shard(0)]}
        check(name, on, arrays, {"x": lying}, expected, causal="aligned", scale=0.5)
        # Queries may be sharded where nothing counts them, and then the mask's are.
        queries = [Shard(2), Shard(1)]
        expected = {"y": queries, "x": queries, "mask": [Shard(1), SUM], "sink": [SUM, Shard(0)]}
        arrays["mask"] = torch.randn(1, 5, 9)
        check(name, on, arrays, {"x": queries}, expected)
        arrays["mask"] = torch.rand(9) < 0.5
        check(name, on, arrays, {"x": queries}, {"y": queries, "x": queries}, mask_keeps=True)
    # A causal mode counts queries: all of them come together.
    x = torch.randn(3, 2, 5, 9)
    for arrays in ({"x": x}, {"x": x, "sink": torch.randn(2)}):
        check("softmax", on, arrays, {"x": [Shard(2), Shard(1)]}, {"y": [WHOLE, Shard(1)]}, causal="aligned", window=3)
        check("softmax", on, arrays, {"x": [Shard(2), Shard(2)]}, {"y": [WHOLE, WHOLE]}, causal="aligned")


def case_results_that_are_asked_for():
    """DTensor remembers strategies: each call differs from others in one argument that is no tensor."""
    on, x, weight = mesh(), torch.randn(5, HIDDEN), torch.randn(HIDDEN)
    sharded, whole = distribute_tensor(x, on, [Shard(0)]), distribute_tensor(weight, on, [WHOLE])
    for name, asked in [
        ("rms_norm", {}),
        ("rms_norm", {"return_rstd": True}),
        ("rms_norm", {"out_dtype": torch.bfloat16}),
        ("rms_norm", {"out_dtype": torch.bfloat16, "return_rstd": True}),
        ("rms_norm", {"out_dtype": torch.int8, "row_scaling": True}),
        ("layer_norm", {"return_mean": True}),
        ("layer_norm", {"return_rstd": True}),
        ("layer_norm", {"return_mean": True, "return_rstd": True, "eps": 1.0}),
        ("layer_norm", {"eps": 2.0}),
    ]:
        call = getattr(transformer_rtc, name)
        found, right = several(call(sharded, whole, **asked)), several(call(x, weight, **asked))
        assert len(found) == len(right)
        for one, exact in zip(found, right, strict=True):
            same(one, exact)
            assert one.placements == (Shard(0),)
    scores = torch.randn(4, 8, 9)
    for asked in ({}, {"causal": "aligned"}, {"return_lse": True}, {"causal": "aligned", "return_lse": True}):
        found = several(transformer_rtc.softmax(distribute_tensor(scores, on, [Shard(1)]), **asked))
        for one, exact in zip(found, several(transformer_rtc.softmax(scores, **asked)), strict=True):
            same(one, exact)
            assert one.placements == (WHOLE if "causal" in asked else Shard(1),)


def case_strategies_that_are_remembered():
    """A strategy is remembered for all calls that are equal to DTensor, in versions of torch for any causal mode."""
    from torch.distributed.tensor._op_schema import OpSchema

    infos, operator = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info, torch.ops.transformer_rtc.softmax
    spec = distribute_tensor(torch.randn(4, 8, 9), mesh(), [Shard(1)])._spec
    calls = [
        OpSchema(operator.default, (spec, 1.0, None, False, causal), {}, schema_info=infos[operator.default])
        for causal in (None, "aligned", "upper_triangular")
    ]
    assert len(set(calls)) == 3


def case_backward_operators():
    on = mesh()
    dy, x, weight = torch.randn(6, HIDDEN), torch.randn(6, HIDDEN), torch.randn(HIDDEN)
    rows, whole = [Shard(0)], [WHOLE]
    for name in BACKWARD:
        call = getattr(transformer_rtc, name)
        if "norm" not in name:
            other = torch.cat([x, x], -1) if declarations()[name].split_by else x
            found = call(distribute_tensor(dy, on, rows), distribute_tensor(other, on, rows))
            same(found, call(dy, other))
            assert found.placements == tuple(rows)
            continue
        ds = (dy,) if name.startswith("add_") else ()
        first = (dy, *ds, x, weight)
        sharded = [distribute_tensor(one, on, whole if one is weight else rows) for one in first]
        dx, dweight = call(*sharded, return_dweight=True, return_dbias=False)
        exact, exact_sum = call(*first, return_dweight=True, return_dbias=False)
        same(dx, exact)
        close(dweight, exact_sum)
        assert (dx.placements, dweight.placements) == (tuple(rows), (SUM,))
        dbias = call(*sharded, return_dx=False, return_dweight=False, return_dbias=True)
        close(dbias, call(*first, return_dx=False, return_dweight=False, return_dbias=True))
        # Statistics may be given, and lie as the rows do.
        statistics = {"rstd": torch.rand(6) + 0.5} | ({"mean": torch.randn(6)} if "layer" in name else {})
        lying = {key: distribute_tensor(value, on, rows) for key, value in statistics.items()}
        same(call(*sharded, **lying, return_dweight=False, return_dbias=False),
             call(*first, **statistics, return_dweight=False, return_dbias=False))  # fmt: skip


def case_activations():
    on, names = mesh(), [name for name in declarations() if declarations()[name].elementwise]
    for name, last in itertools.product(names, (False, True)):
        gated = bool(declarations()[name].split_by)
        given = [torch.randn(6, HIDDEN) for _ in range(1 + gated + (name == "add") + name.endswith("backward"))]
        shards = [Shard(1 if last else 0)]
        call = getattr(transformer_rtc, name)
        found, exact = several(call(*(distribute_tensor(one, on, shards) for one in given))), several(call(*given))
        for one, other in zip(found, exact, strict=True):
            same(one, other)
            assert one.placements == tuple(shards), name
    # A dimension of one element is no rank's part of several.
    for one, other in ((torch.randn(1, HIDDEN), torch.randn(1, HIDDEN)), (torch.randn(6, 1), torch.randn(6, 1))):
        found = transformer_rtc.add(*(distribute_tensor(each, on, [WHOLE]) for each in (one, other)))
        assert found.placements == (WHOLE,)
        same(found, one + other)
    # What is broadcast lies as the rows do, where it has their dimension.
    x, row, column = torch.randn(6, HIDDEN), torch.randn(HIDDEN), torch.randn(6, 1)
    for first, second in ((x, row), (row, x), (x, column), (column, row)):
        for last in (False, True):
            shards = [Shard(1 if last else 0)]
            lying = [
                distribute_tensor(
                    one, on, shards if one.ndim == 2 and one.shape[last] > 1 else [Shard(0)] if one is row and last
                    else [WHOLE]
                )
                for one in (first, second)
            ]  # fmt: skip
            found = transformer_rtc.add(*lying)
            same(found, first + second)
            assert found.placements == tuple(shards), (first.shape, second.shape, last)
    # Two halves of a row, and what has a scale of each row, are whole.
    both, x = (distribute_tensor(torch.randn(6, 2 * HIDDEN), on, [Shard(1)]) for _ in range(2))
    assert transformer_rtc.silu_and_mul(both).placements == (WHOLE,)
    y, scales = transformer_rtc.silu_and_mul(both, x, out_dtype=torch.int8, row_scaling=True)
    assert (y.placements, scales.placements) == ((WHOLE,), (WHOLE,))


def case_what_is_updated():
    def whole(value: float):
        return distribute_tensor(torch.full((1,), value), on, [WHOLE])

    on = mesh()
    for rows in (8, 5):
        x = torch.randn(rows, HIDDEN)
        most, scale = torch.zeros(1), torch.full((1,), 2.0)
        expected = transformer_rtc.rms_norm(x, out_dtype=torch.float8_e4m3fn, scale=scale, amax=most)
        for before in (0.0, 100.0):
            amax, scale_inv = whole(before), whole(9.0)
            call = {"out_dtype": torch.float8_e4m3fn, "scale": whole(2.0), "amax": amax}
            y = transformer_rtc.rms_norm(distribute_tensor(x, on, [Shard(0)]), **call)
            assert y.placements == (Shard(0),) and amax.placements == (WHOLE,)
            assert torch.equal(y.to_local().float(), distribute_tensor(expected.float(), on, [Shard(0)]).to_local())
            assert amax.to_local().item() == max(most.item(), before)
            # Where a rank may have no rows, it would not learn this one.
            y = transformer_rtc.rms_norm(distribute_tensor(x, on, [Shard(0)]), **call, scale_inv=scale_inv)
            assert y.placements == (Shard(0) if rows == 8 else WHOLE,)
            assert scale_inv.to_local().item() == 0.5


def case_placements_that_are_not_taken():
    on, x, weight = mesh(), torch.randn(8, HIDDEN), torch.randn(HIDDEN)
    right, whole = transformer_rtc.rms_norm(x, weight), distribute_tensor(weight, on, [WHOLE])
    same(transformer_rtc.rms_norm(distribute_tensor(x, on, [Shard(1)]), whole), right)
    rows = distribute_tensor(x, on, [Shard(0)])
    same(transformer_rtc.rms_norm(rows, distribute_tensor(weight, on, [Shard(0)])), right)
    # Halves and quarters are sums without an error.
    parts = DTensor.from_local(x / RANKS, on, [SUM])
    same(transformer_rtc.rms_norm(parts, whole), right)
    parts = DTensor.from_local(weight / RANKS, on, [SUM])
    same(transformer_rtc.rms_norm(rows, parts), right)
    y = transformer_rtc.add_rms_norm(rows, distribute_tensor(x, on, [WHOLE]), whole)
    for one, exact in zip(y, transformer_rtc.add_rms_norm(x, x, weight), strict=True):
        same(one, exact)
        assert one.placements == (Shard(0),)


def case_what_is_refused():
    on = mesh()
    x, whole = torch.randn(8, 8, 9), [WHOLE]
    rows = distribute_tensor(x, on, [Shard(1)])
    # Of its size are the rows of one rank, but not all rows.
    mask = distribute_tensor(torch.zeros(2, 9), on, whole)
    with pytest.raises(ArgumentError, match="mask"):
        transformer_rtc.softmax(rows, mask=mask)
    with pytest.raises(ArgumentError, match="weight"):
        transformer_rtc.rms_norm(rows, distribute_tensor(torch.zeros(7, 9), on, whole))
    with pytest.raises(RuntimeError, match="got mixed torch"):
        transformer_rtc.rms_norm(rows, torch.ones(9))
    with pytest.raises(ArgumentError, match="amax is a plain tensor"):
        transformer_rtc.rms_norm(rows, out_dtype=torch.float8_e4m3fn, scale=torch.ones(1), amax=torch.ones(1))


def case_written_in_place():
    on, x = mesh(), torch.randn(5, HIDDEN)
    rows = distribute_tensor(x, on, [Shard(0)])
    assert transformer_rtc.rms_norm(rows, out=rows) is rows
    same(rows, transformer_rtc.rms_norm(x))
    assert rows.placements == (Shard(0),)


def case_compiled():
    on = mesh()
    for name in ("rms_norm", "add_layer_norm"):
        call = getattr(transformer_rtc, name)
        arrays = given_to(name, 5, HIDDEN)
        plain = {key: value.clone().requires_grad_() for key, value in arrays.items()}
        lying = {"x": [Shard(0)], "residual": [Shard(0)]}
        sharded = {
            key: distribute_tensor(value, on, lying.get(key, [WHOLE])).requires_grad_() for key, value in arrays.items()
        }

        def twice(arrays, call=call):
            return tuple(2 * one for one in several(call(**arrays)))

        found, right = torch.compile(twice, fullgraph=True, backend="aot_eager")(sharded), twice(plain)
        gradients = [torch.randn(one.shape) for one in right]
        for one, exact in zip(found, right, strict=True):
            same(one, exact.detach())
            assert one.placements == (Shard(0),)
        torch.autograd.backward(right, gradients)
        torch.autograd.backward(found, [distribute_tensor(one, on, [Shard(0)]) for one in gradients])
        for key, value in sharded.items():
            close(value.grad, plain[key].grad)


def test_dtensors(tmp_path):
    ranks.run_cases(__file__, RANKS, tmp_path)


REGISTERED = """
known = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
names = list(transformer_rtc.declaration.declarations())
print(len(names), all(getattr(torch.ops.transformer_rtc, name).default in known for name in names))
"""


@pytest.mark.parametrize(
    "first", ["transformer_rtc, torch.distributed.tensor", "torch.distributed.tensor, transformer_rtc"]
)
def test_strategies_are_there_whichever_is_imported_first(first):
    script = f"import {first}\n{REGISTERED}"
    assert output(script) == f"{len(declarations())} True"


def test_an_eager_process_imports_neither_dtensor_nor_dynamo(tmp_path):
    script = """
import sys, torch, transformer_rtc
norm = transformer_rtc.torch.RMSNorm(64)
with transformer_rtc.using("simulator"):
    norm(torch.randn(2, 64)).sum().backward()
    transformer_rtc.softmax(torch.randn(2, 64))
print({"torch._dynamo", "torch.distributed.tensor"} & set(sys.modules))
"""
    assert output(script, **shared(tmp_path)) == "set()"


if __name__ == "__main__":
    ranks.serve(globals())
