#include "operator.hpp"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "errors.hpp"

namespace py = pybind11;

namespace {

bool is_array(Role role) {
  switch (role) {
    case Role::real:
    case Role::non_negative:
    case Role::integer:
    case Role::flag:
    case Role::square:
    case Role::dtype_out:
    case Role::wanted:
    case Role::sm_margin:
    case Role::stream:
      return false;
    default:
      return true;
  }
}

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

template <class T>
void put(char* params, int offset, T value) {
  std::memcpy(params + offset, &value, sizeof(T));
}

// Python's or numpy's.
bool is_bool(PyObject* value) {
  const char* type = Py_TYPE(value)->tp_name;
  return PyBool_Check(value) || std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0;
}

// What a message says of a value.
std::string shown(PyObject* value) {
  return py::module_::import("transformer_rtc.errors").attr("shown")(py::handle(value)).cast<std::string>();
}

constexpr int64_t kMostInY = 65535;  // CTAs of a grid's second dimension

int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

// Of what is divided by, only: where rows are told apart they are fewer than 2^31.
Divisor divide_by_count(int64_t count) {
  return count > 1 && count <= INT32_MAX ? divide_by(static_cast<uint32_t>(count)) : Divisor{};
}

}  // namespace

// Owns references until they are returned.
struct Operator::Outputs {
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

PyObject* Allocator::workspace(int64_t bytes, int device, CUstream, char*& data) {
  constexpr DtypeId uint8 = 1 << 8 | 8;
  return allocate(1, &bytes, uint8, device, data);
}

size_t Operator::KeyHash::operator()(const Key& key) const {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint64_t word : key) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

Operator::Operator(std::string name, std::vector<Argument> arguments, PyObject* plan, PyObject* check,
                   PyObject* slow_call, PyObject* framework_of, PyObject* implementation, std::vector<int64_t> buckets)
    : name_(std::move(name)),
      arguments_(std::move(arguments)),
      plan_(Py_NewRef(plan)),
      check_(Py_NewRef(check)),
      slow_call_(Py_NewRef(slow_call)),
      framework_of_(Py_NewRef(framework_of)),
      implementation_(Py_NewRef(implementation)),
      buckets_(std::move(buckets)),
      dtypes_seen_(PyDict_New()) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    const Role role = argument.role;
    if (!is_array(role)) continue;
    const bool input = role == Role::rows || role == Role::columns || role == Role::row_inputs || role == Role::value ||
                       role == Role::mask || role == Role::head_values;
    arrays_.push_back(
        {&argument, role, static_cast<int>(i), role == Role::rows || role == Role::rows_out, input,
         role == Role::rows_out || role == Role::value_out,
         role == Role::row_values || role == Role::column_values || role == Role::head_sums || role == Role::mask_sums,
         input && !argument.optional, nullptr});
  }
  if (arguments_.empty() || arguments_[0].role != Role::rows || arguments_[0].optional || arrays_.size() > kMaxArrays) {
    throw std::invalid_argument("an operator's first argument is an array of rows, and it has at most " +
                                std::to_string(kMaxArrays) + " arrays");
  }
  const auto count = [&](Role role) {
    return std::count_if(arguments_.begin(), arguments_.end(), [&](const Argument& one) { return one.role == role; });
  };
  if (count(Role::flag) > kMaxFlags || count(Role::real) + count(Role::non_negative) > kMaxArrays ||
      count(Role::integer) > kMaxArrays) {
    throw std::invalid_argument("too many arguments that are no arrays");
  }
  if (!buckets_.empty() && (!std::is_sorted(buckets_.begin(), buckets_.end()) || buckets_.back() != kMostColumns)) {
    throw std::invalid_argument("buckets ascend to the largest number of columns");
  }
  for (const Argument& argument : arguments_) {
    if (argument.role != Role::wanted) continue;
    for (int output : argument.of) arrays_.at(output).wanted_by = &argument;
  }
}

void Operator::refuse(const std::string& argument, const std::string& what) const {
  throw_argument_error(name_ + ": " + argument + " " + what);
}

void Operator::refuse_dtype(const Argument& argument, const std::string& given) const {
  std::string names;
  for (DtypeId accepted : argument.dtypes) names += (names.empty() ? "" : ", ") + dtype_name(accepted);
  refuse(argument.called, "must be one of " + names + "; it is " + given);
}

void Operator::check_dtype(const Argument& argument, DtypeId dtype) const {
  for (DtypeId accepted : argument.dtypes) {
    if (accepted == dtype) return;
  }
  refuse_dtype(argument, dtype_name(dtype));
}

DtypeId Operator::dtype_of(const Argument& argument, PyObject* object) {
  PyObject* known = PyDict_GetItemWithError(dtypes_seen_, object);  // borrowed
  if (known == nullptr) {
    PyErr_Clear();  // unhashable: let the slow way say what is wrong
    py::object id;
    try {
      id = py::module_::import("transformer_rtc.arrays").attr("dtype_id")(py::handle(object));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_ValueError)) throw;
      refuse_dtype(argument, shown(object));
    }
    if (PyDict_SetItem(dtypes_seen_, object, id.ptr()) != 0) PyErr_Clear();
    return id.cast<DtypeId>();
  }
  return static_cast<DtypeId>(PyLong_AsLong(known));
}

