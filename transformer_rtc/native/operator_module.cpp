// SPDX-License-Identifier: Apache-2.0
// Python's view of declarations, plans and operators.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bindings.hpp"
#include "errors.hpp"
#include "operator.hpp"

namespace py = pybind11;

namespace {

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

constexpr const char* kEntryCapsule = "transformer_rtc.entry";

// What a builtin function calls: an operator, which may be made by the first call.
struct Entry {
  Operator* op;
  py::object made;  // keeps it alive; before there is one, what makes it
};

Operator& operator_of(Entry& entry) {
  if (entry.op == nullptr) {
    const py::object make = entry.made;  // another thread may be here, too: both are given the same
    py::object made = make();
    entry.op = made.cast<Operator*>();
    entry.made = std::move(made);
  }
  return *entry.op;
}

template <bool direct>
PyObject* call_operator(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    auto* entry = static_cast<Entry*>(PyCapsule_GetPointer(self, kEntryCapsule));
    return operator_of(*entry).call(arguments, count, direct);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <bool direct>
PyMethodDef call_operator_method = {
    "call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_operator<direct>)), METH_FASTCALL, nullptr};

// Returns a builtin of METH_FASTCALL: no argument tuple, no conversion.
py::object entry(Operator* op, py::object made, bool direct) {
  const py::capsule capsule(
      static_cast<const void*>(new Entry{op, std::move(made)}), kEntryCapsule,
      [](PyObject* self) { delete static_cast<Entry*>(PyCapsule_GetPointer(self, kEntryCapsule)); });
  PyMethodDef* method = direct ? &call_operator_method<true> : &call_operator_method<false>;
  return py::reinterpret_steal<py::object>(PyCFunction_New(method, capsule.ptr()));
}

// Runs an operator on views: (views or None of the array arguments in order, all arguments, allocate, stream, whether
// the workspace must be the memory of the graph that the stream is captured into).
py::object run_views(Operator& op, const std::vector<py::object>& views, const std::vector<py::object>& arguments,
                     py::object allocate, uintptr_t stream, bool graph_memory) {
  Call call;
  std::vector<PyObject*> raw;
  for (const py::object& argument : arguments) raw.push_back(argument.ptr());
  if (raw.size() != op.argument_count() || views.size() > kMaxArrays) {
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

void bind_declaration(py::module_& module) {
  py::enum_<Kind>(module, "Kind")
#define TRTC_VALUE(name, python) .value(#python, Kind::name)
      TRTC_KINDS(TRTC_VALUE)
#undef TRTC_VALUE
          ;
  py::class_<Shape>(module, "Shape")
      .def(py::init([](bool leading, const std::vector<std::pair<int64_t, int>>& sizes, std::string words) {
             Shape shape{leading, {}, std::move(words)};
             for (const auto& [multiple, symbol] : sizes) shape.sizes.push_back({multiple, symbol});
             return shape;
           }),
           py::arg("leading"), py::arg("sizes"), py::arg("words"));
  py::class_<Symbol>(module, "Symbol")
      .def(py::init([](std::string name, std::string noun, bool conditional) {
             return Symbol{std::move(name), std::move(noun), conditional};
           }),
           py::arg("name"), py::arg("noun"), py::arg("conditional"));
  py::class_<Word>(module, "Word")
      .def(py::init([](std::string text, std::optional<std::pair<int, int>> equal, std::string reason) {
             Word word{std::move(text)};
             if (equal) std::tie(word.equal[0], word.equal[1]) = *equal;
             word.reason = std::move(reason);
             return word;
           }),
           py::arg("text"), py::arg("equal") = py::none(), py::arg("reason") = "");
  py::class_<Argument>(module, "Argument")
      .def(py::init([](Kind kind, std::string name, std::string called) {
             Argument argument;
             argument.kind = kind;
             argument.name = std::move(name);
             argument.called = std::move(called);
             return argument;
           }),
           py::arg("kind"), py::arg("name"), py::arg("called"))
      .def_readwrite("shapes", &Argument::shapes)
      .def_readwrite("dtypes", &Argument::dtypes)
      .def_readwrite("optional", &Argument::optional)
      .def_readwrite("broadcast", &Argument::broadcast)
      .def_readwrite("rereads", &Argument::rereads)
      .def_readwrite("like", &Argument::like)
      .def_readwrite("shape_of", &Argument::shape_of)
      .def_readwrite("wanted_with", &Argument::wanted_with)
      .def_readwrite("of", &Argument::of)
      .def_property(
          "minimum", [](const Argument& self) { return self.minimum; },
          [](Argument& self, double minimum) {
            self.has_minimum = true;
            self.minimum = minimum;
          })
      .def_readwrite("largest", &Argument::largest)
      .def_readwrite("noun", &Argument::noun)
      .def_readwrite("needs", &Argument::needs)
      .def_readwrite("needs_words", &Argument::needs_words)
      .def_readwrite("words", &Argument::words);
}

void bind_plan(py::module_& module) {
  py::enum_<Source>(module, "Source")
#define TRTC_VALUE(name, python) .value(#python, Source::name)
      TRTC_SOURCES(TRTC_VALUE)
#undef TRTC_VALUE
          ;
  py::class_<Stage>(module, "Stage")
      .def(py::init([](std::shared_ptr<Launcher> launcher, std::array<unsigned, 3> block,
                       std::array<unsigned, 3> cluster, unsigned dynamic_shared_memory, bool cooperative,
                       const std::vector<std::tuple<Source, int, int, int>>& fields, bool early,
                       int64_t columns_per_cta, int per, int rows_of, int64_t row_groups) {
             Stage stage;
             stage.launcher = std::move(launcher);
             stage.shape = launch_shape({1, 1, 1}, block, cluster, dynamic_shared_memory, cooperative);
             // All CTAs of a cooperative grid must be resident: no part of another launch may be in their places.
             stage.shape.early = early && !cooperative && stage.launcher->may_be_early();
             stage.columns_per_cta = columns_per_cta;
             stage.per = per;
             stage.rows_of = rows_of;
             stage.row_groups = row_groups;
             for (const auto& [source, offset, index, second] : fields) {
               if (offset < 0 || offset + 8 > kMaxParameterBytes) throw std::invalid_argument("too many parameters");
               stage.fields.push_back({source, offset, index, second});
             }
             return stage;
           }),
           py::arg("launcher"), py::arg("block"), py::arg("cluster"), py::arg("dynamic_shared_memory"),
           py::arg("cooperative"), py::arg("fields"), py::kw_only(), py::arg("early") = false,
           py::arg("columns_per_cta") = 0, py::arg("per") = -1, py::arg("rows_of") = -1, py::arg("row_groups") = 0);
  py::class_<Plan> plan(module, "Plan");
  plan.def(py::init([](std::vector<Stage> stages, int64_t multiprocessors, int64_t rows_per_cta,
                       int64_t elements_per_cta, int64_t ctas_per_row, int64_t max_groups, int64_t workspace_bytes,
                       int64_t partial_bytes, int64_t row_bytes, int64_t turn_bytes, int64_t vec_size, int whole) {
             for (size_t i = 0; i < stages.size(); ++i) {
               if ((stages[i].columns_per_cta != 0 || stages[i].per >= 0) != (i > 0)) {
                 throw std::invalid_argument(
                     "a plan's first launch is over rows, and the others are over columns or another dimension");
               }
             }
             Plan made;
             made.stages = std::move(stages);
             made.multiprocessors = multiprocessors;
             made.rows_per_cta = rows_per_cta;
             made.elements_per_cta = elements_per_cta;
             made.ctas_per_row = ctas_per_row;
             made.max_groups = max_groups;
             made.workspace_bytes = workspace_bytes;
             made.partial_bytes = partial_bytes;
             made.row_bytes = row_bytes;
             made.turn_bytes = turn_bytes;
             made.vec_size = vec_size;
             made.whole = whole;
             return made;
           }),
           py::arg("stages"), py::kw_only(), py::arg("multiprocessors"), py::arg("rows_per_cta") = 1,
           py::arg("elements_per_cta") = 0, py::arg("ctas_per_row") = 1, py::arg("max_groups") = Plan::kAnyGroups,
           py::arg("workspace_bytes") = 0, py::arg("partial_bytes") = 0, py::arg("row_bytes") = 0,
           py::arg("turn_bytes") = 0, py::arg("vec_size") = 1, py::arg("whole") = -1);
  plan.attr("ANY_GROUPS") = Plan::kAnyGroups;
}

}  // namespace

void bind_operator(py::module_& module) {
  module.attr("MAX_PARAMETER_BYTES") = kMaxParameterBytes;
  module.attr("MOST_COLUMNS") = kMostColumns;
  module.attr("MOST_PLANS") = PlanTable::kMostPlans;
  py::class_<HeldView>(module, "View")
      .def(py::init<uintptr_t, std::vector<int64_t>, std::vector<int64_t>, DtypeId, int, bool>());
  bind_declaration(module);
  bind_plan(module);
  py::class_<Operator, std::shared_ptr<Operator>>(module, "Operator")
      .def(py::init([](std::string name, std::vector<Argument> arguments, std::vector<Symbol> symbols, py::object plan,
                       py::object check, py::object slow_call, py::object gradient, py::object dispatch,
                       py::object framework_of, py::object implementation, std::vector<int64_t> buckets, int split_by,
                       std::vector<int> broadcasts, bool elementwise) {
             return std::make_shared<Operator>(std::move(name), std::move(arguments), std::move(symbols), plan.ptr(),
                                               check.ptr(), slow_call.ptr(), gradient.ptr(), dispatch.ptr(),
                                               framework_of.ptr(), implementation.ptr(), std::move(buckets), split_by,
                                               std::move(broadcasts), elementwise);
           }),
           py::arg("name"), py::arg("arguments"), py::arg("symbols"), py::arg("plan"), py::arg("check"),
           py::arg("slow_call"), py::arg("gradient"), py::arg("dispatch"), py::arg("framework_of"),
           py::arg("implementation"), py::arg("buckets") = std::vector<int64_t>{}, py::arg("split_by") = -1,
           py::arg("broadcasts") = std::vector<int>{}, py::arg("elementwise") = false)
      .def_property_readonly("name", &Operator::name)
      .def("forget_plans", &Operator::forget_plans)
      .def("run_views", &run_views, py::arg("views"), py::arg("arguments"), py::arg("allocate"), py::arg("stream"),
           py::arg("graph_memory") = false)
      .def(
          "entry", [](const py::object& self, bool direct) { return entry(self.cast<Operator*>(), self, direct); },
          py::arg("direct") = false);
  module.def("promoted", &promoted, py::arg("a"), py::arg("b"));
  // The first call makes the operator: a process uses few of those that there are.
  module.def("deferred_entry", [](py::object make) { return entry(nullptr, std::move(make), false); }, py::arg("make"));
}
