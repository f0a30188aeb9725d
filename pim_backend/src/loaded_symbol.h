/*! \brief Symbols of libraries that this process has loaded, also of those that others do not see. */
#ifndef PIMFLOW_LOADED_SYMBOL_H_
#define PIMFLOW_LOADED_SYMBOL_H_

#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pimflow {

/*! \brief The loaded library that defines `symbol`, and where; null if there is none. */
inline std::pair<std::shared_ptr<void>, const char*> FindSymbol(const std::string& symbol) {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* names) {
        static_cast<std::vector<std::string>*>(names)->emplace_back(info->dlpi_name);
        return 0;
      },
      &paths);
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) {  // the one that is being loaded is the last
    void* handle = path->empty() ? nullptr : dlopen(path->c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    std::shared_ptr<void> library(handle, dlclose);
    if (const void* data = dlsym(handle, symbol.c_str())) return {library, static_cast<const char*>(data)};
  }
  return {nullptr, nullptr};
}

}  // namespace pimflow

#endif  // PIMFLOW_LOADED_SYMBOL_H_