bool Operator::truth(const Argument& argument, PyObject* value) const {
  if (value == Py_True || value == Py_False) return value == Py_True;
  if (!is_bool(value)) refuse(argument.called, "must be True or False; it is " + shown(value));
  return PyObject_IsTrue(value) == 1;
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
  for (size_t i = 0; i < arrays_.size(); ++i) call.wanted[i] = arrays_[i].role == Role::rows_out;
  int array = 0, real = 0, integer = 0, flag = 0;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    PyObject* value = arguments[i];
    switch (argument.role) {
      case Role::rows:
      case Role::columns:
      case Role::row_inputs:
      case Role::value:
      case Role::mask:
      case Role::head_values:
      case Role::value_out:
      case Role::rows_out:
        ++array;
        break;
      case Role::row_values:
      case Role::column_values:
      case Role::head_sums:
      case Role::mask_sums:
        call.wanted[array] = truth(argument, value);
        if (argument.role == Role::row_values) call.dtypes[array] = argument.dtypes[0];
        ++array;
        break;
      case Role::wanted: {
        const bool wanted = truth(argument, value);
        for (int output : argument.of) call.wanted[output] = wanted;
        break;
      }
      case Role::dtype_out:
        if (value != Py_None) {
          const DtypeId dtype = dtype_of(argument, value);
          check_dtype(argument, dtype);
          for (int output : argument.of) call.dtypes[output] = dtype;
        }
        break;
      case Role::real:
      case Role::non_negative: {
        const double number = PyFloat_AsDouble(value);
        if (is_bool(value) || (number == -1.0 && PyErr_Occurred())) {
          const bool too_large = PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError);
          PyErr_Clear();
          if (too_large) refuse(argument.called, "must be finite in float32; it is " + shown(value));
          refuse(argument.called, std::string("must be a real number; it is of type ") + Py_TYPE(value)->tp_name);
        }
        if (!std::isfinite(static_cast<float>(number))) {
          refuse(argument.called,
                 "must be finite; it is " + std::to_string(static_cast<float>(number)) + " in float32");
        }
        if (argument.role == Role::non_negative && number < 0) {
          refuse(argument.called, "must not be negative; it is " + shown(value));
        }
        call.reals[real++] = number;
        break;
      }
      case Role::integer: {
        const Py_ssize_t number = PyBool_Check(value) ? INT64_MIN : PyNumber_AsSsize_t(value, nullptr);
        if (number < INT32_MIN || number > INT32_MAX || PyErr_Occurred()) {
          PyErr_Clear();
          refuse(argument.called, "must be an integer of 32 bits; it is " + shown(value));
        }
        call.integers[integer++] = static_cast<int32_t>(number);
        break;
      }
      case Role::flag:
        call.flags |= static_cast<uint32_t>(truth(argument, value)) << flag++;
        break;
      case Role::square:
        call.square = truth(argument, value);
        break;
      case Role::sm_margin:
        // Beyond 2^63 - 1 it is that: more than any device has.
        call.sm_margin = PyBool_Check(value) ? -1 : PyNumber_AsSsize_t(value, nullptr);
        if (call.sm_margin < 0) {
          PyErr_Clear();
          refuse(argument.called, "must be a non-negative integer; it is " + shown(value));
        }
        break;
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
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].role == Role::stream) slow |= arguments[i] != Py_None;
  }
  for (size_t index = 0; index < arrays_.size(); ++index) {
    const Array& array = arrays_[index];
    const Argument& argument = *array.argument;
    PyObject* object = arguments[array.position];
    if (array.made) continue;
    if (object == Py_None) {
      if (array.required) refuse(argument.called, "must be an array; it is None");
      continue;
    }
    const Framework& owner = framework(Py_TYPE(object), index, argument.called);
    if (owner.api == nullptr || (api != nullptr && owner.api != api)) {
      slow = true;
      break;
    }
    api = owner.api;
    is_grad_enabled = owner.is_grad_enabled;
    DLTensor tensor;
    if (api->tensor_from_object(object, &tensor) != 0) {
      py::error_already_set error;
      const std::string what = error.what();  // its other lines are a trace
      refuse(argument.called, "is a tensor without memory of its own: " + what.substr(0, what.find('\n')));
    }
    if (tensor.device.type != kDLCUDA) {
      slow = true;
      break;
    }
    if (tensor.dtype.lanes != 1) refuse(argument.called, "must not have a vector data type");
    call.views[index] = view_of(tensor);
    call.objects[index] = object;
  }
  if (slow) {
    py::tuple all(count);
    for (Py_ssize_t i = 0; i < count; ++i) all[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    PyObject* result = taking_gil([&] { return PyObject_CallOneArg(slow_call_, all.ptr()); });
    if (result == nullptr) throw PythonErrorSet{};
    return result;
  }
  if (is_grad_enabled != nullptr) {
    py::object enabled = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_grad_enabled));
    if (!enabled) throw PythonErrorSet{};
    if (enabled.ptr() == Py_True) {
      static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
      for (size_t i = 0; i < arrays_.size(); ++i) {
        PyObject* object = call.objects[i];
        if (object == nullptr) continue;
        const Argument& argument = *arrays_[i].argument;
        py::object required = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, requires_grad));
        if (!required) throw PythonErrorSet{};
        if (required.ptr() == Py_True) {
          refuse(argument.called,
                 "requires grad, and this operator records no gradient: call it under torch.no_grad() or "
                 "torch.inference_mode(), or pass " +
                     argument.called + ".detach()");
        }
      }
    }
  }
  check_not_forked();  // before the framework is asked for anything
  void* stream = nullptr;
  if (api->current_stream(kDLCUDA, call.views[0].device, &stream) != 0) throw PythonErrorSet{};
  ExchangeAllocator allocator(api);
  return run(call, allocator, static_cast<CUstream>(stream));
}

