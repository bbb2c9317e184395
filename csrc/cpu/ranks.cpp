#include "ranks.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "parallel.h"

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic_ref<uint32_t>;

// How long a rank looks for another, which computes as much as it does, before it sleeps. After the first
// part of it, it lets others have the core.
constexpr auto kLook = std::chrono::milliseconds(2);
constexpr auto kKeep = std::chrono::microseconds(50);
constexpr long kSleepNs = 50'000'000;  // then it looks whether anybody has gone

// Bytes from which copying is worth more than one thread.
constexpr int64_t kParallel = 256 * 1024;

constexpr int kLine = 16;  // words of a cache line

uint32_t* word(const Meeting& m, int line, int place) {
  return reinterpret_cast<uint32_t*>(m.base) + line * kLine + place;
}
Word arrived(const Meeting& m, int rank) { return Word(*word(m, 1 + rank, 0)); }
Word sleepers(const Meeting& m, int rank) { return Word(*word(m, 1 + rank, 1)); }
Word gone(const Meeting& m) { return Word(*word(m, 0, 0)); }

// Not the private kind that std::atomic waits with: the others are in other processes.
long futex(uint32_t* at, int operation, uint32_t value, const timespec* most) {
  return syscall(SYS_futex, at, operation, value, most, nullptr, 0);
}

void check_there(const Meeting& m) {
  if (gone(m).load(std::memory_order_relaxed) != 0)
    throw std::runtime_error("another rank of this step has gone");
}

// Until `rank` has been at as many meetings as `count`.
void wait_for(const Meeting& m, int rank, uint32_t count) {
  const auto there = [&] {
    return static_cast<int32_t>(arrived(m, rank).load(std::memory_order_acquire) - count) >= 0;
  };
  const Clock::time_point start = Clock::now();
  for (;;) {
    for (int i = 0; i < 32; i++) {
      if (there()) return;
      _mm_pause();
    }
    const Clock::duration passed = Clock::now() - start;
    if (passed > kLook) break;
    if (passed > kKeep) sched_yield();
  }
  while (!there()) {
    check_there(m);
    sleepers(m, rank).fetch_add(1);
    const uint32_t seen = arrived(m, rank).load();
    const timespec most = {0, kSleepNs};
    if (static_cast<int32_t>(seen - count) < 0)
      futex(word(m, 1 + rank, 0), FUTEX_WAIT, seen, &most);
    sleepers(m, rank).fetch_sub(1);
  }
}

// body(row) for all of them, by several threads where the bytes are many.
template <typename Body>
void over_rows(int threads, int64_t rows, int64_t row_bytes, Body&& body) {
  const int64_t parts = rows * row_bytes < kParallel ? 1 : std::min<int64_t>(rows, 4 * threads);
  parallel(threads, parts, [&](int64_t part) {
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) body(row);
  });
}

}  // namespace

char* place(const Meeting& m) {
  const uint32_t before = arrived(m, m.rank).load(std::memory_order_relaxed);
  return m.base + kMeetingHeader + static_cast<int64_t>(before & 1) * m.place_bytes;
}

void meet(const Meeting& m) {
  check_there(m);
  const uint32_t count = arrived(m, m.rank).load(std::memory_order_relaxed) + 1;
  arrived(m, m.rank).store(count);
  if (sleepers(m, m.rank).load() > 0) futex(word(m, 1 + m.rank, 0), FUTEX_WAKE, INT32_MAX, nullptr);
  for (int other = 1; other < m.size; other++) wait_for(m, (m.rank + other) % m.size, count);
}

void gather_columns(const GatherColumnsArgs& a) {
  const Meeting& m = a.at;
  const auto width = [&](int rank) { return (a.bounds[rank + 1] - a.bounds[rank]) * a.item; };
  const int64_t row_bytes = a.bounds[m.size] * a.item, own = width(m.rank);
  const int64_t most = m.place_bytes / row_bytes;
  for (int64_t first = 0; first < a.rows; first += most) {
    const int64_t rows = std::min(most, a.rows - first);
    char* all = place(m);
    const auto of = [&](int rank) { return all + rows * a.bounds[rank] * a.item; };
    const char* x = static_cast<const char*>(a.x) + first * a.x_stride * a.item;
    over_rows(a.threads, rows, own, [&](int64_t row) {
      std::memcpy(of(m.rank) + row * own, x + row * a.x_stride * a.item, static_cast<size_t>(own));
    });
    meet(m);
    if (a.reader >= 0 && a.reader != m.rank) continue;
    char* y = static_cast<char*>(a.y) + first * row_bytes;
    over_rows(a.threads, rows, row_bytes, [&](int64_t row) {
      for (int rank = 0; rank < m.size; rank++)
        std::memcpy(y + row * row_bytes + a.bounds[rank] * a.item, of(rank) + row * width(rank),
                    static_cast<size_t>(width(rank)));
    });
  }
}

void gather_embedding(const GatherEmbeddingArgs& a) {
  const Meeting& m = a.at;
  const int64_t row_bytes = a.table.dim * (a.table.dtype == DType::bf16 ? 2 : 4);
  const int64_t most = m.place_bytes / row_bytes;
  for (int64_t first = 0; first < a.rows; first += most) {
    const int64_t rows = std::min(most, a.rows - first);
    char* all = place(m);
    // its own rows, one after the other where their ids are
    for (int64_t row = 0; row < rows; row++) {
      const int32_t id = a.ids[first + row] - a.bounds[m.rank];
      if (id < 0 || a.ids[first + row] >= a.bounds[m.rank + 1]) continue;
      EmbeddingArgs one = a.table;
      one.tokens = &id;
      one.count = 1;
      one.out = all + row * row_bytes;
      one.threads = 1;
      kernels().embedding(one);
    }
    meet(m);
    std::memcpy(static_cast<char*>(a.y) + first * row_bytes, all, static_cast<size_t>(rows * row_bytes));
  }
}

void gather_largest(const GatherLargestArgs& a) {
  const Meeting& m = a.at;
  const auto bytes = static_cast<int64_t>(sizeof(Largest));
  const int64_t most = m.place_bytes / (m.size * bytes);
  for (int64_t first = 0; first < a.rows; first += most) {
    const int64_t rows = std::min(most, a.rows - first);
    Largest* all = reinterpret_cast<Largest*>(place(m));
    std::memcpy(all + m.rank * rows, a.own + first, static_cast<size_t>(rows * bytes));
    meet(m);
    if (a.reader >= 0 && a.reader != m.rank) continue;
    for (int64_t row = 0; row < rows; row++) {
      Largest best = all[row];
      for (int rank = 1; rank < m.size; rank++) {
        Largest other = all[rank * rows + row];
        other.column += a.bounds[rank];
        const bool is_nan = other.value != other.value && best.value == best.value;
        if (other.value > best.value || is_nan) best = other;
      }
      a.all[first + row] = best;
    }
  }
}

void pass(const PassArgs& a) {
  char* at = static_cast<char*>(a.rows);
  for (int64_t left = a.bytes; left > 0;) {
    const auto size = static_cast<size_t>(left);
    const ssize_t done = a.gives ? send(a.file, at, size, MSG_NOSIGNAL) : recv(a.file, at, size, 0);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw std::runtime_error("another rank of this step has gone");
    at += done;
    left -= done;
  }
}

}  // namespace penstock
