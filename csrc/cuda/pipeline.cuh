// Barriers in shared memory, bulk copies, the shared memory of a cluster's other blocks, and single accesses of 16 bytes: thin names for PTX (compute capability 9.0 and
// later).
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
  // The same for what other blocks of the cluster have written.
  __device__ __forceinline__ void wait_for_cluster(uint32_t parity) {
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
// What this thread has written to shared memory comes before later bulk copies over it.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Programmatic dependent launch: the next kernel of the stream may start; what the one before has written is there.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(&full.word))
               : "memory");
}

// 16 bytes into the shared memory of block `rank`, at the address of `here` in this block; counted there by the barrier at the address of `barrier`.
__device__ __forceinline__ void send(uint32_t rank, void* here, uint64_t a, uint64_t b, Barrier& barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [remote], {%3, %4}, [remote_barrier];\n"
      "}" ::"r"(shared_address(here)), "r"(shared_address(&barrier.word)), "r"(rank), "l"(a), "l"(b) : "memory");
}

// 16 bytes of global memory, written or read at once: never half of them.
__device__ __forceinline__ void store_whole(void* to, uint64_t a, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .b128 v;\n"
      "mov.b128 v, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], v;\n"
      "}" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void load_whole(const void* from, uint64_t& a, uint64_t& b) {
  asm volatile(
      "{\n"
      ".reg .b128 v;\n"
      "ld.relaxed.gpu.global.b128 v, [%2];\n"
      "mov.b128 {%0, %1}, v;\n"
      "}" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

}  // namespace cuda
}  // namespace dce
