// SPDX-License-Identifier: Apache-2.0
// The floor of a call's host time: views arrays, allocates outputs and launches an empty kernel, through the
// framework's DLPack exchange table. A backward call has two outputs, a workspace and two launches. No check of any
// argument. Built and used by host_overhead.py.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include "dlpack.hpp"
#include "driver.hpp"  // types only

namespace {

// As large as the parameters of RMSNorm with a weight; those of its gradient are a little larger.
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

bool view(PyObject* object, DLTensor& tensor) {
  if (api->tensor_from_object(object, &tensor) == 0) return true;
  fail("an array cannot be viewed");
  return false;
}

DLManagedTensorVersioned* allocate(DLDevice device, DLDataType dtype, int32_t ndim, int64_t* shape) {
  DLTensor prototype{nullptr, device, ndim, dtype, shape, nullptr, 0};
  DLManagedTensorVersioned* managed;
  auto set_error = [](void*, const char*, const char* message) { PyErr_SetString(PyExc_MemoryError, message); };
  if (api->allocate(&prototype, &managed, nullptr, set_error) == 0) return managed;
  fail("no output can be allocated");
  return nullptr;
}

// An array like another; `data` becomes its memory.
PyObject* output_like(const DLTensor& like, void*& data) {
  DLManagedTensorVersioned* managed = allocate(like.device, like.dtype, like.ndim, like.shape);
  if (managed == nullptr) return nullptr;
  data = managed->tensor.data;
  void* out;
  if (api->object_from_managed(managed, &out) != 0) return fail("the output cannot be made an array");
  return static_cast<PyObject*>(out);
}

bool launch(int64_t ctas, void* stream, Params& params) {
  const CUlaunchConfig config{static_cast<unsigned>(ctas),   1,       1, 256, 1, 1, 0,
                              static_cast<CUstream>(stream), nullptr, 0};
  void* packed[] = {&params};
  if (launch_kernel(&config, function, packed, nullptr) == 0) return true;
  fail("the launch failed");
  return false;
}

// call(x, weight, ...): further arguments are ignored.
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 2) return fail("call(x, weight)");
  DLTensor x, weight;
  if (!view(arguments[0], x) || !view(arguments[1], weight)) return nullptr;
  void *data, *stream;
  PyObject* out = output_like(x, data);
  if (out == nullptr) return nullptr;
  if (api->current_stream(x.device.type, x.device.id, &stream) != 0) {
    Py_DECREF(out);
    return fail("there is no current stream");
  }
  Params params{{x.data, weight.data, data}, {x.shape[1], 0, x.shape[1], 0}, x.shape[0], {}};
  if (launch(x.shape[0], stream, params)) return out;
  Py_DECREF(out);
  return nullptr;
}

// call_backward(dy, x, weight, rstd, ...): (dx, dweight); further arguments are ignored.
PyObject* call_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 4) return fail("call_backward(dy, x, weight, rstd)");
  DLTensor dy, x, weight, rstd;
  if (!view(arguments[0], dy) || !view(arguments[1], x) || !view(arguments[2], weight) || !view(arguments[3], rstd)) {
    return nullptr;
  }
  void *dx_data, *dweight_data, *stream;
  PyObject* dx = output_like(x, dx_data);
  PyObject* dweight = dx == nullptr ? nullptr : output_like(weight, dweight_data);
  PyObject* both = dweight == nullptr ? nullptr : PyTuple_New(2);
  if (both == nullptr) {
    Py_XDECREF(dx);
    Py_XDECREF(dweight);
    return nullptr;
  }
  PyTuple_SET_ITEM(both, 0, dx);
  PyTuple_SET_ITEM(both, 1, dweight);
  // Partial sums in float32, of each row's CTA.
  int64_t workspace_bytes = x.shape[0] * x.shape[1] * 4;
  DLManagedTensorVersioned* workspace = allocate(x.device, DLDataType{1, 8, 1}, 1, &workspace_bytes);
  bool launched = false;
  if (workspace != nullptr && api->current_stream(x.device.type, x.device.id, &stream) == 0) {
    Params rows{{dy.data, x.data, dx_data}, {x.shape[1], 0, x.shape[1], 0}, x.shape[0], {}};
    Params columns{{workspace->tensor.data, weight.data, dweight_data}, {}, x.shape[1], {}};
    launched = launch(x.shape[0], stream, rows) && launch((x.shape[1] + 31) / 32, stream, columns);
  }
  if (workspace != nullptr)
    workspace->deleter(workspace);  // what the allocator gives next is used behind these launches
  if (launched) return both;
  Py_DECREF(both);
  return fail("there is no current stream");
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, nullptr},
    {"call", fast(call), METH_FASTCALL, nullptr},
    {"call_backward", fast(call_backward), METH_FASTCALL, nullptr},
    {},
};
PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "host_floor", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_host_floor() { return PyModule_Create(&module_definition); }
