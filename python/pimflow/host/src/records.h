/*!
 * \file records.h
 * \brief Records of numbers that cross between Python and C++ by name.
 *
 * The definition of a record is the one place that lists its fields. Python asks the library for them
 * (`host.native.Record`), lays its numbers out in that order, and refuses names that the library does not have.
 */
#ifndef PIMFLOW_HOST_RECORDS_H_
#define PIMFLOW_HOST_RECORDS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
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

/*! \brief What the fields of a record are: one type, their number, and their names. */
struct RecordFields {
  DLDataType dtype;
  int64_t count;
  const char* names;
};

template <typename Record>
constexpr RecordFields FieldsOf() {
  using Field = typename Record::Field;
  return {{std::is_integral_v<Field> ? kDLInt : kDLFloat, 8 * sizeof(Field), 1},
          sizeof(Record) / sizeof(Field),
          Record::kFields};
}

/*! \brief The number of records in a tensor; an error if what it holds are no such records. */
int64_t CountRecords(const tvm::ffi::TensorView& tensor, const RecordFields& fields);

/*! \brief An error unless there is exactly one record. */
void CheckOneRecord(int64_t records, const RecordFields& fields);

/*! \brief Register the type and the fields of a record under a name. */
void DefineFields(const char* name, const RecordFields& fields);

/*! \brief Rows of a tensor that are records. */
template <typename Record>
class RecordTable {
 public:
  explicit RecordTable(const tvm::ffi::TensorView& tensor)
      : begin_(TensorData<Record>(tensor)), end_(begin_ + CountRecords(tensor, FieldsOf<Record>())) {}

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
  CheckOneRecord(table.size(), FieldsOf<Record>());
  return *table.begin();
}

/*! \brief Register the type and the fields of a record, for `Record` in Python. */
template <typename Record>
void DefineRecord(const char* name) {
  DefineFields(name, FieldsOf<Record>());
}

}  // namespace pimflow

#endif  // PIMFLOW_HOST_RECORDS_H_
