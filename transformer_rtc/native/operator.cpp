// SPDX-License-Identifier: Apache-2.0
#include "operator.hpp"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>

#include "errors.hpp"
#include "fields.hpp"
#include "grid.hpp"

namespace py = pybind11;

namespace {

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

// Whether what a function of nothing returns is true. Most are builtins, whose C function takes less time by itself.
bool is_true(PyObject* function) {
  const bool bare = PyCFunction_CheckExact(function) && PyCFunction_GET_FLAGS(function) == METH_NOARGS;
  PyObject* answer = bare ? PyCFunction_GET_FUNCTION(function)(PyCFunction_GET_SELF(function), nullptr)
                          : PyObject_CallNoArgs(function);
  if (answer == nullptr) throw PythonErrorSet{};
  const py::object held = py::reinterpret_steal<py::object>(answer);
  if (answer == Py_True || answer == Py_False || answer == Py_None) return answer == Py_True;
  return PyObject_IsTrue(answer) == 1;
}

// The most elements of a vector that a plan may need.
constexpr int64_t kMostVecSize = 32;

int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

}  // namespace

Operator::Operator(std::string name, std::vector<Argument> arguments, std::vector<Symbol> symbols, PyObject* plan,
                   PyObject* check, PyObject* slow_call, PyObject* gradient, PyObject* dispatch, PyObject* framework_of,
                   PyObject* implementation, std::vector<int64_t> buckets, int split_by, std::vector<int> broadcasts,
                   bool elementwise)
    : name_(std::move(name)),
      arguments_(std::move(arguments)),
      symbols_(std::move(symbols)),
      plan_(Py_NewRef(plan)),
      check_(Py_NewRef(check)),
      slow_call_(Py_NewRef(slow_call)),
      gradient_(Py_NewRef(gradient)),
      dispatch_(Py_NewRef(dispatch)),
      framework_of_(Py_NewRef(framework_of)),
      implementation_(Py_NewRef(implementation)),
      buckets_(std::move(buckets)),
      split_by_(split_by),
      broadcasts_(std::move(broadcasts)),
      elementwise_(elementwise),
      arrays_(arrays_of(arguments_, symbols_)),
      dtypes_seen_(PyDict_New()) {
  const auto count = [&](Kind kind) {
    return std::count_if(arguments_.begin(), arguments_.end(), [&](const Argument& one) { return one.kind == kind; });
  };
  if (count(Kind::flag) + count(Kind::choice) > kMaxFlags || count(Kind::real) > kMaxArrays ||
      count(Kind::integer) > kMaxArrays) {
    throw std::invalid_argument("too many arguments that are no arrays");
  }
  if (symbols_.size() > kMaxSymbols) {
    throw std::invalid_argument("the first array names at most " + std::to_string(kMaxSymbols) + " dimensions");
  }
  if (!buckets_.empty() && (!std::is_sorted(buckets_.begin(), buckets_.end()) || buckets_.back() != kMostColumns)) {
    throw std::invalid_argument("buckets ascend to the largest number of columns");
  }
  if (split_by_ < -1 || split_by_ >= static_cast<int>(arrays_.size())) {
    throw std::invalid_argument("what splits others is an array of the operator");
  }
  for (int array : broadcasts_) {
    const bool fits = array >= 0 && array < static_cast<int>(arrays_.size()) && arrays_[array].required;
    if (!fits || arrays_[array].placement != Placement::rows || broadcasts_[0] != 0) {
      throw std::invalid_argument("arrays that are broadcast to one shape are the first one and others of rows");
    }
  }
  for (const Array& array : arrays_) {
    if (array.placement == Placement::rows && array.width.symbol == 0)
      widest_ = std::max(widest_, array.width.multiple);
  }
}

