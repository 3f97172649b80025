// Spread independent units of work over threads. Which thread takes which unit moves no bit.
#pragma once

#include <cstdint>
#include <functional>

namespace mhc {

// Round to nearest, subnormals kept, for as long as this lives.
class DefaultFloatMode {
 public:
  DefaultFloatMode();
  ~DefaultFloatMode();
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::uint64_t before_;
};

// unit(0) .. unit(units - 1), each once, on at most `threads` threads, the caller's among them. The workers are shared by
// all callers; one that finds them taken does its units alone. unit must not throw.
void parallel_for(std::int64_t units, std::int32_t threads, const std::function<void(std::int64_t)>& unit);

}  // namespace mhc
