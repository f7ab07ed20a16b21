// One all-reduce call of one rank: the tactics, written once over two transports.
//
//   one-shot   push the input to every rank; each sums all of it.                         1 hop,  (W-1) S sent
//   two-shot   push piece c to its owner; the owner sums and pushes the result to all.    2 hops, 2 (W-1)/W S
//   island     two-shot inside islands of M ranks; owners of the same piece exchange fp32 partial sums across islands
//              in between.                                                                3 hops, little crosses
//
// All tactics add in ONE order: inside each island of the tree (`tree_opens`) from the lowest rank up, then the islands from the
// first up, in fp32, rounded once. So every rank holds the same bits, whatever tactic, grid or batch it came through.
//
// Synchronisation: a CTA owns the same slices in every phase, so phases need no grid barrier. LL waits on words, BULK on
// one flag per slice and writer. No CTA waits before it has pushed all its slices, and ranks run at most one call apart.
#pragma once

#include <cmath>

#include "numeric.h"
#include "protocol.h"

namespace breakeven::allreduce {

struct RankBuffers {
  const void* input;
  void* output;               // reduced, or normed if weight is set; may be the input
  const void* residual_input; // with weight only
  void* residual_output;      // with weight only; may be residual_input
  Control* control;
};

struct Call {
  void* slabs[kMaxWorld];  // of every rank, as mapped into this process
  RankBuffers ranks[kMaxWorld];  // of the ranks that this launch plays
  const void* weight;      // [row]: fuse residual add + RMSNorm; a slice is then one row
  Layout layout;
  uint64_t num_bytes;
  uint32_t slice_packs, num_slices;
  uint32_t first_rank;     // this launch plays first_rank .. first_rank + num_ranks - 1
  uint32_t num_ranks;
  uint32_t tree_opens;     // bit r = an island of the reduction tree begins at rank r; fixed for the group
  uint32_t pull;           // bit per phase: readers fetch from the writer's slab instead of being pushed to
  uint32_t ctas;           // per rank
  uint32_t row_elements;
  float eps;
  uint32_t delay_ns, delay_seed;  // torture builds only
};

// A slice cut into pieces of nearly equal length, one per owner.
struct Pieces {
  uint32_t short_len, num_long;
  AR_FN Pieces(uint32_t len, uint32_t owners) : short_len(len / owners), num_long(len % owners) {}
  AR_FN uint32_t begin(uint32_t owner) const { return owner * short_len + (owner < num_long ? owner : num_long); }
  AR_FN uint32_t owner_of(uint32_t at) const {
    const uint32_t long_part = num_long * (short_len + 1);
    return at < long_part ? at / (short_len + 1) : num_long + (at - long_part) / short_len;
  }
};

template <class T, uint32_t W, uint32_t M, bool kBulk, class Context>
struct Collective {
  static constexpr bool kOneShot = M == 0;
  static constexpr uint32_t kIsland = kOneShot ? W : M;  // ranks that exchange pieces
  static constexpr uint32_t kIslands = W / kIsland;
  static constexpr uint32_t kPer = T::kPerPack;
  static constexpr uint32_t kCrossPacks = kPer / 4;  // fp32 packs per pack of T

  Context& ctx;
  const Call& call;
  const RankBuffers& own;
  const uint32_t me, first_of_island, position;
  uint64_t epoch;
  uint32_t wire, buffer, num_packs, tail_bytes;
  bool dead = false;

  AR_FN Collective(Context& context, const Call& c, uint32_t which)
      : ctx(context), call(c), own(c.ranks[which]), me(c.first_rank + which), first_of_island(me / kIsland * kIsland),
        position(me % kIsland) {
    epoch = read_epoch(own.control, dead);
    wire = wire_epoch(epoch);
    buffer = buffer_of(epoch);
    num_packs = static_cast<uint32_t>((call.num_bytes + kPackBytes - 1) / kPackBytes);
    tail_bytes = static_cast<uint32_t>(call.num_bytes % kPackBytes);
  }

  // ---------------------------------------------------------------- lanes

