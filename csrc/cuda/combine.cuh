// The fused kernel's combiners (fused.cuh): from the sums of a block's workers to the row's scale, and its results.
#pragma once

#include "layout.cuh"
#include "settle.cuh"

namespace dce {
namespace cuda {

// One of a block's combiners, a warp: rows `own`, own + kCombiners, ... of the group's.
template <bool kGrad, class T, Features kFeatures, class Map>
__device__ __forceinline__ void combine(const Block<T, kFeatures>& block, const Map& map, const Results& results, int own) {
  using B = Block<T, kFeatures>;
  constexpr bool kExtras = B::kExtras;
  const Rows& rows = block.rows;
  const RowExtras& extras = block.extras;
  const int lane = block.lane;
  Slot slot;
  for (int i = 0; i < own; ++i) slot.next(rows.slots);
  uint32_t turn = 0;  // even and odd rows use the combiner's two mailboxes
  uint32_t settler = own;  // the block that settles the row: row i of the group's is block i % rows.group's
  const auto wrap = [&] {
    while (settler >= static_cast<uint32_t>(rows.group)) settler -= rows.group;
  };
  wrap();
  Waiting mine = {};  // in lane i the i-th of the rows that wait to be settled
  int waiting = 0;
  int64_t batch_word = 0;  // in lane i word i of the losses that this warp has settled
  bool redo = false;  // whether it has marked rows
  const double constant = kExtras && extras.options.smoothing != 0.0 ? constant_of(extras.options, rows.logits.columns) : 0.0;
  wait_for_previous_kernel();  // which clears what this one adds to, and counts
  const double g = B::kOptions ? upstream_of(upstream_one(rows.sums, extras.divisor), 0) : plain_upstream_of({nullptr, 0, rows.sums, Divisor::kOne, nullptr, 0}, 0);
  const auto settle = [&] {
    settle_rows<kExtras>(rows, extras, results.out, map, mine, waiting, batch_word);
    waiting = 0;
  };
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) block.at(slot).empty.arrive();
  };
  for (int64_t row = block.first_row + own * block.groups; row < rows.logits.rows; row += kCombiners * block.groups) {
    const int64_t target = target_at(rows.targets, row);
    const bool ignored = target == rows.targets.ignore_index;
    const bool has_target = target >= 0 && target < rows.logits.columns;
    const float x = has_target && !ignored ? widen(block.logits(row)[target]) : 0.0f;
    MessageOf<kExtras> message = {};
    message.scale.constant = -0.0f;
    message.own = -1;
    message.mode = kZero;
    RowTotal total = {};
    RowSums sums = {};
    total.max = -INFINITY;
    total.exact = true;
    block.at(slot).summed.wait(slot.parity);
    if (!ignored) {
      const int box = own + (turn & 1) * kCombiners, sender = lane < rows.group ? lane : 0;
      Mail<kExtras> mail;
      write_mail<kExtras>(block.at(slot).sum, map, mail);
      if (!kGrad) release();
      if (rows.group > 1 && rows.mail == nullptr) {
        Mail<kExtras>* const cluster_mail = block.cluster_mail + box * rows.group;
        send_in_cluster(mail, cluster_mail, block.control.mailed[box], rows.group, block.rank);
        block.control.mailed[box].wait_for_cluster(turn >> 1 & 1);
        mail = cluster_mail[sender];
      } else if (rows.group > 1) {
        Mail<kExtras>* const global_mail = static_cast<Mail<kExtras>*>(rows.mail) + (block.first_row * kMailboxes + box) * rows.group;
        send_globally(mail, global_mail, block.rank, turn);
        mail = receive_globally(global_mail, sender, turn);
      }
      total = add_mail<kExtras>(mail, rows.group, map);
      ++turn;
      const bool is_number = total.exact && !total.degenerate;
      if (is_number) sums = sums_of(total, has_target ? map(x) : -INFINITY);
      if (kGrad) {
        if (!total.exact) {
          message.mode = kSkip;
        } else if (total.degenerate || !has_target) {
          message.mode = kNaN;
        } else {
          const float y = map(x);
          message.scale = row_scale(g, B::kOptions ? state_with(extras.options, sums, target, y, rows.logits.columns) : row_state(sums));
          message.n_max = total.n_max;
          message.own = target >= block.begin && target < block.begin + block.columns ? static_cast<int32_t>(target - block.begin) : -1;
          message.mode = kScaled;
          if (kExtras && extras.options.smoothing != 0.0) message.scale.constant = static_cast<float>(mul64(g, constant));
          if (!is_finite(message.scale)) message.mode = kNaN;  // a mean over nothing, say
        }
        if constexpr (kExtras) {
          if (extras.words.stats != nullptr && is_number) {
            message.stats = true;
            message.n_max = total.n_max;
            message.max = total.max;
            const int64_t before = has_target && x == total.max ? target - block.begin : 0;
            message.before = before < block.columns ? static_cast<int32_t>(before) : block.columns;
          }
        }
      }
    }
    if (kGrad) {
      if (lane == 0) {
        block.at(slot).message = message;
        block.at(slot).scaled.arrive();
      }
      release();
    } else if (ignored) {
      release();
    }
    if (settler == block.rank && !total.exact) {
      redo = true;
      if (lane == 0) {
        rows.row_max[row] = total.max;
        results.out.status[row] = kRedo;
        if (kExtras && extras.words.stats != nullptr) write_checks(rows, extras, row, total.max, total.extra.least);
      }
    } else if (settler == block.rank) {
      if (lane == waiting) mine = {row, target, x, total.max, total.degenerate, sums, total.extra};
      if (kExtras && extras.words.stats != nullptr && lane == 0) write_digits(rows, row, total);
      if (++waiting == kWaitingRows) settle();
    }
    settler += kCombiners;
    wrap();
    for (int i = 0; i < kCombiners; ++i) slot.next(rows.slots);
  }
  settle();
  if (redo && lane == 0) atomicAdd(&block.control.redo, 1u);
  add_to_batch_by_warp(batch_word, redo ? 0 : 1, B::all_combiners(), results.batch_words, results.total);  // while the last gradients are written
}

}  // namespace cuda
}  // namespace dce
