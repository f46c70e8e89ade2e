// The format of packed stores, checked.
#pragma once

#include <vector>

#include "checks.h"
#include "packed.h"

namespace kvevict {

// `page_bytes` of a page of the cache, of `layers` and `heads`; nothing but zeros without bits.
inline Packed check_packed(int64_t page_tokens, int64_t head_size, int64_t key_bits,
                           int64_t value_bits, const std::vector<int64_t>& signs,
                           const Tensor& centres, int64_t layers, int64_t heads,
                           int64_t page_bytes, const Tensor& first) {
  if (key_bits == 0) return Packed{};
  STD_TORCH_CHECK(key_bits >= 2 && key_bits <= 8 && value_bits >= 2 && value_bits <= 8,
                  "stores have 2 to 8 bits, not ", key_bits, " and ", value_bits);
  check_among(head_size, "head size", {KVEVICT_HEAD_SIZES(KVEVICT_COMMA)});
  Packed format = packed_format(static_cast<int>(page_tokens), static_cast<int>(head_size),
                                static_cast<int>(key_bits), static_cast<int>(value_bits));
  STD_TORCH_CHECK(format.used_bytes <= page_bytes, "a page of ", page_bytes, " bytes does not hold ",
                  page_tokens, " tokens of ", key_bits, " and ", value_bits, " bits");
  STD_TORCH_CHECK(static_cast<int64_t>(signs.size()) == (head_size + 31) / 32,
                  "signs must have a bit for each of ", head_size, " dimensions");
  check(centres, "centres", ScalarType::Float, {layers, heads, head_size}, first);
  format.centres = in<float>(centres);
  for (size_t i = 0; i < signs.size(); ++i) format.signs[i] = static_cast<uint32_t>(signs[i]);
  return format;
}

}  // namespace kvevict
