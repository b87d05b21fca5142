from __future__ import annotations

import itertools

import calls
import numpy as np
import pytest
import reference
from cases import CASES, FLOATS, Case
from frameworks import FRAMEWORKS, Guarded, bits, inputs

from transformer_rtc import rms_norm
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import BFLOAT16, FLOAT16, FLOAT32

EVERY_HIDDEN = sorted({case.hidden for case in CASES})
SOME_HIDDEN = (1, 2, 3, 7, 8, 31, 64, 129, 256, 1000, 1021, 4096, 4097, 16384, 16385, 50257, 131071)
# JAX has no arrays to write to, and CuPy no floats of 8 bits.
OF_EVERY_FRAMEWORK = [case for case in CASES if case.out in (*FLOATS, None)][3::29]
COMPILED = (
    *(Case(1, hidden, BFLOAT16, BFLOAT16, BFLOAT16) for hidden in EVERY_HIDDEN),
    *(Case(1, hidden, dtype, dtype, dtype) for hidden in SOME_HIDDEN for dtype in FLOATS),
    *(
        Case(1, hidden, x, weight, out, True)
        for hidden in (7, 1000, 4096, 20_001)
        for x, weight, out in itertools.product(FLOATS, (*FLOATS, None), FLOATS)
    ),
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", OF_EVERY_FRAMEWORK, ids=lambda case: case.name)
def test_every_framework_gives_its_own_arrays_and_the_same_bits(framework, case, implementation, rng):
    kind = FRAMEWORKS[framework]()
    given = calls.make_inputs(rng, case)
    arrays = {name: kind.array(host) for name, host in given.items()}
    results = {name: kind.host(array) for name, array in calls.call(case, arrays).items()}
    calls.hold_within(case, results, calls.expect(case, given))
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits(kind.host(array)), bits(given[name]), err_msg=name)
    staged = calls.call(case, given)
    for name, host in results.items():
        np.testing.assert_array_equal(bits(staged[name]), bits(host), err_msg=name)


@pytest.mark.parametrize(
    ("x_type", "out_type"), list(itertools.product(FLOATS, FLOATS)), ids=lambda dtype: dtype.symbol
)
@pytest.mark.parametrize("weight_type", (*FLOATS, None), ids=lambda dtype: dtype.symbol if dtype else "none")
@pytest.mark.parametrize("hidden", [7, 1000, 4096, 20_001])
def test_every_combination_of_types(x_type, weight_type, out_type, hidden, implementation, gpu, rng):
    case = Case(5, hidden, x_type, weight_type, out_type, True)
    x, weight = inputs(rng, case)
    y, rstd = rms_norm(
        gpu.array(x), None if weight is None else gpu.array(weight), out_dtype=gpu.dtype(out_type), return_rstd=True
    )
    expected, expected_rstd = reference.rms_norm(x, weight)
    assert y.dtype == gpu.dtype(out_type)
    reference.assert_close(gpu.host(y), expected, out_type)
    reference.assert_close(gpu.host(rstd), expected_rstd, FLOAT32, "rstd")


@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5, 0.1])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-5, 0.1, 3])
def test_eps_and_the_weights_offset_are_the_callers(offset, eps, implementation, gpu, rng):
    for dtype in FLOATS:
        x, weight = inputs(rng, Case(9, 300, dtype, dtype, dtype, False))
        y = rms_norm(gpu.array(x), gpu.array(weight), eps, weight_offset=offset)
        reference.assert_close(gpu.host(y), reference.rms_norm(x, weight, eps, offset)[0], dtype)


def test_an_offset_without_a_weight_changes_nothing(implementation, gpu, rng):
    x, _ = inputs(rng, Case(9, 300, BFLOAT16, None, BFLOAT16, False))
    y = rms_norm(gpu.array(x), weight_offset=1.0)
    np.testing.assert_array_equal(bits(gpu.host(y)), bits(gpu.host(rms_norm(gpu.array(x)))))


