// SPDX-License-Identifier: Apache-2.0
#include "driver.hpp"

#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>

#include "errors.hpp"

namespace {

constexpr unsigned kDisableTiming = 2;
constexpr CUresult kInvalidValue = 1;
constexpr CUresult kOutOfMemory = 2;
constexpr CUresult kNotInitialised = 3;  // also what a fork of a process that uses CUDA gets
constexpr CUresult kCaptureImplicit = 906;

pid_t opened_in = 0;  // the process in which the driver was opened
bool is_forked = false;

[[noreturn]] void throw_fork_error(const std::string& parent) {
  throw PackageError{"ForkError",
                     "process " + std::to_string(getpid()) + " was forked from " + parent +
                         " after that had used CUDA, which does not survive a fork: start processes by "
                         "spawn or forkserver, or fork before the first call on a GPU and the first compile"};
}

// An interpreter that ends leaves what it has to the driver, which may have ended before it.
bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

Driver open_driver() {
  Driver driver{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw PackageError{"DriverNotFoundError",
                       std::string("no NVIDIA driver: libcuda.so.1 cannot be opened (") + dlerror() + ")"};
  }
  auto resolve = [&](const char* name) { return dlsym(library, name); };
  driver.cuDriverGetVersion = reinterpret_cast<decltype(driver.cuDriverGetVersion)>(resolve("cuDriverGetVersion"));
  if (driver.cuDriverGetVersion == nullptr || driver.cuDriverGetVersion(&driver.version) != 0) {
    throw PackageError{"DriverError", "libcuda.so.1 does not tell its version"};
  }
  if (driver.version < kOldestDriver) {
    throw PackageError{"DriverError", "the NVIDIA driver is too old: it runs CUDA " +
                                          std::to_string(driver.version / 1000) + "." +
                                          std::to_string(driver.version % 1000 / 10) +
                                          "; transformer_rtc needs CUDA 12.0, driver 525.60.13 or newer"};
  }
#define TRTC_RESOLVE(name, parameters)                                   \
  driver.name = reinterpret_cast<decltype(driver.name)>(resolve(#name)); \
  if (driver.name == nullptr) throw PackageError{"DriverError", "the NVIDIA driver has no " #name};
  TRTC_DRIVER_FUNCTIONS(TRTC_RESOLVE)
#undef TRTC_RESOLVE
  driver.cuFuncGetParamInfo = reinterpret_cast<decltype(driver.cuFuncGetParamInfo)>(resolve("cuFuncGetParamInfo"));
  driver.cuFuncLoad = reinterpret_cast<decltype(driver.cuFuncLoad)>(resolve("cuFuncLoad"));
  const CUresult result = driver.cuInit(0);
  if (result == kNotInitialised) throw_fork_error("another one (cuInit: initialization error)");
  if (result != 0) {
    const char* text = nullptr;
    driver.cuGetErrorString(result, &text);
    throw PackageError{"DriverError", std::string("the NVIDIA driver does not start: cuInit: ") + (text ? text : "?")};
  }
  opened_in = getpid();
  pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
  return driver;
}

CUlaunchConfig driver_config(const LaunchShape& shape, CUstream stream, CUlaunchAttribute (&attributes)[3]) {
  unsigned count = 0;
  if (shape.cooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count++].value.flag = 1;
  }
  if (shape.early) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.flag = 1;
  }
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.cluster = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  return {shape.grid.x,
          shape.grid.y,
          shape.grid.z,
          shape.block.x,
          shape.block.y,
          shape.block.z,
          shape.dynamic_shared_memory,
          stream,
          attributes,
          count};
}

}  // namespace

const Driver& driver() {
  // A failure is not remembered: the next call tries again and throws again.
  static const Driver instance = open_driver();
  check_not_forked();
  return instance;
}

bool forked() { return is_forked; }

void check_not_forked() {
  if (is_forked) throw_fork_error("process " + std::to_string(opened_in));
}

void check(CUresult result, const char* what) {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  throw PackageError{"DriverError", std::string(what) + ": " + (name ? name : "unknown error") + " (" +
                                        std::to_string(result) + "): " + (text ? text : "")};
}

int Device::attribute(int id) const {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, id, handle), "cuDeviceGetAttribute");
  return value;
}

int device_count() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

const Device& device(int ordinal) {
  // Called with the GIL held. Devices stay where they are: plans keep references.
  static std::vector<std::unique_ptr<Device>> devices;
  if (ordinal >= 0 && ordinal < static_cast<int>(devices.size()) && devices[ordinal]) return *devices[ordinal];
  const int count = device_count();
  if (ordinal < 0 || ordinal >= count) {
    throw PackageError{"DeviceNotFoundError", "there is no CUDA device " + std::to_string(ordinal) +
                                                  ": the driver sees " + std::to_string(count)};
  }
  auto opened = std::make_unique<Device>();
  opened->ordinal = ordinal;
  check(driver().cuDeviceGet(&opened->handle, ordinal), "cuDeviceGet");
  check(driver().cuDevicePrimaryCtxRetain(&opened->context, opened->handle), "cuDevicePrimaryCtxRetain");
  devices.resize(count);
  devices[ordinal] = std::move(opened);
  return *devices[ordinal];
}

