// Scratch memory of a call, whose pages the calling thread keeps for its next one.
#pragma once

#include <cstdint>

namespace mhc {

// `count` floats, not initialised, aligned to a cache line. Throws std::bad_alloc.
class Floats {
 public:
  explicit Floats(std::int64_t count);
  ~Floats();
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  float* get() const { return data_; }

 private:
  float* data_;
  std::int64_t size_;
};

}  // namespace mhc
