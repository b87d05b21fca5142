#include "operator.hpp"

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstring>

#include "errors.hpp"

namespace py = pybind11;

namespace {

bool is_array(Role role) { return role != Role::real && role != Role::dtype_out && role != Role::stream; }
bool is_input(Role role) { return role == Role::rows || role == Role::columns; }

// Allocates through a framework's exchange table.
class ExchangeAllocator : public Allocator {
 public:
  explicit ExchangeAllocator(const DLPackExchangeAPI* api) : api_(api) {}

  PyObject* allocate(int ndim, const int64_t* shape, DtypeId dtype, int device, char*& data) override {
    DLTensor prototype{};
    prototype.device = {kDLCUDA, device};
    prototype.ndim = ndim;
    prototype.dtype = {static_cast<uint8_t>(dtype >> 8), static_cast<uint8_t>(dtype & 0xff), 1};
    prototype.shape = const_cast<int64_t*>(shape);
    DLManagedTensorVersioned* managed = nullptr;
    std::string error;
    auto set_error = [](void* to, const char* kind, const char* message) {
      *static_cast<std::string*>(to) = std::string(kind) + ": " + message;
    };
    if (api_->allocate(&prototype, &managed, &error, set_error) != 0) {
      if (PyErr_Occurred()) throw PythonErrorSet{};
      throw PackageError{"AllocationError", "the framework could not allocate an output: " + error};
    }
    data = static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset;
    void* object = nullptr;
    if (api_->object_from_managed(managed, &object) != 0) throw PythonErrorSet{};
    return static_cast<PyObject*>(object);
  }

 private:
  const DLPackExchangeAPI* api_;
};

// Owns references until they are returned.
struct Outputs {
  PyObject* objects[kMaxArrays] = {};
  int count = 0;
  ~Outputs() {
    for (int i = 0; i < count; ++i) Py_XDECREF(objects[i]);
  }
  PyObject* release() {
    PyObject* result = objects[0];
    if (count > 1) {
      result = PyTuple_New(count);
      if (result == nullptr) throw PythonErrorSet{};
      for (int i = 0; i < count; ++i) PyTuple_SET_ITEM(result, i, objects[i]);
    }
    count = 0;
    return result;
  }
};

template <class T>
void put(char* params, int offset, T value) {
  std::memcpy(params + offset, &value, sizeof(T));
}

}  // namespace

DtypeId dtype_from_object(PyObject* cache, PyObject* object) {
  PyObject* known = PyDict_GetItemWithError(cache, object);  // borrowed
  if (known == nullptr) {
    PyErr_Clear();  // unhashable: let the slow way say what is wrong
    py::object id = py::module_::import("transformer_rtc.arrays").attr("dtype_id")(py::handle(object));
    if (PyDict_SetItem(cache, object, id.ptr()) != 0) PyErr_Clear();
    return id.cast<DtypeId>();
  }
  return static_cast<DtypeId>(PyLong_AsLong(known));
}

size_t Operator::KeyHash::operator()(const Key& key) const {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint64_t word : key) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

Operator::Operator(std::string name, std::vector<Argument> arguments, PyObject* plan, PyObject* slow_call,
                   PyObject* framework_of, PyObject* implementation)
    : name_(std::move(name)),
      arguments_(std::move(arguments)),
      plan_(Py_NewRef(plan)),
      slow_call_(Py_NewRef(slow_call)),
      framework_of_(Py_NewRef(framework_of)),
      implementation_(Py_NewRef(implementation)),
      dtypes_seen_(PyDict_New()) {
  for (const Argument& argument : arguments_) array_count_ += is_array(argument.role);
  if (arguments_.empty() || arguments_[0].role != Role::rows || array_count_ > kMaxArrays) {
    throw std::invalid_argument("an operator's first argument is an array of rows, and it has at most " +
                                std::to_string(kMaxArrays) + " arrays");
  }
}

void Operator::refuse(const std::string& argument, const std::string& what) const {
  throw_argument_error(name_ + ": " + argument + " " + what);
}

void Operator::check_dtype(const Argument& argument, DtypeId dtype) const {
  for (DtypeId accepted : argument.dtypes) {
    if (accepted == dtype) return;
  }
  std::string names;
  for (DtypeId accepted : argument.dtypes) names += (names.empty() ? "" : ", ") + dtype_name(accepted);
  refuse(argument.name, "must be one of " + names + "; it is " + dtype_name(dtype));
}

