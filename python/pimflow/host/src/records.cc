/*!
 * \file records.cc
 * \brief What all records share, compiled once: not once for each record.
 */
#include "records.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <string>

namespace pimflow {

namespace ffi = tvm::ffi;

int64_t CountRecords(const ffi::TensorView& tensor, const RecordFields& fields) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.code != fields.dtype.code || dtype.bits != fields.dtype.bits || !tensor.IsContiguous() ||
      tensor.device().device_type != kDLCPU || tensor.numel() % fields.count) {
    TVM_FFI_THROW(ValueError) << tensor.numel() << " numbers are no records of " << fields.names;
  }
  return tensor.numel() / fields.count;
}

void CheckOneRecord(int64_t records, const RecordFields& fields) {
  if (records != 1) TVM_FFI_THROW(ValueError) << records << " records of " << fields.names << ", not one";
}

void DefineFields(const char* name, const RecordFields& fields) {
  const char* type = fields.dtype.code == kDLInt ? "int" : "float";
  const ffi::Array<ffi::String> described{type + std::to_string(fields.dtype.bits), fields.names};
  ffi::Function::SetGlobal(std::string(name) + ".fields", ffi::Function::FromTyped([described] { return described; }));
}

}  // namespace pimflow
