// Python's view of the native parts.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>

#include "errors.hpp"
#include "operator.hpp"

namespace py = pybind11;

namespace {

CUstream as_stream(uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }

LaunchShape launch_shape(const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block,
                         const std::array<unsigned, 3>& cluster, unsigned dynamic_shared_memory, bool cooperative) {
  return {{grid[0], grid[1], grid[2]},
          {block[0], block[1], block[2]},
          {cluster[0], cluster[1], cluster[2]},
          dynamic_shared_memory,
          cooperative};
}

// An owner of the shape and strides that a View borrows.
struct HeldView {
  View view;
  std::vector<int64_t> shape, strides;

  HeldView(uintptr_t data, std::vector<int64_t> held_shape, std::vector<int64_t> held_strides, DtypeId dtype,
           int device, bool read_only)
      : shape(std::move(held_shape)), strides(std::move(held_strides)) {
    if (shape.size() != strides.size()) throw std::invalid_argument("as many strides as dimensions");
    view.data = reinterpret_cast<char*>(data);
    view.ndim = static_cast<int>(shape.size());
    view.shape = shape.data();
    view.strides = strides.data();
    view.dtype = dtype;
    view.device = device;
    view.read_only = read_only;
  }
};

// Allocates by calling allocate(shape, dtype, device) -> (object, pointer).
class PythonAllocator : public Allocator {
 public:
  PythonAllocator(py::object allocate, bool graph_memory)
      : allocate_(std::move(allocate)), graph_memory_(graph_memory) {}

  PyObject* allocate(int ndim, const int64_t* shape, DtypeId dtype, int device, char*& data) override {
    py::tuple dimensions(ndim);
    for (int i = 0; i < ndim; ++i) dimensions[i] = py::int_(shape[i]);
    std::optional<Uncaptured> uncaptured;
    if (graph_memory_) uncaptured.emplace(::device(device));  // a framework that knows no graphs may ask the driver
    const py::tuple made = taking_gil([&] { return allocate_(dimensions, dtype, device); });
    data = reinterpret_cast<char*>(made[1].cast<uintptr_t>());
    return py::object(made[0]).release().ptr();
  }

  PyObject* workspace(int64_t bytes, int device, CUstream stream, char*& data) override {
    if (!graph_memory_) return Allocator::workspace(bytes, device, stream, data);
    auto memory = std::make_unique<GraphMemory>(device, bytes, stream);
    data = reinterpret_cast<char*>(memory->pointer());
    return py::capsule(memory.release(), [](void* memory) { delete static_cast<GraphMemory*>(memory); })
        .release()
        .ptr();
  }

 private:
  py::object allocate_;
  bool graph_memory_;
};

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

constexpr const char* kOperatorCapsule = "transformer_rtc.operator";

PyObject* call_operator(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return static_cast<Operator*>(PyCapsule_GetPointer(self, kOperatorCapsule))->call(arguments, count);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef call_operator_method = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_operator)),
                                    METH_FASTCALL, nullptr};

