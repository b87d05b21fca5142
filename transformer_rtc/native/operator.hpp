// SPDX-License-Identifier: Apache-2.0
// The hot call of an operator: view the arrays, check them, find the plan, allocate outputs, launch. What an operator
// is like is said by its declaration alone.
#pragma once

#include <Python.h>
#include <pybind11/pytypes.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "call.hpp"
#include "plan_table.hpp"

// A call whose arguments are read: what is left is to check the arrays, and to launch.
struct Read {
  PyObject* const* arguments;
  Py_ssize_t count;
  Call call;
  const DLPackExchangeAPI* api = nullptr;
};

// Has a framework record the gradient of calls.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual PyObject* record(Read& read) = 0;
};

class Operator {
 public:
  // What it calls in Python:
  // - plan(implementation, device, vec_size, dtypes, columns, variant, with a margin, flags) -> Plan, where every row
  //   is whole aligned vectors of vec_size elements, the largest power of two up to kMostVecSize
  // - check, of the same, refuses what a plan would -> multiprocessors
  // - slow_call(arguments, direct) -> result
  // - gradient(*arguments) -> result records a gradient, where an array requires one, until there is a recorder; None:
  //   such a call is refused
  // - dispatch(*arguments) -> result, where a framework does more with a call than run it: traces or transforms it
  // - framework_of(type, argument) -> a tuple of three: the DLPack exchange API's capsule, or None; whether every call
  //   with arrays of the type is dispatched; what is asked at each call (the fields of `Asked`), or None
  // - implementation: a context variable holding a small int
  // Where there are `buckets`, ascending, a plan is for every number of columns up to one of them, and is asked for
  // with that; the last one is kMostColumns.
  Operator(std::string name, std::vector<Argument> arguments, std::vector<Symbol> symbols, PyObject* plan,
           PyObject* check, PyObject* slow_call, PyObject* gradient, PyObject* dispatch, PyObject* framework_of,
           PyObject* implementation, std::vector<int64_t> buckets, int split_by, std::vector<int> broadcasts,
           bool elementwise);
  ~Operator();
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  // The hot path. Arguments as in the declaration, all given. A `direct` call comes from the framework's own
  // dispatcher, which has seen to gradients and transforms: it only runs.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count, bool direct);

  // The same with views made by the caller: for arrays that need more than a pointer.
  PyObject* run(Call& call, Allocator& allocator, CUstream stream);

  // The end of the hot path: of a call that is read.
  PyObject* launch(Read& read);
  // Asks for a result that the caller did not ask for, by the number of its argument.
  void ask_for(int argument, Call& call) const;

  const std::string& name() const { return name_; }
  // Has the next call of each kind ask for its plan again.
  void forget_plans() { plans_.clear(); }
  // Calls with an array that requires a gradient go to the recorder, which must outlive this operator.
  void set_recorder(Recorder* recorder) { recorder_ = recorder; }
  size_t argument_count() const { return arguments_.size(); }
  // Fills the call with what the arguments that are no arrays say. values.cpp
  void read_values(PyObject* const* arguments, Call& call);

 private:
  // What a framework is asked at each call.
  struct Asked {
    PyObject* is_grad_enabled = nullptr;
    PyObject* was_written = nullptr;    // called with an array of the caller's that was written
    std::vector<PyObject*> transforms;  // functions of nothing: whether any call is traced or transformed now
    PyObject* of_gradients = nullptr;   // the same of calls whose gradient is recorded
    PyObject* levels = nullptr;         // a dictionary of numbers, and a key in it: as transforms where not negative
    PyObject* level = nullptr;
  };
  struct Framework {
    const DLPackExchangeAPI* api = nullptr;  // null: the slow call
    bool wrapped = false;
    std::shared_ptr<const Asked> asked;
  };

  const Framework& framework(PyTypeObject* type, int array, const std::string& argument);
  void tell_of_written(const Call& call, PyObject* was_written) const;
  // Whether the framework traces or transforms the call, or has an array of it whose memory is not its value.
  bool transforms(const Call& call, const Asked& asked) const;
  // Whether autograd is to record a gradient of the call. Refuses one that this operator does not have.
  bool records_gradient(const Call& call, PyObject* is_grad_enabled) const;
  std::shared_ptr<const Plan> plan(const Call& call, const Layout& layout);
  // Whether all that is given is whole vectors of `vec_size` elements at aligned addresses. What is allocated is.
  bool is_whole(const Call& call, const Layout& layout, int64_t vec_size) const;
  // Throws for a plan with numbers of what this operator does not have.
  void check_plan(const Plan& plan) const;
  pybind11::object ask(PyObject* callback, const Call& call, const Layout& layout, int64_t columns) const;
  int64_t bucket_of(int64_t columns) const;

