#include "parallel.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread without work looks for some before it sleeps: longer than Python takes between
// two operators. After the first part of it, it lets others have the core.
constexpr auto kLook = std::chrono::microseconds(200);
constexpr auto kKeep = std::chrono::microseconds(20);

constexpr uint64_t kClosed = 0xffffffff;

// Pause until `found()`, or `most` has passed; false then.
template <typename Found>
bool look(Found found, Clock::duration most) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    for (int i = 0; i < 32; i++) {
      if (found()) return true;
      _mm_pause();
    }
    const Clock::duration passed = Clock::now() - start;
    if (passed > most) return false;
    if (passed > kKeep) sched_yield();
  }
}

class Pool {
 public:
  void run(int threads, int64_t parts, void (*body)(void*, int64_t), void* context) {
    const std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone) {
      for (int64_t i = 0; i < parts; i++) body(context, i);
      return;
    }
    start(threads - 1);
    const uint64_t epoch = publish(threads - 1, parts, body, context);
    take(epoch);
    while (!look([&] { return done_.load(std::memory_order_acquire) == parts; }, kLook)) {
    }
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

 private:
  // As many threads as `wanted`, or as the system allows: parts are claimed by those there are.
  void start(int wanted) {
    while (started_ < wanted && !full_) {
      try {
        std::thread(&Pool::work, this, started_).detach();
        started_++;
      } catch (const std::system_error&) {
        full_ = true;
      }
    }
  }

  uint64_t publish(int workers, int64_t parts, void (*body)(void*, int64_t), void* context) {
    const uint64_t epoch = (epoch_.load(std::memory_order_relaxed) + 1) & 0xffffffff;
    // nobody claims anything while the job is being written
    claim_.store((epoch - 1) << 32 | kClosed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    parts_.store(parts, std::memory_order_relaxed);
    workers_.store(workers, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    claim_.store(epoch << 32);
    epoch_.store(static_cast<uint32_t>(epoch));
    if (sleepers_.load() > 0) epoch_.notify_all();
    return epoch;
  }

  // Claim parts of job `epoch` until there are none. A claim that succeeds means that the job isn't
  // over, so what was read of it before is its own.
  void take(uint64_t epoch) {
    for (;;) {
      uint64_t next = claim_.load(std::memory_order_acquire);
      if (next >> 32 != epoch) return;
      void (*body)(void*, int64_t) = body_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      const int64_t part = static_cast<int64_t>(next & 0xffffffff);
      if (part >= parts_.load(std::memory_order_relaxed)) return;
      if (!claim_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      try {
        body(context, part);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(failing_);
        if (!failed_) failed_ = std::current_exception();
      }
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  [[noreturn]] void work(int id) {
    uint32_t seen = 0;
    for (;;) {
      if (!look([&] { return epoch_.load(std::memory_order_acquire) != seen; }, kLook)) {
        sleepers_.fetch_add(1);
        epoch_.wait(seen);
        sleepers_.fetch_sub(1);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (id < workers_.load(std::memory_order_relaxed)) take(seen);
    }
  }

  std::mutex busy_, failing_;
  int started_ = 0;
  bool full_ = false;  // no more threads could be started
  std::exception_ptr failed_;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<void (*)(void*, int64_t)> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> parts_{0};
  std::atomic<int> workers_{0};
  alignas(64) std::atomic<uint64_t> claim_{kClosed};  // epoch << 32 | next part
  alignas(64) std::atomic<int64_t> done_{0};
};

// Never destroyed: its threads may outlive everything else. A forked child has none of them.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void run_parts(int threads, int64_t parts, void (*body)(void*, int64_t), void* context) {
  the_pool().run(threads, parts, body, context);
}

}  // namespace penstock