# ---- Where rows lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", SOME_HIDDEN)
def test_every_alignment_gives_the_same_bits_and_writes_nothing_else(hidden, dtype, implementation, gpu, rng):
    rows = 5
    x, weight = inputs(rng, Case(rows, hidden, dtype, dtype, dtype, False))
    x_gpu, weight_gpu = gpu.array(x), gpu.array(weight)
    aligned = rms_norm(x_gpu, weight_gpu)
    expected = bits(gpu.host(aligned))
    reference.assert_close(gpu.host(aligned), reference.rms_norm(x, weight)[0], dtype)
    for offset in range(9):
        # Offsets of x, weight and out, each alone and together; rows padded by an odd number of elements as well.
        for of_x, of_weight, of_out, padding in (
            (offset, 0, 0, 0),
            (0, offset, 0, 0),
            (0, 0, offset, 0),
            (offset, offset, offset, 0),
            (offset, 0, 8 - offset, 3),
        ):
            strides = (hidden + padding, 1)
            moved_x = Guarded((rows, hidden), dtype, of_x, strides).fill(x_gpu).array
            moved_weight = Guarded((hidden,), dtype, of_weight).fill(weight_gpu).array
            out = Guarded((rows, hidden), dtype, of_out, (hidden + 2 * padding, 1))
            y = rms_norm(moved_x, moved_weight, out=out.array)
            where = f"offsets of x {of_x}, weight {of_weight}, out {of_out}, padding {padding}"
            np.testing.assert_array_equal(bits(gpu.host(y)), expected, err_msg=where)
            out.assert_intact_around()


@pytest.mark.parametrize("out_type", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (2, 127, 4096, 50257))
def test_a_misaligned_output_of_another_type(hidden, out_type, implementation, gpu, rng):
    for x_type in FLOATS:
        x, weight = inputs(rng, Case(3, hidden, x_type, x_type, out_type, False))
        expected = reference.rms_norm(x, weight)[0]
        for offset in (0, 1, 2, 3, 5):
            out = Guarded(x.shape, out_type, offset, (hidden + offset, 1))
            y = rms_norm(gpu.array(x), gpu.array(weight), out=out.array)
            reference.assert_close(gpu.host(y), expected, out_type)
            out.assert_intact_around()


@pytest.mark.parametrize("hidden", (64, 80, 128, 129))
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 8), (7, 1), (13, 5), (130, 3)])
def test_heads_inside_packed_rows(hidden, tokens, heads, implementation, gpu, rng):
    for dtype in FLOATS:
        x, weight = inputs(rng, Case(1, hidden, dtype, dtype, dtype, False), (tokens, 3 * heads))
        packed = Guarded(x.shape, dtype).fill(gpu.array(x))
        weight_gpu = gpu.array(weight)
        q, k, v = (packed.array[:, part * heads : (part + 1) * heads] for part in range(3))
        expected = reference.rms_norm(x, weight)[0]
        # Out of place, with an output that is dense.
        y, rstd = rms_norm(k, weight_gpu, return_rstd=True)
        assert y.is_contiguous() and rstd.shape == (tokens, heads)
        reference.assert_close(gpu.host(y), expected[:, heads : 2 * heads], dtype)
        # In place, and from v into k: q stays as it is.
        assert rms_norm(v, weight_gpu, out=k) is k
        rms_norm(v, weight_gpu, out=v)
        np.testing.assert_array_equal(bits(gpu.host(q)), bits(x[:, :heads]))
        np.testing.assert_array_equal(bits(gpu.host(k)), bits(gpu.host(v)))
        reference.assert_close(gpu.host(v), expected[:, 2 * heads :], dtype)
        packed.assert_intact_around()


def test_two_strides_in_any_order_of_the_dimensions(implementation, gpu, rng):
    x, weight = inputs(rng, Case(1, 200, FLOAT32, FLOAT32, FLOAT32, False), (6, 10, 7))
    x_gpu, weight_gpu = gpu.array(x), gpu.array(weight)
    for view, host in (
        (x_gpu[:, :, 3], x[:, :, 3]),
        (x_gpu[2:, 1:9], x[2:, 1:9]),
        (x_gpu.permute(1, 2, 0, 3)[..., 2, :], x.transpose(1, 2, 0, 3)[..., 2, :]),
        (x_gpu[:, 4].transpose(0, 1), x[:, 4].transpose(1, 0, 2)),
        (x_gpu[::2, None], x[::2, None]),
        (x_gpu[0, 0, 0], x[0, 0, 0]),
        (x_gpu[:1].expand(5, 10, 7, 200), np.broadcast_to(x[:1], (5, 10, 7, 200))),
    ):
        y = rms_norm(view, weight_gpu)
        assert y.shape == view.shape and y.is_contiguous()
        reference.assert_close(gpu.host(y), reference.rms_norm(host, weight)[0], FLOAT32)
        out = gpu.module.full_like(y, float("nan"))
        np.testing.assert_array_equal(bits(gpu.host(rms_norm(view, weight_gpu, out=out))), bits(gpu.host(y)))