  AR_FN char* lane(uint32_t holder, uint32_t source) const {
    const uint64_t offset = kBulk ? call.layout.bulk_offset(buffer, source) : call.layout.ll_offset(buffer, source);
    return static_cast<char*>(call.slabs[holder]) + offset;
  }
  AR_FN bool pulls(Phase phase) const { return (call.pull >> static_cast<uint32_t>(phase)) & 1u; }
  AR_FN char* outbox(uint32_t reader, Phase phase) const { return lane(pulls(phase) ? me : reader, me); }
  AR_FN char* inbox(uint32_t source, Phase phase) const { return lane(pulls(phase) ? source : me, source); }
  AR_FN uint64_t pack_offset(Phase phase, uint32_t pack) const {
    if constexpr (kBulk) return Layout::flag_bytes() + phase_start(phase) * call.layout.bulk_bytes + uint64_t{pack} * kPackBytes;
    return 2 * phase_start(phase) * call.layout.ll_bytes + uint64_t{pack} * 2 * kPackBytes;
  }
  AR_FN static uint64_t flag_offset(Phase phase, uint32_t slice) {
    return (static_cast<uint32_t>(phase) * kMaxSlices + slice) * kFlagStride;
  }

  AR_FN void put(char* to_lane, Phase phase, uint32_t pack, const uint32_t (&d)[4]) const {
    char* at = to_lane + pack_offset(phase, pack);
    if constexpr (kBulk) {
      store_payload(at, d);
    } else {
      const uint64_t tag = static_cast<uint64_t>(wire) << 32;
      store_words(at, tag | d[0], tag | d[1]);
      store_words(at + kPackBytes, tag | d[2], tag | d[3]);
    }
  }

  // Bit r set = rank r reads what I write in this phase (and writes what I read), besides myself.
  AR_FN uint32_t partners(Phase phase) const {
    uint32_t mask = 0;
    if (phase == Phase::kCross) {
#pragma unroll
      for (uint32_t i = 0; i < kIslands; ++i) mask |= 1u << (i * kIsland + position);
    } else {
      mask = ((1u << kIsland) - 1u) << first_of_island;
    }
    return mask & ~(1u << me);
  }

  // To every partner, the nearest higher rank first, so that inbound streams stay few as well.
  AR_FN void put_all(Phase phase, uint32_t pack, const uint32_t (&d)[4], bool also_self) const {
    if (also_self || pulls(phase)) put(lane(me, me), phase, pack, d);
    if (pulls(phase)) return;
    const uint32_t mask = partners(phase);
    constexpr uint32_t kUnroll = kBulk && W == 8 ? 1 : W;  // seven hoisted addresses would spill there
#pragma unroll kUnroll
    for (uint32_t step = 1; step < W; ++step) {
      const uint32_t reader = (me + step) % W;
      if ((mask >> reader) & 1u) put(lane(reader, me), phase, pack, d);
    }
  }

  // ---------------------------------------------------------------- BULK: flags

  // All of the CTA's stores for the slice, then one flag per reader.
  AR_FN void publish(Phase phase, uint32_t slice) const {
    if constexpr (kBulk) {
      ctx.sync();
      if (pulls(phase)) {
        if (ctx.tid() == 0) store_flag(lane(me, me) + flag_offset(phase, slice), wire);
        return;
      }
      const uint32_t mask = partners(phase);
      for (uint32_t r = ctx.tid(); r < W; r += ctx.num_threads()) {
        if ((mask >> r) & 1u) store_flag(lane(r, me) + flag_offset(phase, slice), wire);
      }
    }
  }

  // Thread r waits for rank r; the barrier spreads what it acquired over the CTA.
  AR_FN void await(Phase phase, uint32_t slice) {
    if constexpr (kBulk) {
      bool late = dead;
      const uint32_t mask = partners(phase);
      for (uint32_t r = ctx.tid(); r < W && !late; r += ctx.num_threads()) {
        if (((mask >> r) & 1u) == 0) continue;
        const char* flag = inbox(r, phase) + flag_offset(phase, slice);
        Patience patience;
        while (load_flag(flag) != wire) {
          if (patience.more(own.control)) continue;
          give_up(own.control, me, r, phase, epoch, slice);
          late = true;
          break;
        }
      }
      dead = ctx.any(late);
    }
  }

  // ---------------------------------------------------------------- reading