const Operator::Framework& Operator::framework(PyTypeObject* type, int array, const std::string& argument) {
  auto& last = last_frameworks_[array];
  if (last.type == type) return *last.framework;
  auto found = frameworks_.find(type);
  if (found != frameworks_.end()) {
    last = {type, &found->second};
    return found->second;
  }
  py::tuple answer = py::reinterpret_steal<py::object>(
      PyObject_CallFunction(framework_of_, "Os", reinterpret_cast<PyObject*>(type), (name_ + ": " + argument).c_str()));
  if (!answer) throw PythonErrorSet{};
  Framework framework;
  if (!answer[0].is_none()) {
    framework.api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(answer[0].ptr(), "dlpack_exchange_api"));
    if (framework.api == nullptr) throw PythonErrorSet{};
    if (framework.api->version.major != 1 || framework.api->tensor_from_object == nullptr) framework.api = nullptr;
  }
  if (!answer[1].is_none()) framework.is_grad_enabled = Py_NewRef(answer[1].ptr());
  Py_INCREF(type);  // its address is a key from now on
  return frameworks_.emplace(type, framework).first->second;
}

void Operator::read_values(PyObject* const* arguments, Call& call) {
  int array = 0, real = 0, last_out = -1;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    PyObject* value = arguments[i];
    switch (argument.role) {
      case Role::rows:
      case Role::columns:
        ++array;
        break;
      case Role::rows_out:
        call.wanted[array] = true;
        last_out = array++;
        break;
      case Role::row_values: {
        const int truth = PyObject_IsTrue(value);
        if (truth < 0) throw PythonErrorSet{};
        call.wanted[array] = truth != 0;
        call.dtypes[array] = truth != 0 ? argument.dtypes[0] : 0;
        ++array;
        break;
      }
      case Role::dtype_out:
        if (value != Py_None) {
          const DtypeId dtype = dtype_from_object(dtypes_seen_, value);
          check_dtype(argument, dtype);
          call.dtypes[last_out] = dtype;
        }
        break;
      case Role::real: {
        const double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred()) {
          PyErr_Clear();
          refuse(argument.name, std::string("must be a real number; it is of type ") + Py_TYPE(value)->tp_name);
        }
        if (!std::isfinite(static_cast<float>(number))) {
          refuse(argument.name, "must be finite; it is " + std::to_string(static_cast<float>(number)) + " in float32");
        }
        call.reals[real++] = number;
        break;
      }
      case Role::stream:
        break;
    }
  }
  PyObject* implementation = nullptr;
  if (PyContextVar_Get(implementation_, nullptr, &implementation) != 0) throw PythonErrorSet{};
  call.implementation = static_cast<int>(PyLong_AsLong(implementation));
  Py_DECREF(implementation);
}

