// The floor of a call's host time: views two arrays, allocates an output and launches an empty kernel, through the
// framework's DLPack exchange table. No check of any argument. Built and used by host_overhead.py.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include "dlpack.hpp"
#include "driver.hpp"  // types only

namespace {

// As large as the parameters of RMSNorm with a weight.
struct Params {
  void* pointers[3];
  int64_t strides[4];
  int64_t rows;
  uint32_t values[6];
};
static_assert(sizeof(Params) == 88, "host_overhead.py declares 88 bytes");

decltype(Driver::cuLaunchKernelEx) launch_kernel;
CUfunction function;
const DLPackExchangeAPI* api;

template <class Function>
bool resolve(void* library, const char* name, Function& to) {
  to = reinterpret_cast<Function>(dlsym(library, name));
  return to != nullptr;
}

PyObject* fail(const char* what) {
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, what);
  return nullptr;
}

// load(exchange table of the arrays' type, image, symbol). A context must be current.
PyObject* load(PyObject*, PyObject* arguments) {
  PyObject* table;
  const char *image, *symbol;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(arguments, "Oy#s", &table, &image, &size, &symbol)) return nullptr;
  api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(table, "dlpack_exchange_api"));
  if (api == nullptr) return nullptr;
  decltype(Driver::cuModuleLoadData) load_data;
  decltype(Driver::cuModuleGetFunction) get_function;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || !resolve(library, "cuModuleLoadData", load_data) ||
      !resolve(library, "cuModuleGetFunction", get_function) || !resolve(library, "cuLaunchKernelEx", launch_kernel)) {
    return fail("libcuda.so.1 cannot be opened or is too old");
  }
  CUmodule module;
  if (load_data(&module, image) != 0 || get_function(&function, module, symbol) != 0) {
    return fail("the empty kernel cannot be loaded");
  }
  Py_RETURN_NONE;
}

// call(x, weight, ...): further arguments are ignored.
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 2) return fail("call(x, weight)");
  DLTensor x, weight;
  if (api->tensor_from_object(arguments[0], &x) != 0 || api->tensor_from_object(arguments[1], &weight) != 0) {
    return fail("an array cannot be viewed");
  }
  DLTensor prototype{nullptr, x.device, x.ndim, x.dtype, x.shape, nullptr, 0};
  DLManagedTensorVersioned* managed;
  auto set_error = [](void*, const char*, const char* message) { PyErr_SetString(PyExc_MemoryError, message); };
  if (api->allocate(&prototype, &managed, nullptr, set_error) != 0) return fail("no output can be allocated");
  void* data = managed->tensor.data;
  void* out;
  if (api->object_from_managed(managed, &out) != 0) return fail("the output cannot be made an array");
  void* stream;
  if (api->current_stream(x.device.type, x.device.id, &stream) != 0) return fail("there is no current stream");
  Params params{{x.data, weight.data, data}, {x.shape[1], 0, x.shape[1], 0}, x.shape[0], {}};
  const CUlaunchConfig config{static_cast<unsigned>(x.shape[0]), 1,       1, 256, 1, 1, 0,
                              static_cast<CUstream>(stream),     nullptr, 0};
  void* packed[] = {&params};
  if (launch_kernel(&config, function, packed, nullptr) != 0) {
    Py_DECREF(static_cast<PyObject*>(out));
    return fail("the launch failed");
  }
  return static_cast<PyObject*>(out);
}

PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, nullptr},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr},
    {},
};
PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "host_floor", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_host_floor() { return PyModule_Create(&module_definition); }