py::object Operator::ask(PyObject* callback, const Call& call, const Layout& layout, int64_t columns) const {
  py::tuple dtypes(arrays_.size());
  for (size_t i = 0; i < arrays_.size(); ++i) dtypes[i] = py::int_(call.dtypes[i]);
  py::object answer = py::reinterpret_steal<py::object>(taking_gil([&] {
    return PyObject_CallFunction(callback, "iiOLOOI", call.implementation, call.views[0].device, dtypes.ptr(),
                                 static_cast<long long>(columns), layout.per_head ? Py_True : Py_False,
                                 call.sm_margin > 0 ? Py_True : Py_False, call.flags);
  }));
  if (!answer) throw PythonErrorSet{};
  return answer;
}

int64_t Operator::bucket_of(int64_t columns) const {
  return buckets_.empty() ? columns : *std::lower_bound(buckets_.begin(), buckets_.end(), columns);
}

std::shared_ptr<const Plan> Operator::plan(const Call& call, const Layout& layout) {
  Key key{};
  const int device = call.views[0].device;
  const bool margin = call.sm_margin > 0;
  const int64_t columns = bucket_of(layout.geometry.columns);
  key[0] = static_cast<uint64_t>(call.flags) << 48 | static_cast<uint64_t>(call.implementation) << 34 |
           static_cast<uint64_t>(margin) << 33 | static_cast<uint64_t>(layout.per_head) << 32 |
           static_cast<uint32_t>(device);
  key[1] = static_cast<uint64_t>(columns);
  std::memcpy(&key[2], call.dtypes, sizeof(call.dtypes));
  if (last_plan_ != nullptr && key == last_key_) return last_plan_;

  auto found = plans_.find(key);
  if (found == plans_.end()) {
    const py::object made = ask(plan_, call, layout, columns);
    if (plans_.size() >= kMostPlans) forget_plans();
    found = plans_.emplace(key, Kept{std::make_shared<const Plan>(made.cast<const Plan&>()), 0}).first;
  }
  found->second.looked_up = ++lookups_;
  last_key_ = key;
  last_plan_ = found->second.plan;
  return last_plan_;
}

void Operator::forget_plans() {
  std::vector<uint64_t> times;
  for (const auto& [key, kept] : plans_) times.push_back(kept.looked_up);
  const auto quarter = times.begin() + times.size() / 4;
  std::nth_element(times.begin(), quarter, times.end());
  // They end last: a kernel that is unloaded lets other threads run, and these may come here.
  std::vector<std::shared_ptr<const Plan>> forgotten;
  for (auto it = plans_.begin(); it != plans_.end();) {
    if (it->second.looked_up < *quarter) {
      forgotten.push_back(std::move(it->second.plan));
      it = plans_.erase(it);
    } else {
      ++it;
    }
  }
}

