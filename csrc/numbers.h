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

// How a cache stores keys.
enum class Stored { kAsQueries, kE4M3, kE5M2 };

}  // namespace kvevict
