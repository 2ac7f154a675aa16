// Barriers in shared memory, bulk copies, and the shared memory of a cluster's other blocks: thin names for PTX (compute capability 9.0 and later).
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

struct Barrier {
  uint64_t word;
  __device__ __forceinline__ void init(uint32_t arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory"); }
  __device__ __forceinline__ void arrive() { asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory"); }
  // One arrival, and `bytes` of bulk copies to come.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes) : "memory");
  }
  // An arrival at the same barrier of block `rank` of the cluster.
  __device__ __forceinline__ void arrive_at(uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(shared_address(&word)), "r"(rank) : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(shared_address(&word)), "r"(parity) : "memory");
  }
  __device__ __forceinline__ void wait_cluster(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(shared_address(&word)), "r"(parity) : "memory");
  }
};

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(&full.word))
               : "memory");
}

// 8 bytes into the shared memory of block `rank`, at the address of `here` in this block.
__device__ __forceinline__ void store_at(uint32_t rank, void* here, uint64_t v) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u64 [remote], %2;\n"
      "}" ::"r"(shared_address(here)), "r"(rank), "l"(v) : "memory");
}

}  // namespace cuda
}  // namespace dce
