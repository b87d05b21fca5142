// SPDX-License-Identifier: Apache-2.0
// The CUDA driver, opened at run time: the few entry points that the package uses, with every result checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" {
using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUdeviceptr = unsigned long long;

enum CUlaunchAttributeID : int {
  CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char padding[4];
  union {
    char bytes[64];
    int flag;
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned dynamic_shared_memory;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
}

// name, parameters. A name ends in the version of the interface that cuda.h gives it.
#define TRTC_DRIVER_FUNCTIONS(X)                                                  \
  X(cuInit, (unsigned))                                                           \
  X(cuDriverGetVersion, (int*))                                                   \
  X(cuGetErrorName, (CUresult, const char**))                                     \
  X(cuGetErrorString, (CUresult, const char**))                                   \
  X(cuDeviceGetCount, (int*))                                                     \
  X(cuDeviceGet, (CUdevice*, int))                                                \
  X(cuDeviceGetName, (char*, int, CUdevice))                                      \
  X(cuDeviceGetAttribute, (int*, int, CUdevice))                                  \
  X(cuDeviceTotalMem_v2, (size_t*, CUdevice))                                     \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                             \
  X(cuCtxGetDevice, (CUdevice*))                                                  \
  X(cuPointerGetAttribute, (void*, int, CUdeviceptr))                             \
  X(cuCtxGetCurrent, (CUcontext*))                                                \
  X(cuCtxSetCurrent, (CUcontext))                                                 \
  X(cuCtxPushCurrent_v2, (CUcontext))                                             \
  X(cuCtxPopCurrent_v2, (CUcontext*))                                             \
  X(cuModuleLoadData, (CUmodule*, const void*))                                   \
  X(cuModuleGetFunction, (CUfunction*, CUmodule, const char*))                    \
  X(cuModuleUnload, (CUmodule))                                                   \
  X(cuFuncGetAttribute, (int*, int, CUfunction))                                  \
  X(cuFuncSetAttribute, (CUfunction, int, int))                                   \
  X(cuFuncSetCacheConfig, (CUfunction, int))                                      \
  X(cuThreadExchangeStreamCaptureMode, (int*))                                    \
  X(cuStreamIsCapturing, (CUstream, int*))                                        \
  X(cuMemAllocAsync, (CUdeviceptr*, size_t, CUstream))                            \
  X(cuMemFreeAsync, (CUdeviceptr, CUstream))                                      \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, CUfunction, int, size_t)) \
  X(cuOccupancyMaxActiveClusters, (int*, CUfunction, const CUlaunchConfig*))      \
  X(cuLaunchKernelEx, (const CUlaunchConfig*, CUfunction, void**, void**))        \
  X(cuMemAlloc_v2, (CUdeviceptr*, size_t))                                        \
  X(cuMemFree_v2, (CUdeviceptr))                                                  \
  X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void*, size_t, CUstream))           \
  X(cuMemcpyDtoHAsync_v2, (void*, CUdeviceptr, size_t, CUstream))                 \
  X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))              \
  X(cuStreamCreate, (CUstream*, unsigned))                                        \
  X(cuStreamSynchronize, (CUstream))                                              \
  X(cuStreamGetCtx, (CUstream, CUcontext*))                                       \
  X(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                             \
  X(cuEventCreate, (CUevent*, unsigned))                                          \
  X(cuEventRecord, (CUevent, CUstream))                                           \
  X(cuEventQuery, (CUevent))                                                      \
  X(cuEventDestroy_v2, (CUevent))

constexpr CUresult kNotReady = 600;

struct Driver {
#define TRTC_DECLARE(name, parameters) CUresult(*name) parameters;
  TRTC_DRIVER_FUNCTIONS(TRTC_DECLARE)
#undef TRTC_DECLARE
  // Since driver 550 (CUDA 12.4); null in an older one.
  CUresult (*cuFuncGetParamInfo)(CUfunction, size_t index, size_t* offset, size_t* size);
  CUresult (*cuFuncLoad)(CUfunction);
  int version;  // 12080: it runs programs of CUDA 12.8
};

// The oldest driver interface that is enough: cuLaunchKernelEx with clusters, and cubins that NVRTC 12 makes.
constexpr int kOldestDriver = 12000;

// Opens libcuda once. Throws DriverNotFoundError, DriverError or, in the child of a fork of a process that had opened
// it, ForkError.
const Driver& driver();

// Whether this process is such a child: its parent's contexts, memory and kernels are none of its own.
bool forked();
// Throws ForkError if it is.
void check_not_forked();

// Throws DriverError with the driver's name and text for a result other than success.
void check(CUresult result, const char* what);

// A GPU, with its primary context, as the CUDA runtime would use it.
struct Device {
  int ordinal;
  CUdevice handle;
  CUcontext context;

  int attribute(int id) const;
};

int device_count();
const Device& device(int ordinal);  // throws DeviceNotFoundError

// Makes a device's primary context current for a scope; what was current before is current after.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device) {
    CUcontext current = nullptr;
    check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    pushed_ = current != device.context;
    if (pushed_) check(driver().cuCtxPushCurrent_v2(device.context), "cuCtxPushCurrent");
  }
  ~CurrentContext() {
    CUcontext popped;
    if (pushed_) driver().cuCtxPopCurrent_v2(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_;
};

// What this thread asks of a device in this scope is part of no capture of a stream, and ends none: neither one that
// this thread began, nor another thread's in the global mode. For what is done once, or for the host: loads,
// allocations, waits. Its device's context is current.
class Uncaptured {
 public:
  explicit Uncaptured(const Device& device) : current_(device) {
    check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
  }
  ~Uncaptured() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  const CurrentContext current_;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; then what was before
};

// Lets other Python threads run while the driver may wait, if this one holds the GIL.
class GilReleased {
 public:
  GilReleased();
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* state_;
};

struct Dim3 {
  unsigned x, y, z;
};

struct LaunchShape {
  Dim3 grid, block, cluster;  // cluster 1, 1, 1: none
  unsigned dynamic_shared_memory;
  bool cooperative;
  bool early = false;  // it may begin before the launch before it has ended, and waits for that by itself
};

// Rows of an array that a kernel is given.
struct Memory {
  const std::string* name;
  const char* data;
  int64_t element_bytes, columns;
  int64_t outer_count, outer_stride, inner_count, inner_stride;  // strides in elements
  bool writable, initialised;
};

// What runs a plan's kernel: a function on a GPU, or something of Python's.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void zero(void* data, size_t bytes, CUstream stream) const = 0;
  // `memory` is empty where it is not asked for.
  virtual void launch(const LaunchShape& shape, void* params, CUstream stream,
                      const std::vector<Memory>& memory) const = 0;
  virtual bool asks_for_memory() const { return false; }
  // Whether a launch may begin early, if its kernel's text waits for the launch before it.
  virtual bool may_be_early() const { return false; }
};

