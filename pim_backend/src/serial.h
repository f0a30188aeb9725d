/*! \brief Writer and reader of a module's data as a byte string; both must use the same order. */
#ifndef PIMFLOW_SERIAL_H_
#define PIMFLOW_SERIAL_H_

#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace pimflow {

class Writer {
 public:
  template <typename T>
  void Put(const T& value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  template <typename Container>
  void PutAll(const Container& values) {
    Put<uint64_t>(values.size());
    out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  }
  std::string out;
};

class Reader {
 public:
  explicit Reader(const tvm::ffi::Bytes& bytes) : at_(bytes.data()), end_(bytes.data() + bytes.size()) {}
  template <typename T>
  T Get() {
    T value;
    Take(&value, sizeof(T));
    return value;
  }
  template <typename Container>
  void GetAll(Container* values) {
    const uint64_t size = Get<uint64_t>();
    TVM_FFI_ICHECK_LE(size, static_cast<uint64_t>(end_ - at_) / sizeof((*values)[0])) << "truncated pimflow module";
    values->resize(size);
    Take(values->data(), size * sizeof((*values)[0]));
  }

  /*! \brief The next `bytes` bytes; throws if there are fewer, before anything is allocated for them. */
  const char* Take(size_t bytes) {
    TVM_FFI_ICHECK_LE(bytes, static_cast<size_t>(end_ - at_)) << "truncated pimflow module";
    at_ += bytes;
    return at_ - bytes;
  }

 private:
  void Take(void* to, size_t bytes) {
    const char* from = Take(bytes);
    if (bytes) std::memcpy(to, from, bytes);  // an empty container has no place to copy to
  }
  const char *at_, *end_;
};

}  // namespace pimflow

#endif  // PIMFLOW_SERIAL_H_
