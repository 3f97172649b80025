#include "dispatch.hpp"

namespace mhc {

namespace {

bool runs_here(std::int32_t isa) {
#if defined(__x86_64__)
  if (isa == MHC_AVX2) return __builtin_cpu_supports("avx2");
  if (isa == MHC_AVX512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return isa == MHC_BASELINE || isa == MHC_NEON;
}

const Kernels* built(std::int32_t isa) {
  switch (isa) {
#ifdef MHC_HAVE_BASELINE
    case MHC_BASELINE: return &baseline::kKernels;
#endif
#ifdef MHC_HAVE_AVX2
    case MHC_AVX2: return &avx2::kKernels;
#endif
#ifdef MHC_HAVE_AVX512
    case MHC_AVX512: return &avx512::kKernels;
#endif
#ifdef MHC_HAVE_NEON
    case MHC_NEON: return &neon::kKernels;
#endif
    default: return nullptr;
  }
}

}  // namespace

const Kernels* kernels_of(std::int32_t isa) {
  const Kernels* kernels = built(isa);
  return kernels != nullptr && runs_here(isa) ? kernels : nullptr;
}

}  // namespace mhc

int32_t mhc_abi_version(void) { return MHC_ABI_VERSION; }

int32_t mhc_isa_available(int32_t isa) { return mhc::kernels_of(isa) != nullptr ? 1 : 0; }
