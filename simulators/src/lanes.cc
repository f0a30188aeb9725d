#include "lanes.h"

#include <tvm/ffi/tvm_ffi.h>

#include <cstdlib>

#include "half.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PIMFLOW_X86_VARIANTS
#include <immintrin.h>
#endif

namespace pimflow {
namespace {

namespace portable {
#define PIMFLOW_WIDTH 4
#include "lane_kernels.h"
#undef PIMFLOW_WIDTH
}  // namespace portable

#ifdef PIMFLOW_X86_VARIANTS

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#define PIMFLOW_WIDTH 8
#define PIMFLOW_FROM_HALF(p) _mm256_cvtph_ps(Load<__m128i>(p))
#define PIMFLOW_ROUND_TO_HALF(v) _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#include "lane_kernels.h"
#undef PIMFLOW_WIDTH
#undef PIMFLOW_FROM_HALF
#undef PIMFLOW_ROUND_TO_HALF
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,prefer-vector-width=512")
namespace avx512 {
#define PIMFLOW_WIDTH 16
#define PIMFLOW_FROM_HALF(p) _mm512_maskz_cvtph_ps(0xffff, Load<__m256i>(p))
#define PIMFLOW_ROUND_TO_HALF(v) \
  _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT))
#include "lane_kernels.h"
#undef PIMFLOW_WIDTH
#undef PIMFLOW_FROM_HALF
#undef PIMFLOW_ROUND_TO_HALF
}  // namespace avx512
#pragma GCC pop_options

#endif  // PIMFLOW_X86_VARIANTS

}  // namespace

const std::vector<LaneKernels>& LaneVariants() {
  static const std::vector<LaneKernels> variants = [] {
    std::vector<LaneKernels> variants_here;
#ifdef PIMFLOW_X86_VARIANTS
    if (__builtin_cpu_supports("avx512f")) {
      variants_here.push_back({"avx512", avx512::Widen, avx512::Narrow, avx512::Comp});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      variants_here.push_back({"avx2", avx2::Widen, avx2::Narrow, avx2::Comp});
    }
#endif
    variants_here.push_back({"portable", portable::Widen, portable::Narrow, portable::Comp});
    return variants_here;
  }();
  return variants;
}

const LaneKernels& FindLaneVariant(const std::string& name) {
  const char* environment_name = std::getenv("PIMFLOW_SIMD");
  const std::string requested = !name.empty() ? name : environment_name ? environment_name : "";
  std::string variant_names;
  for (const LaneKernels& variant : LaneVariants()) {
    if (requested.empty() || requested == variant.name) return variant;
    variant_names += (variant_names.empty() ? "" : ", ") + std::string(variant.name);
  }
  TVM_FFI_THROW(UsageError) << "PIMFLOW_SIMD names no instruction set of this processor: '" << requested
                            << "'; it runs " << variant_names;
}

}  // namespace pimflow
