#include <stdexcept>
#include <string>
#include <utility>

#include "native_call.hpp"
#include "portable_backend.hpp"

namespace mhc::portable {

namespace {

constexpr std::int32_t kThreads = 2;

// The best last, on either processor.
constexpr std::pair<const char*, std::int32_t> kLevels[] = {
    {"baseline", MHC_BASELINE}, {"avx2", MHC_AVX2}, {"avx512", MHC_AVX512}, {"neon", MHC_NEON}};

std::int32_t isa_of(const std::string& level) {
  for (const auto& [name, isa] : kLevels) {
    if (level == name) return isa;
  }
  throw std::runtime_error("no level '" + level + "'");
}

mhc_call& the_call() {
  static mhc_call call = [] {
    const std::vector<std::string> known = levels();
    if (known.empty()) throw std::runtime_error("this processor runs none of the levels that were compiled");
    return mhc_call{MHC_ABI_VERSION, isa_of(known.back()), kThreads, 0};
  }();
  return call;
}

std::int32_t number_of(Function function) {
  switch (function) {
    case Function::kExp: return MHC_EXP;
    case Function::kRsqrt: return MHC_RSQRT;
    case Function::kSqrt: return MHC_SQRT;
    case Function::kSigmoid: break;
  }
  return MHC_SIGMOID;
}

}  // namespace

const char* const kProgram = "native_driver";

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const auto& [name, isa] : kLevels) {
    if (mhc_isa_available(isa)) names.push_back(name);
  }
  return names;
}

void choose_level(const std::string& level) { the_call().isa = isa_of(level); }

void elementary(Function function, std::span<const float> x, std::span<float> y) {
  check(mhc_elementary(native_call(), number_of(function), count(x.size()), x.data(), y.data()));
}

const mhc_call* native_call() { return &the_call(); }

void check(std::int32_t status) {
  if (status != MHC_OK) throw std::runtime_error("the native backend returned status " + std::to_string(status));
}

}  // namespace mhc::portable
