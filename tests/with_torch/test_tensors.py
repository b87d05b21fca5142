# SPDX-License-Identifier: Apache-2.0
"""Tensors of the host: which are taken, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest
from bad_values import Protocol

from transformer_rtc import Field, SimulatedDevice, add, add_rms_norm, rms_norm, rms_norm_backward, softmax, using
from transformer_rtc.errors import ArgumentError
from transformer_rtc.spec import Params

NAMES = "float32, float16, bfloat16"


@pytest.mark.usefixtures("without_driver")
def test_a_plain_tensor_a_parameter_and_a_buffer_are_taken(torch):
    with torch.no_grad():
        for x in (torch.ones(4, 64), torch.nn.Parameter(torch.ones(4, 64)), torch.nn.Buffer(torch.ones(4, 64))):
            assert rms_norm(x, torch.nn.Parameter(torch.ones(64))).shape == x.shape


def test_a_backward_of_a_tensor_that_requires_grad_is_refused_only_while_grad_mode_is_on(torch):
    x, dy = torch.ones(4, 64, requires_grad=True), torch.ones(4, 64)
    for name, arguments in {"x": (dy, x), "weight": (dy, dy, torch.nn.Parameter(torch.ones(64)))}.items():
        with pytest.raises(ArgumentError, match=f"^rms_norm_backward: {name} requires grad.*torch.no_grad"):
            rms_norm_backward(*arguments)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert rms_norm_backward(dy, x).shape == x.shape


def test_a_tensor_of_several_elements_is_no_number(torch):
    several = torch.ones(2)
    with pytest.raises(ArgumentError, match=r"^factor must be of the type float32; it is tensor"):
        Params([Field("factor", "float32")]).pack(factor=several)
    with pytest.raises(ArgumentError, match=r"^softmax: window must be a number of keys"):
        softmax(torch.ones(4, 64), causal="aligned", window=several)


def test_arrays_of_two_frameworks_are_refused(torch):
    host = np.ones((4, 64), np.float32)
    for x, other in ((host, torch.ones(64)), (torch.ones(4, 64), host[0]), (torch.ones(4, 64), Protocol())):
        for name in ("weight", "out"):
            message = f"^rms_norm: {name} must be of the same framework as the .* before it"
            with pytest.raises(ArgumentError, match=message):
                rms_norm(x, **{name: other})


def test_a_subclass_of_tensor_is_taken_and_kept(torch):
    class Mine(torch.Tensor):
        pass

    x, weight = torch.randn(4, 64), torch.rand(64)
    expected = rms_norm(x, weight)
    for arguments in ((x.as_subclass(Mine), weight), (x, weight.as_subclass(Mine))):
        found = rms_norm(*arguments)
        assert type(found) is Mine and found.as_subclass(torch.Tensor).equal(expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_fake_tensor_gives_a_fake_one(torch, device):
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 64, device=device)
    found = rms_norm(x, out_dtype=torch.bfloat16)
    assert type(found) is type(x) and found.shape == x.shape
    assert found.dtype == torch.bfloat16 and found.device == x.device


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, meta: rms_norm(x, meta[0]), "weight must be on the device of x, cpu; it is on meta"),
        (lambda x, meta: rms_norm(meta, x[0]), "weight must be on the device of x, meta; it is on cpu"),
        (lambda x, meta: rms_norm(x.clone().requires_grad_(), meta[0]), "weight must be on the device of x"),
        (lambda x, meta: rms_norm(x, out=meta), "out must be on the device of x, cpu; it is on meta"),
        (lambda x, meta: softmax(x, mask=meta > 0), "mask must be on the device of x"),
        (lambda x, meta: add(x, meta), "other must be on the device of x"),
    ],
)
def test_a_meta_tensor_beside_one_with_elements_is_refused(torch, call, says):
    with pytest.raises(ArgumentError, match=says):
        call(torch.ones(4, 64), torch.ones(4, 64, device="meta"))


def test_a_meta_tensor_gives_a_meta_one(torch):
    y, rstd = rms_norm(torch.ones(4, 64, device="meta"), return_rstd=True)
    assert y.is_meta and rstd.is_meta and y.shape == (4, 64) and rstd.shape == (4,)


def test_a_negated_view_has_its_sign(torch):
    z = torch.randn(6, 1, dtype=torch.complex64)
    view, right, x = z.conj().imag, -z.imag.contiguous(), torch.randn(6, 1)
    assert view.is_neg()
    assert rms_norm(view).equal(rms_norm(right))
    assert rms_norm(x, view[0]).equal(rms_norm(x, right[0]))
    assert add_rms_norm(x, view)[1].equal(x + right)
    assert rms_norm_backward(view, x).equal(rms_norm_backward(right, x))
    dense = torch.randn(4, 64, dtype=torch.complex64).conj().imag.as_strided((4, 64), (128, 1))
    assert dense.is_neg() and rms_norm(dense).equal(rms_norm(dense.clone()))
    with torch.device("meta"):
        assert rms_norm(torch.empty(0, 64, device="cpu")).device.type == "cpu"
    with pytest.raises(ArgumentError, match=r"^rms_norm: out is written in place.* and out requires grad"):
        rms_norm(x, out=view.detach().requires_grad_())


def test_gradients_of_negated_views_have_their_signs(torch):
    z = torch.randn(6, 1, dtype=torch.complex64)
    view, right = z.conj().imag, -z.imag.contiguous()
    for call in (
        lambda x: rms_norm(x, torch.full((1,), 2.0), eps=0.5),
        lambda x: softmax(x[None], sink=torch.zeros(1)),
    ):
        x = torch.randn(6, 1, requires_grad=True)
        assert torch.autograd.grad(call(x), x, view.expand(call(x).shape))[0].equal(
            torch.autograd.grad(call(x), x, right.expand(call(x).shape))[0]
        )
        of_complex, of_real = z.clone().requires_grad_(), right.clone().requires_grad_()
        call(of_complex.conj().imag).sum().backward()
        call(of_real).sum().backward()
        assert of_complex.grad.imag.equal(-of_real.grad)
    rms_norm(torch.ones(6, 1), torch.full((1,), 2.0), eps=3.0, out=view)
    assert (z.imag == -1).all()


def test_a_tangent_is_never_lost_without_a_word(torch):
    forward_ad = torch.autograd.forward_ad
    x, one, leaf = torch.randn(4, 64), torch.ones(()), torch.randn(4, 64, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone(), x)
        # Nothing is dual here, and what is written has no tangent any more.
        assert rms_norm(x).equal(rms_norm(x, out=dual)) and forward_ad.unpack_dual(dual).tangent.count_nonzero() == 0
        dual = forward_ad.make_dual(x.clone(), x)
        for call in (
            lambda: rms_norm(dual),
            lambda: rms_norm(x, dual[0]),
            lambda: add_rms_norm(x, dual),
            lambda: rms_norm_backward(dual, x),
            lambda: softmax(x[None], mask=dual),
            lambda: torch.autograd.grad(rms_norm(leaf), leaf, dual),
        ):
            with pytest.raises(ArgumentError, match=r"^\w+ has no forward-mode derivative: take one in reverse mode"):
                call()
        number = forward_ad.make_dual(one.clone(), one)
        for call in (lambda: rms_norm(x, eps=number), lambda: softmax(x, scale=number)):
            with pytest.raises(ArgumentError, match=r": (eps|scale) is a tensor with a tangent, and is taken as a num"):
                call()
    with pytest.raises(ArgumentError, match=r"^rms_norm: eps is a tensor with a tangent"):
        torch.func.jvp(lambda eps: rms_norm(x, eps=eps), (one,), (one,))
    with pytest.raises(ArgumentError, match=r"^rms_norm: eps is a tensor that requires grad"):
        torch.func.grad(lambda eps: rms_norm(x, eps=eps).sum())(one)


def test_what_is_written_through_an_operator_has_another_version(torch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            return operator(*arguments, **(keywords or {}))

    ones = torch.ones(4, 64)
    for call in (
        lambda h: rms_norm(h, out=h),
        lambda h: add_rms_norm(ones, ones, residual_out=h),
        lambda h: rms_norm(ones, out_dtype=torch.float8_e4m3fn, amax=h.view(-1)[:1]),
        lambda h: rms_norm(ones, out_dtype=torch.float8_e5m2, scale=torch.ones(1), scale_inv=h.view(-1)[:1]),
    ):
        leaf = torch.randn(4, 64, requires_grad=True)
        h = leaf * 1
        y = h.square().sum()
        with Passes(), torch.no_grad():
            call(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_a_freed_storage_is_refused(torch):
    x = torch.randn(4, 64)
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"^rms_norm: x has elements, but no memory$"):
        rms_norm(x)


def test_a_distributed_tensor_beside_a_plain_one_is_refused_by_torch(torch):
    pytest.importorskip("torch.distributed.tensor")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        shard = torch.distributed.tensor.Shard(0)
        x = torch.distributed.tensor.DTensor.from_local(torch.randn(2, 64), mesh, [shard])
        assert rms_norm(x).placements == (shard,) and rms_norm(x.to_local()).shape == (2, 64)
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            rms_norm(x, torch.ones(64))
    finally:
        torch.distributed.destroy_process_group()


def test_a_sparse_tensor_is_refused(torch):
    with pytest.raises(ArgumentError, match=r"^rms_norm: x must be a strided tensor .*; it is torch.sparse_coo on cpu"):
        rms_norm(torch.ones(4, 64).to_sparse())


def test_what_else_torch_has_is_no_array(torch):
    for x in (torch.float32, torch.nn.Linear(2, 2), torch.Size((4, 64)), torch.device("cpu"), torch.Tensor):
        with pytest.raises(ArgumentError, match=r"^rms_norm: x must be an array"):
            rms_norm(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_or_quantized_tensor_is_refused(torch):
    with pytest.raises(ArgumentError, match=r"^rms_norm: x "):
        rms_norm(torch.nested.nested_tensor([torch.ones(4), torch.ones(8)]))
    with pytest.raises(ArgumentError, match=rf"^rms_norm: x must be one of {NAMES}; it is torch.qint8"):
        rms_norm(torch.quantize_per_tensor(torch.ones(4, 64), 0.1, 0, torch.qint8))


@pytest.mark.parametrize("name", ["float64", "int32", "complex64", "bool", "float8_e4m3fn"])
def test_a_tensor_of_another_type_is_refused(torch, name):
    with pytest.raises(ArgumentError, match=rf"^rms_norm: x must be one of {NAMES}; it is (torch\.)?{name}"):
        rms_norm(torch.zeros(4, 64).to(getattr(torch, name)))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_values_go_in_and_are_written_in_place(shape, torch):
    x, amax = torch.full((4, 64), -2.0), torch.full(shape, 0.5)
    options = {"eps": 0.0, "out_dtype": "float8_e4m3fn", "scale": torch.full(shape, 3.0)}
    with using(SimulatedDevice(static=True)):
        found = rms_norm(x, amax=amax, **options)
        with pytest.raises(ArgumentError, match=r"^rms_norm: amax must be of the same framework"):
            rms_norm(x, amax=np.ones(shape, np.float32), **options)
    assert (found.float() == -3).all() and amax.shape == shape and amax.item() == 1


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_outputs_of_eight_bits_are_of_torch_s_own_types(name, torch):
    x, dtype = torch.ones(4, 64), getattr(torch, name)
    out = torch.zeros(4, 64, dtype=dtype)
    with using(SimulatedDevice(static=True)):
        found, _ = rms_norm(x, out_dtype=dtype, row_scaling=True)
        assert rms_norm(x, out=out, row_scaling=True)[0] is out
    assert (
        found.dtype == dtype and found.view(torch.uint8).all() and found.view(torch.uint8).equal(out.view(torch.uint8))
    )
