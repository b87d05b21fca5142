# SPDX-License-Identifier: Apache-2.0
"""The softmax modules of Megatron-LM and TransformerEngine, against float64 references of their paths through torch."""

from __future__ import annotations

import enum
import itertools

import kernel_cache
import pytest

from transformer_rtc import operator, using
from transformer_rtc.errors import ArgumentError

torch = pytest.importorskip("torch")
megatron = pytest.importorskip("transformer_rtc.torch.megatron")
transformer_engine = pytest.importorskip("transformer_rtc.torch.transformer_engine")
scale_mask_softmax = pytest.importorskip("transformer_rtc.torch.scale_mask_softmax")

HALF_ULP = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
AttnMaskType = enum.Enum("AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary"])


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    monkeypatch.setattr(operator, "manager", kernel_cache.manager())
    torch.manual_seed(47)
    with using("simulator"):
        yield


def softmax_of_megatron(mask_type=AttnMaskType.causal, *, dtype=torch.float32, fusion=True, mask_func=None, **options):
    flags = dtype == torch.float16, dtype == torch.bfloat16
    arguments = {"softmax_in_fp32": True, "scale": None} | options
    return megatron.FusedScaleMaskSoftmax(*flags, mask_type, fusion, mask_func, **arguments)


def seen_keys(queries: int, keys: int, before: int | None, after: int | None):
    """Return which keys a query sees whose own are the last ones."""
    own = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen &= (key >= own - before) if before is not None else seen
    return seen & ((key <= own + after) if after is not None else seen)


def in_float64(scores, excluded, scale=None, sink=None):
    """Return torch's softmax of scores that are float64, and zeros where everything is excluded."""
    excluded = excluded.expand(scores.shape)
    v = (scores if scale is None else scores * scale).masked_fill(excluded, -10000.0)
    if sink is not None:
        v = torch.cat([v, sink.view(1, -1, 1, 1).expand(*v.shape[:3], 1)], -1)
    y = torch.softmax(v, -1)[..., : scores.shape[-1]]
    return y.masked_fill(excluded.all(-1, keepdim=True), 0.0)


def check(module_call, scores, excluded, scale=None, sink=None, dtype=None):
    """Compare y, and the gradients of the scores and the sink."""
    dtype = dtype or scores.dtype
    given = [one.requires_grad_() for one in (scores, sink) if one is not None]
    exact = [one.detach().double().requires_grad_() for one in given]
    y = module_call(*given)
    expected = in_float64(exact[0], excluded, scale, exact[1] if sink is not None else None)
    assert y.dtype == dtype and y.shape == scores.shape
    assert (y[excluded.expand(y.shape)] == 0).all()
    bound = HALF_ULP[dtype]
    assert (y.double() - expected).abs().max() <= bound
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    expected.backward(dy.double())
    for one, of in zip(given, exact, strict=True):
        assert one.grad.dtype == one.dtype
        # Each y of a row is rounded, and so is what it is multiplied by: both by half an ulp.
        error = (one.grad.double() - of.grad).abs().max()
        assert error <= 4 * (bound + HALF_ULP[one.dtype]) * of.grad.abs().max().clamp(min=1)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [1, 5, 33, 130])
def test_megatrons_mask_types_windows_and_offsets_are_those_of_float64(keys, dtype):
    def scores(queries=keys):
        return torch.randn(2, 3, queries, keys).to(dtype)

    causal = ~seen_keys(keys, keys, None, 0)
    check(lambda x: softmax_of_megatron(dtype=dtype)(x, None), scores(), causal)
    sink = torch.randn(3).to(dtype)
    attend = softmax_of_megatron(dtype=dtype, scale=0.5)
    check(lambda x, sink: attend(x, None, sink), scores(), causal, 0.5, sink)
    mask = torch.rand(2, 1, 7, keys) < 0.4
    mask[1, 0, 2] = True
    for mask_type in ("padding", AttnMaskType.arbitrary):
        attend = softmax_of_megatron(mask_type, dtype=dtype, scale=3)
        check(lambda x, attend=attend: attend(x, mask), scores(7), mask, 3)
    window = ~seen_keys(7, keys, 2, 0)
    check(lambda x: softmax_of_megatron(dtype=dtype, window_size=(2, 0))(x, None), scores(7), window)
    check(lambda x: softmax_of_megatron(dtype=dtype, window_size=(2, 0))(x, mask), scores(7), window | mask)


