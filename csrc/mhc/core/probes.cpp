// What the processor can do at most, measured in the same process as the operators: for the roofline.
#include <cstring>

#include "dispatch.hpp"

float mhc_probe_add_chain(int64_t steps) {
  float acc = 0.0f, one = 1.0f;
  for (std::int64_t i = 0; i < steps; ++i) {
    acc = acc + one;
#if defined(__x86_64__)
    asm volatile("" : "+x"(acc));
#else
    asm volatile("" : "+w"(acc));
#endif
  }
  return acc;
}

int64_t mhc_probe_multiply_add(const mhc_call* call, int64_t steps) {
  std::int64_t operations = 0;
  const std::int32_t status = mhc::dispatch(call, [&](const mhc::Kernels& kernels, std::int32_t threads) {
    mhc::parallel_for(threads, threads, [&](std::int64_t) {
      volatile float sink = kernels.multiply_add(steps);
      static_cast<void>(sink);
    });
    operations = steps * kernels.multiply_add_operations;
  });
  return status == MHC_OK ? operations : -status;
}

int32_t mhc_probe_copy(const mhc_call* call, int64_t bytes, const void* source, void* target) {
  constexpr std::int64_t kPiece = 1 << 20;
  return mhc::dispatch(call, [&](const mhc::Kernels&, std::int32_t threads) {
    mhc::parallel_ranges(bytes, kPiece, threads, [&](mhc::Range some) {
      std::memcpy(static_cast<char*>(target) + some.begin, static_cast<const char*>(source) + some.begin,
                  static_cast<std::size_t>(some.end - some.begin));
    });
  });
}
