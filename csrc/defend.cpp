#include "defend.h"

#include "kept_check.h"
#include "launchers.h"

namespace kvevict {

void value_norms(const Tensor& norms, const Tensor& totals, std::vector<Tensor> caches,
                 const Tensor& requests, const Tensor& head_indptr, const Tensor& old_store,
                 const Tensor& positional, int64_t page_tokens) {
  const Launch launch(norms);
  Norms work{};
  work.caches = check_caches<const unsigned char>(caches, norms);
  const int64_t layers = caches.size(), heads = caches[0].size(1), block_size = caches[0].size(2);
  const int64_t slot = caches[0].size(3) * caches[0].element_size();
  STD_TORCH_CHECK(slot % 8 == 0, "a slot must hold a key and a value of whole 4 bytes, not ", slot,
                  " bytes");
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     block_size, page_tokens, norms);
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
            const Tensor& old_store, const Tensor& positional, int64_t block_size) {
  const Launch launch(scores);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  Defend work{};
  work.kept = check_kept<const float>(kept, layers, 1, scores);
  const Candidates candidates = check_candidates(requests, head_indptr, old_store, positional,
                                                 layers, heads, block_size, kept[0].size(1), scores);
  work.reach = check_reach(means, peaks, window, candidates, requests.size(0), layers, scores);
  check(scores, "scores", ScalarType::Float, {kAny}, scores);
  check(shares, "shares", ScalarType::Float, {scores.numel()}, scores);
  check(norms, "norms", ScalarType::Float, {scores.numel()}, scores);
  check(totals, "totals", ScalarType::Float, {requests.size(0), layers, kAny}, scores);
  work.scores = out<float>(scores);
  work.shares = out<float>(shares);
  work.norms = in<float>(norms);
  work.totals = in<float>(totals);
  work.num_scores = scores.numel();
  work.stride = narrow(kept[0].size(2), "numbers beside a token");
  work.chunks = chunks_of(max_columns);
  work.width = narrow(totals.size(2), "tokens of a tail");
  launch_defend(work, means.numel(), launch.stream());
  launch.check();
}

}  // namespace kvevict
