/*! \brief fp16 conversions in integer arithmetic without branches, so that loops over them vectorise. */
#ifndef PIMFLOW_SIMULATORS_HALF_H_
#define PIMFLOW_SIMULATORS_HALF_H_

#include <cstdint>
#include <cstring>

namespace pimflow {

inline float ToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

/*! \brief Bits of the exact fp32 value of an fp16; a NaN becomes quiet, as with F16C. */
inline uint32_t HalfToFloatBits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  const uint32_t scaled = ToBits(ToFloat(magnitude << 13) * 0x1p112f);  // exact, subnormals included
  const uint32_t special = magnitude << 13 | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
  return sign | (magnitude >= 0x7c00u ? special : scaled);
}

/*! \brief Bits of the fp32 value of the nearest fp16, ties to even; undefined for a NaN. */
inline uint32_t RoundToHalfBits(uint32_t bits) {
  const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
  // Below 2^-14, fp16 values have a step of 2^-24, which is the last bit of a sum with 0.5.
  const uint32_t subnormal = ToBits((ToFloat(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f) - 0.5f);
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return sign | (normal >= 0x47800000u ? 0x7f800000u : finite);  // 65520 and above
}

/*! \brief The fp16 with the same value as fp32 `bits`; a NaN becomes quiet. */
inline uint16_t HalfBits(uint32_t bits) {
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) return static_cast<uint16_t>(sign | static_cast<uint32_t>(ToFloat(magnitude) * 0x1p24f));
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_HALF_H_
