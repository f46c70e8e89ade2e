#include "pool.h"

#include "candidates_check.h"
#include "launchers.h"

namespace kvevict {

void pool(const Tensor& scores, const Tensor& sums, const Tensor& requests,
          const Tensor& head_indptr, int64_t block_size, int64_t page_tokens, int64_t window,
          int64_t max_columns, double factor, int64_t kernel, bool average) {
  const Launch launch(scores);
  STD_TORCH_CHECK(kernel >= 1 && kernel % 2 == 1,
                  "pooling kernel must be odd and at least 1, not ", kernel);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  check(scores, "scores", ScalarType::Float, {kAny}, scores);
  check(sums, "sums", ScalarType::Float, {kAny, kAny}, scores);
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  Pool work{};
  // Pages play no part: columns are counted, not looked up.
  work.candidates = check_split(requests, head_indptr, layers, heads, block_size, page_tokens, scores);
  work.scores = out<float>(scores);
  work.sums = in<float>(sums);
  work.num_scores = scores.numel();
  work.num_sums = sums.size(1);
  work.factor = static_cast<float>(factor);
  work.query_groups = narrow(sums.size(0), "query groups");
  work.num_layers = narrow(layers, "layers");
  work.window = narrow(window, "window");
  work.kernel = narrow(kernel, "pooling kernel");
  work.chunks = (narrow(max_columns, "columns") + kChunk - 1) / kChunk;
  work.average = average;
  launch_pool(work, requests.size(0) * layers * heads, launch.stream());
  launch.check();
}

}  // namespace kvevict
