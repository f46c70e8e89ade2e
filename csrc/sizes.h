// Every size that kernels are compiled for or bounded by, once. vllm_kvevict/ops/cuda/limits.py has
// those that Python plans with; a test compares them.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace kvevict {

constexpr int kMaxLayers = 128;      // of a launch: their addresses are arguments
constexpr int kMaxHeads = 1024;      // KV heads of a layer
constexpr int kMaxPageTokens = 1024; // of a store's page
constexpr int kChunk = 1024;         // columns that a block of score goes through
constexpr int kStep = 8;             // columns that a warp multiplies at a time
constexpr int kNeighbours = 5;       // columns that peaks are averaged over
constexpr int kBefore = 2;           // columns before a peak of these averages that have it, too
constexpr int kAfter = 14;           // columns after it that have it
constexpr int kPeakChunk = kChunk - 2 * kStep;  // of a block of peaks: with the steps beside it, a chunk
constexpr int kScoreWarps = 8;       // most warps of a block of score
constexpr int kWideHead = 128;       // larger heads halve what a warp holds in registers
constexpr int kLeastScoreWarps = 4;  // of a block of score: fewer load a tile too slowly
constexpr size_t kMaxParameters = 4096;  // bytes of arguments that every target takes
constexpr size_t kMaxShared = 48 << 10;  // bytes that a block has on every target without asking
constexpr float kProtected = 1e30f;  // the score of tokens that stay
constexpr float kLeastShare = 1e-6f; // what stands below a logarithm at least

// Query rows that see a key at once, and the blocks of 16 among them that one warp holds.
constexpr int row_blocks(int head_size) { return head_size <= kWideHead ? 2 : 1; }
constexpr int rows_at_once(int head_size) { return kScoreWarps * 16 * row_blocks(head_size); }

// What a grid holds; the host narrows neither number unseen.
inline void check_grid(int64_t blocks, int groups) {
  if (blocks < 0 || blocks > INT_MAX || groups < 0 || groups > USHRT_MAX) {
    throw std::runtime_error("one launch takes at most 2**31 - 1 blocks and 65535 groups of query rows");
  }
}

}  // namespace kvevict

// Head sizes that score is compiled for, and pages of tokens.
#define KVEVICT_HEAD_SIZES(USE) USE(64) USE(80) USE(96) USE(128) USE(256)
#define KVEVICT_BLOCK_SIZES(USE) USE(16) USE(32) USE(64) USE(128)