void Operator::check_view(const Array& array, const View& view, const View& first, Layout& layout) const {
  const std::string& name = array.argument->called;
  const std::string& first_name = arguments_[0].called;
  const int64_t columns = first.shape[first.ndim - 1];
  check_dtype(*array.argument, view.dtype);
  if (view.device != first.device) {
    refuse(name, "must be on the device of " + first_name + ", cuda:" + std::to_string(first.device) +
                     "; it is on cuda:" + std::to_string(view.device));
  }
  if (view.size() > 0 && reinterpret_cast<uintptr_t>(view.data) % dtype_bytes(view.dtype) != 0) {
    refuse(name, "must be aligned to its elements of " + std::to_string(dtype_bytes(view.dtype)) + " bytes");
  }
  if (view.size() > 0 && view.data == nullptr) refuse(name, "has elements but no memory: it is a fake or meta tensor");
  if (array.written && view.read_only) refuse(name, "is read-only");

  if (array.of_rows) {
    if (!view.same_shape(first)) {
      refuse(name,
             "must have the shape of " + first_name + ", " + first.shape_text() + "; it has " + view.shape_text());
    }
    if (columns > 1 && view.size() > 0 && view.stride(view.ndim - 1) != 1) {
      refuse(name, "must be contiguous in its last dimension; there its stride is " +
                       std::to_string(view.stride(view.ndim - 1)) + ": pass " + name + ".contiguous()");
    }
    return;
  }
  if (array.role == Role::mask) {
    return check_mask(name, view, first, layout.mask_strides[&array - arrays_.data()]);
  }
  if (array.role == Role::columns) {
    if (layout.pattern != nullptr) {
      if (!view.same_shape(*layout.pattern)) {
        refuse(name, "must have the shape of " + *layout.pattern_name + ", " + layout.pattern->shape_text() +
                         "; it has " + view.shape_text());
      }
    } else {
      const View of_all{nullptr, 1, &first.shape[first.ndim - 1]};
      const View of_heads{nullptr, 2, first.shape + first.ndim - 2};
      layout.per_head = first.ndim >= 2 && view.same_shape(of_heads);
      if (!layout.per_head && !view.same_shape(of_all)) {
        refuse(name, "must have the shape " + of_all.shape_text() + ", one element for each column of " + first_name +
                         (first.ndim >= 2 ? ", or " + of_heads.shape_text() + ", such a row for each head" : "") +
                         "; it has " + view.shape_text());
      }
      if (layout.per_head) layout.heads = view.shape[0];
      layout.pattern = &view;
      layout.pattern_name = &name;
    }
  } else if (array.role == Role::row_inputs) {
    const View of_rows{nullptr, first.ndim - 1, first.shape};
    if (!view.same_shape(of_rows)) {
      refuse(name, "must have the shape " + of_rows.shape_text() + ", one element for each row of " + first_name +
                       "; it has " + view.shape_text());
    }
  } else if (array.role == Role::head_values) {
    if (first.ndim < 3 || view.ndim != 1 || view.shape[0] != first.shape[first.ndim - 3]) {
      refuse(name, "must have one element for each head of " + first_name +
                       " [..., heads, queries, keys], whose shape is " + first.shape_text() + "; it has " +
                       view.shape_text());
    }
  } else if (view.ndim > 1 || view.size() != 1) {
    refuse(name, "must have the shape () or (1,); it has " + view.shape_text());
  }
  if (!view.contiguous()) refuse(name, "must be contiguous: pass " + name + ".contiguous()");
}

void Operator::check_mask(const std::string& name, const View& view, const View& first, MaskStrides& strides) const {
  bool broadcasts = view.ndim >= 1 && view.ndim <= first.ndim;
  const int missing = first.ndim - view.ndim;  // its leading dimensions
  for (int i = 0; i < view.ndim && broadcasts; ++i) {
    broadcasts = view.shape[i] == first.shape[missing + i] || (view.shape[i] == 1 && i + 1 < view.ndim);
  }
  if (!broadcasts) {
    refuse(name, "must have the shape of " + arguments_[0].called + ", " + first.shape_text() +
                     ", or one that is broadcast to it along dimensions before the last; it has " + view.shape_text());
  }
  if (view.size() > 0 && view.shape[view.ndim - 1] > 1 && view.stride(view.ndim - 1) != 1) {
    refuse(name, "must be contiguous in its last dimension; there its stride is " +
                     std::to_string(view.stride(view.ndim - 1)) + ": pass " + name + ".contiguous()");
  }
  const auto stride = [&](int dimension) {  // of the rows' shape
    const int own = dimension - missing;
    return own < 0 || view.shape[own] == 1 ? int64_t{0} : view.stride(own);
  };
  if (first.ndim >= 2) strides.query = stride(first.ndim - 2);
  if (first.ndim >= 3) strides.head = stride(first.ndim - 3);
  // Those before the heads are counted as one.
  int64_t extent = 1;
  for (int dimension = first.ndim - 4; dimension >= 0; --dimension) {
    if (first.shape[dimension] == 1) continue;
    if (extent == 1) {
      strides.batch = stride(dimension);
    } else if (stride(dimension) != strides.batch * extent) {
      // Heads, queries and keys may stay as they are.
      std::vector<int64_t> shape(first.shape, first.shape + first.ndim - 3);
      for (int own = first.ndim - 3 - missing; own < view.ndim; ++own) shape.push_back(own < 0 ? 1 : view.shape[own]);
      View enough = first;
      enough.shape = shape.data();
      refuse(name, "must have dimensions before the heads that collapse to one stride; its shape is " +
                       view.shape_text() + ": expand these alone, and pass a contiguous array of " +
                       enough.shape_text());
    }
    extent *= first.shape[dimension];
  }
}

void Operator::check_mask_sums(const Call& call, size_t array, Layout& layout) const {
  const int like = arrays_[array].argument->like;
  if (!call.wanted[array] || call.objects[like] == nullptr) return;  // without a mask a plan is refused
  View dense = call.views[like];
  dense.strides = nullptr;
  check_mask(arrays_[like].argument->called, dense, call.views[0], layout.mask_strides[array]);
  layout.mask_rows = dense.size() / dense.shape[dense.ndim - 1];
}

