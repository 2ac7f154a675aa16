// Sum and gradient in one pass: each row is read once, kept in the shared memory of a group of blocks, and its gradient for an upstream
// gradient of 1 written from there. Compute capability 9.0 and later.
//
// A block holds a slice of the columns of several rows at a time, in a ring of slots. Its warps:
//   loader    fills free slots by bulk copies, rows ahead of the rest;
//   workers   (share.cuh) sum their share of row i, each warp relative to the maximum of its own share, then write their share of the gradient of row i - 1;
//   combiners (combine.cuh, exchange.cuh) add the workers' sums, exchange them with the group's other blocks (integers: any order), and from the total make the row's scale; several, for it
//             is a long chain of few instructions. The block whose turn it is settles the row: its loss and all else that is one number a row (settle.cuh).
// No warp waits for a block-wide barrier: the exchange of row i runs while the workers are busy with the gradient of row i - 1 and the sum of row i + 1.
//
// A row that this scheme cannot sum exactly (shifted, or spread so wide that a term may or may not be dropped depending on the maximum) is marked, and done again at the end by the block
// whose turn it was.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>

#include "combine.cuh"
#include "fused.h"
#include "share.cuh"

namespace dce {
namespace cuda {
namespace {

// What a kernel is compiled for is known to the compiler, so that no code is left for the rest.
template <Features kFeatures>
__device__ __forceinline__ RowExtras known(const RowExtras& given) {
  RowExtras out = given;
  if (kFeatures == kPlain) out.options = {false, 0.0, {nullptr, 0}, 0, 0.0, nullptr, no_map()};
  if (kFeatures < kExtraWords) {
    out.options.smoothing = 0.0;
    out.words = {nullptr, nullptr, nullptr};
  }
  if (kFeatures < kAll) out.options.map = no_map();
  out.options.weight_words = nullptr;  // weights with smoothing are not this kernel's
  return out;
}

template <class T, Features kFeatures>
__device__ __forceinline__ void load(const Block<T, kFeatures>& block) {
  const Rows& rows = block.rows;
  Slot slot;
  int64_t count = 0;
  for (int64_t row = block.first_row; row < rows.logits.rows; row += block.groups, ++count, slot.next(rows.slots)) {
    SlotControl<block.kExtras>& control = block.at(slot);
    if (count >= rows.slots) control.empty.wait(slot.parity ^ 1);
    const bool ignored = is_ignored(rows.targets, row);
    control.ignored = ignored;
    if (ignored) {
      control.full.arrive();
      continue;
    }
    const uint32_t bytes = (block.kOptions ? block.vectors * block.kLanes : block.columns) * static_cast<uint32_t>(sizeof(T));
    const unsigned char* const from = reinterpret_cast<const unsigned char*>(block.logits(row) + block.begin);
    unsigned char* const to = reinterpret_cast<unsigned char*>(block.slice(slot));
    control.full.arrive_and_expect(bytes);
    for (uint32_t at = 0; at < bytes; at += kBulkBytes) bulk_load(to + at, from + at, bytes - at < kBulkBytes ? bytes - at : kBulkBytes, control.full);
  }
}

template <bool kGrad, class T, Features kFeatures, class Map>
__device__ __forceinline__ void work(const Block<T, kFeatures>& block, const Map& map, const TermTable<T>& table) {
  using B = Block<T, kFeatures>;
  constexpr bool kOptions = B::kOptions, kExtras = B::kExtras;
  constexpr int kLanes = B::kLanes;
  const Rows& rows = block.rows;
  const RowExtras& extras = block.extras;
  const int warp = block.warp, lane = block.lane, vectors = block.vectors, columns = block.columns;
  Slot slot, grad_slot;
  int64_t grad_row = block.first_row;
  int share_of = warp, grad_share_of = warp;  // shares go round, for some are a vector longer
  Share grad_share = {};
  // one iteration more than rows: the last has only a gradient to write
  for (int64_t row = block.first_row; row < rows.logits.rows || (kGrad && grad_row < rows.logits.rows); row += block.groups) {
    Share share = {-INFINITY, 0.0f, false};
    if (row < rows.logits.rows) {
      block.at(slot).full.wait(slot.parity);
      if (!block.at(slot).ignored) {
        uint4* const slice = block.slice(slot);
        if (kOptions && vectors * kLanes != columns && (vectors - 1) % (kWorkers * kWarp) == share_of * kWarp + lane) {
          // columns of the padding in the last vector, which is this thread's alone, take no part
          T* const last = reinterpret_cast<T*>(slice + vectors - 1);
          for (int j = columns % kLanes; j < kLanes; ++j) last[j] = narrow<T>(-INFINITY);
          fence_async();
        }
        share = sum_share<T, kExtras>(slice, vectors, columns, share_of * kWarp + lane, table, map, extras, block.at(slot).sum[warp]);
      }
      __syncwarp();
      if (lane == 0) {
        block.at(slot).summed.arrive();
        if (!kGrad) block.at(slot).empty.arrive();
      }
      slot.next(rows.slots);
    }
    if (kGrad && row != block.first_row) {
      block.at(grad_slot).scaled.wait(grad_slot.parity);
      const MessageOf<kExtras> message = block.at(grad_slot).message;
      const uint4* const slice = block.slice(grad_slot);
      T* to = static_cast<T*>(rows.grad) + grad_row * (kOptions ? extras.grad_stride : rows.logits.columns) + block.begin;
      const int first = grad_share_of * kWarp + lane;
      if (kExtras && rows.grad == nullptr) to = nullptr;
      bool written = kExtras && to == nullptr;
      if constexpr (kExtras) {
        if (message.stats) {
          const T* const logits = block.logits(grad_row) + block.begin;
          write_share_and_stats<T>(slice, vectors, first, grad_share, table, map, extras, message, logits, extras.words.stats + grad_row * kStatWords, message.mode == kScaled ? to : nullptr);
          written = written || message.mode == kScaled;
        }
      }
      if (message.mode == kScaled) {
        if (!written) write_share<T, kExtras>(slice, vectors, first, grad_share, table, map, extras, message, to);
      } else if (message.mode != kSkip && !written) {
        Vector<T> v;
#pragma unroll
        for (int j = 0; j < kLanes; ++j) v.lane[j] = message.mode == kZero ? narrow<T>(0.0f) : canonical_nan<T>();
        for (int i = first; i < vectors; i += kWorkers * kWarp) __stcs(reinterpret_cast<uint4*>(to) + i, v.raw);
      }
      __syncwarp();
      if (lane == 0) block.at(grad_slot).empty.arrive();
      grad_slot.next(rows.slots);
      grad_row += block.groups;
    }
    grad_share = share;
    grad_share_of = share_of;
    share_of = share_of + 7 < kWorkers ? share_of + 7 : share_of + 7 - kWorkers;
  }
}

template <class T, bool kGrad, Features kFeatures>
__global__ void __launch_bounds__(kFusedThreads, 1) fused_kernel(const Rows rows, const RowExtras given, const Results results) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const RowExtras extras = known<kFeatures>(given);
  const Block<T, kFeatures> block(rows, extras, shared);
  auto& control = block.control;
  const auto map = map_of<block.kMaps>(extras.options.map);
  TermTable<T> table;
  if constexpr (TermTable<T>::kExists) {
    table.filled = rows.logits.rows >= kTableRows * block.groups;
    if (block.kMaps) {
      table.shift = extras.table_shift;
      table.filled = table.filled && table.starts_flat(extras.options.map);
    }
    if (table.filled && block.kMaps) {
      if (extras.options.map.cap != 0.0f) table.slopes = shared + slopes_begin<T, block.kExtras>(rows.mail == nullptr ? rows.group : 0, rows.slots);
      table.fill(shared, extras.options.map, threadIdx.x, kFusedThreads);
    } else if (table.filled) {
      table.fill(shared, threadIdx.x, kFusedThreads);
    }
    table.entries = shared;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < rows.slots; ++i) {
      control.slot[i].full.init(1);
      control.slot[i].summed.init(kWorkers);
      control.slot[i].scaled.init(1);
      control.slot[i].empty.init(kWorkers + 1);
    }
    for (int i = 0; i < kMailboxes; ++i) control.mailed[i].init(1);
    control.redo = 0;
    fence_barrier_init();
  }
  cluster_sync();

