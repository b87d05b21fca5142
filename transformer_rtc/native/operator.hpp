// One call of an operator, driven by a descriptor: which arrays to view, which outputs to allocate, which fields of the
// kernel's parameters to fill, how large a grid to launch. It knows no operator.
#pragma once

#include <Python.h>
#include <pybind11/pytypes.h>

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "array.hpp"
#include "driver.hpp"

// What a call's argument is. The descriptor lists them in the order of the call.
enum class Role {
  rows,           // input array [..., columns]; the first one is the reference for shape, device and framework
  columns,        // input array [columns], or [heads, columns] where rows are [..., heads, columns]; all have one shape
  row_inputs,     // input array [...], one value a row
  value,          // input array of one element
  mask,           // input array [..., columns] that is broadcast to the rows' shape [..., heads, queries, columns]
  head_values,    // input array [heads], of such rows
  value_out,      // array of one element that is written in place, or None
  real,           // float
  non_negative,   // float that is not below 0
  integer,        // int of 32 bits
  flag,           // bool: which kernels there are
  square,         // bool: whether there must be as many queries as columns
  rows_out,       // output array [..., columns], allocated where None
  dtype_out,      // data type of outputs, or None: that of the arrays they are like
  wanted,         // bool: whether an output of rows is made and returned
  row_values,     // bool: whether to return an output [...] with one value a row
  column_values,  // bool: whether to return an output of the shape of the columns
  head_sums,      // bool: whether to return an output [heads], of rows [..., heads, queries, columns]
  mask_sums,      // bool: whether to return an output of the shape of the mask that it is like
  sm_margin,      // int: multiprocessors to leave free
  stream,         // stream handle, an object that has one, or None: the framework's current stream
};

struct Argument {
  Role role;
  std::string name;
  std::string called;           // by the user's function, in messages
  std::vector<DtypeId> dtypes;  // of arrays
  bool optional = false;
  int like = 0;         // the earlier array whose data type an output has by default
  std::vector<int> of;  // the arrays that this is about
};

// What fills a field of the parameters. `index` counts arrays, reals, integers or flags, in the order of the arguments.
enum class Source {
  data,
  outer_stride,
  inner_stride,
  dtype,
  real,
  integer,
  flag,
  rows,
  columns,
  inner_count,
  inner_magic,
  inner_shift,
  heads,
  heads_magic,
  heads_shift,
  groups,
  workspace,
  partials,
  queries,  // rows [..., heads, queries, columns] as matrices of one head and batch
  queries_magic,
  queries_shift,
  matrix_heads,
  matrix_heads_magic,
  matrix_heads_shift,
  batch_stride,  // of a mask
  head_stride,
  query_stride,
  row_partials,
  mask_rows,  // of what has the shape of a mask
  sharers,    // groups of threads that share what one of these was broadcast to
  diagonal,   // how many columns there are more than queries
};

struct FieldFill {
  Source source;
  int index;
  int offset;
};

constexpr int kMaxParameterBytes = 512;
constexpr int kMaxFlags = 16;

// One launch of a plan.
struct Stage {
  std::shared_ptr<Launcher> launcher;
  LaunchShape shape;  // but for the grid
  std::vector<FieldFill> fields;
  int64_t columns_per_cta;  // of a launch behind the first, whose grid is over the columns and heads; or kOfHeads
  int64_t row_groups;       // of threads in a cluster, where the grid is over the columns and a mask's rows; else 0
};

// All that is fixed once the arguments' types and the hidden size are known. The first stage is over the rows.
struct Plan {
  static constexpr int64_t kAnyGroups = INT32_MAX;
  static constexpr int64_t kOfHeads = -1;  // a CTA for each head of rows [..., heads, queries, columns]

  std::vector<Stage> stages;
  int64_t rows_per_cta;
  int64_t ctas_per_row;
  int64_t max_groups;       // of CTAs that share rows, in one grid; fewer than kAnyGroups take rows in turn
  int64_t workspace_bytes;  // per group, zeroed before the first launch
  int64_t partial_bytes;    // per group, from the first launch to the others
  int64_t row_bytes;        // per row, likewise
  bool whole_heads;         // each group gets rows of the same heads again and again, and keeps what belongs to them
  int64_t group_unit;       // groups that take rows in turn are a multiple of it, if there are more
  int64_t multiprocessors;
  int64_t turn_bytes;  // of partial sums that take as long as a row more in turn; 0: no fewer groups because of them
};

// The call's array arguments and values, in the order of the descriptor.
struct Call {
  View views[kMaxArrays];
  PyObject* objects[kMaxArrays] = {};  // borrowed; null: absent, or an output to allocate
  bool wanted[kMaxArrays] = {};        // outputs that are returned
  DtypeId dtypes[kMaxArrays] = {};     // 0: absent; before `run`: of outputs, what is asked for
  double reals[kMaxArrays] = {};
  int32_t integers[kMaxArrays] = {};
  uint32_t flags = 0;  // a bit for each, in their order
  bool square = false;
  int64_t sm_margin = 0;
  int implementation = 0;
};

// Where outputs and workspaces come from.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // Returns a new reference and sets `data`. Throws.
  virtual PyObject* allocate(int ndim, const int64_t* shape, DtypeId dtype, int device, char*& data) = 0;
  // The same for bytes that the work put on a stream needs until the reference is given up.
  virtual PyObject* workspace(int64_t bytes, int device, CUstream stream, char*& data);
};

