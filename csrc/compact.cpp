#include "compact.h"

#include "candidates_check.h"
#include "launchers.h"
#include "packed_check.h"

namespace kvevict {

void compact(std::vector<Tensor> caches, const Tensor& columns, const Tensor& pages,
             const Tensor& store, const Tensor& requests, const Tensor& head_indptr,
             const Tensor& old_store, const Tensor& positional, const Tensor& staging,
             int64_t page_tokens, int64_t key_bits, int64_t value_bits, std::vector<int64_t> signs,
             const Tensor& centres, std::vector<double> key_scales, std::vector<double> value_scales) {
  const Launch launch(columns);
  Compact work{};
  work.caches = check_caches<unsigned char>(caches, columns);
  const int64_t layers = caches.size(), heads = caches[0].size(1), block_size = caches[0].size(2);
  const int64_t slot = caches[0].size(3) * caches[0].element_size();
  STD_TORCH_CHECK(slot % 4 == 0, "a slot of a head must be a multiple of 4 bytes, not ", slot);
  work.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     block_size, page_tokens, columns);
  check(columns, "columns", ScalarType::Int, {kAny}, columns);
  check(pages, "pages", ScalarType::Int, {requests.size(0), layers, heads}, columns);
  check(store, "store", ScalarType::Int, {requests.size(0), kAny}, columns);
  work.columns = in<int32_t>(columns);
  work.pages = in<int32_t>(pages);
  work.store = in<int32_t>(store);
  work.num_pages = caches[0].size(0) * heads;
  work.slot_bytes = narrow(slot, "bytes of a slot");
  const int page_bytes = narrow(block_size * slot, "bytes of a page");
  const int64_t head_size = caches[0].size(3) / 2;
  work.packed = check_packed(page_tokens, head_size, key_bits, value_bits, signs, centres, layers,
                             heads, page_bytes, columns);
  work.page_bytes = page_bytes;
  if (key_bits > 0) {
    STD_TORCH_CHECK(key_scales.size() == caches.size() && value_scales.size() == caches.size(),
                    "scales of keys and values must be of ", layers, " layers, not ",
                    key_scales.size(), " and ", value_scales.size());
    check_sizes(caches[0], "caches", {kAny, heads, kAny, 2 * head_size});
    work.page_bytes = work.packed.used_bytes;
    work.element = element_of(caches[0]);
    work.head_size = static_cast<int>(head_size);
    for (int64_t i = 0; i < layers; ++i) {
      work.key_scales[i] = static_cast<float>(key_scales[i]);
      work.value_scales[i] = static_cast<float>(value_scales[i]);
    }
  } else {
    STD_TORCH_CHECK(page_tokens == block_size, "pages of a store that is not packed hold ", block_size,
                    " tokens, not ", page_tokens);
  }
  work.num_layers = narrow(layers, "layers");
  work.store_width = narrow(store.size(1), "store blocks");
  work.pass_layers = work.num_layers;
  check(staging, "staging", ScalarType::Byte, {kAny}, columns);
  if (staging.numel() > 0) {
    const int64_t layer_bytes = requests.size(0) * store.size(1) * heads * block_size * slot;
    STD_TORCH_CHECK(staging.numel() >= layer_bytes, "staging must hold a layer of every request, ",
                    layer_bytes, " bytes, not ", staging.numel());
    check_aligned(staging, "staging", 16);
    work.staging = out<unsigned char>(staging);
    work.pass_layers = narrow(staging.numel() / layer_bytes, "layers");
  }
  launch_compact(work, narrow(requests.size(0), "requests"), launch.stream());
  launch.check();
}

}  // namespace kvevict
