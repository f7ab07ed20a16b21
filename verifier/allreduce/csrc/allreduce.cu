// GPU ranks over the shared protocol, behind a plain C interface that ctypes calls.
//
// Every function returns a cudaError_t as int; 0 is success. Nothing here synchronises with the host except the calls that
// allocate or free, so ar_launch may be captured into a CUDA graph.
#include <cuda_runtime.h>

#include "collective.h"
#include "dispatch.h"

namespace breakeven::allreduce {
namespace {

// 448: 7168 16-bit values are exactly two packs per thread. fp32 at world 8 needs more than the 128 registers that leaves.
template <class T>
constexpr uint32_t kMaxThreads = T::kPerPack == 4 ? 384 : 448;

// Shape: one CTA of a rank. Sync: sync/any/sum are CTA barriers and must be reached by all of its threads.
struct DeviceContext {
  uint32_t cta_;
  float* stash_;
  float* scratch_;  // one per warp

  __device__ __forceinline__ uint32_t tid() const { return threadIdx.x; }
  __device__ __forceinline__ uint32_t num_threads() const { return blockDim.x; }
  __device__ __forceinline__ uint32_t cta() const { return cta_; }
  __device__ __forceinline__ float* stash() const { return stash_; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ bool any(bool x) const { return __syncthreads_or(x) != 0; }
  __device__ __forceinline__ float rsqrt(float x) const { return ::rsqrtf(x); }

  // A fixed tree: lanes of a warp by butterfly, then warps in order.
  __device__ __forceinline__ float sum(float x) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if ((threadIdx.x & 31u) == 0) scratch_[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
    for (uint32_t w = 0; w < blockDim.x / 32; ++w) total += scratch_[w];
    __syncthreads();
    return total;
  }

  __device__ __forceinline__ void delay(const Call& call, uint32_t rank, uint64_t epoch, uint32_t slice, uint32_t at) const {
#ifdef AR_TORTURE
    if (call.delay_ns == 0) return;
    uint32_t h = call.delay_seed ^ rank * 0x9e3779b9u ^ static_cast<uint32_t>(epoch) * 0x85ebca6bu ^ slice * 0xc2b2ae35u ^
                 at * 0x27d4eb2fu ^ (threadIdx.x / 32) * 0x165667b1u;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    h ^= h >> 15;
    if ((h & 3u) != 0) return;  // one in four waits
    const uint64_t until = now_ns() + (h >> 2) % call.delay_ns;
    while (now_ns() < until) {
    }
#endif
  }
};

// Grid: num_ranks x ctas blocks, all of them resident at once. Threads: a multiple of 32 up to kMaxThreads<T>.
template <class T, uint32_t W, uint32_t M, bool kBulk>
__global__ void __launch_bounds__(kMaxThreads<T>, 1) allreduce_kernel(const __grid_constant__ Call call) {
  extern __shared__ float stash[];
  __shared__ float scratch[kMaxThreads<T> / 32];
  const uint32_t which = call.num_ranks == 1 ? 0 : blockIdx.x / call.ctas;
  DeviceContext context{blockIdx.x - which * call.ctas, stash, scratch};
  Collective<T, W, M, kBulk, DeviceContext> collective(context, call, which);
  collective.run();
}

__global__ void empty_kernel() {}

#ifdef AR_TORTURE
// Crowds the way to memory with stores to `words` lines, so that some queues are long and others short: a store that may
// overtake another then has the occasion. On host memory it is the way over PCIe.
__global__ void jam_kernel(volatile uint32_t* memory, uint32_t words, uint32_t rounds) {
  for (uint32_t r = 0; r < rounds; ++r) memory[((blockIdx.x + r) % words) * 1056 + threadIdx.x % 32] = r;
}
#endif

struct Launcher {
  const Call& call;
  uint32_t threads, stash_bytes;
  cudaStream_t stream;

  template <class T, uint32_t W, uint32_t M, bool kBulk>
  int run() const {
    auto* kernel = allreduce_kernel<T, W, M, kBulk>;
    if (stash_bytes > 48 * 1024) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, stash_bytes);
      if (error != cudaSuccess) return error;
    }
    kernel<<<call.num_ranks * call.ctas, threads, stash_bytes, stream>>>(call);
    return cudaGetLastError();
  }
};

// Loads a kernel's code now. Loaded lazily, at its first launch, it could wait for a kernel that waits for it.
struct Preloader {
  template <class T, uint32_t W, uint32_t M, bool kBulk>
  int run() const {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, allreduce_kernel<T, W, M, kBulk>);
  }
};

}  // namespace
}  // namespace breakeven::allreduce

using namespace breakeven::allreduce;

extern "C" {

const char* ar_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// shape: 0 one-shot, world = two-shot, less = islands of that many ranks.
int ar_launch(const Call* call, uint32_t dtype, uint32_t shape, uint32_t bulk, uint32_t threads, uint32_t stash_bytes,
              void* stream) {
  return dispatch(Launcher{*call, threads, stash_bytes, static_cast<cudaStream_t>(stream)}, dtype, call->layout.world, shape,
                  bulk != 0);
}

int ar_preload(uint32_t world) {
  for (uint32_t dtype = 0; dtype < 3; ++dtype) {
    for (uint32_t shape = 0; shape <= world; shape += 2) {
      if (shape != 0 && world % shape != 0) continue;
      for (uint32_t bulk = 0; bulk < 2; ++bulk) {
        const int error = dispatch(Preloader{}, dtype, world, shape, bulk != 0);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

int ar_launch_empty(uint32_t grid, uint32_t threads, void* stream) {
  empty_kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

#ifdef AR_TORTURE
int ar_jam(uint32_t* memory, uint32_t words, uint32_t rounds, uint32_t grid, void* stream) {
  jam_kernel<<<grid, 1024, 0, static_cast<cudaStream_t>(stream)>>>(memory, words, rounds);
  return cudaGetLastError();
}
#endif

int ar_device_alloc(uint64_t bytes, void** pointer) {
  cudaError_t error = cudaMalloc(pointer, bytes);
  if (error != cudaSuccess) return error;
  error = cudaMemset(*pointer, 0, bytes);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}
int ar_device_free(void* pointer) { return cudaFree(pointer); }
int ar_copy(void* to, const void* from, uint64_t bytes) { return cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }

// Pinned and mapped; zeroed. The pointer is valid on the device as well.
int ar_host_alloc(uint64_t bytes, void** pointer) {
  const cudaError_t error = cudaHostAlloc(pointer, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaSuccess) std::memset(*pointer, 0, bytes);
  return error;
}
int ar_host_free(void* pointer) { return cudaFreeHost(pointer); }
int ar_host_register(void* pointer, uint64_t bytes, void** device_pointer) {
  const cudaError_t error = cudaHostRegister(pointer, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  return error != cudaSuccess ? error : cudaHostGetDevicePointer(device_pointer, pointer, 0);
}
int ar_host_unregister(void* pointer) { return cudaHostUnregister(pointer); }

// handle: 64 bytes.
int ar_ipc_export(void* pointer, void* handle) {
  return cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), pointer);
}
int ar_ipc_open(const void* handle, void** pointer) {
  cudaIpcMemHandle_t copy;
  std::memcpy(&copy, handle, sizeof(copy));
  return cudaIpcOpenMemHandle(pointer, copy, cudaIpcMemLazyEnablePeerAccess);
}
int ar_ipc_close(void* pointer) { return cudaIpcCloseMemHandle(pointer); }

int ar_set_device(int device) { return cudaSetDevice(device); }
}