Operator::Layout Operator::check(Call& call) const {
  const View& first = call.views[0];
  const std::string& first_name = arguments_[0].called;
  if (first.ndim < 1) refuse(first_name, "must have at least one dimension; it is a scalar");
  Layout layout;
  const View* row_views[kMaxArrays];
  int row_index[kMaxArrays], row_count = 0, results = 0;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    const View& view = call.views[i];
    results += call.wanted[i];
    if (call.objects[i] != nullptr) {
      if (array.wanted_by != nullptr && !call.wanted[i]) {
        refuse(array.argument->called, "was given, but " + array.wanted_by->name + " is False");
      }
      if (call.dtypes[i] != 0 && call.dtypes[i] != view.dtype) {
        refuse(array.argument->called,
               "is " + dtype_name(view.dtype) + " where " + dtype_name(call.dtypes[i]) + " was asked for");
      }
      call.dtypes[i] = view.dtype;
      check_view(array, view, first, layout);
      if (array.of_rows) {
        row_views[row_count] = &view;
        row_index[row_count++] = static_cast<int>(i);
      }
    } else if (call.wanted[i]) {
      if (call.dtypes[i] == 0) call.dtypes[i] = call.dtypes[array.argument->like];
      if (call.dtypes[i] == 0) call.dtypes[i] = first.dtype;  // what it is like was not given
      check_dtype(*array.argument, call.dtypes[i]);
    } else {
      call.dtypes[i] = 0;
    }
  }
  if (results == 0) {
    std::string flags;
    for (const Array& array : arrays_) {
      if (array.wanted_by == nullptr && !array.made) continue;
      flags += (flags.empty() ? "" : ", ") + (array.made ? "return_" + array.argument->name : array.wanted_by->name);
    }
    throw_argument_error(name_ + ": nothing is asked for; one of " + flags + " must be True");
  }

  const int64_t columns = first.shape[first.ndim - 1];
  if (columns < 1 || columns > kMostColumns) {
    refuse(first_name, "must have 1 to 2^30 elements in its last dimension; it has " + std::to_string(columns));
  }
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (arrays_[i].role == Role::mask_sums) check_mask_sums(call, i, layout);
  }
  RowStrides strides[kMaxArrays];
  Geometry& geometry = layout.geometry;
  if (!collapse_rows(row_views, row_count, geometry, strides)) {
    std::string names;
    for (int i = 0; i < row_count; ++i) {
      names += (names.empty() ? "" : " and ") + arrays_[row_index[i]].argument->called;
    }
    refuse(names, "must have leading dimensions that collapse to at most two strides; the shape is " +
                      first.shape_text() + ": pass a contiguous array");
  }
  if (geometry.inner_count > 1 && geometry.rows > INT32_MAX) {
    refuse(first_name,
           "has more than 2^31 - 1 rows, so its leading dimensions must collapse to one stride: "
           "pass a contiguous array");
  }
  if (first.ndim >= 2) layout.queries = first.shape[first.ndim - 2];
  if (first.ndim >= 3) layout.matrix_heads = first.shape[first.ndim - 3];
  for (const Argument& argument : arguments_) {
    if (argument.role == Role::square && call.square && layout.queries != columns) {
      refuse(argument.called + "='" + argument.name + "'",
             "needs as many queries as keys; the shape of " + first_name + " is " + first.shape_text());
    }
  }
  bool by_query = call.flags != 0;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    by_query |= call.objects[i] != nullptr && (arrays_[i].role == Role::mask || arrays_[i].role == Role::head_values);
  }
  if (by_query && geometry.rows > INT32_MAX) {
    refuse(first_name, "may have up to 2^31 - 1 rows where they are told apart by their query");
  }
  if (layout.per_head && (geometry.rows > INT32_MAX || layout.heads > kMostInY)) {
    refuse(*layout.pattern_name, "may have a row for each head up to 65535 heads and 2^31 - 1 rows of " + first_name +
                                     "; there are " + std::to_string(layout.heads) + " heads and " +
                                     std::to_string(geometry.rows) + " rows");
  }
  for (int i = 0; i < row_count; ++i) layout.strides[row_index[i]] = strides[i];
  return layout;
}