// A kernel loaded on one device; unloaded with its last owner, unless a graph has captured a launch of it.
class Function : public Launcher {
 public:
  Function(int ordinal, const void* image, const std::string& symbol);
  ~Function() override;
  Function(const Function&) = delete;
  Function& operator=(const Function&) = delete;

  int attribute(int id) const;
  void set_attribute(int id, int value) const;
  void set_cache_preference(int preference) const;
  int max_active_ctas(const LaunchShape& shape) const;  // per multiprocessor
  int max_active_clusters(const LaunchShape& shape) const;
  // Bytes of the kernel's one parameter, or -1 where the driver cannot say.
  int parameter_bytes() const;
  void zero(void* data, size_t bytes, CUstream stream) const override;
  // Does not check that a cooperative or cluster grid can be resident: the driver does.
  void launch(const LaunchShape& shape, void* params, CUstream stream,
              const std::vector<Memory>& memory) const override;
  bool may_be_early() const override;

  const Device& device() const { return device_; }

 private:
  const Device& device_;
  CUmodule module_;
  CUfunction function_;
  mutable std::atomic<bool> captured_{false};  // a graph does not keep the modules of its kernels
};

// Device memory of our own: for arrays that no framework allocates.
class Buffer {
 public:
  Buffer(int ordinal, size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const Device& device() const { return device_; }
  CUdeviceptr pointer() const { return pointer_; }
  size_t bytes() const { return bytes_; }
  // Throws for a range that is not inside.
  void check_range(size_t offset, size_t bytes) const;

 private:
  const Device& device_;
  CUdeviceptr pointer_ = 0;
  size_t bytes_;
};

// Memory of the graph that a stream is being captured into: every replay has some from here to where this ends.
class GraphMemory {
 public:
  GraphMemory(int ordinal, size_t bytes, CUstream stream);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  CUdeviceptr pointer() const { return pointer_; }

 private:
  const Device& device_;
  CUstream stream_;
  CUdeviceptr pointer_ = 0;
};

// A moment on a stream.
class Event {
 public:
  Event(int ordinal, CUstream stream);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  bool done() const;
  // Work put on a stream from now on waits for it.
  void precede(CUstream stream) const;

 private:
  const Device& device_;
  CUevent event_ = nullptr;
};

// The device whose context is current in this thread; device 0 where none is.
int current_device();
CUcontext current_context();
void set_current_context(CUcontext context);
// The device whose memory an address is in. Throws ArgumentError where it is no device memory.
int pointer_device(CUdeviceptr pointer);
// Whether a stream belongs to a device's primary context, as every stream of the CUDA runtime does.
bool stream_on_device(int ordinal, CUstream stream);
// Whether a stream is being captured into a graph. Throws ArgumentError for the legacy default stream where another
// stream's capture forbids to use it.
bool stream_capturing(int ordinal, CUstream stream);
// A stream of our own on a device, one for the process; it does not wait for the legacy default stream.
CUstream own_stream(int ordinal);
// Work put on `later` from now on waits for what is on `earlier` now.
void order_streams(int ordinal, CUstream earlier, CUstream later);