@pytest.mark.parametrize("before, after", [(3, 2), (-1, 2), (3, -1), (-1, 0), (0, 0), (-1, -1)])
def test_a_window_has_two_limits_of_which_minus_one_is_none(before, after):
    hidden = ~seen_keys(6, 9, *(None if limit == -1 else limit for limit in (before, after)))
    for mask_func in (None, lambda scores, mask: scores.masked_fill(mask, -10000.0)):
        attend = softmax_of_megatron("padding", window_size=(before, after), mask_func=mask_func)
        check(lambda x, attend=attend: attend(x, None), torch.randn(1, 2, 6, 9), hidden)
        mask = torch.rand(1, 1, 6, 9) < 0.3
        mask[..., range(6), range(3, 9)] = False
        check(lambda x, attend=attend, mask=mask: attend(x, mask), torch.randn(1, 2, 6, 9), hidden | mask)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_megatrons_flags_say_the_data_type_only_if_the_softmax_is_in_float32(given):
    scores = torch.randn(1, 2, 5, 5).to(given)
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    for dtype in (torch.float16, torch.bfloat16):
        for in_float32, found in ((True, dtype), (False, given)):
            attend = softmax_of_megatron("no_mask", dtype=dtype, softmax_in_fp32=in_float32)
            check(lambda x, attend=attend: attend(x, None), scores.clone(), nothing, dtype=found)
    check(lambda x: softmax_of_megatron("no_mask", scale=2.0)(x, None), scores.clone(), nothing, 2.0)


def test_a_row_of_which_everything_is_excluded_is_zeros_and_so_is_its_gradient():
    mask = torch.zeros(2, 1, 4, 9, dtype=torch.bool)
    mask[0, 0, 1] = mask[1] = True
    scores = torch.randn(2, 3, 4, 9)
    scores[0, :, 1] = torch.nan
    for attend in (
        lambda x: softmax_of_megatron("padding")(x, mask),
        lambda x: transformer_engine.FusedScaleMaskSoftmax(None)(x, mask, "padding"),
    ):
        x = scores.clone().requires_grad_()
        y = attend(x)
        y.square().sum().backward()
        for found in (y.detach(), x.grad):
            assert found.isfinite().all()
            assert not found[0, :, 1].any() and not found[1].any() and found[0, :, 0].any()
    with_offset = softmax_of_megatron("padding")(scores, mask, torch.zeros(3))
    assert not with_offset[1].any()


def test_a_mask_is_read_as_it_is_and_scores_are_not_changed(monkeypatch):
    given = []
    original = scale_mask_softmax.softmax
    monkeypatch.setattr(
        scale_mask_softmax, "softmax", lambda x, **options: given.append((x, options["mask"])) or original(x, **options)
    )
    scores, mask = torch.randn(2, 3, 4, 9), torch.rand(2, 1, 4, 9) < 0.5
    before = scores.clone()
    sliced = torch.rand(2, 1, 8, 16) < 0.5
    for x, one in ((scores, mask), (torch.randn(2, 3, 4, 16)[..., :9], sliced[:, :, 2:6, 3:12])):
        softmax_of_megatron("padding")(x, one)
        transformer_engine.FusedScaleMaskSoftmax(None)(x, one, "padding")
        assert all(used[0] is x and used[1] is one for used in given)
        given.clear()
    assert torch.equal(scores, before)


@pytest.mark.parametrize("shape", [(), (9,), (4, 9), (2, 1, 1, 9), (2, 1, 4, 1), (1, 3, 1, 9), (2, 3, 4, 9)], ids=str)
def test_masks_are_broadcast_as_torch_does_it_and_scores_have_any_strides(shape):
    mask = torch.rand(shape) < 0.5
    check(lambda x: softmax_of_megatron("padding")(x, mask), torch.randn(2, 3, 4, 9), mask)
    mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2) if mask.dim() > 1 else mask
    others = torch.randn(2, 4, 3, 9).transpose(1, 2), torch.randn(2, 3, 9, 4).transpose(2, 3)
    for scores in others:
        check(lambda x: softmax_of_megatron("padding")(x, mask.to(torch.uint8)), scores, mask)


def test_a_causal_type_and_a_mask_are_joined_if_fusion_is_on_else_the_mask_replaces_the_type():
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    mask[1, ..., 4:] = True
    causal = ~seen_keys(6, 6, None, 0)
    check(lambda x: softmax_of_megatron()(x, mask), torch.randn(2, 2, 6, 6), causal | mask)
    check(lambda x: softmax_of_megatron(fusion=False)(x, mask), torch.randn(2, 2, 6, 6), mask)
    for fusion in (True, False):
        attend = softmax_of_megatron(fusion=fusion)
        check(lambda x, attend=attend: attend(x, mask[..., :3, :]), torch.randn(2, 2, 3, 6), mask[..., :3, :])