Operator::~Operator() {
  if (!Py_IsInitialized()) return;  // the process ends
  for (PyObject* held :
       {plan_, check_, slow_call_, gradient_, dispatch_, framework_of_, implementation_, dtypes_seen_}) {
    Py_DECREF(held);
  }
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
  framework.wrapped = answer[1].cast<bool>();
  if (!answer[2].is_none()) {
    const auto owned = [](py::handle object) { return Py_NewRef(object.ptr()); };
    const py::tuple given = answer[2];
    auto asked = std::make_shared<Asked>();
    asked->is_grad_enabled = owned(given[0]);
    asked->was_written = owned(given[1]);
    for (py::handle transform : py::tuple(given[2])) asked->transforms.push_back(owned(transform));
    asked->of_gradients = owned(given[3]);
    asked->levels = owned(given[4]);
    asked->level = owned(given[5]);
    framework.asked = asked;
  }
  Py_INCREF(type);  // its address is a key from now on
  return frameworks_.emplace(type, framework).first->second;
}

PyObject* Operator::call(PyObject* const* arguments, Py_ssize_t count, bool direct) {
  if (count != static_cast<Py_ssize_t>(arguments_.size())) {
    throw_argument_error(name_ + ": " + std::to_string(arguments_.size()) + " arguments expected, " +
                         std::to_string(count) + " given");
  }
  Read read{arguments, count};
  Call& call = read.call;
  read_values(arguments, call);  // first: it may run Python code, and views borrow
  const auto elsewhere = [&](PyObject* function) {
    PyObject* result = taking_gil([&] { return PyObject_Vectorcall(function, arguments, count, nullptr); });
    if (result == nullptr) throw PythonErrorSet{};
    return result;
  };
  const DLPackExchangeAPI*& api = read.api;
  const Asked* asked = nullptr;
  bool slow = false;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].kind == Kind::stream) slow |= arguments[i] != Py_None;
  }
  for (size_t index = 0; index < arrays_.size(); ++index) {
    const Array& array = arrays_[index];
    const Argument& argument = *array.argument;
    PyObject* object = arguments[array.position];
    if (!array.given) continue;
    if (object == Py_None) {
      if (array.required) refuse(argument.called, "must be an array; it is None");
      continue;
    }
    const Framework& owner = framework(Py_TYPE(object), index, argument.called);
    if (owner.wrapped) return elsewhere(dispatch_);
    if (owner.api == nullptr || (api != nullptr && owner.api != api)) {
      slow = true;
      break;
    }
    api = owner.api;
    asked = owner.asked.get();
    DLTensor tensor;
    if (api->tensor_from_object(object, &tensor) != 0) {
      PyErr_Clear();  // the slow call says what it is
      slow = true;
      break;
    }
    if (tensor.device.type != kDLCUDA) {
      slow = true;
      break;
    }
    if (tensor.dtype.lanes != 1) refuse(argument.called, "must not have a vector data type");
    call.views[index] = view_of(tensor);
    call.objects[index] = object;
    if (tensor.data == nullptr && call.views[index].size() > 0) {  // the slow call knows which tensors have no memory
      slow = true;
      break;
    }
  }
  if (slow) {
    py::tuple all(count);
    for (Py_ssize_t i = 0; i < count; ++i) all[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    PyObject* result = taking_gil(
        [&] { return PyObject_CallFunctionObjArgs(slow_call_, all.ptr(), direct ? Py_True : Py_False, nullptr); });
    if (result == nullptr) throw PythonErrorSet{};
    return result;
  }
  if (asked != nullptr && !direct) {
    if (transforms(call, *asked)) return elsewhere(dispatch_);
    if (records_gradient(call, asked->is_grad_enabled)) {
      if (is_true(asked->of_gradients)) return elsewhere(dispatch_);
      return recorder_ != nullptr ? recorder_->record(read) : elsewhere(gradient_);
    }
  }
  py::object result = py::reinterpret_steal<py::object>(launch(read));
  if (asked != nullptr) tell_of_written(call, asked->was_written);
  return result.release().ptr();
}

