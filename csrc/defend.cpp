#include "defend.h"

#include "candidates_check.h"
#include "launchers.h"

namespace kvevict {

namespace {

Element element_of(const Tensor& cache) {
  switch (cache.scalar_type()) {
    case ScalarType::Float: return Element::kFloat;
    case ScalarType::Half: return Element::kHalf;
    case ScalarType::BFloat16: return Element::kBFloat16;
    case ScalarType::Float8_e4m3fn: return Element::kE4M3;
    case ScalarType::Float8_e5m2: return Element::kE5M2;
    default:
      STD_TORCH_CHECK(false, "caches must be float32, float16, bfloat16, float8_e4m3fn or "
                      "float8_e5m2, not ", torch::headeronly::toString(cache.scalar_type()));
  }
}

// One number for each token of each page: [pages, block_size] of every layer.
template <typename Number>
Layers<Number> check_kept(const std::vector<Tensor>& kept, int64_t layers, const Tensor& first) {
  check_layers(kept.size());
  STD_TORCH_CHECK(static_cast<int64_t>(kept.size()) == layers, "shares must be kept of ", layers,
                  " layers, not ", kept.size());
  Layers<Number> found{};
  for (size_t i = 0; i < kept.size(); ++i) {
    check(kept[i], "kept", ScalarType::Float, {kept[0].size(0), kAny}, first);
    if constexpr (std::is_const_v<Number>) {
      found.at[i] = in<float>(kept[i]);
    } else {
      found.at[i] = out<float>(kept[i]);
    }
  }
  return found;
}

}  // namespace

void value_norms(const Tensor& norms, const Tensor& totals, std::vector<Tensor> caches,
                 const Tensor& requests, const Tensor& head_indptr, const Tensor& old_store,
                 const Tensor& positional) {
  const Launch launch(norms);
  Norms work{};
  work.caches = check_caches<const unsigned char>(caches, norms);
  const int64_t layers = caches.size(), heads = caches[0].size(1), block_size = caches[0].size(2);
  const int64_t slot = caches[0].size(3) * caches[0].element_size();
  STD_TORCH_CHECK(slot % 8 == 0, "a slot must hold a key and a value of whole 4 bytes, not ", slot,
                  " bytes");
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     block_size, norms);
  check(norms, "norms", ScalarType::Float, {kAny}, norms);
  check(totals, "totals", ScalarType::Float, {requests.size(0), layers, kAny}, norms);
  work.norms = out<float>(norms);
  work.totals = out<float>(totals);
  work.num_norms = norms.numel();
  work.element = element_of(caches[0]);
  work.num_layers = narrow(layers, "layers");
  work.slot_bytes = narrow(slot, "bytes of a slot");
  work.value_offset = work.value_bytes = work.slot_bytes / 2;
  work.width = narrow(totals.size(2), "tokens of a tail");
  launch_norms(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

void defend(const Tensor& scores, const Tensor& shares, const Tensor& means, const Tensor& peaks,
            const Tensor& norms, const Tensor& totals, std::vector<Tensor> kept, int64_t window,
            int64_t max_columns, const Tensor& requests, const Tensor& head_indptr,
            const Tensor& old_store, const Tensor& positional) {
  const Launch launch(scores);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  Defend work{};
  work.kept = check_kept<const float>(kept, layers, scores);
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     kept[0].size(1), scores);
  const int64_t rows = requests.size(0) * layers * heads;
  check(scores, "scores", ScalarType::Float, {kAny}, scores);
  check(shares, "shares", ScalarType::Float, {scores.numel()}, scores);
  check(norms, "norms", ScalarType::Float, {scores.numel()}, scores);
  check(means, "means", ScalarType::Float, {rows}, scores);
  check(peaks, "peaks", ScalarType::Float, {kAny, kAny}, scores);
  check(totals, "totals", ScalarType::Float, {requests.size(0), layers, kAny}, scores);
  work.scores = out<float>(scores);
  work.shares = out<float>(shares);
  work.means = out<float>(means);
  work.peaks = in<float>(peaks);
  work.norms = in<float>(norms);
  work.totals = in<float>(totals);
  work.num_scores = scores.numel();
  work.num_peaks = peaks.size(1);
  work.query_groups = narrow(peaks.size(0), "query groups");
  work.num_layers = narrow(layers, "layers");
  work.window = narrow(window, "window");
  const int64_t columns = narrow(max_columns, "columns");
  work.chunks = static_cast<int>((columns + kChunk - 1) / kChunk);
  work.width = narrow(totals.size(2), "tokens of a tail");
  launch_defend(work, rows, launch.stream());
  launch.check();
}

void keep_shares(std::vector<Tensor> kept, const Tensor& shares, const Tensor& columns,
                 const Tensor& pages, const Tensor& store, const Tensor& requests,
                 const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional) {
  const Launch launch(shares);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  Keep work{};
  work.kept = check_kept<float>(kept, layers, shares);
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     kept[0].size(1), shares);
  check(shares, "shares", ScalarType::Float, {kAny}, shares);
  check(columns, "columns", ScalarType::Int, {kAny}, shares);
  check(pages, "pages", ScalarType::Int, {requests.size(0), layers, heads}, shares);
  check(store, "store", ScalarType::Int, {requests.size(0), kAny}, shares);
  work.shares = in<float>(shares);
  work.columns = in<int32_t>(columns);
  work.pages = in<int32_t>(pages);
  work.store = in<int32_t>(store);
  work.num_pages = kept[0].size(0);
  work.num_layers = narrow(layers, "layers");
  work.store_width = narrow(store.size(1), "store blocks");
  launch_keep(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

}  // namespace kvevict
