/*!
 * \file records.h
 * \brief Records of numbers that cross between Python and C++ by name.
 *
 * The definition of a record is the one place that lists its fields. Python asks the library for them
 * (`host.native.Record`), lays its numbers out in that order, and refuses names that the library does not have.
 */
#ifndef PIMFLOW_HOST_RECORDS_H_
#define PIMFLOW_HOST_RECORDS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

namespace pimflow {

/*! \brief A struct whose fields, all of one type, have names in Python: `PIMFLOW_RECORD(Name, Type, field, …)`. */
#define PIMFLOW_RECORD(Name, Type, ...)                          \
  struct Name {                                                  \
    using Field = Type;                                          \
    static constexpr const char* kFields = #__VA_ARGS__;         \
    Type __VA_ARGS__;                                            \
  }

template <typename T>
T* TensorData(const tvm::ffi::TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*! \brief Rows of a tensor that are records. */
template <typename Record>
class RecordTable {
 public:
  explicit RecordTable(const tvm::ffi::TensorView& tensor) : begin_(TensorData<Record>(tensor)) {
    using Field = typename Record::Field;
    constexpr int64_t kColumns = sizeof(Record) / sizeof(Field);
    const DLDataType dtype = tensor.dtype();
    if (dtype.code != (std::is_integral_v<Field> ? kDLInt : kDLFloat) || dtype.bits != 8 * sizeof(Field) ||
        !tensor.IsContiguous() || tensor.device().device_type != kDLCPU || tensor.numel() % kColumns) {
      TVM_FFI_THROW(ValueError) << tensor.numel() << " numbers are no records of " << Record::kFields;
    }
    end_ = begin_ + tensor.numel() / kColumns;
  }

  Record* begin() const { return begin_; }
  Record* end() const { return end_; }
  int64_t size() const { return end_ - begin_; }

 private:
  Record *begin_, *end_;
};

/*! \brief The one record that a tensor holds. */
template <typename Record>
Record& ReadRecord(const tvm::ffi::TensorView& tensor) {
  const RecordTable<Record> table(tensor);
  if (table.size() != 1) TVM_FFI_THROW(ValueError) << table.size() << " records of " << Record::kFields << ", not one";
  return *table.begin();
}

/*! \brief Register the type and the fields of a record, for `Record` in Python. */
template <typename Record>
void DefineRecord(const char* name) {
  using Field = typename Record::Field;
  const std::string dtype = (std::is_integral_v<Field> ? "int" : "float") + std::to_string(8 * sizeof(Field));
  const std::string function = std::string(name) + ".fields";
  tvm::ffi::reflection::GlobalDef().def(function.c_str(), [dtype] {
    return tvm::ffi::Array<tvm::ffi::String>{dtype, Record::kFields};
  });
}

}  // namespace pimflow

#endif  // PIMFLOW_HOST_RECORDS_H_