PyObject* Operator::launch(Read& read) {
  check_not_forked();  // before the framework is asked for anything
  void* stream = nullptr;
  if (read.api->current_stream(kDLCUDA, read.call.views[0].device, &stream) != 0) throw PythonErrorSet{};
  ExchangeAllocator allocator(read.api);
  return run(read.call, allocator, static_cast<CUstream>(stream));
}

void Operator::ask_for(int argument, Call& call) const {
  for (size_t i = 0; i < arrays_.size(); ++i) call.wanted[i] |= arrays_[i].position == argument;
}

bool Operator::transforms(const Call& call, const Asked& asked) const {
  for (PyObject* transform : asked.transforms) {
    if (is_true(transform)) return true;
  }
  if (PyObject* level = PyDict_GetItemWithError(asked.levels, asked.level)) {  // borrowed
    if (PyLong_AsLong(level) >= 0) return true;
  }
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (call.objects[i] == nullptr) continue;
    const py::object answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(call.objects[i], is_neg));
    if (!answer) throw PythonErrorSet{};
    if (answer.ptr() == Py_True) return true;
  }
  return false;
}

void Operator::tell_of_written(const Call& call, PyObject* was_written) const {
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (!arrays_[i].written || call.objects[i] == nullptr) continue;
    const py::object done = py::reinterpret_steal<py::object>(PyObject_CallOneArg(was_written, call.objects[i]));
    if (!done) throw PythonErrorSet{};
  }
}

bool Operator::records_gradient(const Call& call, PyObject* is_grad_enabled) const {
  if (!is_true(is_grad_enabled)) return false;
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  for (size_t i = 0; i < arrays_.size(); ++i) {
    PyObject* object = call.objects[i];
    if (object == nullptr) continue;
    py::object required = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, requires_grad));
    if (!required) throw PythonErrorSet{};
    if (required.ptr() != Py_True) continue;
    if (gradient_ != Py_None) return true;
    const std::string& name = arrays_[i].argument->called;
    refuse(name,
           "requires grad, and this operator records no gradient: call it under torch.no_grad() or "
           "torch.inference_mode(), or pass " +
               name + ".detach()");
  }
  return false;
}

py::object Operator::ask(PyObject* callback, const Call& call, const Layout& layout, int64_t columns) const {
  py::tuple dtypes(arrays_.size());
  for (size_t i = 0; i < arrays_.size(); ++i) dtypes[i] = py::int_(call.dtypes[i]);
  long long vec_size = kMostVecSize;
  while (!is_whole(call, layout, vec_size)) vec_size /= 2;
  py::object answer = py::reinterpret_steal<py::object>(taking_gil([&] {
    return PyObject_CallFunction(callback, "iiLOLOOI", call.implementation, call.views[0].device, vec_size,
                                 dtypes.ptr(), static_cast<long long>(columns),
                                 layout.variant != 0 ? Py_True : Py_False, call.sm_margin > 0 ? Py_True : Py_False,
                                 call.flags);
  }));
  if (!answer) throw PythonErrorSet{};
  return answer;
}

int64_t Operator::bucket_of(int64_t columns) const {
  return buckets_.empty() ? columns : *std::lower_bound(buckets_.begin(), buckets_.end(), columns);
}

std::shared_ptr<const Plan> Operator::plan(const Call& call, const Layout& layout) {
  const int64_t columns = bucket_of(layout.sizes[0]);
  for (bool unaligned : {false, true}) {
    std::shared_ptr<const Plan> found = plans_.find(PlanTable::key_of(call, layout.variant, columns, unaligned));
    if (found != nullptr && is_whole(call, layout, found->vec_size) != unaligned) return found;
  }
  const py::object made = ask(plan_, call, layout, columns);
  const Plan& plan = made.cast<const Plan&>();
  check_plan(plan);
  const bool unaligned = !is_whole(call, layout, plan.vec_size);
  return plans_.keep(PlanTable::key_of(call, layout.variant, columns, unaligned), plan);
}

