#include "threads.hpp"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "mhc/abi.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mhc {

namespace {

typedef std::function<void(std::int64_t)> Unit;

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kSpins = 20000;  // some hundred microseconds: as long as torch may work between two calls of one block

struct Job {
  const Unit* unit;
  std::int64_t units;
  std::atomic<std::int64_t> next{0};
};

void run(Job& job) {
  for (std::int64_t i = job.next.fetch_add(1); i < job.units; i = job.next.fetch_add(1)) (*job.unit)(i);
}

class Pool {
 public:
  std::mutex owner;  // held by the caller whose job runs

  void run_with(Job& job, int workers) {
    while (static_cast<int>(threads_.size()) < workers) {
      try {
        threads_.emplace_back([this] { serve(); });
      } catch (...) {
        break;  // fewer threads do the same work
      }
    }
    {
      const std::lock_guard<std::mutex> guard(lock_);
      job_ = &job;
      wanted_ = workers;
      turn_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    run(job);
    {
      // A worker that has not come by now finds nothing: no unit is left, and nobody waits for it.
      const std::lock_guard<std::mutex> guard(lock_);
      job_ = nullptr;
    }
    for (int spin = 0; active_.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < kSpins) {
        pause_briefly();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void serve() {
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && turn_.load(std::memory_order_acquire) == seen; ++spin) pause_briefly();
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> guard(lock_);
        wake_.wait(guard, [&] { return turn_.load() != seen; });
        seen = turn_.load();
        if (job_ != nullptr && wanted_ > 0) {
          job = job_;
          --wanted_;
          active_.fetch_add(1);
        }
      }
      if (job == nullptr) continue;
      {
        const DefaultFloatMode mode;
        run(*job);
      }
      active_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::atomic<std::uint64_t> turn_{0};
  std::atomic<int> active_{0};  // workers inside the job
  Job* job_ = nullptr;
  int wanted_ = 0;  // workers that may still join it
};

// Never destroyed: its threads sleep in it until the process ends. A forked child has none of them, so it starts with a
// pool of its own and leaves the old one where it is.
Pool* pool = nullptr;

void renew() { pool = new Pool; }

Pool& shared_pool() {
  static const bool once = [] {
    renew();
    pthread_atfork(nullptr, nullptr, renew);
    return true;
  }();
  static_cast<void>(once);
  return *pool;
}

}  // namespace

DefaultFloatMode::DefaultFloatMode() : before_(mhc_float_mode_default()) {}
DefaultFloatMode::~DefaultFloatMode() { mhc_float_mode_restore(before_); }

void parallel_for(std::int64_t units, std::int32_t threads, const Unit& unit) {
  const std::int64_t useful = units < threads ? units : threads;
  if (useful > 1) {
    Pool& workers = shared_pool();
    const std::unique_lock<std::mutex> guard(workers.owner, std::try_to_lock);
    if (guard.owns_lock()) {
      Job job{&unit, units};
      workers.run_with(job, static_cast<int>(useful) - 1);
      return;
    }
  }
  for (std::int64_t i = 0; i < units; ++i) unit(i);
}

}  // namespace mhc

uint64_t mhc_float_mode_default(void) {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80);
  return before;
#elif defined(__aarch64__)
  uint64_t before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  return before;
#endif
}

void mhc_float_mode_restore(uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}