class Operator {
 public:
  // Then the quarter that was not looked up for longest is forgotten: hidden sizes may vary without end.
  static constexpr size_t kMostPlans = 512;

  // plan(implementation, device, dtypes, columns, per head, with a margin, flags) -> Plan; check, of the same, refuses
  // what a plan would -> multiprocessors; slow_call(arguments) -> result;
  // framework_of(type) -> (DLPack exchange API capsule or None, is_grad_enabled or None);
  // implementation: a context variable holding a small int. Where there are `buckets`, ascending, a plan is for every
  // number of columns up to one of them, and is asked for with that; the last one is kMostColumns.
  Operator(std::string name, std::vector<Argument> arguments, PyObject* plan, PyObject* check, PyObject* slow_call,
           PyObject* framework_of, PyObject* implementation, std::vector<int64_t> buckets);

  // The hot path. Arguments as in the descriptor, all given.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count);

  // The same with views made by the caller: for arrays that need more than a pointer.
  PyObject* run(Call& call, Allocator& allocator, CUstream stream);

  const std::string& name() const { return name_; }
  const std::vector<Argument>& arguments() const { return arguments_; }
  // Fills the call with what the arguments that are no arrays say.
  void read_values(PyObject* const* arguments, Call& call);

 private:
  struct Framework {
    const DLPackExchangeAPI* api = nullptr;  // null: the slow call
    PyObject* is_grad_enabled = nullptr;
  };
  // What the descriptor says of an array.
  struct Array {
    const Argument* argument;
    Role role;
    int position;  // of the argument
    bool of_rows;
    bool input;
    bool written;  // into the caller's memory
    bool made;     // never the caller's
    bool required;
    const Argument* wanted_by;  // null: always
  };
  // The rows' place in memory, and what else is one for all arrays.
  struct Layout {
    Geometry geometry;
    RowStrides strides[kMaxArrays];
    const View* pattern = nullptr;  // the first of the columns that is given
    const std::string* pattern_name = nullptr;
    bool per_head = false;
    int64_t heads = 1;
    int64_t queries = 1;
    int64_t matrix_heads = 1;
    MaskStrides mask_strides[kMaxArrays];
    int64_t mask_rows = 1;  // of an output of the shape of a mask
  };
  // Implementation, flags and device; columns; the arrays' dtypes.
  using Key = std::array<uint64_t, 2 + kMaxArrays * sizeof(DtypeId) / sizeof(uint64_t)>;

  const Framework& framework(PyTypeObject* type, int array, const std::string& argument);
  std::shared_ptr<const Plan> plan(const Call& call, const Layout& layout);
  void forget_plans();
  pybind11::object ask(PyObject* callback, const Call& call, const Layout& layout, int64_t columns) const;
  int64_t bucket_of(int64_t columns) const;
  [[noreturn]] void refuse(const std::string& argument, const std::string& what) const;
  [[noreturn]] void refuse_dtype(const Argument& argument, const std::string& given) const;
  void check_dtype(const Argument& argument, DtypeId dtype) const;
  // A DtypeId for a data type object of any framework; asks transformer_rtc.arrays the first time.
  DtypeId dtype_of(const Argument& argument, PyObject* object);
  bool truth(const Argument& argument, PyObject* value) const;
  // Checks the arrays, and finds how their rows lie and what types outputs have.
  Layout check(Call& call) const;
  void check_view(const Array& array, const View& view, const View& first, Layout& layout) const;
  void check_mask(const std::string& name, const View& view, const View& first, MaskStrides& strides) const;
  // Of an output of the shape of a mask: its own strides, and how many rows it has.
  void check_mask_sums(const Call& call, size_t array, Layout& layout) const;
  // Written arrays must not overlap any other, but for an output of rows that is an input of rows, in place, unless
  // that is read again by a launch behind the one that writes.
  void check_overlap(const Call& call, const Layout& layout) const;
  // Allocates where the caller gave none; returns the results.
  struct Outputs;
  void make_outputs(Call& call, Layout& layout, Allocator& allocator, Outputs& outputs) const;
  void check_margin(const Call& call, int64_t multiprocessors) const;
  // How many groups of CTAs share out the rows.
  int64_t groups(const Call& call, const Layout& layout, const Plan& plan) const;
  // Groups of threads of a stage's CTA that share the rows that one row of a mask was broadcast to.
  static int64_t sharers(const Layout& layout, const Stage& stage);
  std::vector<Memory> memory(const Call& call, const Layout& layout) const;

  std::string name_;
  std::vector<Argument> arguments_;
  PyObject* plan_;
  PyObject* check_;
  PyObject* slow_call_;
  PyObject* framework_of_;
  PyObject* implementation_;
  std::vector<int64_t> buckets_;
  std::vector<Array> arrays_;
  std::unordered_map<PyTypeObject*, Framework> frameworks_;
  // The last call's, which the next one most likely is like.
  struct {
    PyTypeObject* type = nullptr;
    const Framework* framework = nullptr;
  } last_frameworks_[kMaxArrays];
  Key last_key_{};
  std::shared_ptr<const Plan> last_plan_;

  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Kept {
    std::shared_ptr<const Plan> plan;  // a call goes on with what is forgotten meanwhile
    uint64_t looked_up;
  };
  std::unordered_map<Key, Kept, KeyHash> plans_;
  uint64_t lookups_ = 0;
  PyObject* dtypes_seen_;  // {data type object: DtypeId}
};
