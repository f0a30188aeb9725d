/*!
 * \brief Options of pimflow in TVM's PassContext.
 *
 * Only C++ that is linked with TVM's compiler can register such options. This library is not linked with it, so that
 * it works without TVM; it looks the function up in the compiler library that Python has loaded.
 */
#include <dlfcn.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <functional>
#include <list>
#include <string>

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

// tvm::transform::PassContext::RegisterConfigOption(const char*, ffi::String, std::function<ffi::Any(ffi::Any)>)
constexpr const char* kRegister =
    "_ZN3tvm9transform11PassContext20RegisterConfigOptionEPKcNS_3ffi6StringESt8functionIFNS4_3AnyES7_EE";
using Register = void (*)(const char*, ffi::String, std::function<ffi::Any(ffi::Any)>);

/*!
 * \brief Register an option of PassContext.
 * \param compiler Path of TVM's compiler library, which must be loaded.
 * \param key Name of the option.
 * \param check Called with its value; passes see what it returns.
 * \return Whether this TVM has the function to register options.
 */
bool RegisterPassOption(ffi::String compiler, ffi::String key, ffi::Function check) {
  void* library = dlopen(compiler.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  void* function = library == nullptr ? nullptr : dlsym(library, kRegister);
  if (function == nullptr) return false;
  static std::list<std::string> keys;  // TVM keeps the pointer
  keys.emplace_back(key.c_str());
  reinterpret_cast<Register>(function)(keys.back().c_str(), "any",
                                       [check](ffi::Any value) -> ffi::Any { return check(value); });
  return true;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("pimflow.register_pass_option", RegisterPassOption);
}

}  // namespace
}  // namespace pimflow
