#include "rows.h"

#include "candidates_check.h"
#include "launchers.h"

namespace kvevict {

void rows(const Tensor& start, const Tensor& length, const Tensor& caps, const Tensor& first_kept,
          const Tensor& store_blocks, const Tensor& requests, const Tensor& head_indptr,
          int64_t block_size, int64_t page_tokens) {
  const Launch launch(start);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  Rows work{};
  work.candidates = check_split(requests, head_indptr, layers, heads, block_size,
                                page_tokens, start);
  const int64_t groups = requests.size(0) * layers;
  check(start, "start", ScalarType::Long, {groups, heads}, start);
  check(length, "length", ScalarType::Int, {groups, heads}, start);
  check(caps, "caps", ScalarType::Int, {groups, heads}, start);
  check(first_kept, "first_kept", ScalarType::Long, {groups}, start);
  check(store_blocks, "store_blocks", ScalarType::Int, {groups}, start);
  work.start = out<int64_t>(start);
  work.length = out<int32_t>(length);
  work.caps = out<int32_t>(caps);
  work.first_kept = out<int64_t>(first_kept);
  work.store_blocks = out<int32_t>(store_blocks);
  work.num_heads = groups * heads;
  work.num_layers = narrow(layers, "layers");
  launch_rows(work, launch.stream());
  launch.check();
}

}  // namespace kvevict
