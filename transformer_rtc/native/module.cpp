// SPDX-License-Identifier: Apache-2.0
// Python's view of the driver, of arrays of other frameworks, and of the native operators (operator_module.cpp).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>

#include "array.hpp"
#include "bindings.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace {

// A launcher of Python's: zero(address, bytes) and
// launch(grid, block, cluster, dynamic shared memory, cooperative, parameters, stream, memory).
class PythonLauncher : public Launcher {
 public:
  PythonLauncher(py::object zero, py::object launch, size_t parameter_bytes)
      : zero_(std::move(zero)), launch_(std::move(launch)), parameter_bytes_(parameter_bytes) {}

  void zero(void* data, size_t bytes, CUstream) const override { zero_(reinterpret_cast<uintptr_t>(data), bytes); }

  void launch(const LaunchShape& shape, void* params, CUstream stream,
              const std::vector<Memory>& memory) const override {
    const auto triple = [](const Dim3& size) { return py::make_tuple(size.x, size.y, size.z); };
    py::list rows;
    for (const Memory& m : memory) {
      rows.append(py::make_tuple(reinterpret_cast<uintptr_t>(m.data), m.writable, m.initialised, *m.name,
                                 m.element_bytes, m.columns, m.outer_count, m.outer_stride, m.inner_count,
                                 m.inner_stride));
    }
    launch_(triple(shape.grid), triple(shape.block), triple(shape.cluster), shape.dynamic_shared_memory,
            shape.cooperative, py::bytes(static_cast<const char*>(params), parameter_bytes_),
            reinterpret_cast<uintptr_t>(stream), rows);
  }

  bool asks_for_memory() const override { return true; }

 private:
  py::object zero_, launch_;
  size_t parameter_bytes_;
};

// What a consumer of our device memory gets: an owner of the buffer, in DLPack's form.
struct Export {
  std::shared_ptr<Buffer> buffer;
  std::vector<int64_t> shape;
  DLManagedTensor managed;
};

