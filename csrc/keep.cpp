#include "keep.h"

#include "kept_check.h"
#include "launchers.h"

namespace kvevict {

void keep_page_values(std::vector<Tensor> kept, const Tensor& numbers, const Tensor& columns,
                      const Tensor& pages, const Tensor& store, const Tensor& requests,
                      const Tensor& head_indptr, const Tensor& old_store, const Tensor& positional,
                      int64_t block_size) {
  const Launch launch(numbers);
  check_sizes(head_indptr, "head_indptr", {kAny, kAny, kAny});
  check(numbers, "numbers", ScalarType::Float, {kAny, kAny}, numbers);
  const int64_t layers = head_indptr.size(0), heads = head_indptr.size(2) - 1;
  Keep work{};
  work.kept = check_kept<float>(kept, layers, numbers.size(0), numbers);
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     block_size, kept[0].size(1), numbers);
  check(columns, "columns", ScalarType::Int, {kAny}, numbers);
  check(pages, "pages", ScalarType::Int, {requests.size(0), layers, heads}, numbers);
  check(store, "store", ScalarType::Int, {requests.size(0), kAny}, numbers);
  work.numbers = in<float>(numbers);
  work.columns = in<int32_t>(columns);
  work.pages = in<int32_t>(pages);
  work.store = in<int32_t>(store);
  work.num_numbers = numbers.size(1);
  work.num_pages = kept[0].size(0);
  work.channels = narrow(numbers.size(0), "numbers of a token");
  work.stride = narrow(kept[0].size(2), "numbers beside a token");
  work.num_layers = narrow(layers, "layers");
  work.store_width = narrow(store.size(1), "store blocks");
  launch_keep(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

}  // namespace kvevict
