/*!
 * \brief Runs of kernels as CUDA graphs, and storage that keeps its address between inferences.
 *
 * Functions of TVM's virtual machine for CUDA do both, where there are any. Else, and once a capture has failed,
 * kernels are launched one by one.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

std::atomic<bool> can_capture{true};  // until a capture fails

/*! \brief Say once why there are no graphs. */
void WarnOnce(const std::string& reason) {
  static std::atomic<bool> has_warned{false};
  if (!has_warned.exchange(true)) {
    std::fprintf(stderr, "warning: kernels are launched one by one, not as CUDA graphs: %s\n", reason.c_str());
  }
}

ffi::Any Invoke(ffi::AnyView machine, const ffi::ObjectRef& closure, const ffi::Array<ffi::Any>& operands) {
  static ffi::Function invoke = ffi::Function::GetGlobalRequired("vm.builtin.invoke_closure");
  std::vector<ffi::AnyView> args{machine, closure};
  args.insert(args.end(), operands.begin(), operands.end());
  ffi::Any result;
  invoke.CallPacked(args.data(), static_cast<int32_t>(args.size()), &result);
  return result;
}

/*! \brief Call (virtual machine, closure, operands, number of the run): captures at the first call, then replays. */
void RunOrCapture(ffi::PackedArgs args, ffi::Any* result) {
  if (can_capture) {
    auto run = ffi::Function::GetGlobal("vm.builtin.cuda_graph.run_or_capture");
    if (run) {
      try {
        run->CallPacked(args, result);
        return;
      } catch (const ffi::Error& error) {
        can_capture = false;
        WarnOnce(error.message());
        throw;  // the run may have begun: its operands are lost, and the inference begins again
      }
    }
    WarnOnce("this TVM has no CUDA graphs");
  }
  *result = Invoke(args[0], args[1].cast<ffi::ObjectRef>(), args[2].cast<ffi::Array<ffi::Any>>());
}

/*! \brief Call (virtual machine, closure, number): what the closure allocates, the same at every call. */
void CachedStorage(ffi::PackedArgs args, ffi::Any* result) {
  auto cached = ffi::Function::GetGlobal("vm.builtin.cuda_graph.get_cached_alloc");
  if (cached) {
    cached->CallPacked(args, result);
  } else {
    *result = Invoke(args[0], args[1].cast<ffi::ObjectRef>(), {});
  }
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("pimflow.runtime.run_or_capture", RunOrCapture)
      .def_packed("pimflow.runtime.cached_storage", CachedStorage)
      .def("pimflow.runtime.can_capture_kernels", []() { return can_capture.load(); });
}

}  // namespace
}  // namespace pimflow
