# SPDX-License-Identifier: Apache-2.0
"""What times configurations, on the fake driver: its kernels do nothing, and its events tell of no time."""

from __future__ import annotations

BENCH = """
import gc, sys, types
import transformer_rtc.compiler as compiler
from transformer_rtc import tuner_bench, warming
from transformer_rtc.declaration import declaration_of
from transformer_rtc.errors import CompileError, DriverError, LaunchError
from transformer_rtc.kernel_manager import KernelManager

# The bindings: memory is the host's. Between a call's two events, `between` is set.
between, made_between = [False], []
def memset(pointer, value, size, stream):
    ctypes.memset(pointer, value, min(size, 1))
    return (0,)
def copy(to, source, size, stream):
    ctypes.memmove(to, source, size)
    return (0,)
def record(event, stream):
    between[0] = not between[0]
    return (0,)
bindings = types.ModuleType("cuda.bindings.driver")
bindings.CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
for name, function in {
    "cuDeviceGet": lambda device: (0, device), "cuDevicePrimaryCtxRetain": lambda device: (0, 1),
    "cuDevicePrimaryCtxRelease": lambda device: (0,), "cuCtxSetCurrent": lambda context: (0,),
    "cuMemsetD8Async": memset, "cuMemcpyDtoDAsync": copy, "cuEventCreate": lambda flags: (0, object()),
    "cuEventRecord": record, "cuEventSynchronize": lambda event: (0,), "cuEventElapsedTime": lambda *_: (0, 0.25),
    "cuEventDestroy": lambda event: (0,),
}.items():
    function.__name__ = name
    setattr(bindings, name, function)
packages = {name: types.ModuleType(name) for name in ("cuda", "cuda.bindings")}
packages["cuda.bindings"].driver = bindings
sys.modules.update(packages | {"cuda.bindings.driver": bindings})

tuner_bench._FLUSHED_BYTES, tuner_bench._PLACES, tuner_bench._RANDOM_BYTES = 1 << 20, 1 << 20, 1 << 14
class Native:
    def __getattr__(self, name):
        return getattr(_native, name)
    def Buffer(self, device, size):
        if between[0]:
            made_between.append(size)
        return _native.Buffer(device, size)
tuner_bench._native = Native()

refused = set()  # symbols that do not compile
def compile_program(symbol, program, headers, options, architecture):
    if symbol in refused:
        raise CompileError(symbol, (), program, "it is refused", {})
    return compiler.Compiled(b"\\x7fELF" + symbol.encode(), "cubin", "", "fake")
tuner_bench.KernelManager = lambda cache, most_kernels: KernelManager(
    cache, compile_program, lambda: "fake", most_kernels=most_kernels
)
LIMITS = t.device_limits(0)

def request_of(operator, dtype, columns, per_head=False, **given):
    (request,) = warming._requests(operator, dtype, columns, per_head, False, given)
    return request

def few(request):
    family = declaration_of(request.operator).family
    configs = family.configurations(request, LIMITS)
    some = tuple(dict.fromkeys((*configs[:6], *configs[-6:])))
    family.configurations = lambda *_: some
    return some
"""

EVERY_KIND = """
before = driver.fake_modules()
for asked in (
    request_of("rms_norm", "bfloat16", 5376, return_rstd=True),
    request_of("layer_norm_backward", "float32", 8192),
    request_of("rms_norm_backward", "bfloat16", 128, True, return_dx=False),
    request_of("layer_norm", "bfloat16", 1001, return_mean=True),
    request_of("add_rms_norm", "bfloat16", 4096, out_dtype="float8_e4m3fn", scale=True, amax=True),
    request_of("softmax", "bfloat16", 1000, mask="bool", mask_keeps=True),
    request_of("softmax_backward", "bfloat16", 1000, sink=True, lse=True, mask="float32", causal="aligned"),
):
    some = few(asked)
    bench = tuner_bench.GpuBench(asked, 0, most_bytes=4 << 20)
    assert list(bench.configs) == list(some), (asked, bench.configs)
    made = []
    class Seen(tuner_bench._Arrays):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)
    arrays, tuner_bench._Arrays = tuner_bench._Arrays, Seen
    times = bench.times(bench.configs, 3)
    assert bench.takes_unaligned(bench.configs[-1])
    tuner_bench._Arrays = arrays
    assert times == {config: [250.0] * 3 for config in bench.configs}
    # What is made of a call's results has memory of its own, which later calls have again.
    pointers = [buffer.pointer for buffer in made[0]._results]
    assert len(set(pointers)) == len(pointers) and not made_between, (asked.operator, made_between)
    wanted = sum(value is True for value in made[0].values[-5:])
    print(asked.operator, len(pointers))
    bench.close()
    del declaration_of(asked.operator).family.configurations
    del bench, made, times
    gc.collect()
    assert driver.fake_modules() == before, driver.fake_modules()
"""

REFUSALS = """
asked = request_of("rms_norm", "bfloat16", 5376)
default, *others = few(asked)
family = declaration_of("rms_norm").family
symbol = lambda config, kind=False: family.specialise(asked._replace(unaligned=kind), LIMITS, config)[0][0].symbol
refused |= {symbol(others[0]), symbol(others[1], True)}
bench = tuner_bench.GpuBench(asked, 0, most_bytes=1 << 20)
assert list(bench.configs) == [default, *dict.fromkeys(others[1:])]
assert not bench.takes_unaligned(others[1]) and bench.takes_unaligned(others[2])
for name, dropped in (("CUDA_ERROR_INVALID_VALUE", True), ("CUDA_ERROR_ILLEGAL_ADDRESS", False)):
    def fail(config, arrays):
        raise DriverError(name)
    bench._run = fail
    try:
        assert not bench._runs(default, None) and dropped
    except DriverError:
        assert not dropped
refused |= {symbol(default)}
print(type(told_by_error(lambda: tuner_bench.GpuBench(asked, 0))).__name__)
del sys.modules["cuda.bindings.driver"], packages["cuda.bindings"].driver
refused.clear()
print(told_by(lambda: tuner_bench.GpuBench(asked, 0)))
"""
TOLD_BY_ERROR = """
def told_by_error(call):
    try:
        call()
    except t.TransformerRtcError as error:
        return error
"""


def test_calls_of_every_kind_are_timed_and_leave_nothing_behind(fake_driver):
    lines = fake_driver(BENCH + EVERY_KIND)
    assert len(lines) == 7
    counts = [int(line.split()[1]) for line in lines]
    # rstd; dweight, dbias and partial sums; dweight and partial sums; mean; nothing; nothing; dsink, dmask, row sums.
    assert counts[0] >= 1 and counts[1] >= 3 and counts[2] >= 2 and counts[3] >= 1 and counts[5] == 0 and counts[6] >= 3


def test_what_cannot_be_compiled_or_launched_is_no_configuration(fake_driver):
    lines = fake_driver(BENCH + TOLD_BY_ERROR + REFUSALS)
    assert lines[0] == "CompileError"
    assert lines[1].startswith("SettingsError tuning times launches by cuda-python, which cannot be imported")