@pytest.mark.parametrize("hidden", (1, 7, 128, 1000, 4096, 4097, 16385, 65536, 262145))
def test_in_place_gives_the_same_bits(hidden, implementation, gpu, rng):
    for dtype in FLOATS:
        x, weight = inputs(rng, Case(11, hidden, dtype, dtype, dtype, False))
        x_gpu, weight_gpu = Guarded(x.shape, dtype, 1).fill(gpu.array(x)), gpu.array(weight)
        expected = bits(gpu.host(rms_norm(x_gpu.array, weight_gpu)))
        assert rms_norm(x_gpu.array, weight_gpu, out=x_gpu.array) is x_gpu.array
        np.testing.assert_array_equal(bits(gpu.host(x_gpu.array)), expected)
        x_gpu.assert_intact_around()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("leading", [(0,), (0, 3), (3, 0, 2)])
def test_no_rows_give_an_empty_output(framework, leading, implementation):
    kind = FRAMEWORKS[framework]()
    y, rstd = rms_norm(kind.array(np.zeros((*leading, 300), np.float16)), return_rstd=True)
    y, rstd = kind.host(y), kind.host(rstd)
    assert (y.shape, y.dtype, rstd.shape, rstd.dtype) == ((*leading, 300), np.float16, leading, np.float32)


# ---- Values that are no ordinary numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (1, 3, 64, 129, 1000, 4096, 16385, 131071))
def test_infinity_nan_and_zeros_stay_in_their_rows(hidden, dtype, implementation, gpu, rng):
    x, weight = inputs(rng, Case(8, hidden, dtype, dtype, dtype, True))
    # The last element too: where a row ends, loads differ.
    x[1, rng.integers(hidden)], x[2, -1] = np.inf, -np.inf
    x[3, rng.integers(hidden)], x[4, -1] = np.nan, np.nan
    x[5] = 0
    x[6] = -0.0
    y, rstd = rms_norm(gpu.array(x), gpu.array(weight), return_rstd=True)
    expected, expected_rstd = reference.rms_norm(x, weight)
    reference.assert_close(gpu.host(y), expected, dtype)
    reference.assert_close(gpu.host(rstd), expected_rstd, FLOAT32, "rstd")


def test_zeros_without_eps_are_nan_as_zero_times_infinity_is(implementation, gpu):
    y, rstd = rms_norm(gpu.array(np.zeros((3, 100), np.float32)), eps=0.0, return_rstd=True)
    assert np.isnan(gpu.host(y)).all() and np.isposinf(gpu.host(rstd)).all()


def test_an_output_beyond_its_type_is_infinite(implementation, gpu):
    x, weight = np.ones((2, 40), np.float32), np.full(40, 1e6, np.float32)
    weight[1::2] *= -1
    y = gpu.host(rms_norm(gpu.array(x), gpu.array(weight), out_dtype="float16"))
    np.testing.assert_array_equal(y, np.sign(weight) * np.full((2, 40), np.inf))


@pytest.mark.parametrize("exponent", [-130, -60, -20, 40, 55])
def test_tiny_and_huge_rows(exponent, implementation, gpu, rng):
    # Squares of up to 2^126 are no overflow; those below the smallest number vanish beside eps.
    for dtype in (FLOAT32, BFLOAT16):
        x = (rng.standard_normal((6, 257)) * 2.0**exponent).astype(reference.NUMPY_TYPES[dtype])
        y = gpu.host(rms_norm(gpu.array(x)))
        reference.assert_close(y, reference.rms_norm(x)[0], dtype)


def test_a_nan_in_the_weight_reaches_its_column_and_no_other(implementation, gpu, rng):
    x, weight = inputs(rng, Case(8, 1000, BFLOAT16, BFLOAT16, BFLOAT16, False))
    weight[[0, 500, 999]] = np.nan
    y = rms_norm(gpu.array(x), gpu.array(weight))
    reference.assert_close(gpu.host(y), reference.rms_norm(x, weight)[0], BFLOAT16)