// Runs an operator on views: (views or None of the array arguments in order, all arguments, allocate, stream, whether
// the workspace must be the memory of the graph that the stream is captured into).
py::object run_views(Operator& op, const std::vector<py::object>& views, const std::vector<py::object>& arguments,
                     py::object allocate, uintptr_t stream, bool graph_memory) {
  Call call;
  std::vector<PyObject*> raw;
  for (const py::object& argument : arguments) raw.push_back(argument.ptr());
  if (raw.size() != op.arguments().size() || views.size() > kMaxArrays) {
    throw std::invalid_argument("as many arguments as the operator has");
  }
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].is_none()) continue;
    const py::tuple pair = views[i];
    call.views[i] = pair[0].cast<const HeldView&>().view;
    call.objects[i] = pair[1].ptr();
  }
  op.read_values(raw.data(), call);
  PythonAllocator allocator(std::move(allocate), graph_memory);
  return py::reinterpret_steal<py::object>(op.run(call, allocator, as_stream(stream)));
}

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
  module.attr("MAX_PARAMETER_BYTES") = kMaxParameterBytes;
  module.attr("MOST_COLUMNS") = kMostColumns;
  module.attr("MOST_PLANS") = Operator::kMostPlans;
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

  py::class_<HeldView>(module, "View")
      .def(py::init<uintptr_t, std::vector<int64_t>, std::vector<int64_t>, DtypeId, int, bool>());

  py::enum_<Role>(module, "Role")
      .value("ROWS", Role::rows)
      .value("COLUMNS", Role::columns)
      .value("ROW_INPUTS", Role::row_inputs)
      .value("VALUE", Role::value)
      .value("MASK", Role::mask)
      .value("HEAD_VALUES", Role::head_values)
      .value("VALUE_OUT", Role::value_out)
      .value("REAL", Role::real)
      .value("NON_NEGATIVE", Role::non_negative)
      .value("INTEGER", Role::integer)
      .value("FLAG", Role::flag)
      .value("SQUARE", Role::square)
      .value("ROWS_OUT", Role::rows_out)
      .value("DTYPE_OUT", Role::dtype_out)
      .value("WANTED", Role::wanted)
      .value("ROW_VALUES", Role::row_values)
      .value("COLUMN_VALUES", Role::column_values)
      .value("HEAD_SUMS", Role::head_sums)
      .value("MASK_SUMS", Role::mask_sums)
      .value("SM_MARGIN", Role::sm_margin)
      .value("STREAM", Role::stream);
  py::enum_<Source>(module, "Source")
      .value("DATA", Source::data)
      .value("OUTER_STRIDE", Source::outer_stride)
      .value("INNER_STRIDE", Source::inner_stride)
      .value("DTYPE", Source::dtype)
      .value("REAL", Source::real)
      .value("INTEGER", Source::integer)
      .value("FLAG", Source::flag)
      .value("ROWS", Source::rows)
      .value("COLUMNS", Source::columns)
      .value("INNER_COUNT", Source::inner_count)
      .value("INNER_MAGIC", Source::inner_magic)
      .value("INNER_SHIFT", Source::inner_shift)
      .value("HEADS", Source::heads)
      .value("HEADS_MAGIC", Source::heads_magic)
      .value("HEADS_SHIFT", Source::heads_shift)
      .value("GROUPS", Source::groups)
      .value("WORKSPACE", Source::workspace)
      .value("PARTIALS", Source::partials)
      .value("QUERIES", Source::queries)
      .value("QUERIES_MAGIC", Source::queries_magic)
      .value("QUERIES_SHIFT", Source::queries_shift)
      .value("MATRIX_HEADS", Source::matrix_heads)
      .value("MATRIX_HEADS_MAGIC", Source::matrix_heads_magic)
      .value("MATRIX_HEADS_SHIFT", Source::matrix_heads_shift)
      .value("BATCH_STRIDE", Source::batch_stride)
      .value("HEAD_STRIDE", Source::head_stride)
      .value("QUERY_STRIDE", Source::query_stride)
      .value("ROW_PARTIALS", Source::row_partials)
      .value("MASK_ROWS", Source::mask_rows)
      .value("SHARERS", Source::sharers)
      .value("DIAGONAL", Source::diagonal);

  py::class_<Stage>(module, "Stage")
      .def(py::init([](std::shared_ptr<Launcher> launcher, std::array<unsigned, 3> block,
                       std::array<unsigned, 3> cluster, unsigned dynamic_shared_memory, bool cooperative,
                       const std::vector<std::tuple<Source, int, int>>& fields, int64_t columns_per_cta, bool early,
                       int64_t row_groups) {
        Stage stage{std::move(launcher),
                    launch_shape({1, 1, 1}, block, cluster, dynamic_shared_memory, cooperative),
                    {},
                    columns_per_cta,
                    row_groups};
        // All CTAs of a cooperative grid must be resident: no part of another launch may be in their places.
        stage.shape.early = early && !cooperative && stage.launcher->may_be_early();
        for (const auto& [source, index, offset] : fields) {
          if (offset < 0 || offset + 8 > kMaxParameterBytes) throw std::invalid_argument("too many parameters");
          stage.fields.push_back({source, index, offset});
        }
        return stage;
      }));
  py::class_<Plan> plan(module, "Plan");
  plan.def(
      py::init([](std::vector<Stage> stages, int64_t rows_per_cta, int64_t ctas_per_row, int64_t max_groups,
                  int64_t workspace_bytes, int64_t partial_bytes, bool whole_heads, int64_t multiprocessors,
                  int64_t row_bytes, int64_t group_unit, int64_t turn_bytes) {
        for (size_t i = 0; i < stages.size(); ++i) {
          if ((stages[i].columns_per_cta != 0) != (i > 0)) {
            throw std::invalid_argument("a plan's first launch is over rows, and the others are over columns or heads");
          }
        }
        return Plan{std::move(stages), rows_per_cta, ctas_per_row, max_groups,      workspace_bytes, partial_bytes,
                    row_bytes,         whole_heads,  group_unit,   multiprocessors, turn_bytes};
      }),
      py::arg("stages"), py::arg("rows_per_cta"), py::arg("ctas_per_row"), py::arg("max_groups"),
      py::arg("workspace_bytes"), py::arg("partial_bytes"), py::arg("whole_heads"), py::arg("multiprocessors"),
      py::arg("row_bytes") = 0, py::arg("group_unit") = 1, py::arg("turn_bytes") = 0);
  plan.attr("ANY_GROUPS") = Plan::kAnyGroups;
  plan.attr("OF_HEADS") = Plan::kOfHeads;

  py::class_<Operator, std::shared_ptr<Operator>>(module, "Operator")
      .def(
          py::init([](std::string name,
                      std::vector<
                          std::tuple<Role, std::string, std::string, std::vector<DtypeId>, bool, int, std::vector<int>>>
                          arguments,
                      py::object plan, py::object check, py::object slow_call, py::object framework_of,
                      py::object implementation, std::vector<int64_t> buckets) {
            std::vector<Argument> list;
            for (auto& [role, argument, called, dtypes, optional, like, of] : arguments) {
              list.push_back({role, argument, called, dtypes, optional, like, of});
            }
            return std::make_shared<Operator>(std::move(name), std::move(list), plan.ptr(), check.ptr(),
                                              slow_call.ptr(), framework_of.ptr(), implementation.ptr(),
                                              std::move(buckets));
          }),
          py::arg("name"), py::arg("arguments"), py::arg("plan"), py::arg("check"), py::arg("slow_call"),
          py::arg("framework_of"), py::arg("implementation"), py::arg("buckets") = std::vector<int64_t>{})
      .def_property_readonly("name", &Operator::name)
      .def("run_views", &run_views, py::arg("views"), py::arg("arguments"), py::arg("allocate"), py::arg("stream"),
           py::arg("graph_memory") = false)
      .def("entry", [](py::object self) {
        // A builtin of METH_FASTCALL: no argument tuple, no conversion. The capsule keeps the operator alive.
        const py::capsule capsule(static_cast<const void*>(self.cast<Operator*>()), kOperatorCapsule);
        PyCapsule_SetContext(capsule.ptr(), self.inc_ref().ptr());
        return py::reinterpret_steal<py::object>(PyCFunction_New(&call_operator_method, capsule.ptr()));
      });
}
