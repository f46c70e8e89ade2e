#include "select.h"

#include "checks.h"
#include "launchers.h"

namespace kvevict {

void select(const Tensor& columns, const Tensor& scores, const Tensor& start, const Tensor& length,
            const Tensor& pages, const Tensor& first_kept, int64_t page_tokens) {
  const Launch launch(columns);
  STD_TORCH_CHECK(page_tokens >= 1, "a page must hold at least 1 token, not ", page_tokens);
  check_sizes(pages, "pages", {kAny, kAny});
  const int64_t groups = pages.size(0), heads = pages.size(1);
  check(columns, "columns", ScalarType::Int, {kAny}, columns);
  check(scores, "scores", ScalarType::Float, {kAny}, columns);
  check(start, "start", ScalarType::Long, {groups, heads}, columns);
  check(length, "length", ScalarType::Int, {groups, heads}, columns);
  check(pages, "pages", ScalarType::Int, {groups, heads}, columns);
  check(first_kept, "first_kept", ScalarType::Long, {groups}, columns);

  Select work{};
  work.columns = out<int32_t>(columns);
  work.scores = in<float>(scores);
  work.start = in<int64_t>(start);
  work.length = in<int32_t>(length);
  work.pages = in<int32_t>(pages);
  work.first_kept = in<int64_t>(first_kept);
  work.num_scores = scores.numel();
  work.num_columns = columns.numel();
  work.num_groups = narrow(groups, "groups");
  work.num_heads = narrow(heads, "KV heads");
  work.page_tokens = narrow(page_tokens, "tokens of a page");
  launch_select(work, launch.stream());
  launch.check();
}

}  // namespace kvevict
