// SPDX-License-Identifier: Apache-2.0
// Python's view of the machine: load a module that the host's compiler made, and run one of its kernels.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <mutex>
#include <new>
#include <thread>

#include "machine.hpp"

namespace py = pybind11;
using namespace simulator;

namespace {

Machine& machine() {
  static Machine instance;
  return instance;
}

// A launch at a time: the machine is one, and so is `current`.
std::mutex running;
std::atomic<std::thread::id> runner;

// A process forked while another thread simulates has no such thread.
void start_anew() {
  new (&running) std::mutex;
  new (&machine()) Machine;
  runner = std::thread::id();
}

bool interrupted() {
  const py::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

Index index_of(const std::array<unsigned, 3>& size) { return {size[0], size[1], size[2]}; }

class Module {
 public:
  explicit Module(const std::string& path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
    const auto* module = static_cast<const trtc_simulator::Module*>(symbol("trtc_module"));
    *module->machine = machine().interface();
    for (auto* variable = *module->shared_variables; variable != nullptr; variable = variable->next) {
      shared_variables_.push_back(variable);
    }
    Machine::lay_out(shared_variables_);
    find_segments();
  }

  ~Module() { dlclose(handle_); }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Bytes on a GPU: of every kernel of the module, or of those that have run.
  unsigned static_shared_memory(bool of_run) const {
    unsigned bytes = 0;
    for (const auto* variable : shared_variables_) {
      if (of_run && !variable->used) continue;
      bytes = (bytes + variable->alignment - 1) / variable->alignment * variable->alignment + variable->bytes;
    }
    return bytes;
  }

  unsigned parameter_bytes(const std::string& kernel) const {
    return *static_cast<const unsigned*>(symbol("trtc_bytes_" + kernel));
  }

  unsigned max_threads(const std::string& kernel) const {
    return *static_cast<const unsigned*>(symbol("trtc_threads_" + kernel));
  }

  // extents: (address, writable, initialised, name, element bytes, columns, outer count, outer stride, inner count,
  // inner stride), strides in elements.
  using Rows = std::tuple<uintptr_t, bool, bool, std::string, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

  py::object run(const std::string& kernel, std::array<unsigned, 3> grid, std::array<unsigned, 3> block,
                 std::array<unsigned, 3> cluster, unsigned dynamic_shared_memory, bool cooperative,
                 const py::bytes& params, const std::vector<Rows>& memory, bool knows_memory, double endless_seconds,
                 bool checked, int schedule, uint64_t seed) {
    Launch launch{};
    launch.entry = reinterpret_cast<void (*)(const void*)>(symbol("trtc_run_" + kernel));
    launch.params = PyBytes_AS_STRING(params.ptr());
    launch.grid = index_of(grid);
    launch.block = index_of(block);
    launch.cluster = index_of(cluster);
    launch.dynamic_shared_memory = dynamic_shared_memory;
    launch.cooperative = cooperative;
    launch.checked = checked;
    launch.schedule = static_cast<Schedule>(schedule);
    launch.seed = seed;
    launch.shared_variables = shared_variables_;
    launch.code_begin = code_begin_;
    launch.code_end = code_end_;
    launch.endless_seconds = endless_seconds;
    launch.knows_memory = knows_memory || checked;  // where nothing else may be touched
    launch.names.push_back("the kernel's constants and variables");
    for (const auto& [begin, end, writable] : segments_) launch.memory.push_back({begin, end, writable, true, 0});
    for (const auto& [address, writable, initialised, name, size, columns, outer, outer_stride, inner, inner_stride] :
         memory) {
      launch.names.push_back(name);
      for (int64_t i = 0; i < outer; ++i) {
        for (int64_t j = 0; j < inner; ++j) {
          const uintptr_t row = address + static_cast<uintptr_t>((i * outer_stride + j * inner_stride) * size);
          launch.memory.push_back({row, row + static_cast<uintptr_t>(columns * size), writable, initialised,
                                   static_cast<int>(launch.names.size()) - 1});
        }
      }
    }
    if (checked) launch.extents = launch.memory;
    if (runner == std::this_thread::get_id()) {
      throw std::runtime_error(kernel +
                               " is launched by a signal's handler while this thread simulates another launch");
    }
    Fault fault;
    std::vector<Suspect> suspects;
    {
      const py::gil_scoped_release released;
      const std::lock_guard<std::mutex> held(running);
      runner = std::this_thread::get_id();
      fault = machine().run(launch, &interrupted);
      runner = std::thread::id();
      suspects = machine().suspects();
      std::fflush(stdout);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    py::list pairs;
    for (const Suspect& suspect : suspects)
      pairs.append(py::make_tuple(suspect.what, party(suspect.a), party(suspect.b)));
    if (fault.kind.empty()) return py::make_tuple(py::none(), pairs);
    return py::make_tuple(
        py::make_tuple(fault.kind, fault.message, party(fault.at), party(fault.other), fault.file, fault.line), pairs);
  }

 private:
  void* symbol(const std::string& name) const {
    void* found = dlsym(handle_, name.c_str());
    if (found == nullptr) throw std::runtime_error("the module has no " + name);
    return found;
  }

  void find_segments() {
    struct link_map* map = nullptr;
    dlinfo(handle_, RTLD_DI_LINKMAP, &map);
    base_ = map->l_addr;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* self) {
          auto& module = *static_cast<Module*>(self);
          if (info->dlpi_addr != module.base_) return 0;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_LOAD) continue;
            const uintptr_t begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
            module.segments_.emplace_back(begin, end, (header.p_flags & PF_W) != 0);
            if ((header.p_flags & PF_X) != 0) module.code_begin_ = begin, module.code_end_ = end;
          }
          return 1;
        },
        this);
  }

  // (offset of the caller in the module or None, block, thread), or None where nobody is known.
  py::object party(const Party& party) const {
    const auto caller = reinterpret_cast<uintptr_t>(party.caller);
    const bool inside = caller >= code_begin_ && caller < code_end_;
    if (!inside && !party.known) return py::none();
    const auto triple = [&](const Index& index) { return py::make_tuple(index.x, index.y, index.z); };
    return py::make_tuple(inside ? py::object(py::int_(caller - base_)) : py::none(),
                          party.known ? py::object(triple(party.cta)) : py::none(),
                          party.known ? py::object(triple(party.thread)) : py::none());
  }

  void* handle_;
  uintptr_t base_ = 0, code_begin_ = 0, code_end_ = 0;
  std::vector<std::tuple<uintptr_t, uintptr_t, bool>> segments_;
  std::vector<trtc_simulator::SharedVariable*> shared_variables_;
};

}  // namespace

PYBIND11_MODULE(_machine, module) {
  pthread_atfork(nullptr, nullptr, &start_anew);
  module.doc() = "Runs kernels that the host's compiler made, with CUDA's semantics.";
  py::class_<Module>(module, "Module")
      .def(py::init<const std::string&>())
      .def("static_shared_memory", &Module::static_shared_memory)
      .def("parameter_bytes", &Module::parameter_bytes)
      .def("max_threads", &Module::max_threads)
      .def("run", &Module::run);
}
