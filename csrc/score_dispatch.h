// The head sizes that score is compiled for. One dtype a file: they compile side by side.
#pragma once

#include "score.cuh"

namespace kvevict {

enum class Pass { kLse, kColumns };

template <typename T>
void launch_score(const Score& work, Pass pass, int head_size, int64_t heads, Stream stream);

// Query groups of a launch: rows of `sums`.
inline int query_groups(int rows, int head_size) {
  const int most = kScoreWarps * (head_size <= 128 ? 32 : 16);
  return (rows + most - 1) / most;
}

#define KVEVICT_SCORE(T)                                                                        \
  template <>                                                                                   \
  void launch_score<T>(const Score& work, Pass pass, int head_size, int64_t heads,              \
                       Stream stream) {                                                         \
    const auto run = [&](auto size) {                                                           \
      constexpr int D = decltype(size)::value;                                                  \
      if (pass == Pass::kLse) {                                                                 \
        launch_lse<T, D>(work, heads, stream);                                                  \
      } else {                                                                                  \
        launch_columns<T, D>(work, heads, stream);                                              \
      }                                                                                         \
    };                                                                                          \
    switch (head_size) {                                                                        \
      case 64: return run(std::integral_constant<int, 64>{});                                   \
      case 80: return run(std::integral_constant<int, 80>{});                                   \
      case 96: return run(std::integral_constant<int, 96>{});                                   \
      case 128: return run(std::integral_constant<int, 128>{});                                 \
      case 256: return run(std::integral_constant<int, 256>{});                                 \
    }                                                                                           \
  }

template <> void launch_score<Half>(const Score&, Pass, int, int64_t, Stream);
template <> void launch_score<BFloat16>(const Score&, Pass, int, int64_t, Stream);
template <> void launch_score<float>(const Score&, Pass, int, int64_t, Stream);

}  // namespace kvevict