void Operator::check_overlap(const Call& call, const Layout& layout) const {
  const Geometry& geometry = layout.geometry;
  const auto extent = [&](size_t i) {
    const View& view = call.views[i];
    if (arrays_[i].role == Role::mask) return extent_of_strided(view);
    return arrays_[i].of_rows ? extent_of(geometry, view, layout.strides[i]) : extent_of(view);
  };
  const auto given = [&](size_t i) { return call.objects[i] != nullptr && call.views[i].size() > 0; };
  const Argument* reader = nullptr;  // of rows, behind the launch that writes
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (arrays_[i].role == Role::mask_sums && call.wanted[i]) reader = arrays_[i].argument;
  }
  for (size_t out = 0; out < arrays_.size(); ++out) {
    if (!arrays_[out].written || !given(out)) continue;
    const std::string& name = arrays_[out].argument->called;
    const View& a = call.views[out];
    const RowStrides& a_strides = layout.strides[out];
    if (arrays_[out].of_rows && rows_overlap(geometry, a_strides)) refuse(name, "has rows that overlap each other");
    for (size_t other = 0; other < arrays_.size(); ++other) {
      // Of two written arrays, the later one is told.
      if (!given(other) || (arrays_[other].written && other >= out)) continue;
      const std::string& other_name = arrays_[other].argument->called;
      const View& b = call.views[other];
      const RowStrides& b_strides = layout.strides[other];
      if (!arrays_[out].of_rows || !arrays_[other].of_rows) {
        if (extent(out).overlaps(extent(other))) refuse(name, "must not overlap " + other_name);
      } else if (arrays_[other].written) {
        if (arrays_overlap(geometry, a, a_strides, b, b_strides)) refuse(name, "must not overlap " + other_name);
      } else {
        const bool in_place = a.data == b.data && a.dtype == b.dtype && a_strides.outer == b_strides.outer &&
                              a_strides.inner == b_strides.inner;
        if (reader != nullptr && arrays_overlap(geometry, a, a_strides, b, b_strides)) {
          refuse(name, "must not overlap " + other_name + ", which is read again for " + reader->name);
        }
        if (!in_place && arrays_overlap(geometry, a, a_strides, b, b_strides)) {
          refuse(name, "must be " + other_name + " itself or not overlap it");
        }
      }
    }
  }
}

void Operator::make_outputs(Call& call, Layout& layout, Allocator& allocator, Outputs& outputs) const {
  const View& first = call.views[0];
  const Geometry& geometry = layout.geometry;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (!call.wanted[i]) continue;
    if (call.objects[i] != nullptr) {
      outputs.objects[outputs.count++] = Py_NewRef(call.objects[i]);
      continue;
    }
    int ndim = first.ndim;
    const int64_t* shape = first.shape;
    if (arrays_[i].role == Role::row_values) {
      --ndim;
    } else if (arrays_[i].role == Role::head_sums) {
      ndim = 1;
      shape = &layout.matrix_heads;
    } else if (arrays_[i].role == Role::mask_sums) {
      const View& mask = call.views[arrays_[i].argument->like];
      ndim = mask.ndim;
      shape = mask.shape;
    } else if (arrays_[i].role == Role::column_values) {
      ndim = layout.per_head ? 2 : 1;
      shape += first.ndim - ndim;
    }
    outputs.objects[outputs.count] = allocator.allocate(ndim, shape, call.dtypes[i], first.device, call.views[i].data);
    ++outputs.count;
    layout.strides[i] = {geometry.inner_count * geometry.columns, geometry.columns};
  }
}

void Operator::check_margin(const Call& call, int64_t multiprocessors) const {
  for (const Argument& argument : arguments_) {
    if (argument.role == Role::sm_margin && call.sm_margin >= multiprocessors) {
      refuse(argument.called, "must leave at least one of " + std::to_string(multiprocessors) +
                                  " multiprocessors; it is " + std::to_string(call.sm_margin));
    }
  }
}

int64_t Operator::groups(const Call& call, const Layout& layout, const Plan& plan) const {
  const std::string& first_name = arguments_[0].called;
  const bool in_turn = plan.max_groups < Plan::kAnyGroups;
  int64_t most = plan.max_groups;
  if (call.sm_margin > 0) {
    check_margin(call, plan.multiprocessors);
    most = std::max<int64_t>(1, most * (plan.multiprocessors - call.sm_margin) / plan.multiprocessors);
  }
  const int64_t groups = (layout.geometry.rows + plan.rows_per_cta - 1) / plan.rows_per_cta;
  int64_t launched = in_turn ? std::min(groups, most) : groups;
  if (in_turn && plan.turn_bytes > 0) {
    // t rows in turn are the best where groups of one row each would leave t (t - 1) times `turn_bytes`, or more.
    const double ratio = static_cast<double>(groups) * static_cast<double>(plan.partial_bytes) / plan.turn_bytes;
    const double turns = std::floor(0.5 + std::sqrt(0.25 + ratio));
    const auto by = [&](double rows) {
      const auto found = static_cast<int64_t>(std::ceil(static_cast<double>(groups) / rows));
      return (found + plan.group_unit - 1) / plan.group_unit * plan.group_unit;
    };
    // Of several, rather one more than a second group on some multiprocessors.
    const int64_t once = (plan.multiprocessors - call.sm_margin) / plan.ctas_per_row;
    const bool takes_more = turns >= 2 && by(turns) > once && by(turns + 1) <= once;
    launched = std::min(launched, by(takes_more ? turns + 1 : turns));
  }
  if (launched < groups && launched > plan.group_unit) launched -= launched % plan.group_unit;
  if (layout.per_head && plan.whole_heads) {
    const int64_t unit = layout.heads / std::gcd(layout.heads, plan.rows_per_cta);
    launched = std::max(unit, launched / unit * unit);
  }
  if (launched > INT32_MAX / plan.ctas_per_row) refuse(first_name, "has more rows than a grid can hold");
  return launched;
}

