// Products of heads, each with a matrix of its own: ops/mla.py.
#include "gathered.h"
#include "latent.h"
#include "parallel.h"

namespace penstock {

void head_linear(const HeadsArgs& a) {
  if (a.rows == 0) return;
  const int64_t in = size_of(a.first.dtype), out = size_of(a.first.out_dtype);
  const auto take = [&](int64_t h, int threads) {
    LinearArgs one = a.first;
    one.weight = static_cast<const char*>(one.weight) + h * a.weight_pitch;
    one.x = static_cast<const char*>(a.x) + h * a.x_head * in;
    one.x_stride = a.x_stride;
    one.rows = a.rows;
    one.y = static_cast<char*>(a.y) + h * a.y_head * out;
    one.y_stride = a.y_stride;
    one.threads = threads;
    kernels().linear(one);
  };
  // A thread a head where there are enough of them: each then reads what it has alone.
  const int64_t apart = a.heads >= a.threads ? a.heads / a.threads * a.threads : 0;
  parallel(a.threads, apart, [&](int64_t h) { take(h, 1); });
  for (int64_t h = apart; h < a.heads; h++) take(h, a.threads);
}

void latent_query(const LatentQueryArgs& a) {
  HeadsArgs heads = a.heads;
  heads.threads = a.threads;
  head_linear(heads);
  TurnArgs tails = {};
  tails.dtype = heads.first.dtype;
  const int64_t size = size_of(tails.dtype);
  tails.x = static_cast<const char*>(heads.x) + heads.first.k * size;
  tails.x_stride = heads.x_stride;
  tails.x_head = heads.x_head;
  tails.y = static_cast<char*>(heads.y) + heads.first.n * size;
  tails.y_stride = heads.y_stride;
  tails.y_head = heads.y_head;
  tails.angles = a.angles;
  tails.tokens = heads.rows;
  tails.heads = heads.heads;
  tails.threads = a.threads;
  kernels().turn(tails);
  if (a.sink_reach == 0) return;
  // the same products again, behind the heads, and other turns
  const int64_t again = heads.heads * heads.y_head * size, plain = heads.first.n * size;
  parallel(a.threads, heads.rows, [&](int64_t t) {
    char* row = static_cast<char*>(heads.y) + t * heads.y_stride * size;
    for (int64_t h = 0; h < heads.heads; h++, row += heads.y_head * size)
      __builtin_memcpy(row + again, row, static_cast<size_t>(plain));
  });
  tails.y = static_cast<char*>(tails.y) + again;
  tails.angles.last = a.sink_reach - 1;
  kernels().turn(tails);
}

}  // namespace penstock
