// Runs CUDA kernels on the host: one fiber per thread of a block, blocks one after another.
//
// What it checks on the way: a barrier or warp operation that not all threads reach, copies that are
// read before they were waited for, misaligned 16-byte accesses, writes past the shared memory.
// Shared memory starts as NaN in every block. A result that depends on the order of blocks or threads
// is a race; built with ThreadSanitizer (races.cpp), only __syncthreads and __syncwarp order memory
// between the threads of a block, and nothing does between blocks.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>

#include "../../csrc/sizes.h"
#include "fibers.h"
#include "sites.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulate {

inline void whole_warp(unsigned mask) {
  if (mask != 0xffffffffu) fail("a warp operation on part of a warp");
}

inline void aligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16) fail("a 16-byte access that is not aligned");
}

inline float half_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  uint32_t word = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : magnitude << 13;
  float value;
  std::memcpy(&value, &word, 4);
  if (magnitude < 0x7c00u) value *= 0x1p112f;
  return bits & 0x8000u ? -value : value;
}

inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

}  // namespace emulate

inline void __syncthreads(const emulate::Site& site = emulate::Site::current()) {
  if (emulate::removed(site)) return;
  emulate::wait(&emulate::block_epoch, &emulate::block_arrived, emulate::num_threads, true);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       const emulate::Site& site = emulate::Site::current()) {
  if (emulate::removed(site)) return;
  emulate::whole_warp(mask);
  emulate::exchange_slots("__syncwarp", 0, true);
}

template <typename Value>
Value __shfl_sync(unsigned mask, Value value, int lane) {
  emulate::whole_warp(mask);
  return emulate::lane_value<Value>(emulate::exchange_slots("__shfl_sync", value), lane % 32);
}

template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lanes) {
  emulate::whole_warp(mask);
  const auto* slots = emulate::exchange_slots("__shfl_xor_sync", value);
  return emulate::lane_value<Value>(slots, (threadIdx.x % 32) ^ lanes);
}

template <typename Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned lanes) {
  emulate::whole_warp(mask);
  const auto* slots = emulate::exchange_slots("__shfl_up_sync", value);
  const unsigned lane = threadIdx.x % 32;
  return emulate::lane_value<Value>(slots, lane < lanes ? lane : lane - lanes);
}

inline unsigned __match_any_sync(unsigned mask, unsigned value) {
  emulate::whole_warp(mask);
  const auto* slots = emulate::exchange_slots("__match_any_sync", value);
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane) {
    equal |= (emulate::lane_value<unsigned>(slots, lane) == value ? 1u : 0u) << lane;
  }
  return equal;
}

inline unsigned __ballot_sync(unsigned mask, bool value) {
  emulate::whole_warp(mask);
  const auto* slots = emulate::exchange_slots("__ballot_sync", value);
  unsigned set = 0;
  for (int lane = 0; lane < 32; ++lane) {
    set |= (emulate::lane_value<bool>(slots, lane) ? 1u : 0u) << lane;
  }
  return set;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

inline unsigned atomicAdd(unsigned* address, unsigned value,
                          const emulate::Site& site = emulate::Site::current()) {
  if (!emulate::removed(site)) {
    emulate::pause();
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  }
  const unsigned before = *address;
  emulate::pause();
  *address = before + value;
  return before;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

inline float __uint_as_float(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline int64_t __double_as_longlong(double value) {
  int64_t word;
  std::memcpy(&word, &value, 8);
  return word;
}

#define KVEVICT_ASSERT(condition)                                     \
  do {                                                                \
    if (!(condition)) emulate::fail("assertion " #condition);         \
  } while (0)

namespace kvevict {

using Stream = void*;

inline unsigned char* shared_memory() { return emulate::shared; }

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int groups, int threads, size_t shared,
            Stream, const Arguments&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= kMaxParameters);
  check_grid(blocks, groups);
  emulate::run(blocks, groups, threads, shared, [&] { kernel(arguments...); });
}

inline uint4 load16(const void* address) {
  emulate::aligned(address);
  uint4 value;
  std::memcpy(&value, address, 16);
  return value;
}

inline void store16(void* address, uint4 value) {
  emulate::aligned(address);
  std::memcpy(address, &value, 16);
}

EMULATION_UNSEEN inline void copy_async(void* shared, const void* global) {
  emulate::aligned(shared);
  emulate::aligned(global);
  emulate::Fiber& fiber = emulate::fibers[emulate::current];
  if (fiber.num_copies == emulate::kMaxCopies) emulate::fail("copies that are never waited for");
  emulate::copies[emulate::current][fiber.num_copies++] = {shared, global, fiber.group};
  emulate::asynchronous_write(shared);
}

EMULATION_UNSEEN inline void commit_copies() { ++emulate::fibers[emulate::current].group; }

template <int Pending>
EMULATION_UNSEEN void wait_copies(const emulate::Site& site = emulate::Site::current()) {
  if (emulate::removed(site)) return;
  emulate::Fiber& fiber = emulate::fibers[emulate::current];
  emulate::Copy* const copies = emulate::copies[emulate::current];
  int later = 0;
  for (int i = 0; i < fiber.num_copies; ++i) {
    const emulate::Copy copy = copies[i];
    if (copy.group < fiber.group - Pending) {
      std::memcpy(copy.target, copy.source, 16);
    } else {
      copies[later++] = copy;
    }
  }
  fiber.num_copies = later;
}

// mma.m16n8k16: fragment layouts as in the PTX manual, "Matrix Fragments for mma.m16n8k16".
template <float (*Widen)(uint16_t)>
void multiply(const char* tag, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Fragments {
    float a[4][2], b[2][2];
  } mine;
  for (int i = 0; i < 2; ++i) {
    for (int part = 0; part < 4; ++part) {
      mine.a[part][i] = Widen(static_cast<uint16_t>(a[part] >> 16 * i));
    }
    mine.b[0][i] = Widen(static_cast<uint16_t>(b0 >> 16 * i));
    mine.b[1][i] = Widen(static_cast<uint16_t>(b1 >> 16 * i));
  }
  const auto* slots = emulate::exchange_slots(tag, mine);
  const auto at = [&](int lane) {
    return reinterpret_cast<const Fragments*>(slots + lane * emulate::kSlot);
  };
  const int lane = threadIdx.x % 32;
  for (int out = 0; out < 4; ++out) {
    const int half = out / 2, column = lane % 4 * 2 + out % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int quad = k % 8 / 2, upper = k / 8;
      sum += at(lane / 4 * 4 + quad)->a[half + 2 * upper][k % 2] *
             at(column * 4 + quad)->b[upper][k % 2];
    }
    c[out] += sum;
  }
}

inline void multiply_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<emulate::half_to_float>("mma f16", c, a, b0, b1);
}

inline void multiply_bfloat16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<emulate::bfloat16_to_float>("mma bf16", c, a, b0, b1);
}

using emulate::half_to_float;

inline uint16_t half_bits(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

inline float exp2_fast(float value) { return __builtin_exp2f(value); }

}  // namespace kvevict