  if (block.warp == kLoader) {
    if (block.lane == 0) load(block);
  } else if (block.warp >= kWorkers) {
    combine<kGrad>(block, map, results, block.warp - kWorkers);
  } else {
    work<kGrad>(block, map, table);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while another of its cluster may still write to it

  if (control.redo == 0) return;
  RedoScratch& scratch = *reinterpret_cast<RedoScratch*>(block.ring);
  if (threadIdx.x < kSumWords) scratch.batch[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t row = block.first_row + block.rank * block.groups; row < rows.logits.rows; row += rows.group * block.groups)
    if (results.out.status[row] == kRedo) redo_row<T, kGrad, kFeatures>(rows, extras, results.out, row, scratch);
  if (block.warp == 0) add_to_batch_by_warp(block.lane < kSumWords ? scratch.batch[block.lane] : 0, control.redo, block.all_combiners(), results.batch_words, results.total);
#endif
}

// ---- host: how a row is laid over blocks

struct Plan {
  bool cluster;       // each group is a cluster
  int group, groups;  // blocks a group, groups
  int slots, slice;
  size_t shared_bytes;
};

// A cluster, or a cooperative grid: where blocks wait for each other by other means, all must be on the device at once. A cluster's kernel may start before the one before
// it is done.
constexpr int kLaunchAttributes = 2;
cudaLaunchConfig_t configure(const Plan& plan, cudaLaunchAttribute (&attribute)[kLaunchAttributes], cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.group, plan.groups);
  config.blockDim = dim3(kFusedThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (plan.cluster) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = plan.group;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
  } else {
    attribute[0].id = cudaLaunchAttributeCooperative;
    attribute[0].val.cooperative = 1;
  }
  attribute[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = plan.cluster ? 2 : 1;
  return config;
}

// What one device can do with this kernel; asked once, for the questions are slow.
struct Device {
  int shared_bytes = 0;  // a block; 0: it cannot run the kernel
  int processors = 0;
  int clusters[kMaxGroup + 1] = {};  // how many clusters of each size it holds at once, a block a processor
};
template <class T, bool kGrad, Features kFeatures>
const Device& device_of(int index) {
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  Device d;
  const void* kernel = reinterpret_cast<const void*>(&fused_kernel<T, kGrad, kFeatures>);
  int major = 0, shared_bytes = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&d.processors, cudaDevAttrMultiProcessorCount, index), "cudaDeviceGetAttribute");
  cudaFuncAttributes code = {};
  // the kernel is empty where it was compiled for less than 9.0, even if the device is more
  if (major < 9 || cudaFuncGetAttributes(&code, kernel) != cudaSuccess || code.ptxVersion < 90 || code.binaryVersion < 90) {
    cudaGetLastError();
    return known[index] = d;
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute");
  const bool beyond_eight = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess;
  for (int cluster = 1; cluster <= (beyond_eight ? kMaxGroup : 8); ++cluster) {
    const Plan plan = {true, cluster, 1, 0, 0, static_cast<size_t>(shared_bytes)};
    cudaLaunchAttribute attributes[kLaunchAttributes];
    const cudaLaunchConfig_t config = configure(plan, attributes, nullptr);
    if (cudaOccupancyMaxActiveClusters(&d.clusters[cluster], kernel, &config) != cudaSuccess) d.clusters[cluster] = 0;
  }
  cudaGetLastError();
  d.shared_bytes = shared_bytes;
  return known[index] = d;
}

// False if the layout or the device is not one for this kernel.
template <class T, bool kGrad, Features kFeatures>
bool make_plan(const Logits& logits, const RowOptions& options, const void* grad, int64_t grad_stride, Plan& plan) {
  constexpr int kLanes = kVector<T>;
  const int64_t vectors = (logits.columns + kLanes - 1) / kLanes;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
  if (vectors * kLanes > logits.columns + options.padding || logits.row_stride % kLanes != 0 || grad_stride % kLanes != 0 || !aligned(logits.data) || !aligned(grad)) return false;
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  const Device& device = device_of<T, kGrad, kFeatures>(index);
  // short rows go stage by stage, unless they are few: then it is the launches that take the time
  if (logits.columns * static_cast<int64_t>(sizeof(T)) < kFusedPolicy.least_row_bytes && logits.rows > device.processors) return false;
  const bool has_slopes = options.map.cap != 0.0f;
  int64_t best = 0;
  for (const bool cluster : {true, false}) {
    const int64_t row_cost = cluster ? kFusedPolicy.row_cost_bytes : kGrad && sizeof(T) == 4 ? kFusedPolicy.global_row_cost_bytes_fp32 : kFusedPolicy.global_row_cost_bytes;
    for (int group = 1; group <= kMaxGroup; ++group) {
      constexpr int64_t kLine = kLineBytes / kVectorBytes;
      const int64_t slice = ((vectors + group - 1) / group + kLine - 1) / kLine * kLine * kLanes;
      const int64_t slot_bytes = slice * static_cast<int64_t>(sizeof(T));
      int slots = kMaxSlots;
      while (slots > 0 && overhead_bytes<T, (kFeatures >= kExtraWords)>(cluster ? group : 0, slots, has_slopes) + slots * slot_bytes > device.shared_bytes) --slots;
      const int64_t ring_bytes = std::max<int64_t>(slots * slot_bytes, sizeof(RedoScratch));  // where rows are done again
      if (slots < kFusedPolicy.least_slots || (group > 1 && slot_bytes < kFusedPolicy.least_slice_bytes)) continue;
      const int64_t most = cluster ? device.clusters[group] : device.processors / group, groups = most < logits.rows ? most : logits.rows;
      // busy processors, times the part of their work that is columns and not a row's own cost
      const int64_t worth = groups * group * slot_bytes * 1024 / (slot_bytes + row_cost);
      if (worth <= best) continue;
      best = worth;
      plan = {cluster, group, static_cast<int>(groups), slots, static_cast<int>(slice), static_cast<size_t>(overhead_bytes<T, (kFeatures >= kExtraWords)>(cluster ? group : 0, slots, has_slopes) + ring_bytes)};
    }
  }
  return best > 0;
}

template <class T, bool kGrad, Features kFeatures>
bool launch(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total, void* grad,
            int64_t grad_stride, Context context) {
  Plan plan;
  if (!make_plan<T, kGrad, kFeatures>(logits, options, grad, grad_stride, plan)) return false;
  int shift = 0;
  while (options.map.scale > pow2(shift)) ++shift;
  void* const mail = plan.cluster ? nullptr : scratch.zeros + kMailAt;
  const Rows rows = {logits, targets, total.divisor != Divisor::kOne ? scratch.zeros : nullptr, row_max, scratch.digits, grad, mail, plan.group, plan.slots, plan.slice};
  const RowExtras extras = {options, total.divisor, grad_stride, scratch.words, shift};
  cudaLaunchAttribute attributes[kLaunchAttributes];
  const cudaLaunchConfig_t config = configure(plan, attributes, stream_of(context));
  const cudaError_t launched = cudaLaunchKernelEx(&config, fused_kernel<T, kGrad, kFeatures>, rows, extras, Results{out, scratch.zeros, total});
  if (launched == cudaErrorCooperativeLaunchTooLarge) {  // a part of the device is somebody else's
    cudaGetLastError();
    return false;
  }
  check(launched, "cross_entropy");
  if (total.out != nullptr && total.divisor == Divisor::kWeights) round_sums(scratch.zeros, total.divisor, total.out, context);
  return true;
}

}  // namespace

template <class T>
bool fused_of(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total, void* grad,
              int64_t grad_stride, Context context) {
  const auto run = [&](auto with_grad, auto features) {
    return launch<T, decltype(with_grad)::value, decltype(features)::value>(logits, targets, options, scratch, row_max, out, total, grad, grad_stride, context);
  };
  const auto with = [&](auto features) { return grad != nullptr ? run(std::true_type(), features) : run(std::false_type(), features); };
  const bool by_vectors = logits.columns % kVector<T> == 0 && (grad == nullptr || grad_stride == logits.columns);
  if (options.on && !is_identity(options.map)) return run(std::true_type(), std::integral_constant<Features, kAll>());
  if (options.on && (options.smoothing != 0.0 || scratch.words.stats != nullptr)) return run(std::true_type(), std::integral_constant<Features, kExtraWords>());
  if (options.on || !by_vectors) return with(std::integral_constant<Features, kRowOptions>());
  return with(std::integral_constant<Features, kPlain>());
}

}  // namespace cuda
}  // namespace dce
