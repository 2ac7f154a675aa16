// The torch operators, on the stable ABI: check, allocate, call the device's stages. torch-ext/torch_binding.cpp registers them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace dce {

using torch::stable::Tensor;

// Reduction of cross_entropy.
constexpr int64_t kNone = 0, kMean = 1, kSum = 2;

Tensor rowmax(const Tensor& logits, int64_t v_lo, int64_t v_hi);
Tensor denom_digits(const Tensor& logits, const Tensor& rowmax, int64_t v_lo, int64_t v_hi, int64_t v_start, double logit_scale, double softcap);
// int64 [N, 4], the sum of logits; weight: float32 [V]
Tensor logit_digits(const Tensor& logits, const Tensor& rowmax, int64_t v_lo, int64_t v_hi, int64_t v_start, const std::optional<Tensor>& weight, double logit_scale, double softcap);
// int64 [N, 2]
Tensor stat_digits(const Tensor& logits, const Tensor& targets, const Tensor& rowmax, int64_t ignore_index, int64_t v_lo, int64_t v_hi, int64_t v_start, double logit_scale,
                   double softcap);
// The least logit above -inf of each row, +inf if there is none.
Tensor rowleast(const Tensor& logits, int64_t v_lo, int64_t v_hi);
// int64 [N]: what tags of shards [lo, hi) of kind `kind` (1: sums of logits, 2: statistics) add up to
Tensor shard_tags(const Tensor& rowmax, int64_t lo, int64_t hi, int64_t kind, double logit_scale, double softcap);
// float32 [N], 0 where a target is no column
Tensor target_logits(const Tensor& logits, const Tensor& targets, int64_t ignore_index);
// loss, denom, state, status; target_logits float32 [N]; columns: the vocabulary's, or -1: what the digits say
std::tuple<Tensor, Tensor, Tensor, Tensor> finalize(const Tensor& digits, const Tensor& target_logits, const Tensor& targets, const Tensor& rowmax, int64_t ignore_index,
                                                    int64_t columns);
// With options: also lse, z_loss, float32 [N]; the state is [N, 4], or [N, 5] with smoothing. z_loss is lambda, weight float32 [V], softcap 0: none.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> finalize_with_options(const Tensor& digits, const Tensor& target_logits, const Tensor& targets, const Tensor& rowmax,
                                                                                 int64_t ignore_index, int64_t columns, double z_loss, const std::optional<Tensor>& weight,
                                                                                 double label_smoothing, const std::optional<Tensor>& logit_words, double logit_scale,
                                                                                 double softcap);
// lse, logprob, entropy, max_abs, float32 [N]; hit, bool [N]
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> finalize_stats(const Tensor& digits, const Tensor& stat_words, const Tensor& least, const Tensor& target_logits,
                                                                  const Tensor& targets, const Tensor& rowmax, int64_t ignore_index, int64_t columns, double logit_scale,
                                                                  double softcap);
// Between ranks: int32 images, whose integer maximum is the image of the maximum.
Tensor order_images(const Tensor& x);
// words, rowmax: all that a rank adds to the others', int64 [9 N] (N x 8 words of denom_digits, N of ranks.h; with smoothing N x 4 of logit_digits more; with stats N x 2 of
// stat_digits), and the maxima of the images.
// mode: any number that the ranks must have in common, beside ignore_index and N; weight: see Agreement. num_items: int64 [1].
std::tuple<Tensor, Tensor> shard_words(const Tensor& logits, const Tensor& targets, const Tensor& images, int64_t ignore_index, int64_t mode, int64_t weight, int64_t v_start,
                                       double z_loss, int64_t valid_vocab, const std::optional<Tensor>& class_weights, double label_smoothing, double logit_scale, double softcap,
                                       bool stats, const std::optional<Tensor>& num_items);
// targets, target_logits of summed words
std::tuple<Tensor, Tensor> settle_targets(const Tensor& words, const Tensor& targets, int64_t ignore_index);
// out, rowmax, denom, state, sums, status
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index);
// The same for a mean or a sum, and the gradient for an upstream gradient of 1.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_grad(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index);
// With options: also lse, z_loss, float32 [N], and with stats logprob, entropy, max_abs, hit, before the gradient; the state is [N, 4] or [N, 5]. num_items: int64 [1];
// valid_vocab: 0, or how many columns take part.
using WithOptions = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using WithOptionsAndGrad = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
WithOptions cross_entropy_with_options(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index, double z_loss, const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& num_items, int64_t valid_vocab, double label_smoothing, double logit_scale, double softcap, bool stats);
WithOptionsAndGrad cross_entropy_grad_with_options(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index, double z_loss,
                                                   const std::optional<Tensor>& weight, const std::optional<Tensor>& num_items, int64_t valid_vocab, double label_smoothing,
                                                   double logit_scale, double softcap, bool stats);
// grad as cross_entropy_grad left it becomes the gradient for grad_out, float32 [].
void rescale_grad(Tensor grad, const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums,
                  int64_t ignore_index, const std::optional<Tensor>& weight, double logit_scale, double softcap);
// logits become their own gradient.
void grad_over_logits(Tensor logits, const Tensor& grad_out, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums, int64_t ignore_index,
                      const std::optional<Tensor>& grad_lse, const std::optional<Tensor>& weight, double logit_scale, double softcap);
Tensor grad_logits(const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums,
                   int64_t ignore_index, int64_t v_lo, int64_t v_hi, int64_t v_start);
// grad_lse: float32 [N], the upstream gradient of lse; columns of the vocabulary from valid_vocab (if it is not 0) on get 0.
Tensor grad_logits_with_options(const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums,
                                int64_t ignore_index, int64_t v_lo, int64_t v_hi, int64_t v_start, const std::optional<Tensor>& grad_lse, int64_t valid_vocab,
                                const std::optional<Tensor>& weight, double logit_scale, double softcap);
// int64 [12]; with weight, float32 [V], [24]
Tensor loss_digits(const Tensor& loss, const Tensor& targets, int64_t ignore_index, const std::optional<Tensor>& weight);
Tensor reduce_digits(const Tensor& sums, bool mean);
// Of x float32, bfloat16 or float16 [n]: int64 [21]
Tensor square_digits(const Tensor& x);
// float64 []
Tensor grad_norm(const Tensor& digits);
// significand, exponent
std::tuple<Tensor, Tensor> term_parts(const Tensor& x);

}  // namespace dce
