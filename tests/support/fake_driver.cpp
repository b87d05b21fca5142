// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 for machines without a GPU: two devices whose memory is the host's and whose kernels do nothing. What
// it is for are the driver's rules, which it holds more strictly than the driver: what a capture forbids ends the
// capture, a kernel is loaded when it is first asked about, and whoever calls it after a fork is killed. What asks it
// for something can be made to fail.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialised = 3, kInvalidContext = 201, kNotFound = 500,
              kUnsupported = 900, kIsolation = 905, kImplicit = 906;
enum Mode { global, thread_local_mode, relaxed };

struct Context {
  int device;
};
struct Stream {
  Context* context;
  int status = 0;  // 1: captured, 2: a capture that has ended badly
  Mode mode = global;
  std::thread::id by;
  bool blocking = false;
  std::string nodes;
};
struct Module {
  Context* context;
};
struct Function {
  Module* module;
  bool loaded = false;
};
struct Event {
  bool captured = false;
};

std::recursive_mutex lock;
pid_t process = 0;
Context contexts[2] = {{0}, {1}};
std::set<Stream*> streams;
std::set<Module*> modules;
std::atomic<int> events{0};
std::map<unsigned long long, size_t> memory;
int calls_to_failure = 0;  // 0: none is to fail
std::string called;        // since it was said which one
thread_local Mode mode_of_thread = global;
thread_local Context* stack[16];
thread_local int depth = 0;

Context* current() { return depth > 0 ? stack[depth - 1] : nullptr; }

void check_process(const char* name) {
  if (process == 0 || process == getpid()) return;
  std::fprintf(stderr, "%s was called after a fork\n", name);
  abort();
}

// Whether this call is the one that is to fail. What it would have made is no handle then, as the driver leaves it.
bool fails(const char* name, void* made) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  if (calls_to_failure == 0) return false;
  called.append(name).append(" ");
  if (--calls_to_failure > 0) return false;
  if (made != nullptr) std::memset(made, 0xff, sizeof(void*));
  return true;
}
#define MAY_FAIL(made) \
  if (fails(__func__, made)) return kOutOfMemory

// What may wait, or allocate: a capture that forbids it to this thread ends.
int unsafe(const char* name) {
  check_process(name);
  if (current() == nullptr) return kInvalidContext;
  const std::lock_guard<std::recursive_mutex> guard(lock);
  int result = 0;
  for (Stream* stream : streams) {
    const bool mine = stream->by == std::this_thread::get_id();
    const bool forbids = mine ? stream->mode != relaxed : stream->mode == global && mode_of_thread == global;
    if (stream->status == 0 || mode_of_thread == relaxed || !forbids) continue;
    stream->status = 2;
    result = kUnsupported;
  }
  return result;
}

int load(Function* function, const char* name) {
  if (function->loaded) {
    check_process(name);
    return 0;
  }
  const int result = unsafe(name);
  function->loaded = result == 0;
  return result;
}

unsigned long long allocate(size_t bytes) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  const auto pointer = reinterpret_cast<unsigned long long>(aligned_alloc(512, (bytes + 511) / 512 * 512));
  memory[pointer] = bytes;
  return pointer;
}
void release(unsigned long long pointer) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  if (memory.erase(pointer) != 1) abort();
  free(reinterpret_cast<void*>(pointer));
}

bool is_default(Stream* stream) { return reinterpret_cast<size_t>(stream) <= 2; }
bool is_captured(Stream* stream) { return !is_default(stream) && stream->status != 0; }
int end_badly(Stream* stream, int result) {
  stream->status = 2;
  return result;
}

// The blocking stream that is being captured, with which the default stream would be synchronised.
Stream* blocked() {
  for (Stream* stream : streams) {
    if (stream->status == 1 && stream->blocking) return stream;
  }
  return nullptr;
}

int add_node(Stream* stream, const char* node) {
  const std::lock_guard<std::recursive_mutex> guard(lock);
  if (is_default(stream)) {
    stream = blocked();
    return stream == nullptr ? 0 : end_badly(stream, kImplicit);
  }
  if (stream->status == 2) return 901;
  if (stream->status == 1) stream->nodes += node;
  return 0;
}

}  // namespace

// What ends most calls: what only asks about a kernel loads it; a value is given; a handle is made.
#define LOADS(function) \
  MAY_FAIL(nullptr);    \
  return load(function, __func__)
#define GIVES(target, value) \
  MAY_FAIL(nullptr);         \
  return *(target) = value, 0
