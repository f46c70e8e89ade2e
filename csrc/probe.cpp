#include "probe.h"

#include "kept_check.h"
#include "launchers.h"
#include "tail_keys_check.h"

namespace kvevict {

void probe_keys(const Tensor& parts, const Tensor& norms, const Tensor& totals,
                std::vector<Tensor> caches, const Tensor& weights, const Tensor& ages,
                std::vector<Tensor> rotary, bool interleaved, int64_t width, const Tensor& requests,
                const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                int64_t page_tokens) {
  const Launch launch(parts);
  ProbeKeys work{};
  work.keys = check_tail_keys(caches, interleaved, width, requests, head_indptr, old_store, positional,
                              page_tokens, parts);
  const int64_t layers = work.keys.num_layers, heads = work.keys.candidates.num_heads;
  const int64_t columns = work.keys.head_size + kProbeRest;
  check_sizes(weights, "weights", {layers, heads, kAny, columns});
  check_sizes(parts, "parts", {kAny, kAny});
  const int64_t channels = parts.size(0), probes = weights.size(2);
  check_among(channels, "parts", {1, 2});
  check_among(probes, "probes of a head", {channels, 2 * channels});
  check(weights, "weights", ScalarType::Float, {layers, heads, probes, columns}, parts);
  check(parts, "parts", ScalarType::Float, {channels, kAny}, parts);
  check(ages, "ages", ScalarType::Float, {requests.size(0), 2}, parts);
  check(norms, "norms", ScalarType::Float, {channels > 1 ? parts.size(1) : kAny}, parts);
  check(totals, "totals", ScalarType::Float, {requests.size(0), layers, channels > 1 ? width : kAny},
        parts);
  work.weights = in<float>(weights);
  work.ages = in<float>(ages);
  work.parts = out<float>(parts);
  work.norms = out<float>(norms);
  work.totals = out<float>(totals);
  work.num_parts = parts.size(1);
  work.channels = narrow(channels, "parts");
  work.prose = probes > channels;
  check_rotary(rotary, &work.keys, parts);
  launch_probe_keys(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

void probe_scores(const Tensor& scores, const Tensor& parts, const Tensor& means,
                  const Tensor& peaks, const Tensor& norms, const Tensor& totals,
                  const Tensor& window_weights, std::vector<Tensor> kept, int64_t window,
                  int64_t max_columns, const Tensor& requests, const Tensor& head_indptr,
                  const Tensor& old_store, const Tensor& positional, int64_t block_size) {
  const Launch launch(scores);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  check(parts, "parts", ScalarType::Float, {kAny, scores.numel()}, scores);
  const int64_t channels = parts.size(0);
  ProbeScores work{};
  work.kept = check_kept<const float>(kept, layers, channels, scores);
  const Candidates candidates = check_candidates(requests, head_indptr, old_store, positional,
                                                 layers, heads, block_size, kept[0].size(1), scores);
  work.reach = check_reach(means, peaks, window, candidates, requests.size(0), layers, scores);
  if (peaks.size(0) == 0) work.reach.peaks = nullptr;
  STD_TORCH_CHECK(channels > 1 || work.reach.peaks == nullptr, "a window joins the second of two ",
                  "parts, and there is ", channels);
  check(scores, "scores", ScalarType::Float, {kAny}, scores);
  check(norms, "norms", ScalarType::Float, {channels > 1 ? scores.numel() : kAny}, scores);
  check(totals, "totals", ScalarType::Float, {requests.size(0), layers, kAny}, scores);
  check(window_weights, "window_weights", ScalarType::Float, {layers, heads}, scores);
  work.scores = out<float>(scores);
  work.parts = out<float>(parts);
  work.norms = in<float>(norms);
  work.totals = in<float>(totals);
  work.window_weights = in<float>(window_weights);
  work.num_scores = scores.numel();
  work.channels = narrow(channels, "parts");
  work.stride = narrow(kept[0].size(2), "numbers beside a token");
  work.chunks = chunks_of(max_columns);
  work.width = narrow(totals.size(2), "tokens of a tail");
  launch_probe_scores(work, requests.size(0) * layers * heads, launch.stream());
  launch.check();
}

}  // namespace kvevict