void delete_capsule(PyObject* capsule) {
  // A consumer that took the tensor renamed the capsule.
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

py::object to_dlpack(const std::shared_ptr<Buffer>& buffer, std::vector<int64_t> shape, DtypeId dtype) {
  auto* exported = new Export{buffer, std::move(shape), {}};
  DLTensor& tensor = exported->managed.tensor;
  tensor.data = reinterpret_cast<void*>(buffer->pointer());
  tensor.device = {kDLCUDA, buffer->device().ordinal};
  tensor.ndim = static_cast<int32_t>(exported->shape.size());
  tensor.dtype = {static_cast<uint8_t>(dtype >> 8), static_cast<uint8_t>(dtype & 0xff), 1};
  tensor.shape = exported->shape.data();
  exported->managed.manager = exported;
  exported->managed.deleter = [](DLManagedTensor* managed) { delete static_cast<Export*>(managed->manager); };
  return py::reinterpret_steal<py::object>(PyCapsule_New(&exported->managed, "dltensor", delete_capsule));
}

// (pointer, shape, strides or None, dtype, device type, device, read-only) of a DLPack capsule, which stays whole.
py::tuple read_dlpack(py::capsule capsule) {
  const DLTensor* tensor;
  bool read_only = false;
  const char* name = capsule.name();
  if (name != nullptr && std::strcmp(name, "dltensor_versioned") == 0) {
    const auto* managed = capsule.get_pointer<DLManagedTensorVersioned>();
    if (managed->version.major != 1) throw PackageError{"ArgumentError", "a DLPack tensor of an unknown version"};
    tensor = &managed->tensor;
    read_only = (managed->flags & 1) != 0;
  } else {
    // What a used capsule or another's points to is unknown.
    if (name == nullptr || std::strcmp(name, "dltensor") != 0) {
      throw PackageError{"ArgumentError", "a capsule that is no unused DLPack tensor"};
    }
    tensor = &capsule.get_pointer<DLManagedTensor>()->tensor;
  }
  if (tensor->ndim < 0 || (tensor->ndim > 0 && tensor->shape == nullptr)) {
    throw PackageError{"ArgumentError", "a DLPack tensor without a shape"};
  }
  if (tensor->dtype.lanes != 1) throw PackageError{"ArgumentError", "a DLPack tensor of vectors"};
  const View view = view_of(*tensor);
  std::vector<int64_t> shape(view.shape, view.shape + view.ndim), strides;
  for (int i = 0; i < view.ndim; ++i) strides.push_back(view.stride(i));
  return py::make_tuple(reinterpret_cast<uintptr_t>(view.data), py::tuple(py::cast(shape)),
                        py::tuple(py::cast(strides)), view.dtype, tensor->device.type, view.device, read_only);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Array views, module load, occupancy and launch over a CUDA driver that is opened at run time.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) return;
    try {
      std::rethrow_exception(pointer);
    } catch (const PackageError&) {
      set_python_error();
    } catch (const PythonErrorSet&) {
    }
  });

  module.attr("OLDEST_DRIVER") = kOldestDriver;
  module.def("driver_version", [] { return driver().version; });
  module.def("device_count", &device_count);
  module.def("device_attribute", [](int ordinal, int id) { return device(ordinal).attribute(id); });
  module.def("device_name", [](int ordinal) {
    char name[256];
    check(driver().cuDeviceGetName(name, sizeof(name), device(ordinal).handle), "cuDeviceGetName");
    return std::string(name);
  });
  module.def("device_memory", [](int ordinal) {
    size_t bytes = 0;
    check(driver().cuDeviceTotalMem_v2(&bytes, device(ordinal).handle), "cuDeviceTotalMem");
    return bytes;
  });
  module.def("current_device", &current_device);
  module.def("current_context", [] { return reinterpret_cast<uintptr_t>(current_context()); });
  module.def("set_current_context",
             [](uintptr_t context) { set_current_context(reinterpret_cast<CUcontext>(context)); });
  module.def("pointer_device", [](uintptr_t pointer) { return pointer_device(pointer); });
  module.def("stream_on_device",
             [](int ordinal, uintptr_t stream) { return stream_on_device(ordinal, as_stream(stream)); });
  module.def("stream_capturing",
             [](int ordinal, uintptr_t stream) { return stream_capturing(ordinal, as_stream(stream)); });
  module.def("own_stream", [](int ordinal) { return reinterpret_cast<uintptr_t>(own_stream(ordinal)); });
  module.def("order_streams", [](int ordinal, uintptr_t earlier, uintptr_t later) {
    order_streams(ordinal, as_stream(earlier), as_stream(later));
  });
  module.def("synchronize_stream", [](int ordinal, uintptr_t stream) {
    const Uncaptured uncaptured(device(ordinal));
    const GilReleased released;
    check(driver().cuStreamSynchronize(as_stream(stream)), "cuStreamSynchronize");
  });
  module.def("dtype_name", &dtype_name);
  module.def("to_dlpack", &to_dlpack);
  module.def("read_dlpack", &read_dlpack);

  py::class_<Launcher, std::shared_ptr<Launcher>>(module, "Launcher");
  py::class_<PythonLauncher, Launcher, std::shared_ptr<PythonLauncher>>(module, "PythonLauncher")
      .def(py::init<py::object, py::object, size_t>());

  py::class_<Function, Launcher, std::shared_ptr<Function>>(module, "Function")
      .def(py::init([](int ordinal, const py::bytes& image, const std::string& symbol) {
        return std::make_shared<Function>(ordinal, PyBytes_AS_STRING(image.ptr()), symbol);
      }))
      .def_property_readonly("device", [](const Function& self) { return self.device().ordinal; })
      .def("attribute", &Function::attribute)
      .def("set_attribute", &Function::set_attribute)
      .def("set_cache_preference", &Function::set_cache_preference)
      .def("max_active_ctas",
           [](const Function& self, std::array<unsigned, 3> block, unsigned dynamic_shared_memory) {
             return self.max_active_ctas(launch_shape({1, 1, 1}, block, {1, 1, 1}, dynamic_shared_memory, false));
           })
      .def("max_active_clusters",
           [](const Function& self, std::array<unsigned, 3> block, std::array<unsigned, 3> cluster,
              unsigned dynamic_shared_memory) {
             return self.max_active_clusters(launch_shape(cluster, block, cluster, dynamic_shared_memory, false));
           })
      .def("parameter_bytes", &Function::parameter_bytes)
      .def("launch", [](const Function& self, std::array<unsigned, 3> grid, std::array<unsigned, 3> block,
                        std::array<unsigned, 3> cluster, unsigned dynamic_shared_memory, bool cooperative,
                        py::bytes params, uintptr_t stream) {
        self.launch(launch_shape(grid, block, cluster, dynamic_shared_memory, cooperative),
                    PyBytes_AS_STRING(params.ptr()), as_stream(stream), {});
      });

  py::class_<Buffer, std::shared_ptr<Buffer>>(module, "Buffer")
      .def(py::init<int, size_t>())
      .def_property_readonly("pointer", &Buffer::pointer)
      .def_property_readonly("bytes", &Buffer::bytes)
      .def_property_readonly("device", [](const Buffer& self) { return self.device().ordinal; })
      // Between a host address and an offset in the buffer.
      .def("copy_from_host",
           [](Buffer& self, size_t offset, uintptr_t host, size_t bytes, uintptr_t stream) {
             self.check_range(offset, bytes);
             if (bytes == 0) return;
             const Uncaptured uncaptured(self.device());
             const GilReleased released;
             check(driver().cuMemcpyHtoDAsync_v2(self.pointer() + offset, reinterpret_cast<void*>(host), bytes,
                                                 as_stream(stream)),
                   "copying an array to the device");
           })
      .def("copy_to_host", [](const Buffer& self, size_t offset, uintptr_t host, size_t bytes, uintptr_t stream) {
        self.check_range(offset, bytes);
        if (bytes == 0) return;
        const Uncaptured uncaptured(self.device());
        const GilReleased released;
        check(driver().cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(host), self.pointer() + offset, bytes,
                                            as_stream(stream)),
              "copying an array from the device");
      });

  py::class_<Event>(module, "Event")
      .def(py::init([](int ordinal, uintptr_t stream) { return std::make_unique<Event>(ordinal, as_stream(stream)); }))
      .def("done", &Event::done)
      .def("precede", [](const Event& self, uintptr_t stream) { self.precede(as_stream(stream)); });

  bind_operator(module);
  bind_gradient(module);
}