def test_a_single_query_sees_all_keys_and_other_numbers_of_queries_and_keys_need_a_mask():
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    check(lambda x: softmax_of_megatron()(x, None), torch.randn(2, 2, 1, 6), nothing)
    for error in (ArgumentError, AssertionError):
        with pytest.raises(error, match="3 queries and 6 keys"):
            softmax_of_megatron()(torch.randn(1, 2, 3, 6), None)


def test_a_mask_function_that_is_not_known_is_called_on_the_scaled_scores():
    asked = []

    def attention_mask_func(scores, mask):  # others' function of this name, whose mask says what is kept
        asked.append((scores.dtype, mask))
        return (scores + 0.5).masked_fill(~mask, -10000.0)

    keeps = torch.rand(2, 1, 5, 9) < 0.6
    keeps[..., 0], keeps[..., 1] = True, False
    scores = torch.randn(2, 3, 5, 9).bfloat16()
    attend = softmax_of_megatron("padding", dtype=torch.bfloat16, mask_func=attention_mask_func, scale=2)
    check(lambda x: attend(x, keeps), scores.clone(), ~keeps, 2)
    attend = transformer_engine.FusedScaleMaskSoftmax(attention_mask_func)
    check(lambda x: attend(x, keeps, "arbitrary", 2), scores.clone(), ~keeps, 2)
    assert [dtype for dtype, _ in asked] == [torch.float32] * 2 and all(mask is keeps for _, mask in asked)
    attend.mask_func = lambda scores, mask: scores.masked_fill(mask, -10000.0)
    check(lambda x: attend(x, keeps, "arbitrary", 2), scores.clone(), keeps, 2)


def test_a_mask_function_that_is_not_known_gets_the_causal_mask_and_none_without_one():
    def mask_func(scores, mask):
        return scores.masked_fill(mask, -10000.0)

    causal = ~seen_keys(5, 5, None, 0)
    check(lambda x: softmax_of_megatron(mask_func=mask_func)(x, None), torch.randn(1, 2, 5, 5), causal)
    attend = transformer_engine.FusedScaleMaskSoftmax(mask_func)
    check(lambda x: attend(x, None, "causal_bottom_right"), torch.randn(1, 2, 3, 5), causal[2:])
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    assert check(lambda x: attend(x, None, "no_mask"), torch.randn(1, 2, 3, 5), nothing).any()


@pytest.mark.parametrize("module", ["megatron.core.transformer.utils", "transformer_engine.pytorch.utils"])
def test_the_mask_functions_of_the_projects_are_known_by_their_modules_and_names(module):
    def attention_mask_func(scores, mask):
        raise AssertionError("it is called")

    attention_mask_func.__module__ = module
    mask = torch.rand(5, 9) < 0.5
    attend = softmax_of_megatron("padding", mask_func=attention_mask_func, scale=2)
    check(lambda x: attend(x, mask), torch.randn(1, 2, 5, 9), mask, 2)
    known = softmax_of_megatron("padding", mask_func=megatron.attention_mask_func, scale=2)
    scores = torch.randn(1, 2, 5, 9)
    assert torch.equal(known(scores, mask), attend(scores, mask))
    filled = megatron.attention_mask_func(scores, mask)
    assert torch.equal(filled, scores.masked_fill(mask, -10000.0))


def test_megatrons_mask_function_writes_to_scores_that_are_neither_scaled_nor_copied():
    def attention_mask_func(scores, mask):
        scores.masked_fill_(mask, -10000.0)
        return scores

    attention_mask_func.__module__ = "megatron.core.transformer.utils"
    causal = ~seen_keys(5, 5, None, 0)
    for dtype, scale, grad in itertools.product((torch.float32, torch.bfloat16), (None, 2.0), (False, True)):
        attend = softmax_of_megatron(dtype=dtype, mask_func=attention_mask_func, scale=scale)
        scores = torch.randn(1, 2, 5, 5).to(dtype)
        expected = softmax_of_megatron(dtype=dtype, scale=scale)(scores, None)
        given = scores.clone().requires_grad_(grad)
        assert torch.equal(attend(given, None), expected)
        written = dtype == torch.float32 and scale is None and not grad
        assert torch.equal(given, scores.masked_fill(causal, -10000.0) if written else scores)
    everything = torch.ones(5, 5, dtype=torch.bool)
    attend = softmax_of_megatron("padding", mask_func=attention_mask_func)
    assert not attend(torch.randn(1, 2, 5, 5), everything).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 33), (9, 4), (1, 5)])
