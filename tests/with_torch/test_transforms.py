# SPDX-License-Identifier: Apache-2.0
"""torch.func's transforms: vmap has the bits of a loop, gradients nest, what has no derivative is refused."""

from __future__ import annotations

import warnings

import kernel_cache
import pytest

import transformer_rtc
from transformer_rtc import operator, using
from transformer_rtc.arguments import Input, Result
from transformer_rtc.declaration import declarations
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
from torch.func import grad, jacrev, vjp, vmap  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

BATCH = 3
NAMES = list(declarations())
SIZES = {"columns": 33, "hidden": 33, "heads": 2, "queries": 4, "keys": 33}


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    torch.manual_seed(17)
    with using("simulator"), warnings.catch_warnings():
        # Such as that of a performance drop because there is no rule for batches.
        warnings.simplefilter("error", UserWarning)
        yield


class Launches(TorchDispatchMode):
    """Counts the calls of our operators below all transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace == "transformer_rtc"
        return function(*args, **(kwargs or {}))


def launches(function, *arguments) -> tuple[int, tuple]:
    with Launches() as seen:
        found = function(*arguments)
    return seen.count, found if isinstance(found, tuple) else (found,)


def loop(function, in_dims, *arguments) -> tuple:
    """Return what vmap returns, of one call for each example."""
    found = []
    for number in range(BATCH):
        given = [
            one if dim is None else one.select(dim, number).contiguous()
            for one, dim in zip(arguments, in_dims, strict=True)
        ]
        one = function(*given)
        found.append(one if isinstance(one, tuple) else (one,))
    return tuple(torch.stack(results) for results in zip(*found, strict=True))


def check(function, in_dims, *arguments, count: int) -> None:
    """Check vmap against a loop, to the bit, and how often it calls operators."""
    seen, found = launches(vmap(function, in_dims=in_dims), *arguments)
    expected = loop(function, in_dims, *arguments)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert seen == count


def tensors(name: str, leading: tuple[int, ...]) -> dict:
    """Return an example of each input of an operator but what quantizes, by its keyword."""
    declaration = declarations()[name]
    symbols = [symbol for symbol in reversed(declaration.symbols) if symbol not in declaration.conditional]
    shape = (*leading, *(SIZES[symbol] for symbol in symbols))
    found = {}
    for array in declaration.arrays:
        first = declaration.shapes(array)[0]
        if not isinstance(array, Input) or not (first.leading or first.sizes):
            continue
        if array.broadcast:
            found[array.keyword] = torch.randn(shape[-2], shape[-1])
        elif first.leading:
            found[array.keyword] = torch.rand(shape if first.sizes else shape[:-1]) + 0.5
        else:
            found[array.keyword] = torch.randn([SIZES[size.symbol] for size in first.sizes])
    return found


def of_rows(name: str) -> list[str]:
    """Return the inputs of an operator with a row or a number for each row."""
    declaration = declarations()[name]
    leads = [array for array in declaration.arrays if declaration.shapes(array)[0].leading]
    return [array.keyword for array in leads if isinstance(array, Input)]


def shares(name: str) -> bool:
    """Whether an operator has an input that all rows share."""
    return len(of_rows(name)) < len(tensors(name, ()))


def results(name: str, sums: bool) -> dict[str, bool]:
    """Return the flags that ask for all results of rows, and for those that are sums over rows or not."""
    declaration = declarations()[name]
    found = {}
    for array in declaration.arrays:
        if isinstance(array, Result) and array.name != "row_scale":
            is_sum = bool(array.shape_of) or not declaration.shapes(array)[0].leading
            found[array.keyword] = sums or not is_sum
    return found


def of_tensors(name: str, given: dict, **others):
    """Return an operator's public function of tensors by position, in the order of what is given."""
    public = getattr(transformer_rtc, name)
    return lambda *values: public(**dict(zip(given, values, strict=True)), **others)


def batch_of(example, dim: int):
    """Return a batch of other values, in a dimension."""
    return torch.stack([example + 0.25 * number for number in range(BATCH)], dim)