  // Pack `pack` from the ranks first, first + step, ... (bit i of `skip` = not from the i-th), in whatever order they come.
  template <uint32_t N>
  AR_FN void get(uint32_t first, uint32_t step, uint32_t skip, Phase phase, uint32_t pack, uint32_t slice,
                 uint32_t (&d)[N][4]) {
    const uint64_t offset = pack_offset(phase, pack);
    if constexpr (kBulk) {
#pragma unroll
      for (uint32_t i = 0; i < N; ++i) {
        if (((skip >> i) & 1u) == 0) load_payload(inbox(first + i * step, phase) + offset, d[i]);
      }
    } else {
      uint32_t missing = ((1u << N) - 1u) & ~skip;
      if (dead) return;
      Patience patience;
      while (true) {
        uint64_t w[N][4];
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
          if ((missing >> i) & 1u) {
            const char* at = inbox(first + i * step, phase) + offset;
            load_words(at, w[i][0], w[i][1]);
            load_words(at + kPackBytes, w[i][2], w[i][3]);
          }
        }
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
          if ((missing >> i) & 1u) {
            bool whole = true;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              d[i][k] = static_cast<uint32_t>(w[i][k]);
              whole = whole && static_cast<uint32_t>(w[i][k] >> 32) == wire;
            }
            if (whole) missing &= ~(1u << i);
          }
        }
        if (missing == 0) return;
        if (patience.more(own.control)) continue;
        dead = true;
        give_up(own.control, me, first + lowest_bit(missing) * step, phase, epoch, slice);
        return;
      }
    }
  }

  AR_FN static uint32_t lowest_bit(uint32_t mask) {
    uint32_t i = 0;
    while (((mask >> i) & 1u) == 0) ++i;
    return i;
  }
  // ---------------------------------------------------------------- user memory

  AR_FN uint32_t slice_len(uint32_t slice) const {
    const uint32_t begin = slice * call.slice_packs;
    return call.slice_packs < num_packs - begin ? call.slice_packs : num_packs - begin;
  }
  AR_FN void load_input(const void* base, uint32_t pack, uint32_t (&d)[4]) const {
    const char* at = static_cast<const char*>(base) + uint64_t{pack} * kPackBytes;
    if (tail_bytes != 0 && pack == num_packs - 1) {
      d[0] = d[1] = d[2] = d[3] = 0;
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        if (2 * i < tail_bytes) {
          uint16_t half;
          std::memcpy(&half, at + 2 * i, 2);
          d[i / 2] |= static_cast<uint32_t>(half) << (16 * (i & 1u));
        }
      }
      return;
    }
    std::memcpy(d, __builtin_assume_aligned(at, kPackBytes), kPackBytes);
  }
  AR_FN void store_output(void* base, uint32_t pack, const uint32_t (&d)[4]) const {
    char* at = static_cast<char*>(base) + uint64_t{pack} * kPackBytes;
    if (tail_bytes != 0 && pack == num_packs - 1) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        if (2 * i < tail_bytes) {
          const uint16_t half = static_cast<uint16_t>(d[i / 2] >> (16 * (i & 1u)));
          std::memcpy(at + 2 * i, &half, 2);
        }
      }
      return;
    }
    std::memcpy(__builtin_assume_aligned(at, kPackBytes), d, kPackBytes);
  }

  // ---------------------------------------------------------------- the one reduction tree

  // Sum of N packs in rank order; bit r of `opens` = an island begins at r.
  template <uint32_t N>
  AR_FN static void sum(const uint32_t (&d)[N][4], uint32_t opens, float (&total)[kPer]) {
    float part[kPer];
    T::widen(d[0], part);
#pragma unroll
    for (uint32_t k = 0; k < kPer; ++k) total[k] = part[k];
#pragma unroll
    for (uint32_t r = 1; r < N; ++r) {
      float x[kPer];
      T::widen(d[r], x);
      const bool opens_here = (opens >> r) & 1u;
      const bool closed_before = (opens & ((1u << r) - 2u)) != 0;
#pragma unroll
      for (uint32_t k = 0; k < kPer; ++k) {
        if (opens_here) total[k] = closed_before ? total[k] + part[k] : part[k];
        part[k] = opens_here ? x[k] : part[k] + x[k];
      }
    }
#pragma unroll
    for (uint32_t k = 0; k < kPer; ++k) total[k] = (opens & ((1u << N) - 2u)) != 0 ? total[k] + part[k] : part[k];
  }

  // ---------------------------------------------------------------- phases

  AR_FN void push() {
#pragma unroll 1
    for (uint32_t slice = ctx.cta(); slice < call.num_slices; slice += call.ctas) {
      ctx.delay(call, me, epoch, slice, 0);
      const uint32_t begin = slice * call.slice_packs, len = slice_len(slice);
      const Pieces pieces(len, kIsland);
      const uint32_t start = kOneShot ? 0 : pieces.begin((position + 1) % kIsland);
#pragma unroll 1
      for (uint32_t i = ctx.tid(); i < len; i += ctx.num_threads()) {
        uint32_t d[4];
        if constexpr (kOneShot) {
          load_input(own.input, begin + i, d);
          put_all(Phase::kScatter, begin + i, d, false);
        } else {
          const uint32_t at = start + i < len ? start + i : start + i - len;  // my successor's piece first
          const uint32_t owner = pieces.owner_of(at);
          if (owner == position) continue;
          load_input(own.input, begin + at, d);
          put(outbox(first_of_island + owner, Phase::kScatter), Phase::kScatter, begin + at, d);
        }
      }
      ctx.delay(call, me, epoch, slice, 1);
      publish(Phase::kScatter, slice);
    }
  }

  AR_FN void one_shot() {
#pragma unroll 1
    for (uint32_t slice = ctx.cta(); slice < call.num_slices; slice += call.ctas) {
      await(Phase::kScatter, slice);
      float squares = 0.0f;
      const uint32_t begin = slice * call.slice_packs, len = slice_len(slice);
#pragma unroll 1
      for (uint32_t i = ctx.tid(); i < len; i += ctx.num_threads()) {
        uint32_t d[W][4];
        if (!dead) get<W>(0, 1, 1u << me, Phase::kScatter, begin + i, slice, d);
        load_own(d, me, begin + i);
        float total[kPer];
        uint32_t rounded[4];
        sum<W>(d, call.tree_opens, total);
        T::round(total, rounded);
        finish(begin + i, i, rounded, squares);
      }
      norm(begin, len, squares);
    }
  }

  template <uint32_t N>
  AR_FN void load_own(uint32_t (&d)[N][4], uint32_t mine, uint32_t pack) const {
    uint32_t x[4];
    load_input(own.input, pack, x);
#pragma unroll
    for (uint32_t r = 0; r < N; ++r) {
      if (r == mine) {
#pragma unroll
        for (int k = 0; k < 4; ++k) d[r][k] = x[k];
      }
    }
  }

  // Owners: my piece from the island. Flat: summed, rounded, pushed on. Island: the partial goes across first.
  AR_FN void reduce() {
#pragma unroll 1
    for (uint32_t slice = ctx.cta(); slice < call.num_slices; slice += call.ctas) {
      await(Phase::kScatter, slice);
      ctx.delay(call, me, epoch, slice, 2);
      const uint32_t begin = slice * call.slice_packs;
      const Pieces pieces(slice_len(slice), kIsland);
      const uint32_t end = pieces.begin(position + 1);
#pragma unroll 1
      for (uint32_t i = pieces.begin(position) + ctx.tid(); i < end && !dead; i += ctx.num_threads()) {
        uint32_t d[kIsland][4];
        get<kIsland>(first_of_island, 1, 1u << position, Phase::kScatter, begin + i, slice, d);
        if (dead) break;
        load_own(d, position, begin + i);
        float total[kPer];
        sum<kIsland>(d, kIslands > 1 ? 1u : call.tree_opens, total);
        if constexpr (kIslands > 1) {
          put_partial(begin + i, total);
        } else {
          uint32_t rounded[4];
          T::round(total, rounded);
          put_all(Phase::kGather, begin + i, rounded, true);
        }
      }
      ctx.delay(call, me, epoch, slice, 3);
      if (!dead) publish(kIslands > 1 ? Phase::kCross : Phase::kGather, slice);
    }
  }

  AR_FN void put_partial(uint32_t pack, const float (&partial)[kPer]) const {
#pragma unroll
    for (uint32_t h = 0; h < kCrossPacks; ++h) {
      uint32_t d[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) d[k] = bits_of(partial[4 * h + k]);
      put_all(Phase::kCross, pack * kCrossPacks + h, d, true);
    }
  }

  AR_FN void cross() {
#pragma unroll 1
    for (uint32_t slice = ctx.cta(); slice < call.num_slices; slice += call.ctas) {
      await(Phase::kCross, slice);
      const uint32_t begin = slice * call.slice_packs;
      const Pieces pieces(slice_len(slice), kIsland);
      const uint32_t end = pieces.begin(position + 1);
#pragma unroll 1
      for (uint32_t i = pieces.begin(position) + ctx.tid(); i < end && !dead; i += ctx.num_threads()) {
        float total[kPer];
#pragma unroll
        for (uint32_t h = 0; h < kCrossPacks; ++h) {
          uint32_t d[kIslands][4];
          get<kIslands>(position, kIsland, 0, Phase::kCross, (begin + i) * kCrossPacks + h, slice, d);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float x = float_of(d[0][k]);
#pragma unroll
            for (uint32_t r = 1; r < kIslands; ++r) x += float_of(d[r][k]);
            total[4 * h + k] = x;
          }
        }
        if (dead) break;
        uint32_t rounded[4];
        T::round(total, rounded);
        put_all(Phase::kGather, begin + i, rounded, true);
      }
      ctx.delay(call, me, epoch, slice, 4);
      if (!dead) publish(Phase::kGather, slice);
    }
  }

  // The owners' results, my own among them.
  AR_FN void gather() {
#pragma unroll 1
    for (uint32_t slice = ctx.cta(); slice < call.num_slices; slice += call.ctas) {
      await(Phase::kGather, slice);
      float squares = 0.0f;
      const uint32_t begin = slice * call.slice_packs, len = slice_len(slice);
      const Pieces pieces(len, kIsland);
#pragma unroll 1
      for (uint32_t i = ctx.tid(); i < len; i += ctx.num_threads()) {
        uint32_t d[1][4];
        if (!dead) get<1>(first_of_island + pieces.owner_of(i), 1, 0, Phase::kGather, begin + i, slice, d);
        finish(begin + i, i, d[0], squares);
      }
      norm(begin, len, squares);
    }
  }

  // ---------------------------------------------------------------- epilogue

  // Pack i of its slice is reduced: store it, or add the residual and keep the fp32 sum for the norm.
  AR_FN void finish(uint32_t pack, uint32_t i, uint32_t (&d)[4], float& squares) {
    if (dead) {
#pragma unroll
      for (int k = 0; k < 4; ++k) d[k] = T::kNan;
    }
    if (call.weight == nullptr) {
      store_output(own.output, pack, d);
      return;
    }
    float x[kPer], residual[kPer];
    uint32_t r[4];
    T::widen(d, x);
    load_input(own.residual_input, pack, r);
    T::widen(r, residual);
    float* kept = ctx.stash() + i * kPer;
#pragma unroll
    for (uint32_t k = 0; k < kPer; ++k) {
      x[k] += residual[k];
      squares = fmaf(x[k], x[k], squares);
      kept[k] = x[k];
    }
    T::round(x, r);
    store_output(own.residual_output, pack, r);
  }

  // RMSNorm of one row. Thread t holds packs t, t + threads, ... in every tactic, so the sum of squares has one order too.
  AR_FN void norm(uint32_t begin, uint32_t len, float squares) {
    if (call.weight == nullptr) return;
    const float scale = ctx.rsqrt(ctx.sum(squares) / static_cast<float>(call.row_elements) + call.eps);
#pragma unroll 1
    for (uint32_t i = ctx.tid(); i < len; i += ctx.num_threads()) {
      float x[kPer], weight[kPer];
      uint32_t d[4];
      load_input(call.weight, i, d);
      T::widen(d, weight);
      const float* kept = ctx.stash() + i * kPer;
#pragma unroll
      for (uint32_t k = 0; k < kPer; ++k) x[k] = kept[k] * scale * weight[k];
      T::round(x, d);
      store_output(own.output, begin + i, d);
    }
  }

  // ---------------------------------------------------------------- the call

  AR_FN void sweep() const {
    const uint32_t next = (buffer + 1) % kBuffers;
    const uint64_t thread = uint64_t{ctx.cta()} * ctx.num_threads() + ctx.tid();
    const uint64_t threads = uint64_t{call.ctas} * ctx.num_threads();
#pragma unroll 1
    for (uint32_t holder = 0; holder < W; ++holder) {
      char* ll = static_cast<char*>(call.slabs[holder]) + call.layout.ll_offset(next, me);
      for (uint64_t at = thread * kPackBytes; at < call.layout.ll_lane(); at += threads * kPackBytes) store_words(ll + at, 0, 0);
      char* flags = static_cast<char*>(call.slabs[holder]) + call.layout.bulk_offset(next, me);
      for (uint64_t at = thread * kFlagStride; at < Layout::flag_bytes(); at += threads * kFlagStride) store_flag(flags + at, 0);
    }
  }

  AR_FN void run() {
    if constexpr (kBulk) dead = ctx.any(dead);  // barriers follow: the CTA must agree
    if (!dead) {
      if (sweeps(epoch)) sweep();
      push();
    }
    ctx.sync();  // all of the CTA has read the epoch
    if (ctx.tid() == 0) arrive(own.control, epoch, call.ctas);
    if constexpr (kOneShot) {
      one_shot();
    } else {
      reduce();
      if constexpr (kIslands > 1) cross();
      gather();
    }
  }
};

}  // namespace breakeven::allreduce
