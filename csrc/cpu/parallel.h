// Work on several threads, where a call ends when the work has: not when every thread has come by.
//
// An OpenMP region waits for all its threads, and on a machine with other programs one of them is
// often not running: everybody then waits for a time slice. Here parts are claimed one by one, and
// a thread that sleeps or was preempted before it claimed one isn't waited for.
#pragma once

#include <cstdint>

namespace penstock {

// body(context, part) for every part of [0, parts), on the caller and up to `threads` − 1 others.
// While another thread is in here, all of it runs on the caller. Rethrows what a part throws.
void run_parts(int threads, int64_t parts, void (*body)(void*, int64_t), void* context);

template <typename Body>
static inline void parallel(int threads, int64_t parts, Body&& body) {
  if (threads <= 1 || parts <= 1) {
    for (int64_t i = 0; i < parts; i++) body(i);
    return;
  }
  run_parts(
      threads, parts,
      [](void* context, int64_t part) { (*static_cast<Body*>(context))(part); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace penstock