  // values.cpp
  [[noreturn]] void refuse(const std::string& argument, const std::string& what) const;
  [[noreturn]] void refuse_dtype(const Argument& argument, const std::string& given) const;
  void check_dtype(const Argument& argument, DtypeId dtype) const;
  // A DtypeId for a data type object of any framework; asks transformer_rtc.arrays the first time.
  DtypeId dtype_of(const Argument& argument, PyObject* object);
  bool truth(const Argument& argument, PyObject* value) const;
  double real_of(const Argument& argument, PyObject* value) const;
  int32_t integer_of(const Argument& argument, PyObject* value, PyObject* const* arguments) const;
  bool choose(const Argument& argument, PyObject* value, Call& call) const;

  // checks.cpp: the arrays' types, devices and shapes; how they lie, and what types outputs have.
  Layout check(Call& call) const;
  void broadcast_rows(Call& call) const;
  bool is_broadcast(int64_t array) const;
  DtypeId promoted_dtype(const Call& call, const Argument& output) const;
  bool wants_row_results(const Call& call) const;
  int64_t columns_as_one_row(const Call& call, const Layout& layout) const;
  void check_view(const Array& array, const View& view, const View& first, Layout& layout) const;
  void check_rows(const Array& array, const View& view, const View& first, const Layout& layout) const;
  void check_variant(const Array& array, const View& view, const View& first, Layout& layout) const;
  void check_broadcast(const Array& array, const std::string& name, const View& view, const View& first,
                       Layout& layout) const;
  void check_result_shape(const Call& call, const Array& array, Layout& layout) const;
  void check_counts(const Call& call, const Layout& layout) const;
  std::string expected(const Shape& shape, const View& first, const Layout& layout) const;
  bool has_shape(const Shape& shape, const View& view, const View& first, const Layout& layout) const;

  // overlap.cpp: written arrays must not overlap any other, but for an output that is an input of rows, in place,
  // unless that is read again by a later launch than the one that writes.
  void check_overlap(const Call& call, const Layout& layout) const;

  // outputs.cpp: what is allocated where the caller gave none.
  void make_outputs(Call& call, Layout& layout, Allocator& allocator, Outputs& outputs) const;
  void zero_sums(const Call& call, const Layout& layout, const Launcher& launcher, CUstream stream) const;
  int64_t elements(const Call& call, const Layout& layout, size_t array) const;
  std::vector<Memory> memory(const Call& call, const Layout& layout) const;

  // grid.cpp
  void check_margin(const Call& call, int64_t multiprocessors) const;
  // How many groups of CTAs share out the rows.
  int64_t groups(const Call& call, const Layout& layout, const Plan& plan) const;

  std::string name_;
  std::vector<Argument> arguments_;
  std::vector<Symbol> symbols_;
  PyObject* plan_;
  PyObject* check_;
  PyObject* slow_call_;
  PyObject* gradient_;
  Recorder* recorder_ = nullptr;
  PyObject* dispatch_;
  PyObject* framework_of_;
  PyObject* implementation_;
  std::vector<int64_t> buckets_;
  int split_by_;  // the array in whose presence what has multiples has one part (Layout::split); -1: none
  std::vector<int> broadcasts_;  // the arrays of rows that are broadcast to one shape, the first array among them
  bool elementwise_;             // columns depend on no others, but for results of rows
  std::vector<Array> arrays_;
  int64_t widest_ = 1;  // the largest multiple of the columns that a row has
  std::unordered_map<PyTypeObject*, Framework> frameworks_;
  // The last call's, which the next one most likely is like.
  struct {
    PyTypeObject* type = nullptr;
    const Framework* framework = nullptr;
  } last_frameworks_[kMaxArrays];
  PlanTable plans_;
  PyObject* dtypes_seen_;  // {data type object: DtypeId}
};