# ---- vmap of every operator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_are_one_call(name):
    given = tensors(name, (2,))
    batched = {key: batch_of(value, 0) if key in of_rows(name) else value for key, value in given.items()}
    in_dims = tuple(0 if key in of_rows(name) else None for key in given)
    check(of_tensors(name, given, **results(name, sums=False)), in_dims, *batched.values(), count=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_in_any_dimension_of_one_array_is_one_call(name):
    given = tensors(name, (2,))
    function = of_tensors(name, given, **results(name, sums=False))
    for number, key in enumerate(of_rows(name)):
        dim = min(number % 3 + 1, given[key].ndim)
        in_dims = tuple(dim if other == key else None for other in given)
        batched = {other: batch_of(value, dim) if other == key else value for other, value in given.items()}
        check(function, in_dims, *batched.values(), count=1)


@pytest.mark.parametrize("name", NAMES)
def test_sums_over_rows_are_those_of_each_example(name):
    given = tensors(name, (2,))
    flags = results(name, sums=True)
    in_dims = tuple(0 if key in of_rows(name) else None for key in given)
    batched = {key: batch_of(value, 0) if key in of_rows(name) else value for key, value in given.items()}
    has_sums = flags != results(name, sums=False)
    check(of_tensors(name, given, **flags), in_dims, *batched.values(), count=BATCH if has_sums else 1)


@pytest.mark.parametrize("name", ["softmax_backward", "log_softmax_backward"])
def test_gradients_of_masks_are_those_of_each_example(name):
    dy, y, mask = torch.randn(BATCH, 2, 4, 33), torch.rand(BATCH, 2, 4, 33), torch.randn(4, 33)
    function = of_tensors(name, {"dy": dy, "y": y, "mask": mask})
    check(function, (0, 0, None), dy, y, mask, count=BATCH)
    check(function, (0, 0, 0), dy, y, batch_of(mask, 0), count=BATCH)


@pytest.mark.parametrize("name", [name for name in NAMES if shares(name)])
def test_batches_of_what_all_rows_share_are_a_call_for_each(name):
    given = tensors(name, (2,))
    function = of_tensors(name, given, **results(name, sums=False))
    in_dims = tuple(None if key in of_rows(name) else 1 for key in given)
    batched = {key: value if key in of_rows(name) else batch_of(value, 1) for key, value in given.items()}
    check(function, in_dims, *batched.values(), count=BATCH)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_may_be_empty(name):
    given = tensors(name, (2,))
    for sums in (False, True):
        in_dims = tuple(0 if key in of_rows(name) else None for key in given)
        batched = {
            key: value.new_empty(0, *value.shape) if dim == 0 else value
            for (key, value), dim in zip(given.items(), in_dims, strict=True)
        }
        function = of_tensors(name, given, **results(name, sums=sums))
        one = function(*given.values())
        found = vmap(function, in_dims=in_dims)(*batched.values())
        one, found = (value if isinstance(value, tuple) else (value,) for value in (one, found))
        assert [tuple(value.shape) for value in found] == [(0, *value.shape) for value in one]


# ---- Shapes of examples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", [(33,), (2, 33), (2, 1, 2, 33)], ids=str)
def test_a_norm_of_examples_of_any_number_of_dimensions(name, shape):
    public = getattr(transformer_rtc, name)
    x, weight = torch.randn(BATCH, *shape), torch.randn(33)
    check(lambda a, b: public(a, b, return_rstd=True), (0, None), x, weight, count=1)
    if shape[-2:] == (2, 33):  # a row of the weight for each head
        check(public, (0, None), x, torch.randn(2, 33), count=1)


def test_the_batch_is_not_taken_for_heads():
    x, weight = torch.randn(BATCH, 33), torch.randn(BATCH, 33)
    with pytest.raises(ArgumentError, match="weight must have the shape"):
        vmap(transformer_rtc.rms_norm, in_dims=(0, None))(x, weight)
    with pytest.raises(ArgumentError, match="weight must have the shape"):
        vmap(transformer_rtc.rms_norm, in_dims=(0, None))(x, weight[:1])
    check(lambda a: transformer_rtc.softmax(a, causal="aligned", window=3), (0,), x, count=1)
    for sink in (torch.randn(BATCH), torch.randn(1)):
        with pytest.raises(ArgumentError, match="sink must have"):
            vmap(lambda a, b: transformer_rtc.softmax(a, sink=b), in_dims=(0, None))(torch.randn(BATCH, 4, 33), sink)


EXAMPLES = [(33,), (4, 33), (2, 4, 33), (2, 2, 4, 33), (3, 2, 2, 4, 33)]


@pytest.mark.parametrize("mask_dims", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", EXAMPLES, ids=str)
def test_a_softmax_of_examples_of_any_number_of_dimensions(shape, mask_dims):
    mask_dims = min(mask_dims, len(shape))
    x, mask = torch.randn(BATCH, *shape), torch.randn(shape[-mask_dims:])
    sink = torch.randn(shape[-3]) if len(shape) > 2 else None

    def softmax(a, b):
        return transformer_rtc.softmax(a, mask=b, sink=sink, window=9, causal="aligned", return_lse=True)

    check(softmax, (0, None), x, mask, count=1)
    check(softmax, (0, 0), x, batch_of(mask, 0), count=1)
    check(softmax, (None, mask_dims), x[0], batch_of(mask, -1), count=1)
    ones = batch_of(torch.randn([1] * (mask_dims - 1) + [33]), 1 if mask_dims > 1 else 0)
    check(softmax, (len(shape), 1 if mask_dims > 1 else 0), x.movedim(0, -1), ones, count=1)


def test_packed_rows_are_read_where_they_lie():
    packed = torch.randn(BATCH, 5, 2, 3, 33)
    residual, weight = torch.randn(5, 2, 33), torch.randn(33)

    def add(x, residual):
        return transformer_rtc.add_rms_norm(x, residual, weight, eps=1e-5)

    for part in range(3):
        check(add, (0, None), packed[..., part, :], residual, count=1)
        check(add, (1, None), packed[..., part, :].transpose(0, 1), residual, count=1)
        check(add, (0, 3), packed[..., part, :], packed[..., 0, :].movedim(0, -1), count=1)


def test_shapes_that_do_not_fit_are_refused_as_without_vmap():
    x = torch.randn(BATCH, 5, 33)
    with pytest.raises(ArgumentError, match=r"residual must have the shape of x, \(5, 33\); it has \(33,\)"):
        vmap(transformer_rtc.add_rms_norm)(x, torch.randn(BATCH, 33))
    with pytest.raises(ArgumentError, match=r"mask must have the shape of x, \(5, 33\)"):
        vmap(lambda a, b: transformer_rtc.softmax(a, mask=b), in_dims=(0, None))(x, torch.randn(1, 5, 33))
    with pytest.raises(ArgumentError, match="x must have at least one dimension"):
        vmap(transformer_rtc.rms_norm)(torch.randn(BATCH))


# ---- What is updated, and what is written ----------------------------------------------------------------------------


def test_updates_are_those_of_each_example():
    x, scale = torch.randn(BATCH, 5, 33), torch.rand(BATCH, 1) + 0.5
    found, expected = torch.zeros(BATCH, 1), torch.zeros(BATCH, 1)

    def quantized(x, scale, amax):
        out = transformer_rtc.rms_norm(x, out_dtype=torch.float8_e4m3fn, scale=scale, amax=amax)
        return out.view(torch.uint8)

    rows = vmap(quantized)(x, scale, found)
    for number in range(BATCH):
        assert torch.equal(rows[number], quantized(x[number], scale[number], expected[number]))
    assert torch.equal(found, expected) and found.unique().numel() == BATCH
    # What there is one of for all examples becomes another for each.
    operator = torch.ops.transformer_rtc.rms_norm
    amax = vmap(lambda a: operator(a, out_dtype=torch.float8_e4m3fn, scale=scale[0], amax=torch.zeros(1))[2])(x)
    torch.testing.assert_close(amax[:, 0], torch.stack([transformer_rtc.rms_norm(one).abs().max() for one in x]))
    with pytest.raises(RuntimeError, match="vmap: inplace"):
        vmap(quantized, in_dims=(0, None, None))(x, scale[0], torch.zeros(1))


def test_outputs_that_are_written_are_those_of_each_example():
    x, out = torch.randn(BATCH, 5, 33), torch.empty(BATCH, 5, 33)
    returned = vmap(lambda a, b: transformer_rtc.rms_norm(a, out=b))(x, out)
    assert torch.equal(out, transformer_rtc.rms_norm(x)) and torch.equal(returned, out)


# ---- Transforms of transforms ----------------------------------------------------------------------------------------


def case(name: str):
    """Return a function of an operator to differentiate, by what all rows share and by rows, and these."""
    public = getattr(transformer_rtc, name)
    if "softmax" in name:
        sink, x = torch.randn(2), torch.randn(BATCH, 2, 4, 33)
        return (lambda a, b: (public(b, sink=a) * b.detach().cos()).sum()), sink, x
    weight, x = torch.randn(33), torch.randn(BATCH, 5, 33)
    rest = (torch.randn(5, 33),) if "add" in name else ()

    def value(a, b):
        found = public(b, *rest, a, eps=1e-5)
        return sum(one.square().sum() for one in (found if isinstance(found, tuple) else (found,)))

    return value, weight, x


FORWARD = [name for name, declaration in declarations().items() if declaration.gradient and shares(name)]


@pytest.mark.parametrize("name", FORWARD)
def test_gradients_of_examples(name):
    value, shared, x = case(name)
    both = grad(value, (0, 1))
    found = vmap(both, in_dims=(None, 0))(shared, x)
    for one, other in zip(found, loop(both, (None, 0), shared, x), strict=True):
        assert torch.equal(one, other)
    # Where rows alone need a gradient, each direction is one call.
    seen, (rows,) = launches(vmap(grad(value, 1), in_dims=(None, 0)), shared, x)
    assert seen == 2 and torch.equal(rows, found[1])
    assert torch.equal(vmap(both, in_dims=(None, 0), chunk_size=2)(shared, x)[0], found[0])


@pytest.mark.parametrize("name", FORWARD)
def test_a_gradient_of_a_batch(name):
    value, shared, x = case(name)
    batch = vmap(value, in_dims=(None, 0))
    of_shared, of_rows = grad(lambda a, b: batch(a, b).sum(), (0, 1))(shared, x)
    each = loop(grad(value, (0, 1)), (None, 0), shared, x)
    assert torch.equal(of_rows, each[1])
    # One sum of all rows, of which the order is another.
    assert torch.allclose(of_shared, each[0].sum(0), rtol=1e-5, atol=1e-5)
    # By backward, without torch.func.
    leaves = shared.clone().requires_grad_(), x.clone().requires_grad_()
    batch(*leaves).sum().backward()
    assert torch.equal(leaves[0].grad, of_shared) and torch.equal(leaves[1].grad, of_rows)
    # Where each example has its own of what all rows share.
    shared = batch_of(shared, 0)
    found = grad(lambda a, b: vmap(value)(a, b).sum(), (0, 1))(shared, x)
    for one, other in zip(found, loop(grad(value, (0, 1)), (0, 0), shared, x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_vmap_of_vmap(name):
    public = getattr(transformer_rtc, name)
    x, weight = torch.randn(2, 5, 4, 33, BATCH), torch.randn(2, 33)
    if name == "softmax":
        found = vmap(vmap(public, in_dims=1), in_dims=-1, out_dims=2)(x)  # of [2, 4, 33], for each of 5
        expected = torch.stack(
            [torch.stack([public(x[:, j, ..., i].contiguous()) for i in range(3)], 1) for j in range(5)]
        )
        assert torch.equal(found, expected) and found.shape == (5, 2, 3, 4, 33)
        return
    # Rows along one dimension and examples along two, one of which the weights have, too.
    seen, (found,) = launches(vmap(vmap(public, in_dims=(-1, None)), in_dims=(0, 0), out_dims=1), x, weight)
    assert seen == 2 and found.shape == (BATCH, 2, 5, 4, 33)
    for i in range(BATCH):
        for j in range(2):
            assert torch.equal(found[i, j], public(x[j, ..., i].contiguous(), weight[j]))


@pytest.mark.parametrize("name", FORWARD)
def test_jacobians(name):
    _, shared, x = case(name)
    public = getattr(transformer_rtc, name)
    rest = (x[0, :2].clone(), shared) if "add" in name else () if "softmax" in name else (shared,)

    def rows(a):
        found = public(a, *rest)
        return found[0] if isinstance(found, tuple) else found

    x = x[0, :2].clone().requires_grad_()
    out = rows(x)
    expected = torch.stack([torch.autograd.grad(out.flatten()[i], x, retain_graph=True)[0] for i in range(out.numel())])
    found = jacrev(rows)(x.detach())
    assert torch.equal(found, expected.view(*out.shape, *x.shape))
    _, pull = vjp(rows, x.detach())
    assert torch.equal(pull(torch.ones_like(out))[0], torch.autograd.grad(out.sum(), x)[0])


def test_an_ensemble_of_modules():
    modules = [transformer_rtc.torch.LayerNorm(33) for _ in range(BATCH)]
    for module in modules:
        torch.nn.init.normal_(module.weight)
        torch.nn.init.normal_(module.bias)
    parameters, buffers = torch.func.stack_module_state(modules)
    x = torch.randn(5, 33)
    found = vmap(lambda p, b, a: torch.func.functional_call(modules[0], (p, b), a), in_dims=(0, 0, None))(
        parameters, buffers, x
    )
    assert torch.equal(found, torch.stack([module(x) for module in modules]))


def test_vmap_within_torch_compile():
    weight, x = torch.randn(33), torch.randn(BATCH, 5, 33)

    def norms(x, weight):
        return vmap(lambda a, b: transformer_rtc.rms_norm(a, b), in_dims=(0, None))(x, weight)

    compiled = torch.compile(norms, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), norms(x, weight))


# ---- What outer transforms get, and what is refused ------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARD)
def test_an_outer_gradient_goes_through_an_inner_one(name):
    value, shared, x = case(name)
    expected = grad(value, (0, 1))(shared, x[0])
    for inner in (lambda a, b: vjp(value, a, b)[0], lambda a, b: torch.func.grad_and_value(value)(a, b)[1]):
        found = grad(inner, (0, 1))(shared, x[0])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    leaves = shared.clone().requires_grad_(), x[0].clone().requires_grad_()
    vjp(value, *leaves)[0].backward()
    assert torch.equal(leaves[0].grad, expected[0]) and torch.equal(leaves[1].grad, expected[1])


@pytest.mark.parametrize("name", FORWARD)
def test_a_second_derivative_is_refused(name):
    value, shared, x = case(name)
    first = grad(value, 1)

    def by_hand(a):
        (found,) = torch.autograd.grad(value(shared, a), a, create_graph=True)
        found.sum().backward()

    for call in (
        lambda a: grad(lambda b: first(shared, b).sum())(a),
        lambda a: jacrev(lambda b: first(shared, b)[0])(a),
        lambda a: vmap(grad(lambda b: first(shared, b).sum()))(a[None]),
        lambda a: first(shared, a.requires_grad_()).sum().backward(),
        lambda a: by_hand(a.requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match=f"^{name} has no second derivative"):
            call(x[0].clone())


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_is_refused(name):
    value, shared, x = case(name)

    def of_rows(a):
        return value(shared, a)

    a = x[0]
    for call in (
        lambda: torch.func.jvp(of_rows, (a,), (a,)),
        lambda: torch.func.jvp(lambda b: value(b, a), (shared,), (shared,)),
        lambda: torch.func.jacfwd(of_rows)(a),
        lambda: torch.func.hessian(of_rows)(a),
        lambda: torch.func.linearize(of_rows, a),
        lambda: torch.func.jvp(grad(of_rows), (a,), (a,)),
        lambda: grad(lambda b: torch.func.jvp(of_rows, (b,), (b,))[1])(a),
        lambda: vmap(lambda b: torch.func.jvp(of_rows, (b,), (b,)))(x),
        lambda: torch.func.jvp(vmap(of_rows), (x,), (x,)),
    ):
        with pytest.raises(ArgumentError, match=f"^{name} has no forward-mode derivative: take one in reverse mode"):
            call()
    # What has no tangent needs none.
    _, tangent = torch.func.jvp(lambda b: value(shared, a) * b, (a,), (a,))
    assert torch.equal(tangent, value(shared, a) * a)


def test_gradients_may_be_batched():
    leaf = torch.randn(5, 40).requires_grad_()
    y, dy = transformer_rtc.rms_norm(leaf), torch.randn(BATCH, 5, 40)
    (found,) = torch.autograd.grad(y, leaf, dy, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, leaf, one, retain_graph=True)[0] for one in dy]
    assert found.equal(torch.stack(expected))
    jacobian = torch.autograd.functional.jacobian
    row = torch.randn(1, 40)
    assert jacobian(transformer_rtc.rms_norm, row, vectorize=True).equal(jacobian(transformer_rtc.rms_norm, row))
