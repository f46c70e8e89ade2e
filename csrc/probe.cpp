#include "probe.h"

#include "kept_check.h"
#include "launchers.h"

namespace kvevict {

namespace {

// Cosines and sines of every layer, of one type and size; nothing where keys are not rotated.
void check_rotary(const std::vector<Tensor>& rotary, ProbeKeys* work, const Tensor& first) {
  STD_TORCH_CHECK(static_cast<int64_t>(rotary.size()) == work->num_layers, "rotary must be of ",
                  work->num_layers, " layers, not ", rotary.size());
  const Tensor* like = nullptr;
  for (size_t i = 0; i < rotary.size(); ++i) {
    const Tensor& table = rotary[i];
    if (table.numel() == 0) continue;
    if (like == nullptr) {
      like = &table;
      check_sizes(table, "rotary", {kAny, kAny});
      work->num_positions = table.size(0);
      work->angle = element_of(table);
      STD_TORCH_CHECK(work->angle <= Element::kBFloat16, "rotary must be float32, float16 or bfloat16");
    }
    check(table, "rotary", like->scalar_type(), {like->size(0), like->size(1)}, first);
    work->rotary.at[i] = in<unsigned char>(table);
  }
  const int64_t turned = like == nullptr ? 0 : like->size(1);
  const int step = 2 * in_word(work->element);
  STD_TORCH_CHECK(turned % step == 0 && turned <= work->head_size, "rotary must turn a multiple of ",
                  step, " dimensions, at most ", work->head_size, ", not ", turned);
  work->pairs = static_cast<int>(turned / 2);
}

}  // namespace

void probe_keys(const Tensor& parts, const Tensor& norms, const Tensor& totals,
                std::vector<Tensor> caches, const Tensor& weights, const Tensor& ages,
                std::vector<Tensor> rotary, bool interleaved, int64_t width, const Tensor& requests,
                const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional) {
  const Launch launch(parts);
  ProbeKeys work{};
  work.caches = check_caches<const unsigned char>(caches, parts);
  work.element = element_of(caches[0]);
  const int64_t layers = caches.size(), heads = caches[0].size(1), size = caches[0].size(3) / 2;
  check_among(size, "head size", {KVEVICT_HEAD_SIZES(KVEVICT_COMMA)});
  check_sizes(caches[0], "caches", {kAny, heads, kAny, 2 * size});
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     caches[0].size(2), parts);
  check_sizes(weights, "weights", {layers, heads, kAny, size + kProbeRest});
  check_sizes(parts, "parts", {kAny, kAny});
  const int64_t channels = parts.size(0), probes = weights.size(2);
  check_among(channels, "parts", {1, 2});
  check_among(probes, "probes of a head", {channels, 2 * channels});
  check(weights, "weights", ScalarType::Float, {layers, heads, probes, size + kProbeRest}, parts);
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
  work.head_size = narrow(size, "head size");
  work.num_layers = narrow(layers, "layers");
  work.slot_bytes = narrow(caches[0].size(3) * caches[0].element_size(), "bytes of a slot");
  work.width = narrow(width, "tokens of a tail");
  work.interleaved = interleaved;
  check_rotary(rotary, &work, parts);
  launch_probe_keys(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

void probe_scores(const Tensor& scores, const Tensor& parts, const Tensor& means,
                  const Tensor& peaks, const Tensor& norms, const Tensor& totals,
                  const Tensor& window_weights, std::vector<Tensor> kept, int64_t window,
                  int64_t max_columns, const Tensor& requests, const Tensor& head_indptr,
                  const Tensor& old_store, const Tensor& positional) {
  const Launch launch(scores);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  check(parts, "parts", ScalarType::Float, {kAny, scores.numel()}, scores);
  const int64_t channels = parts.size(0);
  ProbeScores work{};
  work.kept = check_kept<const float>(kept, layers, channels, scores);
  const Candidates candidates = check_candidates(requests, head_indptr, old_store, positional,
                                                 layers, heads, kept[0].size(1), scores);
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
