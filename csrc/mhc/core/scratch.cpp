// A fresh block of some megabytes costs a fault for each of its pages, which for few tokens is more than the work itself.
#include "scratch.hpp"

#include <cstddef>
#include <new>
#include <utility>

namespace mhc {

namespace {

constexpr std::align_val_t kLine{64};

// Larger blocks are given back at once: for so many tokens their faults do not count.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kMostKept = 0;  // so that every block ends where its user believes
#else
constexpr std::int64_t kMostKept = std::int64_t{1} << 22;
#endif

struct Block {
  float* data = nullptr;
  std::int64_t size = 0;
};

void free_block(const Block& block) { ::operator delete[](block.data, kLine); }

// No call holds more than two blocks at a time.
struct Kept {
  Block blocks[2];
  ~Kept() {
    for (const Block& block : blocks) free_block(block);
  }
};

thread_local Kept kept;

}  // namespace

Floats::Floats(std::int64_t count) : data_(nullptr), size_(count) {
  Block* best = nullptr;
  for (Block& block : kept.blocks) {
    if (block.size >= count && block.data != nullptr && (best == nullptr || block.size < best->size)) best = &block;
  }
  if (best != nullptr) {
    data_ = std::exchange(best->data, nullptr);
    size_ = std::exchange(best->size, 0);
    return;
  }
  data_ = static_cast<float*>(::operator new[](static_cast<std::size_t>(count) * sizeof(float), kLine));
}

Floats::~Floats() {
  Block mine{data_, size_};
  if (size_ <= kMostKept) {
    for (Block& block : kept.blocks) {
      if (block.size < mine.size) std::swap(block, mine);
    }
  }
  free_block(mine);
}

}  // namespace mhc
