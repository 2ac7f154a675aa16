// Sum and gradient in one pass: each row is read once, kept in the shared memory of a group of blocks, and its gradient for an upstream
// gradient of 1 written from there. Compute capability 9.0 and later.
//
// A block holds a slice of the columns of several rows at a time, in a ring of slots. Its warps:
//   loader    fills free slots by bulk copies, rows ahead of the rest;
//   workers   (share.cuh) sum their share of row i, each warp relative to the maximum of its own share, then write their share of the gradient of row i - 1;
//   combiners (exchange.cuh) add the workers' sums, exchange them with the group's other blocks (integers: any order), and from the total make the row's scale; several, for it
//             is a long chain of few instructions.
// No warp waits for a block-wide barrier: the exchange of row i runs while the workers are busy with the gradient of row i - 1 and the sum of row i + 1.
//
// A row that this scheme cannot sum exactly (shifted, or spread so wide that a term may or may not be dropped depending on the maximum) is marked and done by settle_kernel (settle.cuh).
#pragma once

#include <map>
#include <mutex>
#include <type_traits>

#include "fused.h"
#include "layout.cuh"
#include "settle.cuh"
#include "share.cuh"

namespace dce {
namespace cuda {
namespace {

template <class T, bool kGrad, Features kFeatures>
__global__ void __launch_bounds__(kFusedThreads, 1) fused_kernel(const Rows rows, const RowExtras extras) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kLanes = kVector<T>;
  constexpr bool kOptions = kFeatures != kPlain, kExtras = kFeatures == kAll;
  Control& control = *reinterpret_cast<Control*>(shared + table_bytes<T>());
  Mail* const cluster_mail = reinterpret_cast<Mail*>(shared + table_bytes<T>() + control_bytes(rows.slots));
  const int cluster = rows.mail == nullptr ? rows.group : 0;
  const bool has_slopes = kExtras && extras.options.map.cap != 0.0f;
  unsigned char* const ring = shared + overhead_bytes<T>(cluster, rows.slots, has_slopes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t rank = blockIdx.x;  // in the group
  const int64_t groups = gridDim.y, first_row = blockIdx.y;
  const auto map = map_of<kExtras>(extras.options.map);
  TermTable<T> table;
  if constexpr (TermTable<T>::kExists) {
    table.filled = rows.logits.rows >= kTableRows * groups;
    if (kExtras) {
      table.shift = extras.table_shift;
      table.filled = table.filled && table.starts_at_one(extras.options.map);
    }
    if (table.filled && kExtras) {
      if (has_slopes) table.slopes = shared + slopes_begin<T>(cluster, rows.slots);
      table.fill(shared, extras.options.map, threadIdx.x, kFusedThreads);
    } else if (table.filled) {
      TermTable<T>::fill(shared, threadIdx.x, kFusedThreads);
    }
    table.entries = shared;
    table.minus_first = rows.minus_first;
  }
  const int64_t begin = static_cast<int64_t>(rank) * rows.slice;
  const int64_t left = rows.logits.columns - begin;
  const int columns = left <= 0 ? 0 : left < rows.slice ? static_cast<int>(left) : rows.slice;
  const int vectors = (kOptions ? columns + kLanes - 1 : columns) / kLanes;
  const int64_t slot_bytes = static_cast<int64_t>(rows.slice) * sizeof(T);

  if (threadIdx.x == 0) {
    for (int i = 0; i < rows.slots; ++i) {
      control.slot[i].full.init(1);
      control.slot[i].summed.init(kWorkers);
      control.slot[i].scaled.init(1);
      control.slot[i].empty.init(kWorkers + 1);
    }
    for (int i = 0; i < kMailboxes; ++i) control.mailed[i].init(1);
    fence_barrier_init();
  }
  cluster_sync();

  Slot slot;
  if (warp == kLoader) {
    if (lane == 0) {
      int64_t count = 0;
      for (int64_t row = first_row; row < rows.logits.rows; row += groups, ++count, slot.next(rows.slots)) {
        if (count >= rows.slots) control.slot[slot.index].empty.wait(slot.parity ^ 1);
        const bool ignored = is_ignored(rows.targets, row);
        control.slot[slot.index].ignored = ignored;
        if (ignored) {
          control.slot[slot.index].full.arrive();
          continue;
        }
        const unsigned char* const from = reinterpret_cast<const unsigned char*>(static_cast<const T*>(rows.logits.data) + row * rows.logits.row_stride + begin);
        const uint32_t bytes = (kOptions ? vectors * kLanes : columns) * static_cast<uint32_t>(sizeof(T));
        control.slot[slot.index].full.arrive_and_expect(bytes);
        for (uint32_t at = 0; at < bytes; at += kBulkBytes)
          bulk_load(ring + slot.index * slot_bytes + at, from + at, bytes - at < kBulkBytes ? bytes - at : kBulkBytes, control.slot[slot.index].full);
      }
    }
  } else if (warp >= kWorkers) {
    const int own = warp - kWorkers;
    for (int i = 0; i < own; ++i) slot.next(rows.slots);
    uint32_t turn = 0;  // of this combiner: even and odd rows use its two mailboxes
    const double constant = kExtras && extras.options.smoothing != 0.0 ? constant_of(extras.options, rows.logits.columns) : 0.0;
    const double g = kOptions ? upstream_of(upstream_one(rows.sums, extras.divisor), 0) : plain_upstream_of({nullptr, 0, rows.sums, Divisor::kOne, nullptr, 0}, 0);
    for (int64_t row = first_row + own * groups; row < rows.logits.rows; row += kCombiners * groups) {
      const int64_t target = target_at(rows.targets, row);
      const bool ignored = target == rows.targets.ignore_index;
      const bool has_target = target >= 0 && target < rows.logits.columns;
      const float x = has_target && !ignored ? widen(static_cast<const T*>(rows.logits.data)[row * rows.logits.row_stride + target]) : 0.0f;
      RowMessage message = {{0.0f, 0.0f, -0.0f}, 0, -1, kZero, 0.0f, 0, false};
      RowTotal total = {};
      total.max = -INFINITY;
      total.exact = true;
      control.slot[slot.index].summed.wait(slot.parity);
      if (!ignored) {
        const int box = own + (turn & 1) * kCombiners, sender = lane < rows.group ? lane : 0;
        uint64_t out[kMailWords + 1];
        write_mail(control.slot[slot.index].sum, kWorkers, map, out);
        Mail mail;
        if (rows.group == 1) {
          mail = mail_of(out);
        } else if (rows.mail == nullptr) {
          send_in_cluster(out, cluster_mail + box * rows.group, control.mailed[box], rows.group, rank);
          control.mailed[box].wait_for_cluster(turn >> 1 & 1);
          mail = cluster_mail[box * rows.group + sender];
        } else {
          Mail* const global_mail = rows.mail + (blockIdx.y * static_cast<int64_t>(kMailboxes) + box) * rows.group;
          send_globally(out, global_mail, rank, turn);
          mail = receive_globally(global_mail, sender, turn);
        }
        total = add_mail(mail, rows.group, map);
        ++turn;
        if (kGrad) {
          if (!total.exact) {
            message.mode = kSkip;
          } else if (total.degenerate || !has_target) {
            message.mode = kNaN;
          } else {
            const float y = map(x);
            const RowSums sums = sums_of(total, y);
            message.scale = row_scale(g, kOptions ? state_with(extras.options, sums, target, y, rows.logits.columns) : row_state(sums));
            message.n_max = total.n_max;
            message.own = target >= begin && target < begin + columns ? static_cast<int32_t>(target - begin) : -1;
            message.mode = kScaled;
            if (kExtras && extras.options.smoothing != 0.0) message.scale.constant = static_cast<float>(mul64(g, constant));
            if (!is_finite(message.scale)) message.mode = kNaN;  // a mean over nothing, say
          }
          if (kExtras && extras.words.stats != nullptr && total.exact && !total.degenerate) {
            message.stats = true;
            message.n_max = total.n_max;
            message.max = total.max;
            const int64_t before = has_target && x == total.max ? target - begin : 0;
            message.before = before < columns ? static_cast<int32_t>(before) : columns;
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        if (kGrad) {
          control.slot[slot.index].message = message;
          control.slot[slot.index].scaled.arrive();
        }
        control.slot[slot.index].empty.arrive();
        if (rank == 0) {
          rows.row_max[row] = total.max;
          rows.status[row] = total.exact ? kOk : kRedo;
          int64_t* const words = rows.words + row * kWords;
          for (int i = 0; i < kDigits - 1; ++i) words[i] = static_cast<int64_t>(total.limb[i / 2] >> (32 * (i % 2)) & 0xFFFFFFFFu);
          words[kDigits - 1] = static_cast<int64_t>(total.limb[2] >> 32 | total.limb[3] << 32);
        }
      }
      for (int i = 0; i < kCombiners; ++i) slot.next(rows.slots);
    }
  } else {
    Slot grad_slot;
    int64_t grad_row = first_row;
    int share_of = warp, grad_share_of = warp;  // shares go round, for some are a vector longer
    Share grad_share = {};
    // one iteration more than rows: the last has only a gradient to write
    for (int64_t row = first_row; row < rows.logits.rows || (kGrad && grad_row < rows.logits.rows); row += groups) {
      Share share = {-INFINITY, 0.0f, false};
      if (row < rows.logits.rows) {
        control.slot[slot.index].full.wait(slot.parity);
        if (!control.slot[slot.index].ignored) {
          if (kOptions && vectors * kLanes != columns && (vectors - 1) % (kWorkers * kWarp) == share_of * kWarp + lane) {
            // columns of the padding in the last vector, which is this thread's alone, take no part
            T* const last = reinterpret_cast<T*>(ring + slot.index * slot_bytes) + (vectors - 1) * kLanes;
            for (int j = columns % kLanes; j < kLanes; ++j) last[j] = narrow<T>(-INFINITY);
            fence_async();
          }
          uint4* const slice = reinterpret_cast<uint4*>(ring + slot.index * slot_bytes);
          share = sum_share<T, kExtras>(slice, vectors, columns, share_of * kWarp + lane, table, map, extras, row, control.slot[slot.index].sum[warp]);
        }
        __syncwarp();
        if (lane == 0) {
          control.slot[slot.index].summed.arrive();
          if (!kGrad) control.slot[slot.index].empty.arrive();
        }
        slot.next(rows.slots);
      }
      if (kGrad && row != first_row) {
        control.slot[grad_slot.index].scaled.wait(grad_slot.parity);
        const RowMessage message = control.slot[grad_slot.index].message;
        const uint4* const slice = reinterpret_cast<const uint4*>(ring + grad_slot.index * slot_bytes);
        T* to = static_cast<T*>(rows.grad) + grad_row * rows.logits.columns + begin;
        if constexpr (kOptions) to = static_cast<T*>(rows.grad) + grad_row * extras.grad_stride + begin;
        const int first = grad_share_of * kWarp + lane;
        if (kExtras && rows.grad == nullptr) to = nullptr;
        if (kExtras && message.stats) {
          const T* const logits = static_cast<const T*>(rows.logits.data) + grad_row * rows.logits.row_stride + begin;
          write_share_and_stats<T>(slice, vectors, first, grad_share, table, map, extras, message, logits, extras.words.stats + grad_row * kStatWords, message.mode == kScaled ? to : nullptr);
        }
        if (message.mode == kScaled) {
          if (!kExtras || (!message.stats && to != nullptr)) write_share<T, kExtras>(slice, vectors, first, grad_share, table, map, extras, message, to);
        } else if (message.mode != kSkip && (!kExtras || to != nullptr)) {
          Vector<T> v;
#pragma unroll
          for (int j = 0; j < kLanes; ++j) v.lane[j] = message.mode == kZero ? narrow<T>(0.0f) : canonical_nan<T>();
          for (int i = first; i < vectors; i += kWorkers * kWarp) __stcs(reinterpret_cast<uint4*>(to) + i, v.raw);
        }
        __syncwarp();
        if (lane == 0) control.slot[grad_slot.index].empty.arrive();
        grad_slot.next(rows.slots);
        grad_row += groups;
      }
      grad_share = share;
      grad_share_of = share_of;
      share_of = share_of + 7 < kWorkers ? share_of + 7 : share_of + 7 - kWorkers;
    }
  }
  __syncwarp();
  cluster_sync();  // no block leaves while another of its cluster may still write to it
#endif
}

// ---- host: how a row is laid over blocks

struct Plan {
  bool cluster;       // each group is a cluster
  int group, groups;  // blocks a group, groups
  int slots, slice;
  size_t shared_bytes;
};

// A cluster, or a cooperative grid: where blocks wait for each other by other means, all must be on the device at once.
cudaLaunchConfig_t configure(const Plan& plan, cudaLaunchAttribute* attribute, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.group, plan.groups);
  config.blockDim = dim3(kFusedThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  if (plan.cluster) {
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = plan.group;
    attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  } else {
    attribute->id = cudaLaunchAttributeCooperative;
    attribute->val.cooperative = 1;
  }
  config.attrs = attribute;
  config.numAttrs = 1;
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
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = configure(plan, &attribute, nullptr);
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
    const int64_t row_cost = cluster ? kFusedPolicy.row_cost_bytes : sizeof(T) == 2 ? kFusedPolicy.global_row_cost_bytes : kFusedPolicy.global_row_cost_bytes_fp32;
    for (int group = 1; group <= kMaxGroup; ++group) {
      const int64_t slice = ((vectors + group - 1) / group) * kLanes;
      const int64_t slot_bytes = slice * static_cast<int64_t>(sizeof(T));
      int slots = kMaxSlots;
      while (slots > 0 && overhead_bytes<T>(cluster ? group : 0, slots, has_slopes) + slots * slot_bytes > device.shared_bytes) --slots;
      if (slots < kFusedPolicy.least_slots || (group > 1 && slot_bytes < kFusedPolicy.least_slice_bytes)) continue;
      const int64_t most = cluster ? device.clusters[group] : device.processors / group, groups = most < logits.rows ? most : logits.rows;
      // busy processors, times the part of their work that is columns and not a row's own cost
      const int64_t worth = groups * group * slot_bytes * 1024 / (slot_bytes + row_cost);
      if (worth <= best) continue;
      best = worth;
      plan = {cluster, group, static_cast<int>(groups), slots, static_cast<int>(slice), static_cast<size_t>(overhead_bytes<T>(cluster ? group : 0, slots, has_slopes) + slots * slot_bytes)};
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
  Mail* const mail = plan.cluster ? nullptr : reinterpret_cast<Mail*>(scratch.zeros + kMailAt);
  const Rows rows = {logits, targets, total.divisor != Divisor::kOne ? scratch.zeros : nullptr, row_max, scratch.digits, out.status, grad, mail, plan.group, plan.slots, plan.slice,
                     minus_first(shift)};
  const RowExtras extras = {options, total.divisor, grad_stride, scratch.words, shift};
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(plan, &attribute, stream_of(context));
  const cudaError_t launched = cudaLaunchKernelEx(&config, fused_kernel<T, kGrad, kFeatures>, rows, extras);
  if (launched == cudaErrorCooperativeLaunchTooLarge) {  // a part of the device is somebody else's
    cudaGetLastError();
    return false;
  }
  check(launched, "cross_entropy");
  // a block's words lie where the mail was
  static_assert(kSettleResident * kSumWords * sizeof(int64_t) <= kMailboxes * sizeof(Mail), "room for the words of the blocks of each processor");
  const int64_t most = static_cast<int64_t>(kSettleResident) * processors(), rows_a_block = (logits.rows + most - 1) / most;
  const unsigned blocks = static_cast<unsigned>((logits.rows + rows_a_block - 1) / rows_a_block);
  settle_kernel<T, kGrad, kFeatures == kAll><<<blocks, kSettleThreads, 0, stream_of(context)>>>(rows, extras, out, rows_a_block, scratch.zeros, scratch.zeros + kMailAt, total);
  check(cudaGetLastError(), "cross_entropy");
  return true;
}

}  // namespace

template <class T>
bool fused_of(const Logits& logits, const Targets& targets, const RowOptions& options, const Scratch& scratch, float* row_max, const RowOutputs& out, const Total& total, void* grad,
              int64_t grad_stride, Context context) {
  const auto run = [&](auto with_grad, auto features) {
    return launch<T, decltype(with_grad)::value, decltype(features)::value>(logits, targets, options, scratch, row_max, out, total, grad, grad_stride, context);
  };
  using Plain = std::integral_constant<Features, kPlain>;
  using RowOptionsOnly = std::integral_constant<Features, kRowOptions>;
  using All = std::integral_constant<Features, kAll>;
  const bool partial = logits.columns % kVector<T> != 0;
  if (options.on && (options.smoothing != 0.0 || !is_identity(options.map) || scratch.words.stats != nullptr)) return run(std::true_type(), All());
  if (grad == nullptr) return partial ? run(std::false_type(), RowOptionsOnly()) : run(std::false_type(), Plain());
  const bool row_options = options.on && (options.z_loss != 0.0 || options.weights.data != nullptr);
  return partial || row_options || grad_stride != logits.columns ? run(std::true_type(), RowOptionsOnly()) : run(std::true_type(), Plain());
}

}  // namespace cuda
}  // namespace dce
