// SPDX-License-Identifier: Apache-2.0
#include "gradient.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bindings.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace {

constexpr const char* kHandedCapsule = "transformer_rtc.handed";

// Returns a new reference's owner; throws where there is none.
py::object owned(PyObject* object) {
  if (object == nullptr) throw PythonErrorSet{};
  return py::reinterpret_steal<py::object>(object);
}

// A name, made once.
struct Name {
  PyObject* const object;
  explicit Name(const char* text) : object(PyUnicode_InternFromString(text)) {}
};

py::object attribute(PyObject* object, const Name& name) { return owned(PyObject_GetAttr(object, name.object)); }

// Calls a method of the first argument.
void call_method(const Name& name, PyObject* const* arguments, size_t count) {
  owned(PyObject_VectorcallMethod(name.object, arguments, count, nullptr));
}

py::object tuple_of(PyObject* const* items, Py_ssize_t count) {
  py::object made = owned(PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(made.ptr(), i, Py_NewRef(items[i]));
  return made;
}

std::vector<PyObject*> items_of(PyObject* tuple) {
  std::vector<PyObject*> items(PyTuple_Size(tuple));
  for (size_t i = 0; i < items.size(); ++i) items[i] = PyTuple_GET_ITEM(tuple, i);
  return items;
}

bool is_plain_number(PyObject* value) {
  return value == Py_None || PyFloat_CheckExact(value) || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

py::object bools(unsigned bits, size_t count) {
  py::tuple found(count);
  for (size_t i = 0; i < count; ++i) found[i] = py::bool_((bits >> i & 1) != 0);
  return found;
}

// What a call returned: one object, or a tuple of several.
struct Found {
  py::object object;

  PyObject* operator[](int number) const {
    return PyTuple_CheckExact(object.ptr()) ? PyTuple_GET_ITEM(object.ptr(), number) : object.ptr();
  }
};

// Chooses an implementation, if another one is chosen, until it ends.
class Chosen {
 public:
  Chosen(PyObject* variable, PyObject* implementation) : variable_(variable) {
    PyObject* current = nullptr;
    if (PyContextVar_Get(variable, nullptr, &current) != 0) throw PythonErrorSet{};
    const py::object held = py::reinterpret_steal<py::object>(current);
    if (PyLong_AsLong(current) == PyLong_AsLong(implementation)) return;
    token_ = PyContextVar_Set(variable, implementation);
    if (token_ == nullptr) throw PythonErrorSet{};
  }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;
  ~Chosen() {
    if (token_ == nullptr) return;
    const py::error_scope pending;  // resetting would overwrite it
    if (PyContextVar_Reset(variable_, token_) != 0) PyErr_Clear();
    Py_DECREF(token_);
  }

 private:
  PyObject* variable_;
  PyObject* token_ = nullptr;
};

}  // namespace

void Gradient::begin(py::object apply) {
  apply_ = std::move(apply);
  forward_->set_recorder(this);
}

bool Gradient::is_usual(PyObject* const* values) const {
  bool usual = places_.needed.empty();
  for (int at : places_.needed) usual |= values[at] != Py_None;
  for (int at : places_.unusual) usual &= values[at] == Py_None;
  for (int at : places_.numbers) usual &= is_plain_number(values[at]);
  return usual;
}

PyObject* Gradient::hand(const Handed& handed) {
  const py::object capsule = owned(PyCapsule_New(const_cast<Handed*>(&handed), kHandedCapsule, nullptr));
  // The inputs that are given, alone: each argument takes autograd time, in both directions.
  PyObject* given[kMaxArrays + 1] = {capsule.ptr()};
  size_t number = 1;
  for (int at : places_.inputs) {
    if (handed.values[at] != Py_None) given[number++] = handed.values[at];
  }
  PyObject* result = taking_gil([&] { return PyObject_Vectorcall(apply_.ptr(), given, number, nullptr); });
  if (result == nullptr) throw PythonErrorSet{};
  return result;
}

PyObject* Gradient::record(Read& read) {
  if (!is_usual(read.arguments)) return call(read.arguments, read.count);
  return hand({read.arguments, read.count, &read});
}

PyObject* Gradient::call(PyObject* const* arguments, Py_ssize_t count) {
  if (is_usual(arguments)) return hand({arguments, count, nullptr});
  const py::object prepared = owned(PyObject_CallOneArg(callbacks_.prepare.ptr(), tuple_of(arguments, count).ptr()));
  const std::vector<PyObject*> values = items_of(prepared.ptr());
  return hand({values.data(), count, nullptr});
}

Gradient::ForwardSteps& Gradient::forward_steps(PyObject* context, const Handed& handed) {
  static const Name needs_input_grad("needs_input_grad");
  const py::object of_given = attribute(context, needs_input_grad);
  unsigned given = 0, needs = 0, wanted = 0;
  Py_ssize_t number = 1;  // the first is of what is handed on
  for (size_t i = 0; i < places_.inputs.size(); ++i) {
    if (handed.values[places_.inputs[i]] == Py_None) continue;
    given |= 1u << i;
    needs |= static_cast<unsigned>(PyTuple_GetItem(of_given.ptr(), number++) == Py_True) << i;
  }
  for (int at : places_.results) {
    PyObject* value = handed.values[at];
    wanted = wanted << 2 | (value == Py_None ? 2u : static_cast<unsigned>(PyObject_IsTrue(value) == 1));
  }
  for (ForwardSteps& steps : forward_seen_) {
    if (steps.given == given && steps.needs == needs && steps.wanted == wanted) return steps;
  }
  const size_t inputs = places_.inputs.size();
  ForwardSteps steps{given, needs, wanted, bools(given, inputs), bools(needs, inputs), {}, {}, {}, {}, {}, {}, {}};
  const py::tuple found = callbacks_.forward_steps(steps.is_needed, tuple_of(handed.values, handed.count));
  steps.ask = found[0].cast<std::vector<int>>();
  steps.show = found[1].cast<std::vector<int>>();
  steps.statistics = found[2].cast<std::vector<int>>();
  steps.save = found[3].cast<std::vector<std::pair<bool, int>>>();
  steps.inputs = found[4].cast<std::vector<int>>();
  forward_seen_.push_back(std::move(steps));
  return forward_seen_.back();
}

// Keeps (data types of the inputs that need a gradient, numbers, implementation, which inputs need one, which are
// given) for the backward.
void Gradient::keep(PyObject* context, ForwardSteps& steps, const Handed& handed) {
  static const Name dtype("dtype"), kept("kept");
  PyObject* implementation = nullptr;
  if (PyContextVar_Get(callbacks_.implementation.ptr(), nullptr, &implementation) != 0) throw PythonErrorSet{};
  std::vector<py::object> of{py::reinterpret_steal<py::object>(implementation)};
  for (int at : steps.inputs) of.push_back(attribute(handed.values[at], dtype));
  for (int at : places_.kept) of.push_back(py::reinterpret_borrow<py::object>(handed.values[at]));
  bool same = of.size() == steps.kept_of.size();
  for (size_t i = 0; i < of.size() && same; ++i) same = of[i].is(steps.kept_of[i]);
  if (!same) {
    py::tuple dtypes(steps.inputs.size()), numbers(places_.kept.size());
    for (size_t i = 0; i < dtypes.size(); ++i) dtypes[i] = of[1 + i];
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = of[1 + dtypes.size() + i];
    steps.kept = py::make_tuple(dtypes, numbers, of[0], steps.is_needed, steps.is_given);
    steps.kept_of = std::move(of);
  }
  const py::object held = steps.kept;  // a collection of garbage may run other calls meanwhile
  if (PyObject_SetAttr(context, kept.object, held.ptr()) != 0) throw PythonErrorSet{};
}

PyObject* Gradient::forward(PyObject* const* arguments, Py_ssize_t count) {
  static const Name materialize("set_materialize_grads"), non_differentiable("mark_non_differentiable"),
      save_for_backward("save_for_backward");
  if (count < 2) throw_argument_error("only autograd calls this");
  PyObject* context = arguments[0];
  const auto* handed = static_cast<const Handed*>(PyCapsule_GetPointer(arguments[1], kHandedCapsule));
  if (handed == nullptr) throw PythonErrorSet{};
  ForwardSteps& steps = forward_steps(context, *handed);

  Found found;
  if (handed->read != nullptr) {
    for (int at : steps.ask) forward_->ask_for(at, handed->read->call);
    found.object = owned(forward_->launch(*handed->read));
  } else {
    std::vector<PyObject*> given(handed->values, handed->values + handed->count);
    for (int at : steps.ask) given[at] = Py_True;
    found.object = owned(forward_->call(given.data(), given.size(), true));
  }

  PyObject* of_context[kMaxArrays + 1] = {context};
  size_t number = 1;
  for (const auto& [is_made, at] : steps.save) of_context[number++] = is_made ? found[at] : handed->values[at];
  call_method(save_for_backward, of_context, number);
  keep(context, steps, *handed);
  if (steps.show.size() == 1) return Py_NewRef(found[steps.show[0]]);  // whose gradient is always there

  of_context[1] = Py_False;
  call_method(materialize, of_context, 2);
  if (!steps.statistics.empty()) {
    number = 1;
    for (int statistic : steps.statistics) of_context[number++] = found[statistic];
    call_method(non_differentiable, of_context, number);
  }
  py::object shown = owned(PyTuple_New(steps.show.size()));
  for (size_t i = 0; i < steps.show.size(); ++i) PyTuple_SET_ITEM(shown.ptr(), i, Py_NewRef(found[steps.show[i]]));
  return shown.release().ptr();
}

const Gradient::BackwardSteps& Gradient::backward_steps(PyObject* is_needed, PyObject* dtypes,
                                                        PyObject* const* gradients, Py_ssize_t count) {
  unsigned given = 0;
  for (Py_ssize_t i = 0; i < count; ++i) given |= static_cast<unsigned>(gradients[i] != Py_None) << i;
  const size_t types = PyTuple_GET_SIZE(dtypes);
  for (const BackwardSteps& steps : backward_seen_) {
    // Calls of one kind keep the same object.
    bool same = steps.is_needed.ptr() == is_needed && steps.given == given && steps.dtypes.size() == types;
    for (size_t i = 0; i < types && same; ++i) same = steps.dtypes[i].ptr() == PyTuple_GET_ITEM(dtypes, i);
    if (same) return steps;
  }
  const py::tuple found = callbacks_.backward_steps(py::handle(is_needed), py::handle(dtypes), bools(given, count));
  BackwardSteps steps{py::reinterpret_borrow<py::object>(is_needed),
                      given,
                      py::handle(dtypes).cast<std::vector<py::object>>(),
                      false,
                      {},
                      {},
                      {},
                      {}};
  steps.rare = found[1].is_none() || py::len(found[0]) > 0;
  if (!steps.rare) {
    steps.values = found[1].cast<std::vector<py::object>>();
    steps.saved = found[2].cast<std::vector<int>>();
    steps.gradients = found[3].cast<std::vector<std::pair<int, int>>>();
    steps.gives = found[4].cast<std::vector<std::tuple<int, int, py::object>>>();
  }
  backward_seen_.push_back(std::move(steps));
  return backward_seen_.back();
}

PyObject* Gradient::backward(PyObject* const* arguments, Py_ssize_t count) {
  static const Name saved_tensors("saved_tensors"), dtype("dtype"), kept("kept"), contiguous("contiguous"), to("to");
  if (count < 1) throw_argument_error("only autograd calls this");
  PyObject* context = arguments[0];
  const py::object all = attribute(context, kept);
  PyObject *dtypes = PyTuple_GET_ITEM(all.ptr(), 0), *numbers = PyTuple_GET_ITEM(all.ptr(), 1);
  PyObject *is_needed = PyTuple_GET_ITEM(all.ptr(), 3), *is_given = PyTuple_GET_ITEM(all.ptr(), 4);
  const BackwardSteps& steps = backward_steps(is_needed, dtypes, arguments + 1, count - 1);
  const py::object enabled = owned(PyObject_CallNoArgs(callbacks_.is_grad_enabled.ptr()));
  if (steps.rare || enabled.ptr() == Py_True) {
    return PyObject_Vectorcall(callbacks_.slow_backward.ptr(), arguments, count, nullptr);
  }

  std::vector<PyObject*> given(steps.values.size());
  for (size_t i = 0; i < given.size(); ++i) given[i] = steps.values[i].ptr();
  const py::object saved = attribute(context, saved_tensors);
  if (static_cast<size_t>(PyTuple_GET_SIZE(saved.ptr())) != steps.saved.size()) {
    throw_argument_error("autograd saved another number of tensors");
  }
  for (size_t i = 0; i < steps.saved.size(); ++i) given[steps.saved[i]] = PyTuple_GET_ITEM(saved.ptr(), i);
  for (size_t i = 0; i < places_.given.size(); ++i) given[places_.given[i]] = PyTuple_GET_ITEM(numbers, i);
  std::vector<py::object> gradients;  // whose strides may be any, such as those of a sum's: 0
  for (const auto& [at, output] : steps.gradients) {
    gradients.push_back(owned(PyObject_CallMethodNoArgs(arguments[1 + output], contiguous.object)));
    given[at] = gradients.back().ptr();
  }
  const Found found{[&] {
    const Chosen chosen(callbacks_.implementation.ptr(), PyTuple_GET_ITEM(all.ptr(), 2));
    return owned(backward_->call(given.data(), given.size(), false));  // gradients may be batched: is_grads_batched
  }()};

  py::object of_inputs[kMaxArrays];
  for (const auto& [at, number, type] : steps.gives) {
    of_inputs[at] = py::reinterpret_borrow<py::object>(found[number]);
    if (attribute(found[number], dtype).ptr() != type.ptr()) {
      of_inputs[at] = owned(PyObject_CallMethodOneArg(found[number], to.object, type.ptr()));
    }
  }
  PyObject* result[kMaxArrays + 1] = {Py_None};
  size_t number = 1;
  for (size_t i = 0; i < places_.inputs.size(); ++i) {
    if (PyTuple_GET_ITEM(is_given, i) == Py_True) result[number++] = of_inputs[i] ? of_inputs[i].ptr() : Py_None;
  }
  return tuple_of(result, number).release().ptr();
}

namespace {

constexpr const char* kGradientCapsule = "transformer_rtc.gradient";

template <PyObject* (Gradient::*method)(PyObject* const*, Py_ssize_t)>
PyObject* call_gradient(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return taking_gil([&]() -> PyObject* {
    try {
      auto* gradient = static_cast<Gradient*>(PyCapsule_GetPointer(self, kGradientCapsule));
      return (gradient->*method)(arguments, count);
    } catch (abi::__forced_unwind&) {
      throw;
    } catch (...) {
      set_python_error();
      return nullptr;
    }
  });
}

template <PyObject* (Gradient::*method)(PyObject* const*, Py_ssize_t)>
py::object entry(const py::object& self, const char* name) {
  static PyMethodDef definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_gradient<method>)),
                                   METH_FASTCALL, nullptr};
  const py::capsule capsule(static_cast<const void*>(self.cast<Gradient*>()), kGradientCapsule);
  // This reference is never given up: operators keep a plain pointer to their Gradient.
  PyCapsule_SetContext(capsule.ptr(), py::object(self).inc_ref().ptr());
  return owned(PyCFunction_New(&definition, capsule.ptr()));
}

}  // namespace

