// SPDX-License-Identifier: Apache-2.0
// The hot call of an operator whose gradient torch's autograd records, forward and backward. Which arguments are saved,
// asked for and returned is worked out in Python (transformer_rtc/torch/autograd.py), once for each kind of call.
#pragma once

#include <Python.h>
#include <pybind11/pytypes.h>

#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "operator.hpp"

class Gradient final : public Recorder {
 public:
  // Which arguments are what, by their numbers in the forward call.
  struct Places {
    std::vector<int> inputs;   // arrays that are read: what autograd is given, in this order
    std::vector<int> unusual;  // what most calls leave out, and `prepare` checks
    std::vector<int> needed;   // of these, one must be given, or `prepare` checks; empty: none is needed
    std::vector<int> numbers;  // numbers, flags and words
    std::vector<int> kept;     // of these, what the backward call is given, too
    std::vector<int> results;  // what says whether a result is wanted
    std::vector<int> given;    // of the backward call, where the numbers that are kept go
  };
  // What it calls in Python:
  // - prepare(values) -> values: refuses what has no gradient
  // - forward_steps(needs, values) -> what a forward call does, as ForwardSteps
  // - backward_steps(needs, dtypes, given) -> what a backward call does, as BackwardSteps
  // - slow_backward(ctx, *gradients): what is rare
  // - is_grad_enabled() -> bool
  struct Callbacks {
    pybind11::object prepare, forward_steps, backward_steps, slow_backward, is_grad_enabled, implementation;
  };

  Gradient(std::shared_ptr<Operator> forward, std::shared_ptr<Operator> backward, Places places, Callbacks callbacks)
      : forward_(std::move(forward)),
        backward_(std::move(backward)),
        places_(std::move(places)),
        callbacks_(std::move(callbacks)) {}

  // From now on autograd is handed calls: `apply` calls `forward`. The native operator's calls come here.
  void begin(pybind11::object apply);

  PyObject* record(Read& read) override;
  // The same of arguments that are not read.
  PyObject* call(PyObject* const* arguments, Py_ssize_t count);
  // Of autograd: (context, what `call` or `record` hands on, the inputs that are given).
  PyObject* forward(PyObject* const* arguments, Py_ssize_t count);
  // Of autograd: (context, the outputs' gradients).
  PyObject* backward(PyObject* const* arguments, Py_ssize_t count);

 private:
  // What is handed on from a call to autograd's forward, which runs within it.
  struct Handed {
    PyObject* const* values;
    Py_ssize_t count;
    Read* read;  // null: it is not read
  };
  struct ForwardSteps {
    unsigned given, needs, wanted;         // bits of inputs and of results
    pybind11::object is_given, is_needed;  // the same of inputs, as Python's
    std::vector<int> ask, show, statistics;
    std::vector<std::pair<bool, int>> save;  // of what is made, or of the arguments
    std::vector<int> inputs;
    // What the last call kept for its backward, and of what that was made: most calls keep the same.
    std::vector<pybind11::object> kept_of;
    pybind11::object kept;
  };
  struct BackwardSteps {
    pybind11::object is_needed;
    unsigned given;  // bits of gradients
    std::vector<pybind11::object> dtypes;
    bool rare = false;
    std::vector<pybind11::object> values;
    std::vector<int> saved;
    std::vector<std::pair<int, int>> gradients;
    std::vector<std::tuple<int, int, pybind11::object>> gives;
  };

  PyObject* hand(const Handed& handed);
  // Whether nothing of a call is for `prepare` to look at.
  bool is_usual(PyObject* const* values) const;
  ForwardSteps& forward_steps(PyObject* context, const Handed& handed);
  void keep(PyObject* context, ForwardSteps& steps, const Handed& handed);
  const BackwardSteps& backward_steps(PyObject* is_needed, PyObject* dtypes, PyObject* const* gradients,
                                      Py_ssize_t count);

  std::shared_ptr<Operator> forward_, backward_;
  Places places_;
  Callbacks callbacks_;
  pybind11::object apply_;
  // References to elements stay, while another thread adds one.
  std::list<ForwardSteps> forward_seen_;
  std::list<BackwardSteps> backward_seen_;
};
