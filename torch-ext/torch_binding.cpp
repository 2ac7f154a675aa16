#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rowmax(Tensor logits, int v_lo, int v_hi) -> Tensor");
  ops.def("denom_digits(Tensor logits, Tensor rowmax, int v_lo, int v_hi, int v_start, float logit_scale=1.0, float softcap=0.0) -> Tensor");
  ops.def("logit_digits(Tensor logits, Tensor rowmax, int v_lo, int v_hi, int v_start, Tensor? weight, float logit_scale, float softcap) -> Tensor");
  ops.def("stat_digits(Tensor logits, Tensor targets, Tensor rowmax, int ignore_index, int v_lo, int v_hi, int v_start, float logit_scale, float softcap) -> Tensor");
  ops.def("rowleast(Tensor logits, int v_lo, int v_hi) -> Tensor");
  ops.def("shard_tags(Tensor rowmax, int lo, int hi, int kind, float logit_scale, float softcap) -> Tensor");
  ops.def("target_logits(Tensor logits, Tensor targets, int ignore_index) -> Tensor");
  ops.def("finalize(Tensor digits, Tensor target_logits, Tensor targets, Tensor rowmax, int ignore_index, int columns) -> (Tensor loss, Tensor denom, Tensor state, Tensor status)");
  ops.def("finalize_with_options(Tensor digits, Tensor target_logits, Tensor targets, Tensor rowmax, int ignore_index, int columns, float z_loss, Tensor? weight, float label_smoothing, Tensor? logit_digits, float logit_scale, float softcap) -> (Tensor loss, Tensor denom, Tensor state, Tensor status, Tensor lse, Tensor z_loss)");
  ops.def("finalize_stats(Tensor digits, Tensor stat_digits, Tensor least, Tensor target_logits, Tensor targets, Tensor rowmax, int ignore_index, int columns, float logit_scale, float softcap) -> (Tensor lse, Tensor logprob, Tensor entropy, Tensor max_abs, Tensor hit)");
  ops.def("order_images(Tensor x) -> Tensor");
  ops.def("shard_words(Tensor logits, Tensor targets, Tensor images, int ignore_index, int mode, int weight, int v_start, float z_loss=0.0, int valid_vocab=0, Tensor? class_weights=None, float label_smoothing=0.0, float logit_scale=1.0, float softcap=0.0, bool stats=False, Tensor? num_items=None) -> (Tensor words, Tensor rowmax)");
  ops.def("settle_targets(Tensor words, Tensor targets, int ignore_index) -> (Tensor targets, Tensor target_logits)");
  ops.def("cross_entropy(Tensor logits, Tensor targets, int reduction, int ignore_index) -> (Tensor out, Tensor rowmax, Tensor denom, Tensor state, Tensor sums, Tensor status)");
  ops.def("cross_entropy_grad(Tensor logits, Tensor targets, int reduction, int ignore_index) -> (Tensor out, Tensor rowmax, Tensor denom, Tensor state, Tensor sums, Tensor status, Tensor grad)");
  ops.def("cross_entropy_with_options(Tensor logits, Tensor targets, int reduction, int ignore_index, float z_loss, Tensor? weight, Tensor? num_items, int valid_vocab, float label_smoothing, float logit_scale, float softcap, bool stats) -> (Tensor out, Tensor rowmax, Tensor denom, Tensor state, Tensor sums, Tensor status, Tensor lse, Tensor z_loss, Tensor logprob, Tensor entropy, Tensor max_abs, Tensor hit)");
  ops.def("cross_entropy_grad_with_options(Tensor logits, Tensor targets, int reduction, int ignore_index, float z_loss, Tensor? weight, Tensor? num_items, int valid_vocab, float label_smoothing, float logit_scale, float softcap, bool stats) -> (Tensor out, Tensor rowmax, Tensor denom, Tensor state, Tensor sums, Tensor status, Tensor lse, Tensor z_loss, Tensor logprob, Tensor entropy, Tensor max_abs, Tensor hit, Tensor grad)");
  ops.def("rescale_grad(Tensor(a!) grad, Tensor grad_out, Tensor logits, Tensor targets, Tensor rowmax, Tensor state, Tensor? sums, int ignore_index, Tensor? weight=None, float logit_scale=1.0, float softcap=0.0) -> ()");
  ops.def("grad_over_logits(Tensor(a!) logits, Tensor grad_out, Tensor targets, Tensor rowmax, Tensor state, Tensor? sums, int ignore_index, Tensor? grad_lse=None, Tensor? weight=None, float logit_scale=1.0, float softcap=0.0) -> ()");
  ops.def("grad_logits(Tensor grad_out, Tensor logits, Tensor targets, Tensor rowmax, Tensor state, Tensor? sums, int ignore_index, int v_lo, int v_hi, int v_start) -> Tensor");
  ops.def("grad_logits_with_options(Tensor grad_out, Tensor logits, Tensor targets, Tensor rowmax, Tensor state, Tensor? sums, int ignore_index, int v_lo, int v_hi, int v_start, Tensor? grad_lse, int valid_vocab, Tensor? weight=None, float logit_scale=1.0, float softcap=0.0) -> Tensor");
  ops.def("loss_digits(Tensor loss, Tensor targets, int ignore_index, Tensor? weight=None) -> Tensor");
  ops.def("reduce_digits(Tensor sums, bool mean) -> Tensor");
  ops.def("square_digits(Tensor x) -> Tensor");
  ops.def("grad_norm(Tensor digits) -> Tensor");
  ops.def("term(Tensor x) -> (Tensor significand, Tensor exponent)");
}