PyObject* Operator::call(PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(arguments_.size())) {
    throw_argument_error(name_ + ": " + std::to_string(arguments_.size()) + " arguments expected, " +
                         std::to_string(count) + " given");
  }
  Call call;
  read_values(arguments, call);  // first: it may run Python code, and views borrow
  const DLPackExchangeAPI* api = nullptr;
  PyObject* is_grad_enabled = nullptr;
  bool slow = false;
  int array = 0;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    if (argument.role == Role::stream) slow |= arguments[i] != Py_None;
    if (!is_array(argument.role)) continue;
    const int index = array++;
    PyObject* object = arguments[i];
    if (argument.role == Role::row_values || (object == Py_None && argument.role == Role::rows_out)) continue;
    if (object == Py_None) {
      if (!argument.optional) refuse(argument.name, "must be an array; it is None");
      continue;
    }
    const Framework& owner = framework(Py_TYPE(object), index, argument.name);
    if (owner.api == nullptr || (api != nullptr && owner.api != api)) {
      slow = true;
      break;
    }
    api = owner.api;
    is_grad_enabled = owner.is_grad_enabled;
    DLTensor tensor;
    if (api->tensor_from_object(object, &tensor) != 0) {
      py::error_already_set error;
      refuse(argument.name, std::string("is a tensor without memory of its own: ") + error.what());
    }
    if (tensor.device.type != kDLCUDA) {
      slow = true;
      break;
    }
    if (tensor.dtype.lanes != 1) refuse(argument.name, "must not have a vector data type");
    call.views[index] = view_of(tensor);
    call.objects[index] = object;
    if (call.dtypes[index] == 0) call.dtypes[index] = call.views[index].dtype;
  }
  if (slow) {
    py::tuple all(count);
    for (Py_ssize_t i = 0; i < count; ++i) all[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    PyObject* result = PyObject_CallOneArg(slow_call_, all.ptr());
    if (result == nullptr) throw PythonErrorSet{};
    return result;
  }
  if (is_grad_enabled != nullptr) {
    py::object enabled = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_grad_enabled));
    if (!enabled) throw PythonErrorSet{};
    if (enabled.ptr() == Py_True) {
      static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
      array = 0;
      for (const Argument& argument : arguments_) {
        if (!is_array(argument.role)) continue;
        PyObject* object = call.objects[array++];
        if (object == nullptr) continue;
        py::object required = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, requires_grad));
        if (!required) throw PythonErrorSet{};
        if (required.ptr() == Py_True) {
          refuse(argument.name,
                 "requires grad, and this operator records no gradient: call it under torch.no_grad() or "
                 "torch.inference_mode(), or pass " +
                     argument.name + ".detach()");
        }
      }
    }
  }
  void* stream = nullptr;
  if (api->current_stream(kDLCUDA, call.views[0].device, &stream) != 0) throw PythonErrorSet{};
  ExchangeAllocator allocator(api);
  return run(call, allocator, static_cast<CUstream>(stream));
}

const Plan& Operator::plan(const Call& call, int64_t columns) {
  Key key{};
  key[0] = static_cast<uint64_t>(call.implementation) << 32 | static_cast<uint32_t>(call.views[0].device);
  key[1] = static_cast<uint64_t>(columns);
  for (int i = 0; i < array_count_; ++i) key[2 + i] = call.dtypes[i];
  if (last_plan_ != nullptr && key == last_key_) return *last_plan_;

  auto found = plans_.find(key);
  if (found == plans_.end()) {
    py::tuple dtypes(array_count_);
    for (int i = 0; i < array_count_; ++i) dtypes[i] = py::int_(call.dtypes[i]);
    py::object made = py::reinterpret_steal<py::object>(PyObject_CallFunction(
        plan_, "iiOL", call.implementation, call.views[0].device, dtypes.ptr(), static_cast<long long>(columns)));
    if (!made) throw PythonErrorSet{};
    found = plans_.emplace(key, made.cast<const Plan&>()).first;
  }
  last_key_ = key;
  last_plan_ = &found->second;
  return found->second;
}