#define MAKES(target, value) \
  MAY_FAIL(target);          \
  return *(target) = value, 0
#define API extern "C" __attribute__((visibility("default")))

// ---- For tests ----

API void fake_begin_capture(Stream* stream, int mode) {
  stream->status = 1;
  stream->mode = static_cast<Mode>(mode);
  stream->by = std::this_thread::get_id();
  stream->nodes.clear();
}
// The nodes: K a kernel, Z zeroes, A allocates, F frees; null where the capture was ended by what it forbids.
API const char* fake_end_capture(Stream* stream) {
  const bool good = stream->status == 1;
  stream->status = 0;
  return good ? stream->nodes.c_str() : nullptr;
}
API Stream* fake_stream(int device, int blocking) {
  auto* stream = new Stream{&contexts[device]};
  stream->blocking = blocking != 0;
  streams.insert(stream);
  return stream;
}
API int fake_modules() { return static_cast<int>(modules.size()); }
API int fake_allocations() { return static_cast<int>(memory.size()); }
API int fake_events() { return events; }
API int fake_depth() { return depth; }
// The call of that number from now on, of those that may fail, fails; 0: none. And which ones there were until then.
API void fake_fail(int number) {
  calls_to_failure = number;
  if (number != 0) called.clear();
}
API const char* fake_called() { return called.c_str(); }
API void fake_push(int device) { stack[depth++] = &contexts[device]; }

// ---- The driver ----

// NVRTC asks for it, and does without.
API int cuGetExportTable(const void**, const void*) { return kNotFound; }