int64_t Operator::sharers(const Layout& layout, const Stage& stage) {
  // So that each has 8 rows at least: what a CTA costs is little beside them. The shape alone decides, and with it the
  // order of the sums.
  // CTAs of a cluster share them once a launch only.
  const int64_t ctas = stage.shape.cluster.y,
                groups = stage.row_groups / (layout.mask_rows > kMostInY / ctas ? ctas : 1);
  const int64_t most = std::min(groups, layout.geometry.rows / layout.mask_rows / 8);
  int64_t sharers = 1;
  while (2 * sharers <= most) sharers *= 2;
  return sharers;
}

std::vector<Memory> Operator::memory(const Call& call, const Layout& layout) const {
  const Geometry& geometry = layout.geometry;
  std::vector<Memory> memory;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    const Array& array = arrays_[i];
    if (call.objects[i] == nullptr && !call.wanted[i]) continue;
    Memory rows{&array.argument->name,
                call.views[i].data,
                dtype_bytes(call.dtypes[i]),
                1,
                1,
                0,
                1,
                0,
                !array.input,
                array.input || array.role == Role::value_out};
    if (array.of_rows) {
      rows.columns = geometry.columns;
      rows.outer_count = geometry.rows / geometry.inner_count;
      rows.outer_stride = layout.strides[i].outer;
      rows.inner_count = geometry.inner_count;
      rows.inner_stride = layout.strides[i].inner;
    } else if (array.role == Role::head_values || array.role == Role::head_sums) {
      rows.columns = layout.matrix_heads;
    } else if (array.role == Role::mask_sums) {
      rows.columns = layout.mask_rows * geometry.columns;
    } else if (array.role == Role::mask) {
      const Extent extent = extent_of_strided(call.views[i]);
      rows.data = const_cast<char*>(extent.low);
      rows.columns = (extent.high - extent.low) / dtype_bytes(call.dtypes[i]);
    } else if (array.role == Role::row_inputs || array.role == Role::row_values) {
      rows.columns = geometry.rows;
    } else if (array.role == Role::columns || array.role == Role::column_values) {
      rows.columns = layout.heads * geometry.columns;
    }
    memory.push_back(rows);
  }
  return memory;
}