void bind_gradient(py::module_& module) {
  using Numbers = std::vector<int>;
  py::class_<Gradient, std::shared_ptr<Gradient>>(module, "Gradient")
      .def(py::init([](std::shared_ptr<Operator> forward, std::shared_ptr<Operator> backward, Numbers inputs,
                       Numbers unusual, Numbers needed, Numbers numbers, Numbers kept, Numbers results, Numbers given,
                       py::object prepare, py::object forward_steps, py::object backward_steps,
                       py::object slow_backward, py::object is_grad_enabled, py::object implementation) {
             return std::make_shared<Gradient>(std::move(forward), std::move(backward),
                                               Gradient::Places{inputs, unusual, needed, numbers, kept, results, given},
                                               Gradient::Callbacks{prepare, forward_steps, backward_steps,
                                                                   slow_backward, is_grad_enabled, implementation});
           }),
           py::arg("forward"), py::arg("backward"), py::kw_only(), py::arg("inputs"), py::arg("unusual"),
           py::arg("needed"), py::arg("numbers"), py::arg("kept"), py::arg("results"), py::arg("given"),
           py::arg("prepare"), py::arg("forward_steps"), py::arg("backward_steps"), py::arg("slow_backward"),
           py::arg("is_grad_enabled"), py::arg("implementation"))
      .def("begin", &Gradient::begin, py::arg("apply"))
      .def_property_readonly("call", [](const py::object& self) { return entry<&Gradient::call>(self, "call"); })
      .def_property_readonly("forward",
                             [](const py::object& self) { return entry<&Gradient::forward>(self, "forward"); })
      // As a method of autograd's context, which a builtin function is not by itself.
      .def_property_readonly("backward", [](const py::object& self) {
        return owned(PyInstanceMethod_New(entry<&Gradient::backward>(self, "backward").ptr()));
      });
}
