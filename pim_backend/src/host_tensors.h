/*! \brief Tensors in host memory, and copies between them and tensors of other devices and types. */
#ifndef PIMFLOW_HOST_TENSORS_H_
#define PIMFLOW_HOST_TENSORS_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace pimflow {

namespace ffi = tvm::ffi;

struct Allocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (tensor->dtype.bits + 7) / 8;
    for (int i = 0; i < tensor->ndim; ++i) bytes *= tensor->shape[i];
    tensor->data = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

inline ffi::Tensor HostTensor(ffi::ShapeView shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(Allocator(), shape, dtype, DLDevice{kDLCPU, 0});
}

/*! \brief Copy between any two devices; waits until it is done. */
inline void CopyBetweenDevices(const ffi::Tensor& from, const ffi::Tensor& to) {
  static ffi::Function copy = ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyFromTo");
  copy(from, to);
}

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
  } else {
    bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

/*! \brief Round to the nearest fp16 value, ties to even. */
inline uint16_t FloatToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u);  // NaN, or too large
  if (bits < 0x38800000u) {  // subnormal: the sum aligns its last bit with fp16's
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);
  return sign | static_cast<uint16_t>(bits >> 13);
}

inline int64_t Bytes(const ffi::Tensor& tensor) { return tensor.numel() * tensor.dtype().bits / 8; }

inline const char* DataBegin(const ffi::Tensor& tensor) {
  return static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
}

/*! \brief Whether the device can use a tensor without a copy. */
inline bool IsHostFloat32(const ffi::Tensor& tensor) {
  return tensor.device().device_type == kDLCPU && tensor.dtype().bits == 32;
}

inline bool HasOverlap(const ffi::Tensor& a, const ffi::Tensor& b) {
  return DataBegin(a) < DataBegin(b) + Bytes(b) && DataBegin(b) < DataBegin(a) + Bytes(a);
}

/*! \brief A copy of `x` in fp32 on the CPU. */
inline ffi::Tensor ToHostFloat32(const ffi::Tensor& x) {
  ffi::Tensor host = x;
  if (x.device().device_type != kDLCPU) {
    host = HostTensor(x.shape(), x.dtype());
    CopyBetweenDevices(x, host);
  }
  ffi::Tensor full = HostTensor(x.shape(), kFloat32);
  const char* data = DataBegin(host);
  auto* to = static_cast<float*>(full.data_ptr());
  if (x.dtype().bits == 16) {
    const auto* from = reinterpret_cast<const uint16_t*>(data);
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = HalfToFloat(from[i]);
  } else {
    std::memcpy(to, data, x.numel() * sizeof(float));
  }
  return full;
}

/*! \brief Copy `full`, fp32 on the CPU, to `y`, and convert its type. */
inline void CopyFromHostFloat32(const ffi::Tensor& full, const ffi::Tensor& y) {
  const bool on_host = y.device().device_type == kDLCPU;
  ffi::Tensor host = on_host ? y : HostTensor(y.shape(), y.dtype());
  char* data = static_cast<char*>(host.data_ptr()) + host.byte_offset();
  const auto* from = static_cast<const float*>(full.data_ptr());
  if (y.dtype().bits == 16) {
    auto* to = reinterpret_cast<uint16_t*>(data);
    for (int64_t i = 0; i < y.numel(); ++i) to[i] = FloatToHalf(from[i]);
  } else {
    std::memcpy(data, from, y.numel() * sizeof(float));
  }
  if (!on_host) CopyBetweenDevices(host, y);
}

/*! \brief `x`, or a copy of it on the CPU if it lies on another device. */
inline ffi::Tensor ToCpu(const ffi::Tensor& x) {
  if (x.device().device_type == kDLCPU) return x;
  ffi::Tensor host = HostTensor(x.shape(), x.dtype());
  CopyBetweenDevices(x, host);
  return host;
}

/*! \brief A copy of `count` elements from `first` on. */
inline ffi::Tensor Part(const ffi::Tensor& tensor, int64_t first, int64_t count) {
  ffi::Tensor part = HostTensor(ffi::Shape({count}), tensor.dtype());
  const int64_t bytes = tensor.dtype().bits / 8;
  std::memcpy(part.data_ptr(), DataBegin(tensor) + first * bytes, count * bytes);
  return part;
}

inline ffi::Tensor Copy(const ffi::TensorView& from) {
  ffi::Tensor copy = HostTensor(from.shape(), from.dtype());
  std::memcpy(copy.data_ptr(), static_cast<const char*>(from.data_ptr()) + from.byte_offset(), Bytes(copy));
  return copy;
}

}  // namespace pimflow

#endif  // PIMFLOW_HOST_TENSORS_H_
