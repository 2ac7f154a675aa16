#include "ops.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/rounding.h"
#include "ranks.h"
#include "squares.h"

#if defined(CUDA_KERNEL)
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace dce {
namespace {

using torch::headeronly::ScalarType;

// Contiguous, on the device of `like`. Straight from the C interface: torch::stable::new_empty goes through the dispatcher, and a step makes ten of these.
Tensor empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype) {
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  int64_t stride[2] = {1, 1};  // at most two dimensions
  if (size.size() == 2) stride[0] = size.begin()[1] > 0 ? size.begin()[1] : 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.begin(), stride, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

Dtype dtype_of(const Tensor& x, const char* name = "logits") {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default: STD_TORCH_CHECK(false, name, ": expected float32, bfloat16 or float16");
  }
  return Dtype::kFloat32;
}

Logits view_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits: expected [N, V], got ", logits.dim(), " dimensions");
  STD_TORCH_CHECK(logits.size(1) < (int64_t{1} << 31), "logits: expected V < 2^31, got V = ", logits.size(1));
  STD_TORCH_CHECK(logits.size(1) <= 1 || logits.stride(1) == 1, "logits: expected adjacent columns, got stride ", logits.stride(1));
  return {logits.const_data_ptr(), dtype_of(logits), logits.size(0), logits.size(1), logits.stride(0)};
}

// Of a whole vocabulary, where a shard may be empty.
Logits view_vocabulary(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) >= 1, "logits: expected [N, V] with V >= 1");
  return view_logits(logits);
}

void check_vector(const Tensor& t, const char* name, const Tensor& like, int64_t rows) {
  STD_TORCH_CHECK(t.is_cuda() == like.is_cuda() && t.get_device_index() == like.get_device_index(), name, ": expected on the device of logits");
  STD_TORCH_CHECK(t.dim() >= 1 && t.size(0) == rows, name, ": expected ", rows, " rows");
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
}
Targets view_targets(const Tensor& targets, const Tensor& like, int64_t rows, int64_t ignore_index) {
  check_vector(targets, "targets", like, rows);
  const bool is_int64 = targets.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(targets.dim() == 1 && (is_int64 || targets.scalar_type() == ScalarType::Int), "targets: expected int64 or int32 [N]");
  return {targets.const_data_ptr(), is_int64, ignore_index};
}
const float* float_rows(const Tensor& t, const char* name, const Tensor& like, int64_t rows) {
  check_vector(t, name, like, rows);
  STD_TORCH_CHECK(t.dim() == 1 && t.scalar_type() == ScalarType::Float, name, ": expected float32 [N]");
  return t.const_data_ptr<float>();
}
const int64_t* sum_words(const Tensor& sums) {
  STD_TORCH_CHECK(sums.dim() == 1 && (sums.size(0) == kSumWords || sums.size(0) == kBatchWords) && sums.scalar_type() == ScalarType::Long && sums.is_contiguous(),
                  "sums: expected contiguous int64 [", kSumWords, "] or [", kBatchWords, "]");
  return sums.const_data_ptr<int64_t>();
}
Divisor divisor_of(const Tensor& sums) { return sums.size(0) == kBatchWords ? Divisor::kWeights : Divisor::kCount; }
const int64_t* view_items(const std::optional<Tensor>& num_items, const Tensor& like) {
  if (!num_items.has_value()) return nullptr;
  check_vector(*num_items, "num_items", like, 1);
  STD_TORCH_CHECK(num_items->dim() == 1 && num_items->scalar_type() == ScalarType::Long, "num_items: expected int64 [1]");
  return num_items->const_data_ptr<int64_t>();
}
Weights view_weights(const std::optional<Tensor>& weight, const Tensor& like) {
  if (!weight.has_value()) return {nullptr, 0};
  STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) > 0, "weight: expected [V] with V >= 1");  // nothing at all would be taken for no weights
  return {float_rows(*weight, "weight", like, weight->size(0)), weight->size(0)};
}
Shard shard(const Logits& logits, int64_t lo, int64_t hi, int64_t start) {
  STD_TORCH_CHECK(0 <= lo && lo <= hi && hi <= logits.columns, "v_lo, v_hi: expected 0 <= v_lo <= v_hi <= ", logits.columns, ", got ", lo, ", ", hi);
  STD_TORCH_CHECK(start >= 0 && start + hi < (int64_t{1} << 31), "v_start: expected v_start >= 0 and v_start + v_hi < 2^31, got ", start);
  return {lo, hi, start};
}

