// The keys of tails and the tables that take their rotation out, checked.
#pragma once

#include <vector>

#include "candidates_check.h"
#include "tail_keys.h"

namespace kvevict {

// Cosines and sines of every layer, of one type and size; nothing where keys are not rotated.
inline void check_rotary(const std::vector<Tensor>& rotary, TailKeys* keys, const Tensor& first) {
  STD_TORCH_CHECK(static_cast<int64_t>(rotary.size()) == keys->num_layers, "rotary must be of ",
                  keys->num_layers, " layers, not ", rotary.size());
  const Tensor* like = nullptr;
  for (size_t i = 0; i < rotary.size(); ++i) {
    const Tensor& table = rotary[i];
    if (table.numel() == 0) continue;
    if (like == nullptr) {
      like = &table;
      check_sizes(table, "rotary", {kAny, kAny});
      keys->num_positions = table.size(0);
      keys->angle = element_of(table);
      STD_TORCH_CHECK(keys->angle <= Element::kBFloat16, "rotary must be float32, float16 or bfloat16");
    }
    check(table, "rotary", like->scalar_type(), {like->size(0), like->size(1)}, first);
    keys->rotary.at[i] = in<unsigned char>(table);
  }
  const int64_t turned = like == nullptr ? 0 : like->size(1);
  const int step = 2 * in_word(keys->element);
  STD_TORCH_CHECK(turned % step == 0 && turned <= keys->head_size, "rotary must turn a multiple of ",
                  step, " dimensions, at most ", keys->head_size, ", not ", turned);
  keys->pairs = static_cast<int>(turned / 2);
}

// Without the rotation, which is checked behind the other arguments of a launch.
inline TailKeys check_tail_keys(const std::vector<Tensor>& caches, bool interleaved, int64_t width,
                                const Tensor& requests, const Tensor& head_indptr,
                                const Tensor& old_store, const Tensor& positional,
                                int64_t page_tokens, const Tensor& first) {
  TailKeys keys{};
  keys.caches = check_caches<const unsigned char>(caches, first);
  keys.element = element_of(caches[0]);
  const int64_t layers = caches.size(), heads = caches[0].size(1), size = caches[0].size(3) / 2;
  check_among(size, "head size", {KVEVICT_HEAD_SIZES(KVEVICT_COMMA)});
  check_sizes(caches[0], "caches", {kAny, heads, kAny, 2 * size});
  keys.candidates = check_candidates(requests, head_indptr, old_store, positional, layers, heads,
                                     caches[0].size(2), page_tokens, first);
  keys.head_size = narrow(size, "head size");
  keys.num_layers = narrow(layers, "layers");
  keys.slot_bytes = narrow(caches[0].size(3) * caches[0].element_size(), "bytes of a slot");
  keys.width = narrow(width, "tokens of a tail");
  keys.interleaved = interleaved;
  return keys;
}

}  // namespace kvevict
