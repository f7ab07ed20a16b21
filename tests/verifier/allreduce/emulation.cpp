// Every rank and CTA a CPU thread over the real protocol headers, for the thread sanitizer and for machines without a GPU.
//
//   emulation WORLD TREE_ISLAND START_EPOCH SEED < script     a line per call: dtype shape bulk pull ctas num_bytes
//
// Exits 0 and says how many calls were right; 1 if a result is wrong, ranks differ or a rank gave up.
#include <pthread.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "collective.h"

using namespace breakeven::allreduce;

extern "C" int ar_run_on_cpu(const Call*, uint32_t which, uint32_t cta, uint32_t dtype, uint32_t shape, uint32_t bulk,
                             uint32_t times);

namespace {

constexpr uint64_t kCapacity = 4096;
constexpr uint32_t kMaxCtas = 4;

struct Line {
  uint32_t dtype, shape, bulk, pull, ctas, num_bytes;
};

struct Slab {
  explicit Slab(uint64_t bytes) : data(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
    std::memset(data, 0, bytes);
  }
  ~Slab() { std::free(data); }
  Slab(const Slab&) = delete;
  char* data;
};

float value(uint32_t rank, uint32_t call, uint32_t i) {
  uint32_t h = rank * 0x9e3779b9u + call * 0x85ebca6bu + i * 0xc2b2ae35u;
  h = (h ^ h >> 15) * 0x2c1b3c6du;
  h ^= h >> 13;
  return (static_cast<float>(h >> 8) / 8388608.0f - 1.0f) * 4.0f;
}

uint32_t round_one(uint32_t dtype, float x) {
  return dtype == 0 ? BFloat16::round_one(x) : dtype == 1 ? Float16::round_one(x) : bits_of(x);
}
float widen_one(uint32_t dtype, uint32_t bits) {
  return dtype == 0 ? float_of(bits << 16) : dtype == 1 ? Float16::widen_one(bits) : float_of(bits);
}
uint32_t element(const std::vector<char>& raw, uint32_t dtype, uint32_t i) {
  if (dtype == 2) {
    uint32_t u;
    std::memcpy(&u, raw.data() + 4 * i, 4);
    return u;
  }
  uint16_t u;
  std::memcpy(&u, raw.data() + 2 * i, 2);
  return u;
}
void set_element(char* raw, uint32_t dtype, uint32_t i, uint32_t bits) {
  std::memcpy(raw + (dtype == 2 ? 4 : 2) * i, &bits, dtype == 2 ? 4 : 2);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const uint32_t world = std::atoi(argv[1]), tree = std::atoi(argv[2]), seed = std::atoi(argv[4]);
  const uint64_t start = std::strtoull(argv[3], nullptr, 10);
  std::vector<Line> lines;
  for (Line l; std::scanf("%u %u %u %u %u %u", &l.dtype, &l.shape, &l.bulk, &l.pull, &l.ctas, &l.num_bytes) == 6;) lines.push_back(l);

  Layout layout{kCapacity, kCapacity, world};
  std::vector<Slab*> slabs;
  std::vector<Control> controls(world);
  std::vector<Error> errors(world);
  for (uint32_t r = 0; r < world; ++r) {
    slabs.push_back(new Slab(layout.slab_bytes()));
    controls[r] = Control{start, 0, 0, 20'000'000'000ull, &errors[r]};
  }
  std::vector<std::vector<std::vector<char>>> outputs(world, std::vector<std::vector<char>>(lines.size()));

  std::vector<pthread_barrier_t> barriers(world);
  for (auto& barrier : barriers) pthread_barrier_init(&barrier, nullptr, kMaxCtas);
  std::vector<std::thread> threads;
  std::vector<std::vector<char>> inputs(world, std::vector<char>(kCapacity + 64));
  for (uint32_t r = 0; r < world; ++r) {
    for (uint32_t cta = 0; cta < kMaxCtas; ++cta) {
      threads.emplace_back([&, r, cta] {
        for (uint32_t n = 0; n < lines.size(); ++n) {
          const Line& line = lines[n];
          char* input = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(inputs[r].data()) + 15) / 16 * 16);
          if (cta == 0) {
            outputs[r][n].assign(line.num_bytes + 16, 0);
            const uint32_t size = line.dtype == 2 ? 4 : 2;
            for (uint32_t i = 0; i < line.num_bytes / size; ++i) set_element(input, line.dtype, i, round_one(line.dtype, value(r, n, i)));
          }
          pthread_barrier_wait(&barriers[r]);  // the previous kernel of this rank has ended, the input is there
          Call call{};
          for (uint32_t p = 0; p < world; ++p) call.slabs[p] = slabs[p]->data;
          call.layout = layout;
          call.num_bytes = line.num_bytes;
          const uint32_t packs = (line.num_bytes + 15) / 16, owners = line.shape == 0 ? 1 : line.shape;
          call.slice_packs = std::max((packs + line.ctas - 1) / line.ctas, owners);
          call.num_slices = (packs + call.slice_packs - 1) / call.slice_packs;
          call.first_rank = r;
          call.num_ranks = 1;
          for (uint32_t p = 0; p < world; p += tree) call.tree_opens |= 1u << p;
          call.pull = line.pull;
          call.ctas = line.ctas;
          call.delay_ns = 1;
          call.delay_seed = seed;
          char* output = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(outputs[r][n].data()) + 15) / 16 * 16);
          call.ranks[0] = RankBuffers{input, output, nullptr, nullptr, &controls[r]};
          if (cta < line.ctas) ar_run_on_cpu(&call, 0, cta, line.dtype, line.shape, line.bulk, 1);
          pthread_barrier_wait(&barriers[r]);
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();

  for (uint32_t r = 0; r < world; ++r) {
    if (errors[r].code != 0) {
      std::printf("rank %u gave up on rank %u in phase %u of call %llu\n", r, errors[r].peer, errors[r].phase,
                  static_cast<unsigned long long>(errors[r].epoch));
      return 1;
    }
    if (controls[r].epoch != start + lines.size()) return std::printf("rank %u counted wrong\n", r), 1;
  }
  for (uint32_t n = 0; n < lines.size(); ++n) {
    const Line& line = lines[n];
    auto aligned = [&](uint32_t r) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(outputs[r][n].data());
      const char* at = reinterpret_cast<const char*>((begin + 15) / 16 * 16);
      return std::vector<char>(at, at + line.num_bytes);
    };
    const auto first = aligned(0);
    for (uint32_t r = 1; r < world; ++r) {
      if (aligned(r) != first) return std::printf("call %u: ranks 0 and %u differ\n", n, r), 1;
    }
    for (uint32_t i = 0; i < line.num_bytes / (line.dtype == 2 ? 4 : 2); ++i) {
      double exact = 0, size = 0;
      float part = 0, total = 0;
      for (uint32_t r = 0; r < world; ++r) {
        const float x = widen_one(line.dtype, round_one(line.dtype, value(r, n, i)));
        exact += x;
        size += std::fabs(x);
        if (r % tree == 0 && r > 0) total = r == tree ? part : total + part;
        part = r % tree == 0 ? x : part + x;
      }
      total = tree < world ? total + part : part;
      const uint32_t got = element(first, line.dtype, i);
      if (got != round_one(line.dtype, total)) return std::printf("call %u element %u: not the tree's sum\n", n, i), 1;
      const double off = std::fabs(widen_one(line.dtype, got) - exact);
      // One rounding to the type, and fp32's own in the sum.
      const double unit = line.dtype == 0 ? 0x1p-8 : line.dtype == 1 ? 0x1p-11 : 0x1p-24;
      if (off > unit * std::fabs(exact) + size * 0x1p-21) return std::printf("call %u element %u: off by %g\n", n, i, off), 1;
    }
  }
  for (auto* slab : slabs) delete slab;
  std::printf("%zu calls right\n", lines.size());
  return 0;
}