// Calls stage(backend functions' context, ...) of the device that `like` is on, with that device current.
#if defined(CUDA_KERNEL)
#define DCE_CALL(like, stage, ...)                                                                    \
  do {                                                                                                \
    if ((like).is_cuda()) {                                                                           \
      const torch::stable::accelerator::DeviceGuard guard((like).get_device_index());                 \
      void* stream = nullptr;                                                                         \
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream((like).get_device_index(), &stream)); \
      cuda::stage(__VA_ARGS__, cuda::Context{stream});                                                \
    } else {                                                                                          \
      cpu::stage(__VA_ARGS__, cpu::Context{});                                                        \
    }                                                                                                 \
  } while (false)
#else
#define DCE_CALL(like, stage, ...) cpu::stage(__VA_ARGS__, cpu::Context{})
#endif

// Columns that the caller calls [N, width].
const int64_t* int64_rows(const Tensor& t, const char* name, const Tensor& like, int64_t rows, int64_t width) {
  check_vector(t, name, like, rows);
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) == width && t.scalar_type() == ScalarType::Long, name, ": expected int64 [N, ", width, "]");
  return t.const_data_ptr<int64_t>();
}
LogitMap map_of(double logit_scale, double softcap) {
  const auto fits = [](double x) { return x >= 0x1p-60 && x <= 0x1p+60; };
  STD_TORCH_CHECK(fits(logit_scale), "logit_scale: expected 2^-60 to 2^60, got ", logit_scale);
  STD_TORCH_CHECK(softcap == 0.0 || fits(softcap), "softcap: expected 2^-60 to 2^60, or 0 for none, got ", softcap);
  const cpu::DefaultRounding rounding;
  return make_map(static_cast<float>(logit_scale), static_cast<float>(softcap));
}
double smoothing_of(double label_smoothing) {
  STD_TORCH_CHECK(label_smoothing >= 0.0 && label_smoothing <= 1.0, "label_smoothing: expected 0 to 1, got ", label_smoothing);
  return label_smoothing;
}

struct RowTensors {
  Tensor loss, denom, state, status;
  std::optional<Tensor> lse, z_loss;  // with options
  RowTensors(const Tensor& like, int64_t rows, const RowOptions& options)
      : loss(empty(like, {rows}, ScalarType::Float)),
        denom(empty(like, {rows}, ScalarType::Float)),
        state(empty(like, {rows, state_width(options)}, ScalarType::Double)),
        status(empty(like, {rows}, ScalarType::Int)) {
    if (!options.on) return;
    lse = empty(like, {rows}, ScalarType::Float);
    z_loss = empty(like, {rows}, ScalarType::Float);
  }
  RowOutputs view() const {
    return {loss.mutable_data_ptr<float>(), denom.mutable_data_ptr<float>(), state.mutable_data_ptr<double>(), status.mutable_data_ptr<int32_t>(),
            lse ? lse->mutable_data_ptr<float>() : nullptr, z_loss ? z_loss->mutable_data_ptr<float>() : nullptr};
  }
};

struct StatTensors {
  Tensor lse, logprob, entropy, max_abs, hit;
  StatTensors(const Tensor& like, int64_t rows)
      : lse(empty(like, {rows}, ScalarType::Float)),
        logprob(empty(like, {rows}, ScalarType::Float)),
        entropy(empty(like, {rows}, ScalarType::Float)),
        max_abs(empty(like, {rows}, ScalarType::Float)),
        hit(empty(like, {rows}, ScalarType::Bool)) {}
  StatOutputs view() const {
    return {lse.mutable_data_ptr<float>(), logprob.mutable_data_ptr<float>(), entropy.mutable_data_ptr<float>(), max_abs.mutable_data_ptr<float>(),
            static_cast<bool*>(hit.mutable_data_ptr())};
  }
};
constexpr StatOutputs kNoStats = {nullptr, nullptr, nullptr, nullptr, nullptr};

// The exact sum of the first `classes` weights, int64 [12].
Tensor sum_of_weights(const Weights& weights, int64_t classes, const Tensor& like) {
  STD_TORCH_CHECK(classes <= weights.size, "weight: expected at least ", classes, " classes, got ", weights.size);
  Tensor words = empty(like, {kSumWords}, ScalarType::Long);
  DCE_CALL(like, count_targets, kNoTargets, 0, words.mutable_data_ptr<int64_t>(), kSumWords);
  DCE_CALL(like, sum_losses, weights.data, kNoTargets, classes, words.mutable_data_ptr<int64_t>());
  return words;
}

}  // namespace

Tensor rowmax(const Tensor& logits, int64_t v_lo, int64_t v_hi) {
  const Logits x = view_logits(logits);
  Tensor out = empty(logits, {x.rows}, ScalarType::Float);
  if (x.rows > 0) DCE_CALL(logits, row_max, x, shard(x, v_lo, v_hi, 0), out.mutable_data_ptr<float>());
  return out;
}