#define DCE_BIND(ops)                                                                            \
  ops.impl("rowmax", TORCH_BOX(&dce::rowmax));                                                   \
  ops.impl("denom_digits", TORCH_BOX(&dce::denom_digits));                                       \
  ops.impl("logit_digits", TORCH_BOX(&dce::logit_digits));                                       \
  ops.impl("stat_digits", TORCH_BOX(&dce::stat_digits));                                         \
  ops.impl("rowleast", TORCH_BOX(&dce::rowleast));                                               \
  ops.impl("shard_tags", TORCH_BOX(&dce::shard_tags));                                           \
  ops.impl("target_logits", TORCH_BOX(&dce::target_logits));                                     \
  ops.impl("finalize", TORCH_BOX(&dce::finalize));                                               \
  ops.impl("finalize_stats", TORCH_BOX(&dce::finalize_stats));                                   \
  ops.impl("finalize_with_options", TORCH_BOX(&dce::finalize_with_options));                     \
  ops.impl("order_images", TORCH_BOX(&dce::order_images));                                       \
  ops.impl("shard_words", TORCH_BOX(&dce::shard_words));                                         \
  ops.impl("settle_targets", TORCH_BOX(&dce::settle_targets));                                   \
  ops.impl("cross_entropy", TORCH_BOX(&dce::cross_entropy));                                     \
  ops.impl("cross_entropy_grad", TORCH_BOX(&dce::cross_entropy_grad));                           \
  ops.impl("cross_entropy_with_options", TORCH_BOX(&dce::cross_entropy_with_options));           \
  ops.impl("cross_entropy_grad_with_options", TORCH_BOX(&dce::cross_entropy_grad_with_options)); \
  ops.impl("rescale_grad", TORCH_BOX(&dce::rescale_grad));                                       \
  ops.impl("grad_over_logits", TORCH_BOX(&dce::grad_over_logits));                               \
  ops.impl("grad_logits", TORCH_BOX(&dce::grad_logits));                                         \
  ops.impl("grad_logits_with_options", TORCH_BOX(&dce::grad_logits_with_options));               \
  ops.impl("loss_digits", TORCH_BOX(&dce::loss_digits));                                         \
  ops.impl("reduce_digits", TORCH_BOX(&dce::reduce_digits));                                     \
  ops.impl("square_digits", TORCH_BOX(&dce::square_digits));                                     \
  ops.impl("grad_norm", TORCH_BOX(&dce::grad_norm));                                             \
  ops.impl("term", TORCH_BOX(&dce::term_parts));

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { DCE_BIND(ops) }
#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { DCE_BIND(ops) }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
