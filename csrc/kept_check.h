// Numbers beside cached tokens, and what scores by peaks read, checked.
#pragma once

#include <type_traits>
#include <vector>

#include "candidates_check.h"
#include "reach.h"

namespace kvevict {

// [pages, page_tokens, numbers] of every layer; at least `channels` numbers a token.
template <typename Number>
Layers<Number> check_kept(const std::vector<Tensor>& kept, int64_t layers, int64_t channels,
                          const Tensor& first) {
  check_layers(kept.size());
  STD_TORCH_CHECK(static_cast<int64_t>(kept.size()) == layers, "numbers must be kept of ", layers,
                  " layers, not ", kept.size());
  check_sizes(kept[0], "kept", {kAny, kAny, kAny});
  STD_TORCH_CHECK(kept[0].size(2) >= channels, "kept must have ", channels,
                  " numbers a token or more, not ", kept[0].size(2));
  Layers<Number> found{};
  for (size_t i = 0; i < kept.size(); ++i) {
    const Tensor& one = kept[i];
    check(one, "kept", ScalarType::Float, {kept[0].size(0), kept[0].size(1), kept[0].size(2)}, first);
    if constexpr (std::is_const_v<Number>) {
      found.at[i] = in<float>(one);
    } else {
      found.at[i] = out<float>(one);
    }
  }
  return found;
}

inline Reach check_reach(const Tensor& means, const Tensor& peaks, int64_t window,
                         const Candidates& candidates, int64_t requests, int64_t layers,
                         const Tensor& first) {
  check(means, "means", ScalarType::Float, {requests * layers * candidates.num_heads}, first);
  check(peaks, "peaks", ScalarType::Float, {kAny, kAny}, first);
  Reach work{};
  work.candidates = candidates;
  work.means = out<float>(means);
  work.peaks = in<float>(peaks);
  work.num_peaks = peaks.size(1);
  work.query_groups = narrow(peaks.size(0), "query groups");
  work.num_layers = narrow(layers, "layers");
  work.window = narrow(window, "window");
  return work;
}

// Blocks that share the columns of a head.
inline int chunks_of(int64_t max_columns) {
  return (narrow(max_columns, "columns") + kChunk - 1) / kChunk;
}

}  // namespace kvevict