API int cuInit(unsigned) {
  MAY_FAIL(nullptr);
  if (process != 0 && process != getpid()) return kNotInitialised;
  process = getpid();
  return 0;
}
API int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
API int cuGetErrorName(int result, const char** name) {
  static thread_local char text[32];
  std::snprintf(text, sizeof(text), result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "FAKE_ERROR_%d", result);
  *name = text;
  return 0;
}
API int cuGetErrorString(int, const char** text) { return *text = "fake", 0; }
API int cuDeviceGetCount(int* count) { GIVES(count, 2); }
API int cuDeviceGet(int* device, int ordinal) { GIVES(device, ordinal); }
API int cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "fake"), 0; }
API int cuDeviceGetAttribute(int* value, int id, int) {
  GIVES(value, id == 16 ? 132 : id == 75 ? 9 : id == 76 ? 0 : id == 97 ? 227 * 1024 : 1);
}
API int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{1} << 30, 0; }
API int cuDevicePrimaryCtxRetain(Context** context, int device) {
  check_process(__func__);
  MAKES(context, &contexts[device]);
}
API int cuCtxGetDevice(int* device) {
  MAY_FAIL(nullptr);
  return current() == nullptr ? kInvalidContext : (*device = current()->device, 0);
}
API int cuPointerGetAttribute(int* value, int, unsigned long long pointer) {
  MAY_FAIL(nullptr);
  const std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = memory.upper_bound(pointer);
  if (found == memory.begin() || pointer >= (--found)->first + found->second) return kInvalidValue;
  *value = 0;
  return 0;
}
API int cuCtxGetCurrent(Context** context) { MAKES(context, current()); }
API int cuCtxPushCurrent_v2(Context* context) {
  MAY_FAIL(nullptr);
  check_process(__func__);
  stack[depth++] = context;
  return 0;
}
API int cuCtxSetCurrent(Context* context) {
  // In the place of what is current; null: of nothing.
  if (depth > 0) --depth;
  if (context != nullptr) stack[depth++] = context;
  return 0;
}
API int cuCtxPopCurrent_v2(Context** context) { return *context = stack[--depth], 0; }
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  check_process(__func__);
  const Mode before = mode_of_thread;
  mode_of_thread = static_cast<Mode>(*mode);
  *mode = before;
  return 0;
}
API int cuModuleLoadData(Module** module, const void* image) {
  MAY_FAIL(module);
  const int result = unsafe(__func__);
  if (result != 0) return result;
  if (std::memcmp(image, "\177ELF", 4) != 0) return 200;
  const std::lock_guard<std::recursive_mutex> guard(lock);
  modules.insert(*module = new Module{current()});
  return 0;
}
API int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  MAY_FAIL(function);
  check_process(__func__);
  if (std::strcmp(name, "missing") == 0) return kNotFound;
  *function = new Function{module};
  return 0;
}
API int cuModuleUnload(Module* module) {
  const int result = unsafe(__func__);
  const std::lock_guard<std::recursive_mutex> guard(lock);
  if (result == 0 && modules.erase(module) != 1) abort();
  return result;
}
API int cuFuncLoad(Function* function) { LOADS(function); }
API int cuFuncGetAttribute(int* value, int id, Function* function) {
  MAY_FAIL(nullptr);
  const char* text = std::getenv("FAKE_PTX_VERSION");  // of every kernel's text
  *value = id == 0 ? 1024 : id == 8 ? 48 * 1024 : id == 4 ? 32 : id == 5 ? (text ? std::atoi(text) : 90) : 0;
  return load(function, __func__);
}
API int cuFuncSetAttribute(Function* function, int, int) { LOADS(function); }
API int cuFuncSetCacheConfig(Function* function, int) { LOADS(function); }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Function* function, int, size_t) {
  *count = 2;
  LOADS(function);
}
API int cuOccupancyMaxActiveClusters(int* count, Function* function, const void*) {
  *count = 16;
  LOADS(function);
}
struct Attribute {
  int id;
  alignas(8) int flag;
  char rest[60];
};
struct Config {
  unsigned size[7];
  Stream* stream;
  const Attribute* attributes;
  unsigned attribute_count;
};
API int cuLaunchKernelEx(const Config* config, Function* function, void**, void**) {
  MAY_FAIL(nullptr);
  check_process(__func__);
  if (current() != function->module->context || modules.count(function->module) == 0) return kInvalidContext;
  const int result = load(function, __func__);
  bool early = false;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    early = early || (config->attributes[i].id == 6 && config->attributes[i].flag != 0);
  }
  return result != 0 ? result : add_node(config->stream, early ? "E" : "K");
}
API int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  MAY_FAIL(pointer);
  const int result = unsafe(__func__);
  if (result == 0) *pointer = allocate(bytes);
  return result;
}
API int cuMemFree_v2(unsigned long long pointer) {
  const int result = unsafe(__func__);
  if (result == 0) release(pointer);
  return result;
}
API int cuMemAllocAsync(unsigned long long* pointer, size_t bytes, Stream* stream) {
  MAY_FAIL(pointer);
  check_process(__func__);
  *pointer = allocate(bytes);
  return add_node(stream, "A");
}
API int cuMemFreeAsync(unsigned long long pointer, Stream* stream) {
  check_process(__func__);
  release(pointer);
  return add_node(stream, "F");
}
static int copy(const char* name, void* to, const void* from, size_t bytes) {
  const int result = unsafe(name);
  if (result == 0) std::memcpy(to, from, bytes);
  return result;
}
API int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, Stream*) {
  MAY_FAIL(nullptr);
  return copy(__func__, reinterpret_cast<void*>(to), from, bytes);
}
API int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, Stream*) {
  MAY_FAIL(nullptr);
  return copy(__func__, to, reinterpret_cast<void*>(from), bytes);
}
API int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, Stream* stream) {
  MAY_FAIL(nullptr);
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return add_node(stream, "Z");
}
API int cuStreamCreate(Stream** stream, unsigned) {
  MAY_FAIL(stream);
  *stream = fake_stream(current()->device, 0);
  return unsafe(__func__);
}
API int cuStreamSynchronize(Stream* stream) {
  MAY_FAIL(nullptr);
  return is_captured(stream) ? end_badly(stream, kUnsupported) : unsafe(__func__);
}
API int cuStreamIsCapturing(Stream* stream, int* status) {
  MAY_FAIL(nullptr);
  check_process(__func__);
  *status = is_default(stream) ? 0 : stream->status;
  return is_default(stream) && blocked() != nullptr ? kImplicit : 0;
}
API int cuStreamGetCtx(Stream* stream, Context** context) { MAKES(context, stream->context); }
API int cuEventCreate(Event** event, unsigned) {
  MAY_FAIL(event);
  return *event = new Event, ++events, 0;
}
API int cuEventRecord(Event* event, Stream* stream) { GIVES(&event->captured, is_captured(stream)); }
API int cuEventQuery(Event*) {
  MAY_FAIL(nullptr);
  return unsafe(__func__);
}
API int cuEventDestroy_v2(Event* event) {
  check_process(__func__);
  return delete event, --events, 0;
}
API int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  MAY_FAIL(nullptr);
  return is_captured(stream) && !event->captured ? end_badly(stream, kIsolation) : 0;
}