Tensor denom_digits(const Tensor& logits, const Tensor& rowmax, int64_t v_lo, int64_t v_hi, int64_t v_start, double logit_scale, double softcap) {
  const Logits x = view_logits(logits);
  const float* max = float_rows(rowmax, "global_rowmax", logits, x.rows);
  Tensor digits = empty(logits, {x.rows, kWords}, ScalarType::Long);
  if (x.rows > 0) DCE_CALL(logits, denom_digits, x, max, shard(x, v_lo, v_hi, v_start), map_of(logit_scale, softcap), digits.mutable_data_ptr<int64_t>());
  return digits;
}

Tensor logit_digits(const Tensor& logits, const Tensor& rowmax, int64_t v_lo, int64_t v_hi, int64_t v_start, const std::optional<Tensor>& weight, double logit_scale, double softcap) {
  const Logits x = view_logits(logits);
  const float* max = float_rows(rowmax, "global_rowmax", logits, x.rows);
  const Weights weights = view_weights(weight, logits);
  STD_TORCH_CHECK(weights.data == nullptr || weights.size >= v_start + v_hi, "weight: expected at least ", v_start + v_hi, " classes, got ", weights.size);
  Tensor words = empty(logits, {x.rows, kLogitWords}, ScalarType::Long);
  if (x.rows > 0) DCE_CALL(logits, logit_digits, x, max, shard(x, v_lo, v_hi, v_start), map_of(logit_scale, softcap), weights, words.mutable_data_ptr<int64_t>());
  return words;
}

Tensor stat_digits(const Tensor& logits, const Tensor& targets, const Tensor& rowmax, int64_t ignore_index, int64_t v_lo, int64_t v_hi, int64_t v_start, double logit_scale,
                   double softcap) {
  const Logits x = view_logits(logits);
  const Targets t = view_targets(targets, logits, x.rows, ignore_index);
  const float* max = float_rows(rowmax, "global_rowmax", logits, x.rows);
  Tensor words = empty(logits, {x.rows, kStatWords}, ScalarType::Long);
  if (x.rows > 0) DCE_CALL(logits, stat_digits, x, t, max, shard(x, v_lo, v_hi, v_start), map_of(logit_scale, softcap), words.mutable_data_ptr<int64_t>());
  return words;
}

Tensor rowleast(const Tensor& logits, int64_t v_lo, int64_t v_hi) {
  const Logits x = view_logits(logits);
  Tensor out = empty(logits, {x.rows}, ScalarType::Float);
  if (x.rows > 0) DCE_CALL(logits, row_least, x, kNoTargets, shard(x, v_lo, v_hi, 0), out.mutable_data_ptr<float>());
  return out;
}

Tensor shard_tags(const Tensor& rowmax, int64_t lo, int64_t hi, int64_t kind, double logit_scale, double softcap) {
  const int64_t rows = rowmax.size(0);
  const float* max = float_rows(rowmax, "global_rowmax", rowmax, rows);
  STD_TORCH_CHECK(0 <= lo && lo <= hi && hi < (int64_t{1} << 31), "lo, hi: expected 0 <= lo <= hi < 2^31, got ", lo, ", ", hi);
  Tensor tags = empty(rowmax, {rows}, ScalarType::Long);
  const uint64_t salt = mix64(map_salt(map_of(logit_scale, softcap)) + static_cast<uint64_t>(kind));
  if (rows > 0) DCE_CALL(rowmax, shard_tags, max, rows, Shard{lo, hi, 0}, salt, tags.mutable_data_ptr<int64_t>());
  return tags;
}

Tensor target_logits(const Tensor& logits, const Tensor& targets, int64_t ignore_index) {
  const Logits x = view_logits(logits);
  const Targets t = view_targets(targets, logits, x.rows, ignore_index);
  Tensor out = empty(logits, {x.rows}, ScalarType::Float);
  if (x.rows > 0) DCE_CALL(logits, target_logits, x, t, shard(x, 0, x.columns, 0), out.mutable_data_ptr<float>());
  return out;
}