bool Operator::is_whole(const Call& call, const Layout& layout, int64_t vec_size) const {
  if (vec_size == 1) return true;
  if (layout.launched_columns() % vec_size != 0) return false;
  for (size_t i = 0; i < arrays_.size(); ++i) {
    if (!arrays_[i].by_columns || call.objects[i] == nullptr || layout.strides[i].column == 0) continue;
    const int bytes = dtype_bytes(call.views[i].dtype);
    int64_t strides = layout.broadcast[i].leading;
    if (layout.one_row == 0) strides |= layout.strides[i].outer | layout.strides[i].inner;
    for (int64_t stride : layout.broadcast[i].of) strides |= stride;
    const uint64_t offsets = reinterpret_cast<uintptr_t>(call.views[i].data) | static_cast<uint64_t>(strides * bytes);
    if (offsets % std::min<uint64_t>(vec_size * bytes, kVectorAlignment) != 0) return false;
  }
  return true;
}

void Operator::check_plan(const Plan& plan) const {
  const int arrays = static_cast<int>(arrays_.size()), symbols = static_cast<int>(symbols_.size());
  const auto has_rows = [&](int array) { return array < arrays && arrays_[array].argument->shape_of >= 0; };
  bool fits = plan.whole < symbols;
  for (const Stage& stage : plan.stages) {
    fits = fits && stage.per < symbols && (stage.rows_of < 0 || has_rows(stage.rows_of));
    for (const FieldFill& field : stage.fields) {
      fits = fits && field.index >= 0 && field.second >= 0 && field.second < kMaxSymbols;
      switch (field.source) {
        case Source::array_rows:
          fits = fits && has_rows(field.index);
          break;
        case Source::size:
        case Source::magic:
        case Source::shift:
        case Source::difference:
          fits = fits && field.index < symbols;
          break;
        case Source::flag:
          fits = fits && field.index < kMaxFlags;
          break;
        case Source::constant:
          break;
        default:
          fits = fits && field.index < kMaxArrays;
      }
    }
  }
  if (!fits) throw std::invalid_argument("a plan of arrays or symbols that " + name_ + " does not have");
}

PyObject* Operator::run(Call& call, Allocator& allocator, CUstream stream) {
  Layout layout = check(call);
  const Geometry& geometry = layout.geometry;
  Outputs outputs;
  check_overlap(call, layout);
  if (geometry.rows == 0) {
    // Refused as rows would be, without a kernel.
    check_margin(call, ask(check_, call, layout, bucket_of(layout.sizes[0])).cast<int64_t>());
    make_outputs(call, layout, allocator, outputs);
    // Sums over no rows are zero; nothing else is written.
    for (size_t i = 0; i < arrays_.size(); ++i) {
      if (!call.wanted[i] || !arrays_[i].sums || elements(call, layout, i) == 0) continue;
      zero_sums(call, layout, *plan(call, layout)->stages[0].launcher, stream);
      break;
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
  LaunchValues values{call, layout, groups, workspace, workspace + partials_at, workspace + rows_at};
  for (const Stage& stage : plan.stages) {
    LaunchShape shape = stage.shape;
    if (&stage == &plan.stages[0]) {
      shape.grid = {static_cast<unsigned>(groups * plan.ctas_per_row), 1, 1};
    } else {
      const int64_t array_rows = stage.rows_of >= 0 ? rows_of(call, arrays_[stage.rows_of]) : 0;
      shape = later_shape(stage, layout, array_rows);
      values.sharers = stage.rows_of >= 0 ? sharers_of(stage, geometry.rows, array_rows) : 1;
      // The first launch wrote them.
      for (size_t i = written_first; i < memory.size(); ++i) memory[i].initialised = true;
    }
    alignas(16) char params[kMaxParameterBytes] = {};
    fill(params, stage.fields, arrays_, values);
    stage.launcher->launch(shape, params, stream, memory);
  }
  return outputs.release();
}