GilReleased::GilReleased() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}

GilReleased::~GilReleased() {
  if (state_ != nullptr) taking_gil([&] { PyEval_RestoreThread(static_cast<PyThreadState*>(state_)); });
}

Function::Function(int ordinal, const void* image, const std::string& symbol) : device_(::device(ordinal)) {
  const Uncaptured uncaptured(device_);
  CUresult loaded;
  {
    const GilReleased released;  // PTX is compiled here
    loaded = driver().cuModuleLoadData(&module_, image);
  }
  check(loaded, ("loading " + symbol).c_str());
  CUresult result = driver().cuModuleGetFunction(&function_, module_, symbol.c_str());
  // Where modules are loaded lazily, the first launch would do it: within a capture, or waiting for a kernel that waits
  // for this one.
  if (result == 0 && driver().cuFuncLoad != nullptr) result = driver().cuFuncLoad(function_);
  if (result != 0) {
    driver().cuModuleUnload(module_);
    check(result, ("looking up the entry " + symbol).c_str());
  }
}

Function::~Function() {
  if (captured_ || forked() || interpreter_ends()) return;
  try {
    const Uncaptured uncaptured(device_);
    const GilReleased released;  // waits for the work that uses it
    driver().cuModuleUnload(module_);
  } catch (const PackageError&) {  // the driver has ended: there is nothing to unload
  }
}

int Function::attribute(int id) const {
  const Uncaptured uncaptured(device_);
  int value = 0;
  check(driver().cuFuncGetAttribute(&value, id, function_), "cuFuncGetAttribute");
  return value;
}

void Function::set_attribute(int id, int value) const {
  const Uncaptured uncaptured(device_);
  check(driver().cuFuncSetAttribute(function_, id, value), "cuFuncSetAttribute");
}

void Function::set_cache_preference(int preference) const {
  const Uncaptured uncaptured(device_);
  check(driver().cuFuncSetCacheConfig(function_, preference), "cuFuncSetCacheConfig");
}

int Function::max_active_ctas(const LaunchShape& shape) const {
  const Uncaptured uncaptured(device_);
  int count = 0;
  const int threads = static_cast<int>(shape.block.x * shape.block.y * shape.block.z);
  check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&count, function_, threads, shape.dynamic_shared_memory),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return count;
}

int Function::max_active_clusters(const LaunchShape& shape) const {
  const Uncaptured uncaptured(device_);
  CUlaunchAttribute attributes[3];
  const CUlaunchConfig config = driver_config(shape, nullptr, attributes);
  int count = 0;
  check(driver().cuOccupancyMaxActiveClusters(&count, function_, &config), "cuOccupancyMaxActiveClusters");
  return count;
}

int Function::parameter_bytes() const {
  if (driver().cuFuncGetParamInfo == nullptr) return -1;
  const Uncaptured uncaptured(device_);
  // The first, which is the only one: asking for one more than there are is an error that tools report.
  size_t offset = 0, size = 0;
  return driver().cuFuncGetParamInfo(function_, 0, &offset, &size) == 0 ? static_cast<int>(size) : 0;
}

bool Function::may_be_early() const {
  // Of the text, not of the device: what the driver compiled of PTX for older ones does not wait. Graphs have such
  // launches from CUDA 12.3 on.
  constexpr int ptx_version = 5;  // CU_FUNC_ATTRIBUTE_PTX_VERSION
  return driver().version >= 12030 && attribute(ptx_version) >= 90;
}

void Function::zero(void* data, size_t bytes, CUstream stream) const {
  CurrentContext current(device_);
  check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(data), 0, bytes, stream), "cuMemsetD8Async");
}

void Function::launch(const LaunchShape& shape, void* params, CUstream stream, const std::vector<Memory>&) const {
  CurrentContext current(device_);
  if (!captured_.load(std::memory_order_relaxed)) {
    int status = 0;
    if (driver().cuStreamIsCapturing(stream, &status) != 0 || status != 0) captured_ = true;
  }
  CUlaunchAttribute attributes[3];
  const CUlaunchConfig config = driver_config(shape, stream, attributes);
  void* arguments[] = {params};
  check(driver().cuLaunchKernelEx(&config, function_, arguments, nullptr), "cuLaunchKernelEx");
}

Buffer::Buffer(int ordinal, size_t bytes) : device_(::device(ordinal)), bytes_(bytes) {
  const Uncaptured uncaptured(device_);
  if (bytes > 0) check(driver().cuMemAlloc_v2(&pointer_, bytes), "cuMemAlloc");
}