PyObject* Operator::run(Call& call, Allocator& allocator, CUstream stream) {
  const View& x = call.views[0];
  const int device = x.device;

  // Check the arguments, and find how rows lie.
  if (x.ndim < 1) refuse(arguments_[0].name, "must have at least one dimension; it is a scalar");
  const int64_t columns = x.shape[x.ndim - 1];
  const View* row_views[kMaxArrays];
  int row_index[kMaxArrays], row_count = 0;
  int array = 0;
  for (const Argument& argument : arguments_) {
    if (!is_array(argument.role)) continue;
    const int index = array++;
    const View& view = call.views[index];
    const bool given = call.objects[index] != nullptr;
    if (argument.role == Role::rows_out && !given) {
      if (call.dtypes[index] == 0) call.dtypes[index] = x.dtype;
      check_dtype(argument, call.dtypes[index]);
    }
    if (!given) continue;
    if (call.dtypes[index] != 0 && call.dtypes[index] != view.dtype) {
      refuse(argument.name,
             "is " + dtype_name(view.dtype) + " where " + dtype_name(call.dtypes[index]) + " was asked for");
    }
    call.dtypes[index] = view.dtype;
    check_dtype(argument, view.dtype);
    if (view.device != device) {
      refuse(argument.name, "must be on the device of " + arguments_[0].name + ", cuda:" + std::to_string(device) +
                                "; it is on cuda:" + std::to_string(view.device));
    }
    if (view.size() > 0 && reinterpret_cast<uintptr_t>(view.data) % dtype_bytes(view.dtype) != 0) {
      refuse(argument.name, "must be aligned to its elements of " + std::to_string(dtype_bytes(view.dtype)) + " bytes");
    }
    if (view.size() > 0 && view.data == nullptr) {
      refuse(argument.name, "has elements but no memory: it is a fake or meta tensor");
    }
    if (argument.role == Role::columns) {
      if (view.ndim != 1 || view.shape[0] != columns) {
        refuse(argument.name, "must have the shape (" + std::to_string(columns) +
                                  ",), one element for each column of " + arguments_[0].name + "; it has " +
                                  view.shape_text());
      }
      if (columns > 1 && view.stride(0) != 1) refuse(argument.name, "must be contiguous");
    } else {
      bool same = view.ndim == x.ndim;
      for (int i = 0; same && i < x.ndim; ++i) same = view.shape[i] == x.shape[i];
      if (!same) {
        refuse(argument.name, "must have the shape of " + arguments_[0].name + ", " + x.shape_text() + "; it has " +
                                  view.shape_text());
      }
      if (columns > 1 && view.size() > 0 && view.stride(view.ndim - 1) != 1) {
        refuse(argument.name, "must be contiguous in its last dimension; there its stride is " +
                                  std::to_string(view.stride(view.ndim - 1)) + ": pass " + argument.name +
                                  ".contiguous()");
      }
      row_views[row_count] = &view;
      row_index[row_count++] = index;
    }
    if (!is_input(argument.role) && view.read_only) refuse(argument.name, "is read-only");
  }
  constexpr int64_t most_columns = int64_t{1} << 30;
  if (columns < 1 || columns > most_columns) {
    refuse(arguments_[0].name, "must have 1 to 2^30 elements in its last dimension; it has " + std::to_string(columns));
  }
  Geometry geometry;
  RowStrides given_strides[kMaxArrays], strides[kMaxArrays];
  if (!collapse_rows(row_views, row_count, geometry, given_strides)) {
    std::string names;
    for (int i = 0, a = 0; i < static_cast<int>(arguments_.size()); ++i) {
      if (!is_array(arguments_[i].role)) continue;
      for (int j = 0; j < row_count; ++j) {
        if (row_index[j] == a) names += (names.empty() ? "" : " and ") + arguments_[i].name;
      }
      ++a;
    }
    refuse(names, "must have leading dimensions that collapse to at most two strides; the shape is " + x.shape_text() +
                      ": pass a contiguous array");
  }
  if (geometry.inner_count > 1 && geometry.rows > INT32_MAX) {
    refuse(arguments_[0].name,
           "has more than 2^31 - 1 rows, so its leading dimensions must collapse to one stride: "
           "pass a contiguous array");
  }
  for (int i = 0; i < row_count; ++i) strides[row_index[i]] = given_strides[i];

  // Outputs must not overlap what is read, but for an output that is the first input: in place.
  array = 0;
  for (const Argument& argument : arguments_) {
    if (!is_array(argument.role)) continue;
    const int out = array++;
    if (argument.role != Role::rows_out || call.objects[out] == nullptr || geometry.rows == 0) continue;
    if (rows_overlap(geometry, strides[out])) refuse(argument.name, "has rows that overlap each other");
    int other = 0;
    for (const Argument& input : arguments_) {
      if (!is_array(input.role)) continue;
      const int index = other++;
      if (index == out || call.objects[index] == nullptr) continue;
      if (input.role == Role::columns) {
        if (extents_overlap(geometry, call.views[out], strides[out], call.views[index])) {
          refuse(argument.name, "must not overlap " + input.name);
        }
        continue;
      }
      const bool in_place = call.views[out].data == call.views[index].data && call.dtypes[out] == call.dtypes[index] &&
                            strides[out].outer == strides[index].outer && strides[out].inner == strides[index].inner;
      if (!in_place && arrays_overlap(geometry, call.views[out], strides[out], call.views[index], strides[index])) {
        refuse(argument.name, "must be " + input.name + " itself or not overlap it");
      }
    }
  }

  const bool empty = geometry.rows == 0;
  const Plan* plan = empty ? nullptr : &this->plan(call, columns);

  // Allocate.
  Outputs outputs;
  int64_t dense_outer = geometry.inner_count * columns;
  array = 0;
  for (const Argument& argument : arguments_) {
    if (!is_array(argument.role)) continue;
    const int index = array++;
    if (is_input(argument.role) || !call.wanted[index]) continue;
    if (call.objects[index] != nullptr) {
      outputs.objects[outputs.count++] = Py_NewRef(call.objects[index]);
      continue;
    }
    const int ndim = argument.role == Role::row_values ? x.ndim - 1 : x.ndim;
    char* data = nullptr;
    outputs.objects[outputs.count] = allocator.allocate(ndim, x.shape, call.dtypes[index], device, data);
    ++outputs.count;
    call.views[index].data = data;
    strides[index] = {dense_outer, columns};
  }
  if (empty) return outputs.release();

  // Launch.
  LaunchShape shape = plan->shape;
  const int64_t groups = (geometry.rows + plan->rows_per_cta - 1) / plan->rows_per_cta;
  const int64_t launched = groups < plan->max_groups ? groups : plan->max_groups;
  // Only a cooperative grid takes several rows in turn.
  if ((shape.cooperative ? launched : groups) > INT32_MAX / plan->ctas_per_row) {
    refuse(arguments_[0].name, "has more rows than a grid can hold");
  }
  shape.grid = {static_cast<unsigned>(launched * plan->ctas_per_row), 1, 1};

  PyObject* workspace = nullptr;
  char* workspace_data = nullptr;
  if (plan->workspace_bytes > 0) {
    const int64_t bytes = plan->workspace_bytes * launched;
    constexpr DtypeId uint8 = 1 << 8 | 8;
    workspace = allocator.allocate(1, &bytes, uint8, device, workspace_data);
  }
  const py::object workspace_owner = py::reinterpret_steal<py::object>(workspace);

  alignas(16) char params[kMaxParameterBytes];
  const Divisor divisor = geometry.inner_count > 1 ? divide_by(static_cast<uint32_t>(geometry.inner_count)) : Divisor{};
  for (const FieldFill& field : plan->fields) {
    const int i = field.index;
    switch (field.source) {
      case Source::data:
        put(params, field.offset, call.views[i].data);
        break;
      case Source::outer_stride:
        put(params, field.offset, strides[i].outer);
        break;
      case Source::inner_stride:
        put(params, field.offset, geometry.inner_count > 1 ? strides[i].inner : 0);
        break;
      case Source::dtype:
        put(params, field.offset, static_cast<int32_t>(call.dtypes[i]));
        break;
      case Source::real:
        put(params, field.offset, static_cast<float>(call.reals[i]));
        break;
      case Source::rows:
        put(params, field.offset, geometry.rows);
        break;
      case Source::columns:
        put(params, field.offset, static_cast<int32_t>(columns));
        break;
      case Source::inner_count:
        put(params, field.offset, static_cast<uint32_t>(geometry.inner_count));
        break;
      case Source::inner_magic:
        put(params, field.offset, divisor.magic);
        break;
      case Source::inner_shift:
        put(params, field.offset, divisor.shift);
        break;
      case Source::workspace:
        put(params, field.offset, workspace_data);
        break;
    }
  }
  if (plan->workspace_bytes > 0) plan->launcher->zero(workspace_data, plan->workspace_bytes * launched, stream);
  std::vector<Memory> memory;
  if (plan->launcher->asks_for_memory()) {
    static const std::string workspace_name = "the workspace";
    array = 0;
    for (const Argument& argument : arguments_) {
      if (!is_array(argument.role)) continue;
      const int i = array++;
      const bool input = is_input(argument.role);
      if (input ? call.objects[i] == nullptr : !call.wanted[i]) continue;
      Memory rows{&argument.name, call.views[i].data, dtype_bytes(call.dtypes[i]), columns, 1, 0, 1, 0, !input, input};
      if (argument.role == Role::row_values) {
        rows.columns = geometry.rows;
      } else if (argument.role != Role::columns) {
        rows.outer_count = geometry.rows / geometry.inner_count;
        rows.outer_stride = strides[i].outer;
        rows.inner_count = geometry.inner_count;
        rows.inner_stride = strides[i].inner;
      }
      memory.push_back(rows);
    }
    if (plan->workspace_bytes > 0) {
      memory.push_back({&workspace_name, workspace_data, 1, plan->workspace_bytes * launched, 1, 0, 1, 0, true, true});
    }
  }
  plan->launcher->launch(shape, params, stream, memory);
  return outputs.release();
}
