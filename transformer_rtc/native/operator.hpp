// One call of an operator, driven by a descriptor: which arrays to view, which outputs to allocate, which fields of the
// kernel's parameters to fill, how large a grid to launch. It knows no operator.
#pragma once

#include <Python.h>

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "array.hpp"
#include "driver.hpp"

// What a call's argument is. The descriptor lists them in the order of the call.
enum class Role {
  rows,        // input array [..., columns]; the first one is the reference for shape, device and framework
  columns,     // input array [columns], or None where optional
  real,        // float
  rows_out,    // output array [..., columns] like the first input, allocated where None
  dtype_out,   // data type of the rows_out before it, or None: the first input's
  row_values,  // bool: whether to return an output [...] with one value a row
  stream,      // stream handle, an object that has one, or None: the framework's current stream
};

struct Argument {
  Role role;
  std::string name;
  std::vector<DtypeId> dtypes;  // of arrays
  bool optional = false;
};

// What fills a field of the parameters. `index` counts arrays, or reals, in the order of the arguments.
enum class Source {
  data,
  outer_stride,
  inner_stride,
  dtype,
  real,
  rows,
  columns,
  inner_count,
  inner_magic,
  inner_shift,
  workspace,
};

struct FieldFill {
  Source source;
  int index;
  int offset;
};

constexpr int kMaxParameterBytes = 256;

// All that is fixed once the arguments' types and the hidden size are known.
struct Plan {
  std::shared_ptr<Launcher> launcher;
  LaunchShape shape;  // but for the grid
  std::vector<FieldFill> fields;
  int64_t rows_per_cta;
  int64_t ctas_per_row;
  int64_t max_groups;       // of CTAs that share rows, in one grid
  int64_t workspace_bytes;  // per group, zeroed before the launch
};

// The call's array arguments and values, in the order of the descriptor.
struct Call {
  View views[kMaxArrays];
  PyObject* objects[kMaxArrays] = {};  // borrowed; null: absent, or an output to allocate
  bool wanted[kMaxArrays] = {};        // outputs
  DtypeId dtypes[kMaxArrays] = {};     // 0: absent
  double reals[kMaxArrays] = {};
  int implementation = 0;
};

// Where outputs and workspaces come from.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // Returns a new reference and sets `data`. Throws.
  virtual PyObject* allocate(int ndim, const int64_t* shape, DtypeId dtype, int device, char*& data) = 0;
};

class Operator {
 public:
  // plan(implementation, device, dtypes, columns) -> Plan; slow_call(operator, arguments) -> result;
  // framework_of(type) -> (DLPack exchange API capsule or None, is_grad_enabled or None);
  // implementation: a context variable holding a small int.
  Operator(std::string name, std::vector<Argument> arguments, PyObject* plan, PyObject* slow_call,
           PyObject* framework_of, PyObject* implementation);

  // The hot path. Arguments as in the descriptor, all given.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count);

  // The same with views made by the caller: for arrays that need more than a pointer.
  PyObject* run(Call& call, Allocator& allocator, CUstream stream);

  const std::string& name() const { return name_; }
  const std::vector<Argument>& arguments() const { return arguments_; }
  // Fills the call's reals and outputs' dtypes from the arguments that are no arrays.
  void read_values(PyObject* const* arguments, Call& call);

 private:
  struct Framework {
    const DLPackExchangeAPI* api = nullptr;  // null: the slow call
    PyObject* is_grad_enabled = nullptr;
  };
  // Implementation and device, columns, and the arrays' dtypes.
  using Key = std::array<uint64_t, 2 + kMaxArrays>;

  const Framework& framework(PyTypeObject* type, int array, const std::string& argument);
  const Plan& plan(const Call& call, int64_t columns);
  [[noreturn]] void refuse(const std::string& argument, const std::string& what) const;
  void check_dtype(const Argument& argument, DtypeId dtype) const;

  std::string name_;
  std::vector<Argument> arguments_;
  PyObject* plan_;
  PyObject* slow_call_;
  PyObject* framework_of_;
  PyObject* implementation_;
  int array_count_ = 0;
  std::unordered_map<PyTypeObject*, Framework> frameworks_;
  // The last call's, which the next one most likely is like.
  struct {
    PyTypeObject* type = nullptr;
    const Framework* framework = nullptr;
  } last_frameworks_[kMaxArrays];
  Key last_key_{};
  const Plan* last_plan_ = nullptr;

  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  std::unordered_map<Key, Plan, KeyHash> plans_;
  PyObject* dtypes_seen_;  // {data type object: DtypeId}
};

// A DtypeId for a data type object of any framework; asks transformer_rtc.arrays the first time.
DtypeId dtype_from_object(PyObject* cache, PyObject* object);