Buffer::~Buffer() {
  if (pointer_ == 0 || forked() || interpreter_ends()) return;
  try {
    const Uncaptured uncaptured(device_);
    const GilReleased released;  // waits for the work that uses it
    driver().cuMemFree_v2(pointer_);
  } catch (const PackageError&) {  // the driver has ended: there is nothing to free
  }
}

void Buffer::check_range(size_t offset, size_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset) throw std::out_of_range("beyond the end of a buffer");
}

GraphMemory::GraphMemory(int ordinal, size_t bytes, CUstream stream) : device_(::device(ordinal)), stream_(stream) {
  const CurrentContext current(device_);
  check(driver().cuMemAllocAsync(&pointer_, bytes, stream), "cuMemAllocAsync");
}

GraphMemory::~GraphMemory() {
  try {
    const CurrentContext current(device_);
    driver().cuMemFreeAsync(pointer_, stream_);
  } catch (const PackageError&) {  // the driver has ended, or has no context to free it in: the graph keeps it
  }
}

Event::Event(int ordinal, CUstream stream) : device_(::device(ordinal)) {
  CurrentContext current(device_);
  check(driver().cuEventCreate(&event_, kDisableTiming), "cuEventCreate");
  const CUresult result = driver().cuEventRecord(event_, stream);
  if (result != 0) driver().cuEventDestroy_v2(event_);
  check(result, "cuEventRecord");
}

Event::~Event() {
  if (event_ != nullptr && !forked()) driver().cuEventDestroy_v2(event_);
}

bool Event::done() const {
  const Uncaptured uncaptured(device_);
  const CUresult result = driver().cuEventQuery(event_);
  if (result != kNotReady) check(result, "cuEventQuery");
  return result != kNotReady;
}

void Event::precede(CUstream stream) const {
  CurrentContext current(device_);
  check(driver().cuStreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent");
}

CUcontext current_context() {
  CUcontext context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

void set_current_context(CUcontext context) { check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent"); }

int current_device() {
  if (device_count() == 0) throw PackageError{"DeviceNotFoundError", "the driver sees no CUDA device"};
  if (current_context() == nullptr) return 0;
  CUdevice handle = 0;
  check(driver().cuCtxGetDevice(&handle), "cuCtxGetDevice");
  for (int ordinal = 0; ordinal < device_count(); ++ordinal) {
    CUdevice other = -1;
    check(driver().cuDeviceGet(&other, ordinal), "cuDeviceGet");
    if (other == handle) return ordinal;
  }
  return 0;
}

int pointer_device(CUdeviceptr pointer) {
  constexpr int ordinal_attribute = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
  int ordinal = -1;
  const CUresult result = driver().cuPointerGetAttribute(&ordinal, ordinal_attribute, pointer);
  if (result == kInvalidValue || (result == 0 && ordinal < 0)) throw_argument_error("an address is no device memory");
  check(result, "cuPointerGetAttribute");
  return ordinal;
}

bool stream_on_device(int ordinal, CUstream stream) {
  // The legacy and per-thread default streams are of whichever context is current.
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return true;
  CUcontext context = nullptr;
  const CurrentContext current(device(ordinal));
  const CUresult result = driver().cuStreamGetCtx(stream, &context);
  if (result == kOutOfMemory) check(result, "cuStreamGetCtx");  // any other says that the stream is none
  return result == 0 && context == device(ordinal).context;
}

bool stream_capturing(int ordinal, CUstream stream) {
  const CurrentContext current(device(ordinal));
  int status = 0;
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  if (result == kCaptureImplicit) {
    throw_argument_error(
        "the call is on the legacy default stream, which may not be used while a stream that waits for it is captured: "
        "pass the stream that is captured");
  }
  check(result, "cuStreamIsCapturing");
  return status != 0;
}

CUstream own_stream(int ordinal) {
  static std::vector<CUstream> streams;
  const Device& on = device(ordinal);
  streams.resize(device_count());
  if (streams[ordinal] == nullptr) {
    const Uncaptured uncaptured(on);
    constexpr unsigned non_blocking = 1;
    CUstream made = nullptr;  // where it fails, as without memory, the driver writes a handle that is none
    check(driver().cuStreamCreate(&made, non_blocking), "cuStreamCreate");
    streams[ordinal] = made;
  }
  return streams[ordinal];
}

void order_streams(int ordinal, CUstream earlier, CUstream later) {
  CurrentContext current(device(ordinal));
  CUevent event = nullptr;
  check(driver().cuEventCreate(&event, kDisableTiming), "cuEventCreate");
  CUresult result = driver().cuEventRecord(event, earlier);
  if (result == 0) result = driver().cuStreamWaitEvent(later, event, 0);
  driver().cuEventDestroy_v2(event);  // freed once it has happened
  check(result, "ordering two streams");
}
