// The wire of the all-reduce: words, lanes, epochs, fences, bounded waits.
//
// One copy for GPU ranks, CPU ranks and the thread sanitizer: what nvcc compiles as CUDA runs on the device, the rest on the
// host. docs/allreduce.md has the argument why a buffer may be used again; tools/allreduce_model.py checks it.
//
//   word     8 bytes {32 bits of data, 32 bits of epoch}. Only 8-byte atomicity is assumed, never 16, never order.
//   pack     16 bytes of payload: two 16-byte stores of two words each (LL), or one plain 16-byte store (BULK).
//   lane     what ONE writer puts into ONE holder's slab in ONE buffer. No address has two writers, ever.
//   epoch    the call counter in device memory; its image on the wire is never 0, and 0 means "never written".
//
// Forbidden here: atomics on a peer's memory, loads of a lane that may be cached, assumptions about 128-byte lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define AR_FN __device__ __forceinline__
#else
#include <sched.h>
#include <time.h>
#define AR_FN inline __attribute__((always_inline))
#endif

#ifndef AR_BUFFERS  // fewer is a negative control
#define AR_BUFFERS 3
#endif
#ifndef AR_SWEEP_PERIOD  // tests shorten it
#define AR_SWEEP_PERIOD (1u << 24)
#endif

namespace breakeven::allreduce {

constexpr uint32_t kMaxWorld = 8;
constexpr uint32_t kBuffers = AR_BUFFERS;
constexpr uint32_t kPackBytes = 16;
constexpr uint32_t kMaxSlices = 512;   // BULK has one flag per slice
constexpr uint32_t kFlagStride = 32;   // one sector per flag
constexpr uint32_t kWireModulus = 0xFFFFFFFFu;  // a multiple of 3: one wire epoch always meets the same buffer
constexpr uint32_t kSweepPeriod = AR_SWEEP_PERIOD;

enum class Phase : uint32_t { kScatter = 0, kCross = 1, kGather = 2 };

// ---------------------------------------------------------------- where things lie

struct Layout {
  uint64_t ll_bytes;    // widest payload of the LL family, a multiple of 16
  uint64_t bulk_bytes;  // widest payload of the BULK family, a multiple of 16
  uint32_t world;

  // scatter 2x (flag in data), cross 4x (fp32 partials of 16-bit values, flag in data), gather 2x
  AR_FN uint64_t ll_lane() const { return 8 * ll_bytes; }
  AR_FN static constexpr uint64_t flag_bytes() { return 3ull * kMaxSlices * kFlagStride; }
  AR_FN uint64_t bulk_lane() const { return flag_bytes() + 4 * bulk_bytes; }
  AR_FN uint64_t ll_offset(uint32_t buffer, uint32_t source) const { return (buffer * world + source) * ll_lane(); }
  AR_FN uint64_t bulk_offset(uint32_t buffer, uint32_t source) const {
    return kBuffers * world * ll_lane() + (buffer * world + source) * bulk_lane();
  }
  AR_FN uint64_t slab_bytes() const { return kBuffers * world * (ll_lane() + bulk_lane()); }
};

// Where a phase starts inside a lane, in payload bytes of the family: scatter 0, cross 1, gather 3.
AR_FN uint64_t phase_start(Phase phase) { return phase == Phase::kScatter ? 0 : phase == Phase::kCross ? 1 : 3; }

// ---------------------------------------------------------------- what a rank keeps for itself

struct Error {  // in mapped host memory
  uint32_t code;  // 0 = none, 1 = a peer did not answer in time
  uint32_t rank, peer, phase;
  uint64_t epoch;
  uint32_t slice, reserved;
};

struct Control {    // in this rank's own memory; peers never see it
  uint64_t epoch;   // of the next call, from 1
  uint32_t aborted; // sticky: every later call poisons its output at once
  uint32_t arrived; // CTAs of the running call that have read the epoch
  uint64_t timeout_ns;
  Error* error;
};

AR_FN uint32_t wire_epoch(uint64_t epoch) { return static_cast<uint32_t>(epoch % kWireModulus) + 1u; }
AR_FN uint32_t buffer_of(uint64_t epoch) { return static_cast<uint32_t>(epoch % kBuffers); }

// The wrap rule: three calls in a row out of kSweepPeriod zero what this rank wrote into the NEXT buffer, everywhere, so
// that no word outlives the period and none can be taken for current when the wire epoch comes round.
AR_FN bool sweeps(uint64_t epoch) {
#ifdef AR_NO_SWEEP  // negative control
  return false;
#else
  return epoch % kSweepPeriod < kBuffers;
#endif
}

// ---------------------------------------------------------------- memory

// Two words in one 16-byte store. Each word is whole by itself; the pair need not be.
// On the host release/acquire stand for the kernel boundaries that order calls on a GPU.
AR_FN void store_words(void* at, uint64_t a, uint64_t b) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(a), "l"(b) : "memory");
#else
  __atomic_store_n(static_cast<uint64_t*>(at), a, __ATOMIC_RELEASE);
  __atomic_store_n(static_cast<uint64_t*>(at) + 1, b, __ATOMIC_RELEASE);