def test_mask_types_of_transformer_engine_are_those_of_float64(queries, keys, dtype):
    attend = transformer_engine.FusedScaleMaskSoftmax(transformer_engine.attention_mask_func)
    mask = torch.rand(2, 1, queries, keys) < 0.3
    nothing = torch.zeros(queries, keys, dtype=torch.bool)
    hidden = {
        "causal": torch.ones(queries, keys, dtype=torch.bool).triu(1),
        "causal_bottom_right": torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1),
        "padding": nothing,
    }
    for mask_type, excluded in hidden.items():
        for given in (None, mask):
            check(
                lambda x, mask_type=mask_type, given=given: attend(x, given, mask_type, 0.25),
                torch.randn(2, 3, queries, keys).to(dtype),
                excluded if given is None else excluded | given,
                0.25,
            )
    for mask_type in ("padding_causal", "padding_causal_bottom_right", "arbitrary"):
        scores = torch.randn(2, 3, queries, keys).to(dtype)
        check(lambda x, mask_type=mask_type: attend(x, mask, mask_type), scores, mask)
    check(lambda x: attend(x, mask, "no_mask"), torch.randn(2, 3, queries, keys).to(dtype), nothing)


def test_bad_arguments_are_refused_and_what_the_projects_assert_is_an_assertion():
    scores, mask = torch.randn(2, 3, 5, 5), torch.zeros(5, 5, dtype=torch.bool)
    attend, engine = softmax_of_megatron(), transformer_engine.FusedScaleMaskSoftmax(None)
    asserted = {
        "both be set": lambda: megatron.FusedScaleMaskSoftmax(True, True, "causal", True, None, True, None),
        "where there is a scale": lambda: softmax_of_megatron(softmax_in_fp32=False, scale=2.0),
        r"input must be \[batch.*\(3, 5, 5\)": lambda: attend(scores[0], mask),
        r"inp must be \[batch.*\(3, 5, 5\)": lambda: engine(scores[0], mask, "padding"),
        "scale; scale is 2.0": lambda: transformer_engine.FusedScaleMaskSoftmax(None, False)(
            scores, None, "causal", 2.0
        ),
    }
    for message, call in asserted.items():
        for error in (ArgumentError, AssertionError):
            with pytest.raises(error, match=message):
                call()
    refused = {
        "attn_mask_type must be .*AttnMaskType.padding_causal": lambda: softmax_of_megatron(
            AttnMaskType.padding_causal
        ),
        "attn_mask_type must be one of .*'prefix'": lambda: engine(scores, mask, "prefix"),
        "padding_causal needs a mask": lambda: engine(scores, None, "padding_causal"),
        "bool or uint8, not 0 where a score is excluded; it is of torch.float32": lambda: softmax_of_megatron(
            "padding"
        )(scores, mask.float()),
        r"input must be a tensor; it is \[1\]": lambda: attend([1], mask),
        r"mask must be a tensor .*it is \[True\]": lambda: engine(scores, [True], "padding"),
        "not 0 where .*torch.int64": lambda: engine(scores, mask.long(), "causal"),
        r"window_size must .*\(3,\)": lambda: softmax_of_megatron(window_size=(3,)),
        r"window_size must .*\(3, -2\)": lambda: softmax_of_megatron(window_size=(3, -2)),
        "window_size must .* 3$": lambda: softmax_of_megatron(window_size=3),
        "mask must have the shape": lambda: attend(scores, torch.zeros(2, 1, 5, 6, dtype=torch.bool)),
    }
    for message, call in refused.items():
        with pytest.raises(ArgumentError, match=message):
            call()
    window = softmax_of_megatron(window_size=(2, 2))
    with pytest.raises(ArgumentError, match="bool or uint8"):
        window(scores, mask.float())


def test_modules_have_no_state_and_say_what_they_are():
    attend = softmax_of_megatron(scale=2.0, window_size=(4, 0))
    assert not attend.state_dict() and not list(attend.buffers())
    assert repr(attend) == "FusedScaleMaskSoftmax(causal, scale=2.0, window_size=(4, 0))"
    for module in (attend, transformer_engine.FusedScaleMaskSoftmax(None)):
        assert module.is_kernel_available(None, 1, 3, 5, 7) is True


def test_nothing_in_the_modules_breaks_a_graph():
    scores, mask = torch.randn(2, 3, 6, 6), torch.rand(2, 1, 6, 6) < 0.3
    engine = transformer_engine.FusedScaleMaskSoftmax(lambda scores, mask: scores.masked_fill(mask, -10000.0))
    calls = [
        (softmax_of_megatron(), (scores, mask, torch.zeros(3))),
        (softmax_of_megatron("padding", dtype=torch.bfloat16, window_size=(2, 1)), (scores.bfloat16(), mask)),
        (engine, (scores, mask, "causal", 0.5)),
    ]
    for module, arguments in calls:
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x, *others = arguments
        found, expected = [], []
        for call, results in ((compiled, found), (module, expected)):
            leaf = x.clone().requires_grad_()
            results.append(call(leaf, *others))
            results[0].square().sum().backward()
            results.append(leaf.grad)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