PyObject* Operator::run(Call& call, Allocator& allocator, CUstream stream) {
  Layout layout = check(call);
  const Geometry& geometry = layout.geometry;
  const bool empty = geometry.rows == 0;
  Outputs outputs;
  check_overlap(call, layout);
  if (empty) {
    // Refused as rows would be, without a kernel.
    check_margin(call, ask(check_, call, layout, bucket_of(geometry.columns)).cast<int64_t>());
    // Sums over no rows are zero; nothing else is written.
    make_outputs(call, layout, allocator, outputs);
    for (size_t i = 0; i < arrays_.size(); ++i) {
      const Role role = arrays_[i].role;
      const int64_t elements = role == Role::head_sums       ? layout.matrix_heads
                               : role == Role::mask_sums     ? layout.mask_rows * geometry.columns
                               : role == Role::column_values ? layout.heads * geometry.columns
                                                             : 0;
      if (!call.wanted[i] || elements == 0) continue;
      plan(call, layout)->stages[0].launcher->zero(call.views[i].data, elements * dtype_bytes(call.dtypes[i]), stream);
    }
    return outputs.release();
  }
  const std::shared_ptr<const Plan> kept = this->plan(call, layout);
  const Plan& plan = *kept;
  const int64_t groups = this->groups(call, layout, plan);
  make_outputs(call, layout, allocator, outputs);

  // What the CTAs share is one allocation: what is zeroed, and behind it the partial sums.
  constexpr int64_t alignment = 256;
  const int64_t zeroed_bytes = plan.workspace_bytes * groups;
  const int64_t partials_at = plan.partial_bytes > 0 ? round_up(zeroed_bytes, alignment) : zeroed_bytes;
  const int64_t rows_at = partials_at + plan.partial_bytes * groups;
  const int64_t shared_bytes = rows_at + plan.row_bytes * geometry.rows;
  char* workspace = nullptr;
  py::object workspace_owner;
  if (shared_bytes > 0) {
    workspace_owner =
        py::reinterpret_steal<py::object>(allocator.workspace(shared_bytes, call.views[0].device, stream, workspace));
  }
  if (zeroed_bytes > 0) plan.stages[0].launcher->zero(workspace, zeroed_bytes, stream);

  std::vector<Memory> memory;
  size_t written_first = 0;  // from this entry on, by the first launch
  if (plan.stages[0].launcher->asks_for_memory()) {
    static const std::string workspace_name = "the workspace", partials_name = "the partial sums",
                             rows_name = "the rows' parts";
    memory = this->memory(call, layout);
    if (zeroed_bytes > 0) memory.push_back({&workspace_name, workspace, 1, zeroed_bytes, 1, 0, 1, 0, true, true});
    written_first = memory.size();
    if (plan.partial_bytes > 0) {
      memory.push_back(
          {&partials_name, workspace + partials_at, 4, plan.partial_bytes * groups / 4, 1, 0, 1, 0, true, false});
    }
    if (plan.row_bytes > 0) {
      memory.push_back(
          {&rows_name, workspace + rows_at, 4, plan.row_bytes * geometry.rows / 4, 1, 0, 1, 0, true, false});
    }
  }
  const Divisor inner_divisor = divide_by_count(geometry.inner_count), heads_divisor = divide_by_count(layout.heads);
  const Divisor queries_divisor = divide_by_count(layout.queries),
                matrix_heads_divisor = divide_by_count(layout.matrix_heads);
  for (size_t number = 0; number < plan.stages.size(); ++number) {
    const Stage& stage = plan.stages[number];
    LaunchShape shape = stage.shape;
    if (number == 0) {
      shape.grid = {static_cast<unsigned>(groups * plan.ctas_per_row), 1, 1};
    } else {
      if (stage.columns_per_cta == Plan::kOfHeads) {
        shape.grid = {static_cast<unsigned>(layout.matrix_heads), 1, 1};
      } else {
        const int64_t ctas = (geometry.columns + stage.columns_per_cta - 1) / stage.columns_per_cta;
        int64_t in_y = layout.heads;
        if (stage.row_groups > 0) {
          const int64_t shared_by = sharers(layout, stage), in_turn = stage.row_groups / shared_by;
          const int64_t in_cluster = shape.cluster.y;
          in_y = in_cluster * std::min(kMostInY / in_cluster, (layout.mask_rows + in_turn - 1) / in_turn);
          // CTAs that share nothing are launched one by one.
          if (shared_by * in_cluster <= stage.row_groups) shape.cluster = {1, 1, 1};
        }
        shape.grid = {static_cast<unsigned>(ctas), static_cast<unsigned>(in_y), 1};
      }
      // The first launch wrote them.
      for (size_t i = written_first; i < memory.size(); ++i) memory[i].initialised = true;
    }
    alignas(16) char params[kMaxParameterBytes] = {};
    for (const FieldFill& field : stage.fields) {
      const int i = field.index;
      switch (field.source) {
        case Source::data:
          put(params, field.offset, call.views[i].data);
          break;
        case Source::outer_stride:
          put(params, field.offset, layout.strides[i].outer);
          break;
        case Source::inner_stride:
          put(params, field.offset, geometry.inner_count > 1 ? layout.strides[i].inner : 0);
          break;
        case Source::dtype:
          put(params, field.offset, static_cast<int32_t>(call.dtypes[i]));
          break;
        case Source::real:
          put(params, field.offset, static_cast<float>(call.reals[i]));
          break;
        case Source::integer:
          put(params, field.offset, call.integers[i]);
          break;
        case Source::flag:
          put(params, field.offset, static_cast<int32_t>(call.flags >> i & 1));
          break;
        case Source::rows:
          put(params, field.offset, geometry.rows);
          break;
        case Source::columns:
          put(params, field.offset, static_cast<int32_t>(geometry.columns));
          break;
        case Source::inner_count:
          put(params, field.offset, static_cast<uint32_t>(geometry.inner_count));
          break;
        case Source::inner_magic:
          put(params, field.offset, inner_divisor.magic);
          break;
        case Source::inner_shift:
          put(params, field.offset, inner_divisor.shift);
          break;
        case Source::heads:
          put(params, field.offset, static_cast<uint32_t>(layout.heads));
          break;
        case Source::heads_magic:
          put(params, field.offset, heads_divisor.magic);
          break;
        case Source::heads_shift:
          put(params, field.offset, heads_divisor.shift);
          break;
        case Source::groups:
          put(params, field.offset, static_cast<int32_t>(groups));
          break;
        case Source::workspace:
          put(params, field.offset, workspace);
          break;
        case Source::partials:
          put(params, field.offset, workspace + partials_at);
          break;
        case Source::diagonal:
          put(params, field.offset, static_cast<int32_t>(geometry.columns - layout.queries));
          break;
        case Source::row_partials:
          put(params, field.offset, workspace + rows_at);
          break;
        case Source::mask_rows:
          put(params, field.offset, layout.mask_rows);
          break;
        case Source::sharers:
          put(params, field.offset, static_cast<int32_t>(sharers(layout, stage)));
          break;
        case Source::queries:
          put(params, field.offset, static_cast<uint32_t>(layout.queries));
          break;
        case Source::queries_magic:
          put(params, field.offset, queries_divisor.magic);
          break;
        case Source::queries_shift:
          put(params, field.offset, queries_divisor.shift);
          break;
        case Source::matrix_heads:
          put(params, field.offset, static_cast<uint32_t>(layout.matrix_heads));
          break;
        case Source::matrix_heads_magic:
          put(params, field.offset, matrix_heads_divisor.magic);
          break;
        case Source::matrix_heads_shift:
          put(params, field.offset, matrix_heads_divisor.shift);
          break;
        case Source::batch_stride:
          put(params, field.offset, layout.mask_strides[i].batch);
          break;
        case Source::head_stride:
          put(params, field.offset, layout.mask_strides[i].head);
          break;
        case Source::query_stride:
          put(params, field.offset, layout.mask_strides[i].query);
          break;
      }
    }
    stage.launcher->launch(shape, params, stream, memory);
  }
  return outputs.release();
}
