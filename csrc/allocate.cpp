#include "allocate.h"

#include "checks.h"
#include "launchers.h"
#include "sort.h"

namespace kvevict {

void allocate(const Tensor& pages, const Tensor& keys, const Tensor& other, const Tensor& gains,
              const Tensor& scores, const Tensor& start, const Tensor& length, const Tensor& caps,
              const Tensor& store_blocks, int64_t block_size, double floor) {
  const Launch launch(pages);
  STD_TORCH_CHECK(block_size >= 1, "block size must be at least 1, not ", block_size);
  STD_TORCH_CHECK(floor >= 0 && floor <= 1, "floor must be in [0, 1], not ", floor);
  check_sizes(pages, "pages", {kAny, kAny});
  const int64_t groups = pages.size(0), heads = pages.size(1), count = scores.numel();
  STD_TORCH_CHECK(heads <= kMaxHeads, "a layer has at most ", kMaxHeads, " KV heads, not ", heads);
  check(pages, "pages", ScalarType::Int, {groups, heads}, pages);
  check(scores, "scores", ScalarType::Float, {count}, pages);
  STD_TORCH_CHECK(count % block_size == 0, "scores must be whole pages");
  check(keys, "keys", ScalarType::Int, {count}, pages);
  check(other, "other", ScalarType::Int, {count}, pages);
  check(gains, "gains", ScalarType::Long, {count / block_size}, pages);
  check(start, "start", ScalarType::Long, {groups, heads}, pages);
  check(length, "length", ScalarType::Int, {groups, heads}, pages);
  check(caps, "caps", ScalarType::Int, {groups, heads}, pages);
  check(store_blocks, "store_blocks", ScalarType::Int, {groups}, pages);

  Sort sort{};
  sort.keys = out<uint32_t>(keys);
  sort.other = out<uint32_t>(other);
  sort.scores = in<float>(scores);
  sort.start = in<int64_t>(start);
  sort.length = in<int32_t>(length);
  sort.num_scores = count;
  sort.num_rows = narrow(groups * heads, "heads of all layers and requests");
  launch_sort(sort, launch.stream());

  Allocate work{};
  work.pages = out<int32_t>(pages);
  work.gains = out<uint64_t>(gains);
  work.keys = sort.keys;
  work.start = sort.start;
  work.length = sort.length;
  work.caps = in<int32_t>(caps);
  work.store_blocks = in<int32_t>(store_blocks);
  work.floor = floor;
  work.num_groups = narrow(groups, "groups");
  work.num_heads = narrow(heads, "KV heads");
  work.block_size = narrow(block_size, "block size");
  launch_allocate(work, launch.stream());
  launch.check();
}

}  // namespace kvevict