# ---- A row's bits do not depend on the others -----------------------------------------------------------------------


def assert_rows_do_not_depend_on_each_other(call, gpu, rng, hidden, dtype, most=65536):
    torch = gpu.module
    probe, weight = inputs(rng, Case(1, hidden, dtype, dtype, dtype, False))
    probe, weight = gpu.array(probe), gpu.array(weight)
    alone = bits(gpu.host(call(probe, weight)))
    for rows in (1, 2, 3, 7, 129, 1000, 4099, 65536):
        if rows > most:
            continue
        x = torch.empty((rows, hidden), dtype=probe.dtype, device="cuda").normal_()
        places = sorted({0, 1 % rows, rows // 2, rows - 1, int(rng.integers(rows))})
        x[places] = probe
        y = call(x, weight)
        for place in places:
            np.testing.assert_array_equal(bits(gpu.host(y[place])), alone[0], err_msg=f"row {place} of {rows}")
        del x, y


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (1, 64, 129, 4096, 4097, 65536))
def test_a_rows_bits_are_the_same_alone_and_among_many(hidden, dtype, implementation, gpu, rng):
    assert_rows_do_not_depend_on_each_other(rms_norm, gpu, rng, hidden, dtype)


@pytest.mark.parametrize("hidden", [hidden for hidden in EVERY_HIDDEN if hidden > 1])
def test_a_rows_bits_are_the_same_alone_and_among_some_for_every_hidden_size(hidden, implementation, gpu, rng):
    assert_rows_do_not_depend_on_each_other(rms_norm, gpu, rng, hidden, BFLOAT16, min(4099, (1 << 28) // hidden))


def test_more_rows_than_a_32_bit_offset_reaches(implementation, gpu, rng):
    torch = gpu.module
    rows, hidden = (1 << 32) // 1000 + 5, 1000
    x = torch.empty((rows, hidden), dtype=torch.bfloat16, device="cuda").normal_()
    y, rstd = rms_norm(x, return_rstd=True)
    for place in (0, (1 << 31) // hidden, rows - 1):
        expected, expected_rstd = reference.rms_norm(gpu.host(x[place]))
        reference.assert_close(gpu.host(y[place]), expected, BFLOAT16)
        reference.assert_close(gpu.host(rstd[place : place + 1]), expected_rstd[None], FLOAT32, "rstd")


# ---- Rows of several CTAs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (65536, 65537, 131071, 262144, 1048576, 1048577, 3_000_001))
def test_clusters_and_cooperative_grids_of_more_rows_than_are_resident(limited, hidden, dtype, gpu, rng):
    call, family = limited
    distinct, repeats = 3, 100 if hidden <= 262144 else 30
    x, weight = inputs(rng, Case(distinct, hidden, dtype, dtype, dtype, True))
    expected, expected_rstd = reference.rms_norm(x, weight)
    x_gpu, weight_gpu = gpu.array(x), gpu.array(weight)
    many = x_gpu.repeat(repeats, 1)
    out = Guarded(tuple(many.shape), dtype, offset=int(rng.integers(4)))
    y, rstd = call(many, weight_gpu, out.array, True)
    first = gpu.host(y[:distinct])
    reference.assert_close(first, expected, dtype)
    reference.assert_close(gpu.host(rstd[:distinct]), expected_rstd, FLOAT32, "rstd")
    # Every repetition has the bits of the first.
    torch = gpu.module
    integers = torch.int32 if dtype is FLOAT32 else torch.int16
    assert (y.view(integers).view(repeats, distinct, hidden) == y[:distinct].view(integers)).all()
    assert (rstd.view(torch.int32).view(repeats, distinct) == rstd[:distinct].view(torch.int32)).all()
    # In place, twice: no state outlives a launch.
    for _ in range(2):
        again = many.clone()
        call(again, weight_gpu, again)
        assert (again.view(integers) == y.view(integers)).all()
    out.assert_intact_around()
    if hidden >= 262144:  # more than a CTA's shared memory holds: the rows really were shared, and as asked
        assert family.rules[-1].ctas_per_row > 1
        assert family.rules[-1].clusters == (family.max_cluster_size > 1)


def test_the_bits_of_a_shared_row_do_not_depend_on_the_others(limited, gpu, rng):
    call, _ = limited
    for hidden in (65536, 131071):
        assert_rows_do_not_depend_on_each_other(call, gpu, rng, hidden, BFLOAT16, 4099)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.symbol)
@pytest.mark.parametrize("hidden", (1 << 20, (1 << 20) + 1, 5_000_011))
def test_rows_of_a_million_and_more(hidden, dtype, implementation, gpu, rng):
    x, weight = inputs(rng, Case(2, hidden, dtype, dtype, dtype, False))
    out = Guarded(x.shape, dtype, 1)
    y = rms_norm(gpu.array(x), gpu.array(weight), out=out.array)
    reference.assert_close(gpu.host(y), reference.rms_norm(x, weight)[0], dtype)
    out.assert_intact_around()


# ---- What frameworks promise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["torch", "cupy", "numpy"])
def test_an_output_of_the_caller_is_returned_and_filled(framework, implementation, rng):
    kind = FRAMEWORKS[framework]()
    for out_type in FLOATS:
        x, weight = inputs(rng, Case(6, 1001, FLOAT16, FLOAT16, out_type, False))
        out = kind.array(np.full(x.shape, np.nan, reference.NUMPY_TYPES[out_type]))
        assert rms_norm(kind.array(x), kind.array(weight), out=out) is out
        reference.assert_close(kind.host(out), reference.rms_norm(x, weight)[0], out_type)


def test_numpy_outputs_with_strides_change_nothing_around_them(implementation, rng):
    x, weight = inputs(rng, Case(1, 100, FLOAT32, FLOAT32, FLOAT32, False), (5, 6))
    memory = np.full((5, 9, 111), np.nan, np.float32)
    for place in ((slice(None), slice(2, 8), slice(7, 107)), (slice(None, None, -1), slice(1, 7), slice(3, 103))):
        memory.fill(np.nan)
        out = memory[place]
        assert rms_norm(x, weight, out=out) is out
        reference.assert_close(out, reference.rms_norm(x, weight)[0], FLOAT32)
        out.fill(np.nan)
        assert np.isnan(memory).all()
    # In place inside packed rows: numpy's memory is mirrored as it lies.
    packed = np.concatenate([x, x + 1], axis=1)
    before = packed.copy()
    rms_norm(packed[:, :6], weight, out=packed[:, :6])
    reference.assert_close(packed[:, :6], reference.rms_norm(before[:, :6], weight)[0], FLOAT32)
    np.testing.assert_array_equal(packed[:, 6:], before[:, 6:])


def test_numpy_overlap_and_read_only_outputs_are_refused():
    memory = np.zeros((5, 100), np.float32)
    with pytest.raises(ArgumentError, match="out must be x itself or not overlap it"):
        rms_norm(memory[:4], out=memory[1:])
    out = np.zeros((5, 100), np.float32)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="out is read-only"):
        rms_norm(memory, out=out)
    with pytest.raises(ArgumentError, match="x must have at least one dimension"):
        rms_norm(np.ones((), np.float32))


def test_torch_tensors_of_the_host_come_back_to_the_host(torch, implementation, rng):
    for dtype in FLOATS:
        x, _ = inputs(rng, Case(4, 77, dtype, None, dtype, False))
        tensor = torch.from_numpy(bits(x)).view(getattr(torch, dtype.name))
        y = rms_norm(tensor)
        assert y.device.type == "cpu" and y.dtype == tensor.dtype
        numpy_bits = y.view(torch.int32 if dtype is FLOAT32 else torch.int16).numpy()
        reference.assert_close(numpy_bits.view(x.dtype), reference.rms_norm(x)[0], dtype)
        with pytest.raises(ArgumentError, match="weight must be on the host"):
            rms_norm(tensor, torch.ones(77, dtype=tensor.dtype, device="cuda"))
        with pytest.raises(ArgumentError, match="weight must be on the GPU"):
            rms_norm(tensor.cuda(), torch.ones(77, dtype=tensor.dtype))


def test_a_gpu_tensor_that_requires_grad_is_refused_only_while_grad_mode_is_on(torch):
    x, weight = torch.ones(4, 64, device="cuda"), torch.nn.Parameter(torch.ones(64, device="cuda"))
    with pytest.raises(ArgumentError, match=r"^rms_norm: weight requires grad.*torch.no_grad"):
        rms_norm(x, weight)
    with torch.no_grad():
        assert rms_norm(x, weight).shape == x.shape
    assert rms_norm(x, weight.detach()).shape == x.shape


def test_gpu_tensors_that_cannot_be_viewed_are_refused(torch):
    class Mine(torch.Tensor):
        pass

    x = torch.ones(4, 64, device="cuda")
    bad = {
        "subclass": x.as_subclass(Mine),
        "must be one of": x.double(),
        "must be contiguous in its last dimension": x[:, ::2],
        "two strides": torch.ones(3, 4, 5, 64, device="cuda")[::2, ::2, ::2],
        "at least one dimension": x[0, 0],
    }
    for message, array in bad.items():
        with pytest.raises(ArgumentError, match=message):
            rms_norm(array)
    for message, out in {"overlap": x[:3], "overlap each other": x[:1].expand(3, 64)}.items():
        with pytest.raises(ArgumentError, match=message):
            rms_norm(x[1:], out=out)
    with pytest.raises(ArgumentError, match="same framework"):
        rms_norm(x, np.ones(64, np.float32))


def test_jax_refuses_out_and_tracers_and_keeps_inputs_alive(rng):
    kind = FRAMEWORKS["jax"]()
    jax = kind.module
    x, weight = inputs(rng, Case(64, 4096, BFLOAT16, BFLOAT16, BFLOAT16, False))
    with pytest.raises(ArgumentError, match="out is a JAX array, and those are immutable"):
        rms_norm(kind.array(x), out=kind.array(x))
    with pytest.raises(ArgumentError, match="x is a JAX tracer"):
        jax.jit(rms_norm)(kind.array(x))
    # Inputs that nobody holds, and outputs that feed the next call and JAX's own work.
    expected = x
    y = kind.array(x)
    for _ in range(10):
        y = rms_norm(y * 1, kind.array(weight))
    for _ in range(10):
        expected = rms_norm(expected, weight)
    np.testing.assert_array_equal(bits(kind.host(y)), bits(expected))


def test_a_jax_array_of_the_host_comes_back_to_the_host(rng):
    jax = FRAMEWORKS["jax"]().module
    x, weight = inputs(rng, Case(6, 1000, BFLOAT16, BFLOAT16, BFLOAT16, False))
    cpu = jax.local_devices(backend="cpu")[0]
    y = rms_norm(jax.device_put(x, cpu), jax.device_put(weight, cpu))
    assert y.devices() == {cpu}
    np.testing.assert_array_equal(bits(np.asarray(y)), bits(rms_norm(x, weight)))


def test_an_array_of_another_framework_comes_back_as_our_own(torch, rng):
    x, _ = inputs(rng, Case(6, 1000, FLOAT32, None, FLOAT32, False))
    tensor = torch.from_numpy(x).cuda()
    torch.cuda.synchronize()
    interface = type("Other", (), {"__cuda_array_interface__": tensor.__cuda_array_interface__})()
    dlpack = type(
        "Other",
        (),
        {
            "__dlpack__": lambda self, **options: tensor.__dlpack__(**options),
            "__dlpack_device__": lambda self: tensor.__dlpack_device__(),
        },
    )()
    for other in (interface, dlpack):
        y, rstd = rms_norm(other, return_rstd=True)
        assert (type(y).__name__, y.shape, y.dtype, rstd.shape) == ("DeviceArray", (6, 1000), "float32", (6,))
        back = torch.from_dlpack(y)
        assert back.device.type == "cuda"
        reference.assert_close(back.cpu().numpy(), reference.rms_norm(x)[0], FLOAT32)
    with pytest.raises(ArgumentError, match="an address is no device memory"):
        bad = {**tensor.__cuda_array_interface__, "data": (x.ctypes.data, False)}
        rms_norm(type("Other", (), {"__cuda_array_interface__": bad})())


def test_a_cupy_stream_and_memory_pool_are_used(rng):
    kind = FRAMEWORKS["cupy"]()
    x, _ = inputs(rng, Case(6, 1000, FLOAT32, None, FLOAT32, False))
    x = kind.array(x)
    used = kind.module.get_default_memory_pool().used_bytes()
    y = rms_norm(x)
    assert kind.module.get_default_memory_pool().used_bytes() >= used + y.nbytes