#endif
}

AR_FN void load_words(const void* at, uint64_t& a, uint64_t& b) {
#ifdef __CUDACC__
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(at));
#else
  a = __atomic_load_n(static_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE);
  b = __atomic_load_n(static_cast<const uint64_t*>(at) + 1, __ATOMIC_ACQUIRE);
#endif
}

// BULK payload. On the host plain memory, so that the thread sanitizer sees a missing release.
AR_FN void store_payload(void* at, const uint32_t (&d)[4]) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
#else
  std::memcpy(at, d, kPackBytes);
#endif
}

AR_FN void load_payload(const void* at, uint32_t (&d)[4]) {
#ifdef __CUDACC__
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "l"(at)
               : "memory");
#else
  std::memcpy(d, at, kPackBytes);
#endif
}

// Publishes all stores that the CTA made before its barrier: release is cumulative.
AR_FN void store_flag(void* at, uint32_t value) {
#ifdef __CUDACC__
#ifdef AR_NO_RELEASE  // negative control: the flag may overtake the payload
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
#else
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
#endif
#else
#ifdef AR_NO_RELEASE
  __atomic_store_n(static_cast<uint32_t*>(at), value, __ATOMIC_RELAXED);
#else
  __atomic_store_n(static_cast<uint32_t*>(at), value, __ATOMIC_RELEASE);
#endif
#endif
}

AR_FN uint32_t load_flag(const void* at) {
#ifdef __CUDACC__
  uint32_t value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
#else
  return __atomic_load_n(static_cast<const uint32_t*>(at), __ATOMIC_ACQUIRE);
#endif
}

// ---------------------------------------------------------------- the call counter

AR_FN uint64_t read_epoch(const Control* control, bool& aborted) {
#ifdef __CUDACC__
  uint64_t epoch, rest;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(epoch), "=l"(rest) : "l"(control) : "memory");
  aborted = static_cast<uint32_t>(rest) != 0;
  return epoch;
#else
  aborted = __atomic_load_n(&control->aborted, __ATOMIC_RELAXED) != 0;
  return __atomic_load_n(&control->epoch, __ATOMIC_ACQUIRE);
#endif
}

// One thread per CTA, after all of the CTA has read the epoch. The last CTA steps the counter: it counts calls, not
// blocks, so the grid may differ from call to call, and eager launches and graph replays are alike.
AR_FN void arrive(Control* control, uint64_t epoch, uint32_t num_ctas) {
#ifdef __CUDACC__
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(&control->arrived) : "memory");
  if (before + 1 == num_ctas) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], 0;" ::"l"(&control->arrived) : "memory");
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(&control->epoch), "l"(epoch + 1) : "memory");
  }
#else
  if (__atomic_add_fetch(&control->arrived, 1u, __ATOMIC_ACQ_REL) == num_ctas) {
    __atomic_store_n(&control->arrived, 0u, __ATOMIC_RELAXED);
    __atomic_store_n(&control->epoch, epoch + 1, __ATOMIC_RELEASE);
  }
#endif
}

// ---------------------------------------------------------------- bounded waits

AR_FN uint64_t now_ns() {
#ifdef __CUDACC__
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#else
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
#endif
}

// One wait for one peer or set of peers. Clock and abort flag are looked at every 1,024 turns only, so an answer that is
// there costs nothing extra.
struct Patience {
  uint64_t deadline_ns = 0;
  uint32_t turns = 0;

  // True while waiting may go on.
  AR_FN bool more(const Control* control) {
    ++turns;
#ifndef __CUDACC__
    if ((turns & 15u) == 0) sched_yield();
#endif
    if ((turns & 1023u) != 0) return true;
    const uint64_t now = now_ns();
    if (deadline_ns == 0) deadline_ns = now + control->timeout_ns;
    bool aborted;
    read_epoch(control, aborted);
    return !aborted && now < deadline_ns;
  }
};

// The first waiter to give up writes the error word and stops every later call of this rank.
AR_FN void give_up(Control* control, uint32_t rank, uint32_t peer, Phase phase, uint64_t epoch, uint32_t slice) {
#ifdef __CUDACC__
  if (atomicCAS(&control->aborted, 0u, 1u) != 0u) return;
#else
  uint32_t none = 0;
  if (!__atomic_compare_exchange_n(&control->aborted, &none, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
#endif
  volatile Error* error = control->error;
  error->rank = rank;
  error->peer = peer;
  error->phase = static_cast<uint32_t>(phase);
  error->epoch = epoch;
  error->slice = slice;
#ifdef __CUDACC__
  __threadfence_system();
  error->code = 1;
#else
  __atomic_store_n(const_cast<uint32_t*>(&error->code), 1u, __ATOMIC_RELEASE);
#endif
}

}  // namespace breakeven::allreduce
