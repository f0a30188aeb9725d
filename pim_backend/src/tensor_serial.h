/*! \brief Tensors in host memory as bytes of a stored module: type, shape, and usually the values. */
#ifndef PIMFLOW_TENSOR_SERIAL_H_
#define PIMFLOW_TENSOR_SERIAL_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "host_tensors.h"
#include "serial.h"

namespace pimflow {

struct TensorForm {
  DLDataType dtype;
  std::vector<int64_t> shape;
  uint64_t bytes;
};

inline void PutTensorForm(const ffi::Tensor& tensor, Writer* w) {
  w->Put(tensor.dtype());
  w->PutAll(tensor.shape());
}

inline TensorForm GetTensorForm(Reader* r) {
  TensorForm form{r->Get<DLDataType>(), {}, 0};
  r->GetAll(&form.shape);
  TVM_FFI_ICHECK(form.dtype.bits >= 8 && form.dtype.bits % 8 == 0 && form.dtype.lanes == 1)
      << "not a tensor of a pimflow module";
  form.bytes = form.dtype.bits / 8;
  for (int64_t extent : form.shape) {
    TVM_FFI_ICHECK(extent >= 0 && extent < int64_t{1} << 31 && form.bytes < uint64_t{1} << 31)
        << "not a tensor of a pimflow module";
    form.bytes *= extent;
  }
  return form;
}

inline void PutTensor(const ffi::Tensor& tensor, Writer* w) {
  PutTensorForm(tensor, w);
  w->out.append(DataBegin(tensor), Bytes(tensor));
}

inline ffi::Tensor GetTensor(Reader* r) {
  const TensorForm form = GetTensorForm(r);
  const char* data = r->Take(form.bytes);
  ffi::Tensor tensor = HostTensor(ffi::Shape(form.shape), form.dtype);
  std::memcpy(tensor.data_ptr(), data, form.bytes);
  return tensor;
}

}  // namespace pimflow

#endif  // PIMFLOW_TENSOR_SERIAL_H_
