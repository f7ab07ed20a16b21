// CPU threads as ranks over the same protocol: peers of a GPU over pinned memory, and the ranks of the host emulation.
#include <algorithm>
#include <vector>

#include "dispatch.h"

namespace breakeven::allreduce {
namespace {

// One CTA of one thread.
struct HostContext {
  uint32_t cta_;
  std::vector<float> kept;
  uint32_t tid() const { return 0; }
  uint32_t num_threads() const { return 1; }
  uint32_t cta() const { return cta_; }
  float* stash() { return kept.data(); }
  void sync() const {}
  bool any(bool x) const { return x; }
  float rsqrt(float x) const { return 1.0f / std::sqrt(x); }
  float sum(float x) const { return x; }

  // One in four points gives the processor away a few times.
  void delay(const Call& call, uint32_t rank, uint64_t epoch, uint32_t slice, uint32_t at) const {
    if (call.delay_ns == 0) return;
    uint32_t h = call.delay_seed ^ (rank * 0x9e3779b9u) ^ (static_cast<uint32_t>(epoch) * 0x85ebca6bu) ^ (slice * 0xc2b2ae35u) ^
                 (at * 0x27d4eb2fu);
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h ^= h >> 12;
    if ((h & 3u) != 0) return;
    for (uint32_t i = 0; i < ((h >> 2) & 7u); ++i) sched_yield();
  }
};

struct HostRunner {
  const Call& call;
  uint32_t which, cta;

  template <class T, uint32_t W, uint32_t M, bool kBulk>
  int run() const {
    HostContext context{cta, std::vector<float>(call.weight != nullptr ? call.row_elements : 0)};
    Collective<T, W, M, kBulk, HostContext> collective(context, call, which);
    collective.run();
    return 0;
  }
};

}  // namespace
}  // namespace breakeven::allreduce

using namespace breakeven::allreduce;

extern "C" {

// Sizes that the caller's mirror of the structs must agree with.
uint32_t ar_call_bytes() { return sizeof(Call); }
uint32_t ar_control_bytes() { return sizeof(Control); }
uint32_t ar_error_bytes() { return sizeof(Error); }
uint64_t ar_slab_bytes(uint32_t world, uint64_t ll_bytes, uint64_t bulk_bytes) {
  return Layout{ll_bytes, bulk_bytes, world}.slab_bytes();
}

// Plays CTA `cta` of rank `call->first_rank + which`, `times` times over; returns when it is done. All of `call` must be
// host memory.
int ar_run_on_cpu(const Call* call, uint32_t which, uint32_t cta, uint32_t dtype, uint32_t shape, uint32_t bulk, uint32_t times) {
  int error = 0;
  for (uint32_t i = 0; i < times && error == 0; ++i) {
    error = dispatch(HostRunner{*call, which, cta}, dtype, call->layout.world, shape, bulk != 0);
  }
  return error;
}
}