namespace {

RowTensors finalize_rows(const Tensor& digits, const int64_t* logit_words, const Tensor& target_logits, const Tensor& targets, const Tensor& rowmax, int64_t ignore_index,
                         int64_t columns, const RowOptions& options) {
  const int64_t rows = digits.size(0);
  const int64_t* words = int64_rows(digits, "den_digits", digits, rows, kWords);
  STD_TORCH_CHECK(columns >= -1 && columns < (int64_t{1} << 31), "columns: expected -1 <= columns < 2^31, got ", columns);
  const Targets t = view_targets(targets, digits, rows, ignore_index);
  const float* x = float_rows(target_logits, "target_logits", digits, rows);
  const float* max = float_rows(rowmax, "global_rowmax", digits, rows);
  RowTensors out(digits, rows, options);
  if (rows > 0) DCE_CALL(digits, finalize, words, logit_words, x, t, max, rows, columns, options, out.view());
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> finalize(const Tensor& digits, const Tensor& target_logits, const Tensor& targets, const Tensor& rowmax, int64_t ignore_index,
                                                    int64_t columns) {
  const RowTensors out = finalize_rows(digits, nullptr, target_logits, targets, rowmax, ignore_index, columns, kNoOptions);
  return {out.loss, out.denom, out.state, out.status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> finalize_with_options(const Tensor& digits, const Tensor& target_logits, const Tensor& targets, const Tensor& rowmax,
                                                                                 int64_t ignore_index, int64_t columns, double z_loss, const std::optional<Tensor>& weight,
                                                                                 double label_smoothing, const std::optional<Tensor>& logit_words, double logit_scale,
                                                                                 double softcap) {
  RowOptions options = {true, z_loss, view_weights(weight, digits), 0, smoothing_of(label_smoothing), nullptr, map_of(logit_scale, softcap)};
  std::optional<Tensor> all;
  if (options.smoothing != 0.0 && weight.has_value()) {
    all = sum_of_weights(options.weights, columns < 0 ? options.weights.size : columns, digits);
    options.weight_words = all->const_data_ptr<int64_t>();
  }
  STD_TORCH_CHECK(logit_words.has_value() == (options.smoothing != 0.0), "logit_digits: expected with label_smoothing, and else none");
  const int64_t* words = logit_words.has_value() ? int64_rows(*logit_words, "logit_digits", digits, digits.size(0), kLogitWords) : nullptr;
  const RowTensors out = finalize_rows(digits, words, target_logits, targets, rowmax, ignore_index, columns, options);
  return {out.loss, out.denom, out.state, out.status, *out.lse, *out.z_loss};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> finalize_stats(const Tensor& digits, const Tensor& stat_words, const Tensor& least, const Tensor& target_logits,
                                                                  const Tensor& targets, const Tensor& rowmax, int64_t ignore_index, int64_t columns, double logit_scale,
                                                                  double softcap) {
  const int64_t rows = digits.size(0);
  const Targets t = view_targets(targets, digits, rows, ignore_index);
  const StatTensors out(digits, rows);
  if (rows > 0)
    DCE_CALL(digits, finalize_stats, int64_rows(digits, "den_digits", digits, rows, kWords), int64_rows(stat_words, "stat_digits", digits, rows, kStatWords),
             float_rows(least, "least", digits, rows), float_rows(target_logits, "target_logits", digits, rows), t, float_rows(rowmax, "global_rowmax", digits, rows), rows, columns,
             map_of(logit_scale, softcap), out.view());
  return {out.lse, out.logprob, out.entropy, out.max_abs, out.hit};
}

Tensor order_images(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 1, "x: expected float32 [N]");
  const float* values = float_rows(x, "x", x, x.size(0));
  Tensor images = empty(x, {x.size(0)}, ScalarType::Int);
  if (x.size(0) > 0) DCE_CALL(x, order_images, values, x.size(0), images.mutable_data_ptr<int32_t>());
  return images;
}

std::tuple<Tensor, Tensor> shard_words(const Tensor& logits, const Tensor& targets, const Tensor& images, int64_t ignore_index, int64_t mode, int64_t weight, int64_t v_start,
                                       double z_loss, int64_t valid_vocab, const std::optional<Tensor>& class_weights, double label_smoothing, double logit_scale, double softcap,
                                       bool stats, const std::optional<Tensor>& num_items) {
  const Logits x = view_logits(logits);
  const LogitMap map = map_of(logit_scale, softcap);
  const bool smooth = smoothing_of(label_smoothing) != 0.0;
  const Shard own = shard(x, 0, x.columns, v_start);
  const Targets t = view_targets(targets, logits, x.rows, ignore_index);
  check_vector(images, "images", logits, x.rows);
  STD_TORCH_CHECK(images.dim() == 1 && images.scalar_type() == ScalarType::Int, "images: expected int32 [N]");
  uint64_t salt = 0;
  for (const int64_t common : {ignore_index, mode, x.rows}) salt = mix64(salt + static_cast<uint64_t>(common));
  const Weights classes = view_weights(class_weights, logits);
  if (z_loss != 0.0 || valid_vocab != 0 || classes.data != nullptr)
    for (const uint64_t common : {bits(z_loss), static_cast<uint64_t>(valid_vocab)}) salt = mix64(salt + common);
  if (smooth || !is_identity(map))
    for (const uint64_t common : {bits(label_smoothing), static_cast<uint64_t>(bits(map.scale)), static_cast<uint64_t>(bits(map.cap))}) salt = mix64(salt + common);
  Agreement agree = {salt, weight, classes, nullptr, view_items(num_items, logits)};
  Tensor words = empty(logits, {(kWords + kRankWords + (smooth ? kLogitWords : 0) + (stats ? kStatWords : 0)) * x.rows}, ScalarType::Long);
  Tensor max = empty(logits, {x.rows}, ScalarType::Float);
  if (x.rows > 0) {
    int64_t* digits = words.mutable_data_ptr<int64_t>();
    int64_t* of_ranks = digits + kWords * x.rows;
    std::optional<Tensor> hash;
    if (smooth && classes.data != nullptr) {
      hash = empty(logits, {1}, ScalarType::Long);
      DCE_CALL(logits, hash_weights, classes, hash->mutable_data_ptr<int64_t>());
      agree.all_weights = hash->const_data_ptr<int64_t>();
    }
    DCE_CALL(logits, rank_words, x, t, images.const_data_ptr<int32_t>(), own, agree, max.mutable_data_ptr<float>(), of_ranks);
    DCE_CALL(logits, denom_digits, x, max.const_data_ptr<float>(), own, map, digits);
    int64_t* more = of_ranks + kRankWords * x.rows;
    if (smooth) {
      STD_TORCH_CHECK(classes.data == nullptr || classes.size >= v_start + x.columns, "weight: expected at least ", v_start + x.columns, " classes, got ", classes.size);
      DCE_CALL(logits, logit_digits, x, max.const_data_ptr<float>(), own, map, classes, more);
      more += kLogitWords * x.rows;
    }
    if (stats) DCE_CALL(logits, stat_digits, x, t, max.const_data_ptr<float>(), own, map, more);
  }
  return {words, max};
}

std::tuple<Tensor, Tensor> settle_targets(const Tensor& words, const Tensor& targets, int64_t ignore_index) {
  const int64_t rows = targets.size(0);
  check_vector(words, "words", targets, words.size(0));
  STD_TORCH_CHECK(words.dim() == 1 && words.scalar_type() == ScalarType::Long && words.size(0) >= (kWords + kRankWords) * rows, "words: expected int64, ", kWords + kRankWords,
                  " a row or more");
  const Targets t = view_targets(targets, words, rows, ignore_index);
  Tensor settled = empty(targets, {rows}, targets.scalar_type());
  Tensor target_logits = empty(targets, {rows}, ScalarType::Float);
  const int64_t* of_ranks = words.const_data_ptr<int64_t>() + kWords * rows;
  if (rows > 0) DCE_CALL(words, settle_targets, of_ranks, t, rows, settled.mutable_data_ptr(), target_logits.mutable_data_ptr<float>());
  return {settled, target_logits};
}

namespace {

// Checked inputs of a whole batch, and what its forward writes.
struct Batch {
  Logits x;  // of the valid columns
  Targets t;
  RowOptions options;
  RowTensors rows;
  Tensor max, scratch, sums;
  std::optional<Tensor> weight_words;
  std::optional<StatTensors> stats;
  Divisor divisor;
  int64_t reduction, zeros;
  Batch(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index, const RowOptions& options = kNoOptions, const std::optional<Tensor>& num_items = std::nullopt,
        int64_t valid_vocab = 0, bool wants_stats = false)
      : x(view_vocabulary(logits)),
        t(view_targets(targets, logits, x.rows, ignore_index)),
        options(options),
        rows(logits, x.rows, options),
        max(empty(logits, {x.rows}, ScalarType::Float)),
        divisor(reduction != kMean ? Divisor::kOne : options.weights.data != nullptr && !num_items ? Divisor::kWeights : Divisor::kCount),
        reduction(reduction) {
    STD_TORCH_CHECK(reduction == kNone || reduction == kMean || reduction == kSum, "reduction: expected 0, 1 or 2, got ", reduction);
    STD_TORCH_CHECK(valid_vocab >= 0 && valid_vocab <= x.columns, "valid_vocab: expected 1 to ", x.columns, ", or 0 for all, got ", valid_vocab);
    if (valid_vocab > 0) {
      this->options.padding = x.columns - valid_vocab;
      x.columns = valid_vocab;
    }
    if (options.smoothing != 0.0 && options.weights.data != nullptr) {
      weight_words = sum_of_weights(options.weights, x.columns, logits);
      this->options.weight_words = weight_words->const_data_ptr<int64_t>();
    }
    if (wants_stats) stats = StatTensors(logits, x.rows);
    DCE_CALL(logits, zero_words, &zeros);
    scratch = empty(logits, {zeros + x.rows * (kWords + (options.smoothing != 0.0 ? kLogitWords : 0) + (wants_stats ? kStatWords + 1 : 0))}, ScalarType::Long);
    sums = torch::stable::narrow(scratch, 0, 0, reduction == kNone ? 0 : divisor == Divisor::kWeights ? kBatchWords : kSumWords);
    DCE_CALL(logits, count_targets, t, reduction == kNone ? 0 : x.rows, scratch.mutable_data_ptr<int64_t>(), zeros);
    if (divisor == Divisor::kWeights && x.rows > 0) DCE_CALL(logits, sum_weights, options.weights, t, x.rows, scratch.mutable_data_ptr<int64_t>() + kSumWords);
    if (num_items) {
      view_items(num_items, logits);
      STD_TORCH_CHECK(reduction == kMean, "num_items: expected a mean");
      Tensor count = torch::stable::narrow(scratch, 0, kCountWord, 1);
      torch::stable::copy_(count, *num_items);
    }
  }
  Scratch memory() const {
    int64_t* const zero = scratch.mutable_data_ptr<int64_t>();
    Scratch m = {zero, zero + zeros, {nullptr, nullptr, nullptr}};
    int64_t* more = m.digits + x.rows * kWords;
    if (options.smoothing != 0.0) {
      m.words.logits = more;
      more += x.rows * kLogitWords;
    }
    if (stats) {
      m.words.stats = more;
      m.words.least = reinterpret_cast<float*>(more + x.rows * kStatWords);
    }
    return m;
  }
  // With grad, of `width` columns a row, the gradient too, for an upstream of 1. Returns the loss, or the losses.
  Tensor run(const Tensor& logits, void* grad = nullptr, int64_t width = 0) const {
    const bool wanted = reduction != kNone;
    const Tensor out = wanted ? empty(logits, {}, ScalarType::Float) : rows.loss;
    const Total total = {divisor, wanted ? out.mutable_data_ptr<float>() : nullptr};
    const StatOutputs of_rows = stats ? stats->view() : kNoStats;
    if (x.rows == 0) {
      if (wanted) DCE_CALL(logits, reduce_losses, rows.loss.const_data_ptr<float>(), t, 0, scratch.mutable_data_ptr<int64_t>(), total);
      return out;
    }
    if (grad == nullptr) {
      DCE_CALL(logits, forward, x, t, options, memory(), max.mutable_data_ptr<float>(), rows.view(), of_rows, total);
    } else {
      DCE_CALL(logits, forward_backward, x, t, options, memory(), max.mutable_data_ptr<float>(), rows.view(), of_rows, total, grad, width);
      if (x.columns < width) DCE_CALL(logits, zero_columns, grad, x.dtype, x.rows, width, x.columns, width);
    }
    return out;
  }
};

// Checked inputs of a gradient.
struct GradInputs {
  Logits x;
  Targets t;
  const float* max;
  RowStates states;
  Upstream upstream;
  ColumnOptions columns;
  GradInputs(const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& row_state, const std::optional<Tensor>& sums, int64_t ignore_index,
             const std::optional<Tensor>& grad_lse = std::nullopt, const LogitMap& map = no_map(), const std::optional<Tensor>& weight = std::nullopt, int64_t classes = 0)
      : x(view_logits(logits)), t(view_targets(targets, logits, x.rows, ignore_index)), max(float_rows(rowmax, "rowmax", logits, x.rows)) {
    check_vector(row_state, "state", logits, x.rows);
    STD_TORCH_CHECK(row_state.dim() == 2 && (row_state.size(1) == 2 || row_state.size(1) == 4 || row_state.size(1) == 5) && row_state.scalar_type() == ScalarType::Double,
                    "state: expected float64 [N, 2], [N, 4] or [N, 5]");
    states = {row_state.const_data_ptr<double>(), row_state.size(1)};
    const bool smooth = states.width == 5;
    const Weights weights = view_weights(weight, logits);
    STD_TORCH_CHECK(!smooth || weights.data == nullptr || weights.size >= classes, "weight: expected at least ", classes, " classes, got ", weights.size);
    columns = {smooth || !is_identity(map), map, smooth ? weights.data : nullptr};
    STD_TORCH_CHECK(grad_out.scalar_type() == ScalarType::Float && (grad_out.dim() == 0 || (grad_out.dim() == 1 && grad_out.size(0) == x.rows)),
                    "grad_out: expected float32 [] or [N]");
    upstream = {grad_out.const_data_ptr<float>(), grad_out.dim() == 0 ? 0 : grad_out.stride(0), nullptr, Divisor::kOne, nullptr, 0};
    if (sums.has_value()) {
      upstream.sums = sum_words(*sums);
      upstream.divisor = divisor_of(*sums);
    }
    if (grad_lse.has_value()) {
      STD_TORCH_CHECK(grad_lse->scalar_type() == ScalarType::Float && grad_lse->dim() == 1 && grad_lse->size(0) == x.rows && states.width >= 4,
                      "grad_lse: expected float32 [N], and a state [N, 4] or [N, 5]");
      upstream.lse = grad_lse->const_data_ptr<float>();
      upstream.lse_stride = grad_lse->stride(0);
    }
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index) {
  const Batch b(logits, targets, reduction, ignore_index);
  return {b.run(logits), b.max, b.rows.denom, b.rows.state, b.sums, b.rows.status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_grad(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index) {
  STD_TORCH_CHECK(reduction != kNone, "reduction: expected 1 or 2, got 0");
  const Batch b(logits, targets, reduction, ignore_index);
  const Tensor grad = empty(logits, {b.x.rows, logits.size(1)}, logits.scalar_type());
  return {b.run(logits, grad.mutable_data_ptr(), logits.size(1)), b.max, b.rows.denom, b.rows.state, b.sums, b.rows.status, grad};
}

namespace {

RowOptions options_of(const Tensor& logits, double z_loss, const std::optional<Tensor>& weight, double label_smoothing, double logit_scale, double softcap) {
  return {true, z_loss, view_weights(weight, logits), 0, smoothing_of(label_smoothing), nullptr, map_of(logit_scale, softcap)};
}
// The statistics of the rows come last; without them, tensors of nothing.
WithOptions with_options(const Batch& b, const Tensor& logits, const Tensor& out) {
  const auto stat = [&](Tensor StatTensors::*which, ScalarType dtype) { return b.stats ? (*b.stats).*which : empty(logits, {0}, dtype); };
  return {out,
          b.max,
          b.rows.denom,
          b.rows.state,
          b.sums,
          b.rows.status,
          *b.rows.lse,
          *b.rows.z_loss,
          stat(&StatTensors::logprob, ScalarType::Float),
          stat(&StatTensors::entropy, ScalarType::Float),
          stat(&StatTensors::max_abs, ScalarType::Float),
          stat(&StatTensors::hit, ScalarType::Bool)};
}

}  // namespace

WithOptions cross_entropy_with_options(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index, double z_loss, const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& num_items, int64_t valid_vocab, double label_smoothing, double logit_scale, double softcap, bool stats) {
  const Batch b(logits, targets, reduction, ignore_index, options_of(logits, z_loss, weight, label_smoothing, logit_scale, softcap), num_items, valid_vocab, stats);
  return with_options(b, logits, b.run(logits));
}

WithOptionsAndGrad cross_entropy_grad_with_options(const Tensor& logits, const Tensor& targets, int64_t reduction, int64_t ignore_index, double z_loss,
                                                   const std::optional<Tensor>& weight, const std::optional<Tensor>& num_items, int64_t valid_vocab, double label_smoothing,
                                                   double logit_scale, double softcap, bool stats) {
  STD_TORCH_CHECK(reduction != kNone, "reduction: expected 1 or 2, got 0");
  const Batch b(logits, targets, reduction, ignore_index, options_of(logits, z_loss, weight, label_smoothing, logit_scale, softcap), num_items, valid_vocab, stats);
  const Tensor grad = empty(logits, {b.x.rows, logits.size(1)}, logits.scalar_type());
  return std::tuple_cat(with_options(b, logits, b.run(logits, grad.mutable_data_ptr(), logits.size(1))), std::make_tuple(grad));
}

void rescale_grad(Tensor grad, const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums,
                  int64_t ignore_index, const std::optional<Tensor>& weight, double logit_scale, double softcap) {
  const GradInputs in(grad_out, logits, targets, rowmax, state, sums, ignore_index, std::nullopt, map_of(logit_scale, softcap), weight, logits.size(1));
  STD_TORCH_CHECK(grad_out.dim() == 0, "grad_out: expected float32 []");
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == in.x.rows && grad.size(1) == in.x.columns && (in.x.columns <= 1 || grad.stride(1) == 1) && grad.scalar_type() == logits.scalar_type(),
                  "grad: expected shape and dtype of logits, and adjacent columns");
  if (in.x.rows > 0) DCE_CALL(logits, backward_unless_one, in.x, in.t, in.max, in.states, in.upstream, in.columns, grad.mutable_data_ptr(), grad.stride(0));
}

void grad_over_logits(Tensor logits, const Tensor& grad_out, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums, int64_t ignore_index,
                      const std::optional<Tensor>& grad_lse, const std::optional<Tensor>& weight, double logit_scale, double softcap) {
  const GradInputs in(grad_out, logits, targets, rowmax, state, sums, ignore_index, grad_lse, map_of(logit_scale, softcap), weight, logits.size(1));
  if (in.x.rows > 0)
    DCE_CALL(logits, backward, in.x, in.t, in.max, in.states, in.upstream, shard(in.x, 0, in.x.columns, 0), in.columns, logits.mutable_data_ptr(), in.x.row_stride);
}

Tensor grad_logits(const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums,
                   int64_t ignore_index, int64_t v_lo, int64_t v_hi, int64_t v_start) {
  return grad_logits_with_options(grad_out, logits, targets, rowmax, state, sums, ignore_index, v_lo, v_hi, v_start, std::nullopt, 0, std::nullopt, 1.0, 0.0);
}

Tensor grad_logits_with_options(const Tensor& grad_out, const Tensor& logits, const Tensor& targets, const Tensor& rowmax, const Tensor& state, const std::optional<Tensor>& sums,
                                int64_t ignore_index, int64_t v_lo, int64_t v_hi, int64_t v_start, const std::optional<Tensor>& grad_lse, int64_t valid_vocab,
                                const std::optional<Tensor>& weight, double logit_scale, double softcap) {
  const int64_t width = v_hi - v_lo;
  // the columns of the part that take part
  int64_t valid = valid_vocab > 0 ? valid_vocab - v_start - v_lo : width;
  valid = valid < 0 ? 0 : valid < width ? valid : width;
  const GradInputs in(grad_out, logits, targets, rowmax, state, sums, ignore_index, grad_lse, map_of(logit_scale, softcap), weight, v_start + v_lo + valid);
  const Shard part = shard(in.x, v_lo, v_hi, v_start);
  Tensor out = empty(logits, {in.x.rows, width}, logits.scalar_type());
  if (in.x.rows > 0 && valid > 0)
    DCE_CALL(logits, backward, in.x, in.t, in.max, in.states, in.upstream, Shard{part.lo, part.lo + valid, part.start}, in.columns, out.mutable_data_ptr(), width);
  if (in.x.rows > 0 && valid < width) DCE_CALL(logits, zero_columns, out.mutable_data_ptr(), in.x.dtype, in.x.rows, width, valid, width);
  return out;
}

Tensor loss_digits(const Tensor& loss, const Tensor& targets, int64_t ignore_index, const std::optional<Tensor>& weight) {
  STD_TORCH_CHECK(loss.dim() == 1, "loss: expected float32 [N]");
  const int64_t rows = loss.size(0);
  const float* l = float_rows(loss, "loss", loss, rows);
  const Targets t = view_targets(targets, loss, rows, ignore_index);
  const Weights weights = view_weights(weight, loss);
  const int64_t words = weight.has_value() ? kBatchWords : kSumWords;
  Tensor sums = empty(loss, {words}, ScalarType::Long);
  DCE_CALL(loss, count_targets, t, rows, sums.mutable_data_ptr<int64_t>(), words);
  DCE_CALL(loss, sum_losses, l, t, rows, sums.mutable_data_ptr<int64_t>());
  if (weight.has_value()) DCE_CALL(loss, sum_weights, weights, t, rows, sums.mutable_data_ptr<int64_t>() + kSumWords);
  return sums;
}

Tensor reduce_digits(const Tensor& sums, bool mean) {
  const int64_t* words = sum_words(sums);
  Tensor out = empty(sums, {}, ScalarType::Float);
  DCE_CALL(sums, round_sums, words, mean ? divisor_of(sums) : Divisor::kOne, out.mutable_data_ptr<float>());
  return out;
}

Tensor square_digits(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 1 && x.is_contiguous() && x.size(0) < (int64_t{1} << 40), "tensor: expected contiguous [n], n < 2^40");
  const Dtype dtype = dtype_of(x, "tensor");
  Tensor words = empty(x, {kSquareWords + 1}, ScalarType::Long);
  DCE_CALL(x, square_digits, x.const_data_ptr(), dtype, x.size(0), words.mutable_data_ptr<int64_t>());
  return torch::stable::narrow(words, 0, 0, kSquareWords);
}

Tensor grad_norm(const Tensor& digits) {
  STD_TORCH_CHECK(digits.dim() == 1 && digits.size(0) == kSquareWords && digits.scalar_type() == ScalarType::Long && digits.is_contiguous(),
                  "digits: expected contiguous int64 [", kSquareWords, "]");
  Tensor out = empty(digits, {}, ScalarType::Double);
  DCE_CALL(digits, square_norm, digits.const_data_ptr<int64_t>(), out.mutable_data_ptr<double>());
  return out;
}

std::tuple<Tensor, Tensor> term_parts(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous(), "x: expected contiguous float32");
  Tensor significand = torch::stable::new_empty(x, x.sizes(), ScalarType::Int);
  Tensor exponent = torch::stable::new_empty(x, x.sizes(), ScalarType::Int);
  if (x.numel() > 0) DCE_CALL(x, terms, x.const_data_ptr<float>(), x.numel(), significand.mutable_data_ptr<int32_t>(), exponent.mutable_data_ptr<int32_t>());
  return {significand, exponent};
}

}  // namespace dce
