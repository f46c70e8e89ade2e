// score: attention of the observation window over everything a KV head has cached.
//
// ops/torch/score.py, window_attention (Ada-KV sections 3.4 and 3.5), in two passes over the keys:
// the log-sum-exp of every query row, then the column sums of exp(logit - lse). Where the caller has the
// log-sum-exp already, the second pass alone is NACL's Algorithm 2. A block takes kChunk columns of a
// (request, layer, KV head), so results do not depend on what else is in the batch. Softmax is in
// float32, in powers of two.
#pragma once

#include "candidates.h"
#include "cuda_types.h"
#include "layers.h"
#include "sizes.h"
#include "numbers.h"
#include "packed.h"

namespace kvevict {

struct Score {
  Layers<const unsigned char> caches;  // [blocks, H, block_size, slot] each, keys first in a slot
  Layers<const unsigned char> rings;   // [slots * w, query heads, D] each
  float scales[kMaxLayers]; // of the logits, a quantised cache's key scale included
  Candidates candidates;
  float2* partial;          // [E * L * H, chunks, rows]: maximum and sum of powers of a chunk
  float* lse_out;           // [E * L * H, rows], written by the first pass
  const float* lse;         // the same, read by the second
  float* sums;              // [query groups, columns of all requests before the windows]: or peaks
  int64_t num_sums;
  Stored stored;
  Packed packed;            // of the stores; keys of the tail are then as queries
  float softcap;            // 0 for none
  int num_layers, group, window, slot_bytes, chunks;
};

enum class Pass { kLse, kColumns, kPeaks };

template <typename T>
void launch_score(const Score& work, Pass pass, int head_size, int64_t heads, Stream stream);

// Query groups of a launch: rows of `sums`.
inline int query_groups(int rows, int head_size) {
  return (rows + rows_at_once(head_size) - 1) / rows_at_once(head_size);
}

template <> void launch_score<Half>(const Score&, Pass, int, int64_t, Stream);
template <> void launch_score<BFloat16>(const Score&, Pass, int, int64_t, Stream);
template <> void launch_score<float>(const Score&, Pass, int, int64_t, Stream);

}  // namespace kvevict
