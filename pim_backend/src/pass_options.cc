/*!
 * \brief Options of pimflow in TVM's PassContext.
 *
 * TVM registers such options only from C++ that is linked with its compiler, which this library is not:
 * it works without TVM. So the function is looked up in the compiler that Python has loaded.
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
 * \brief Let PassContext take an option.
 * \param compiler Path of TVM's compiler library, which is loaded.
 * \param key Name of the option.
 * \param check Called with its value; what it returns is what passes see.
 * \return Whether this TVM can be extended so.
 */
bool RegisterPassOption(ffi::String compiler, ffi::String key, ffi::Function check) {
  void* library = dlopen(compiler.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  void* found = library == nullptr ? nullptr : dlsym(library, kRegister);
  if (found == nullptr) return false;
  static std::list<std::string> keys;  // TVM keeps the pointer
  keys.emplace_back(key.c_str());
  reinterpret_cast<Register>(found)(keys.back().c_str(), "any",
                                    [check](ffi::Any value) -> ffi::Any { return check(value); });
  return true;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("pimflow.register_pass_option", RegisterPassOption);
}

}  // namespace
}  // namespace pimflow
