// Number formats of queries and keys.
#pragma once

#include <cstdint>

namespace kvevict {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// What a tensor's bytes are.
enum class Element { kFloat, kHalf, kBFloat16, kE4M3, kE5M2 };

// Numbers in four bytes.
constexpr int in_word(Element element) {
  return element == Element::kFloat ? 1 : element == Element::kHalf || element == Element::kBFloat16 ? 2 : 4;
}

template <Element kElement>
constexpr int kInWord = in_word(kElement);  // what device code may name

// How a cache stores keys.
enum class Stored { kAsQueries, kE4M3, kE5M2 };

}  // namespace kvevict
