#include "allocate.h"

#include "checks.h"
#include "launchers.h"
#include "sort.h"

namespace kvevict {

namespace {

// What both ways to share pages out take.
Allocate check_rows_of_heads(const Tensor& pages, const Tensor& gains, const Tensor& start,
                             const Tensor& caps, const Tensor& store_blocks, int64_t page_tokens) {
  STD_TORCH_CHECK(page_tokens >= 1, "a page must hold at least 1 token, not ", page_tokens);
  check_sizes(pages, "pages", {kAny, kAny});
  const int64_t groups = pages.size(0), heads = pages.size(1);
  STD_TORCH_CHECK(heads <= kMaxHeads, "a layer has at most ", kMaxHeads, " KV heads, not ", heads);
  check(pages, "pages", ScalarType::Int, {groups, heads}, pages);
  check(gains, "gains", ScalarType::Long, {kAny}, pages);
  check(start, "start", ScalarType::Long, {groups, heads}, pages);
  check(caps, "caps", ScalarType::Int, {groups, heads}, pages);
  check(store_blocks, "store_blocks", ScalarType::Int, {groups}, pages);
  Allocate work{};
  work.pages = out<int32_t>(pages);
  work.gains = out<uint64_t>(gains);
  work.start = in<int64_t>(start);
  work.caps = in<int32_t>(caps);
  work.store_blocks = in<int32_t>(store_blocks);
  work.num_gains = gains.numel();
  work.num_groups = narrow(groups, "groups");
  work.num_heads = narrow(heads, "KV heads");
  work.page_tokens = narrow(page_tokens, "tokens of a page");
  return work;
}

}  // namespace

void allocate(const Tensor& pages, const Tensor& keys, const Tensor& other, const Tensor& gains,
              const Tensor& scores, const Tensor& start, const Tensor& length, const Tensor& caps,
              const Tensor& store_blocks, int64_t page_tokens, double floor) {
  const Launch launch(pages);
  STD_TORCH_CHECK(floor >= 0 && floor <= 1, "floor must be in [0, 1], not ", floor);
  Allocate work = check_rows_of_heads(pages, gains, start, caps, store_blocks, page_tokens);
  const int64_t count = scores.numel();
  check(scores, "scores", ScalarType::Float, {count}, pages);
  check(keys, "keys", ScalarType::Int, {count}, pages);
  check(other, "other", ScalarType::Int, {count}, pages);
  check_sizes(gains, "gains", {count / page_tokens});
  check(length, "length", ScalarType::Int, {pages.size(0), pages.size(1)}, pages);

  Sort sort{};
  sort.keys = out<uint32_t>(keys);
  sort.other = out<uint32_t>(other);
  sort.scores = in<float>(scores);
  sort.start = work.start;
  sort.length = in<int32_t>(length);
  sort.num_scores = count;
  sort.num_rows = narrow(pages.numel(), "heads of all layers and requests");
  launch_sort(sort, launch.stream());

  work.keys = sort.keys;
  work.length = sort.length;
  work.floor = floor;
  launch_allocate(work, launch.stream());
  launch.check();
}

void allocate_shares(const Tensor& pages, const Tensor& gains, const Tensor& shares,
                     const Tensor& start, const Tensor& caps, const Tensor& store_blocks,
                     int64_t page_tokens) {
  const Launch launch(pages);
  Allocate work = check_rows_of_heads(pages, gains, start, caps, store_blocks, page_tokens);
  check(shares, "shares", ScalarType::Double, {kAny, pages.size(1)}, pages);
  const int64_t layers = shares.size(0);
  STD_TORCH_CHECK(layers >= 1 && pages.size(0) % layers == 0, "shares must be of the ",
                  "layers of each request, not of ", layers, " for ", pages.size(0), " of all");
  work.shares = in<double>(shares);
  work.num_layers = narrow(layers, "layers");
  launch_allocate(work, launch.stream());
  launch.check();
}

}  // namespace kvevict
