// The page of a new store that a block fills: its tokens belong to one head.
#pragma once

#include "device.h"
#include "head.cuh"

namespace kvevict {

struct StorePage {
  Head head;
  int layer;
  int64_t target;          // physical page
  const int32_t* columns;  // [page_tokens] candidates of the head that it will hold
};

// False for a page that a request with a smaller store does not have. `work` has the candidates,
// `columns`, `pages`, `store`, `num_pages`, `num_layers` and `store_width` of compact.h.
// The launch has `layers` of them, from `first_layer` on.
template <typename Work>
__device__ bool find_store_page(const Work& work, int first_layer, int layers, StorePage* page) {
  const int heads = work.candidates.num_heads, size = work.candidates.page_tokens;
  const int flats = work.store_width * heads;
  const int flat = blockIdx.x % flats;
  const int layer = first_layer + blockIdx.x / flats % layers;
  const int request = blockIdx.x / flats / layers;
  const Request& due = work.candidates.requests[request];
  if (flat >= due.store_blocks * heads) return false;

  const int32_t* pages = work.pages + (static_cast<int64_t>(request) * work.num_layers + layer) * heads;
  int owner = 0, before = 0;
  while (owner < heads - 1 && before + pages[owner] <= flat) before += pages[owner++];
  KVEVICT_ASSERT(flat < before + pages[owner]);
  page->head = find_head(work.candidates, request, layer, owner);
  page->layer = layer;
  const int64_t block = work.store[static_cast<int64_t>(request) * work.store_width + flat / heads];
  page->target = block * heads + flat % heads;
  KVEVICT_ASSERT(page->target >= 0 && page->target < work.num_pages);
  page->columns = work.columns + due.first_kept + (layer * due.store_blocks * heads + flat) * size;
  return true;
}

}  // namespace kvevict
