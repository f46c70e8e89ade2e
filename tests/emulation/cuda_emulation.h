// Runs CUDA kernels on the host: one fiber per thread of a block, blocks one after another.
//
// What it checks on the way: a barrier or warp operation that not all threads reach, copies that are
// read before they were waited for, misaligned 16-byte accesses, writes past the shared memory.
// Shared memory starts as NaN in every block. `kvevict_emulation_order` reverses the order of the
// blocks, and of their threads between two barriers: a result that depends on it is a race.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/limits.h"

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

struct Index3 { unsigned x = 0, y = 0, z = 0; };
inline Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

constexpr int kWarp = 32, kMaxThreads = 1024, kStack = 128 << 10, kSlot = 64, kGuard = 256;

struct Copy {
  void* target;
  const void* source;
  int group;
};

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  bool started, done;
  const uint64_t* epoch;  // what it waits for ...
  uint64_t awaited;       // ... to reach
  unsigned collectives;
  int group;
  std::vector<Copy> copies;
};

struct Warp {
  uint64_t epoch;
  int arrived;
  const char* tag;
  alignas(16) unsigned char slots[2][kWarp][kSlot];
};

inline Fiber fibers[kMaxThreads];
inline Warp warps[kMaxThreads / kWarp];
inline uint64_t block_epoch;
inline int block_arrived, num_threads, current, order;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::string error;
inline std::vector<unsigned char> shared;
inline unsigned char* stacks;

__attribute__((noinline)) inline void yield() {
  if (_setjmp(fibers[current].context) == 0) _longjmp(scheduler, 1);
}

// Ends the kernel with an error; never returns.
[[noreturn]] inline void fail(const std::string& message) {
  if (error.empty()) {
    error = message + " (block " + std::to_string(blockIdx.x) + ", thread " +
            std::to_string(current) + ")";
  }
  for (;;) _longjmp(scheduler, 1);
}

inline void wait(uint64_t* epoch, int* arrived, int expected) {
  const uint64_t mine = *epoch + 1;
  if (++*arrived == expected) {
    *arrived = 0;
    ++*epoch;
    return;
  }
  fibers[current].epoch = epoch;
  fibers[current].awaited = mine;
  yield();
}

inline void enter() {
  body();
  fibers[current].done = true;
  for (;;) _longjmp(scheduler, 1);
}

inline void resume(int thread) {
  Fiber& fiber = fibers[thread];
  current = thread;
  threadIdx.x = thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void start(int thread) {
  Fiber& fiber = fibers[thread];
  fiber.started = fiber.done = false;
  fiber.epoch = nullptr;
  fiber.collectives = fiber.group = 0;
  fiber.copies.clear();
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stacks + static_cast<size_t>(thread) * kStack;
  fiber.start.uc_stack.ss_size = kStack;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, enter, 0);
}

inline void run_block() {
  block_epoch = block_arrived = 0;
  for (Warp& warp : warps) warp.epoch = warp.arrived = 0;
  std::memset(shared.data(), 0xff, shared.size());
  for (int thread = 0; thread < num_threads; ++thread) start(thread);
  for (int left = num_threads; left > 0;) {
    bool progress = false;
    for (int i = 0; i < num_threads; ++i) {
      const int thread = order ? num_threads - 1 - i : i;
      Fiber& fiber = fibers[thread];
      if (fiber.done || (fiber.epoch && *fiber.epoch < fiber.awaited)) continue;
      fiber.epoch = nullptr;
      resume(thread);
      if (!error.empty()) return;
      progress = true;
      if (fiber.done) --left;
    }
    if (!progress) {
      error = "a barrier that not all threads reach (block " + std::to_string(blockIdx.x) + ")";
      return;
    }
    // Threads that left cannot arrive any more.
    if (left > 0 && left < num_threads && block_arrived == left) {
      error = "__syncthreads after a thread has returned (block " + std::to_string(blockIdx.x) + ")";
      return;
    }
  }
  for (size_t i = shared.size() - kGuard; i < shared.size(); ++i) {
    if (shared[i] != 0xff) {
      error = "a write past the shared memory (block " + std::to_string(blockIdx.x) + ")";
      return;
    }
  }
}

inline void run(int64_t blocks, int groups, int threads, size_t bytes, std::function<void()> kernel) {
  if (threads % kWarp || threads > kMaxThreads) throw std::runtime_error("threads of a block");
  if (bytes > (48u << 10)) throw std::runtime_error("more shared memory than every target has");
  if (!stacks) stacks = static_cast<unsigned char*>(std::malloc(size_t{kMaxThreads} * kStack));
  num_threads = threads;
  body = std::move(kernel);
  error.clear();
  shared.resize(bytes + kGuard);
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(blocks), static_cast<unsigned>(groups), 1};
  for (int group = 0; group < groups; ++group) {
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t block = order ? blocks - 1 - i : i;
      blockIdx = {static_cast<unsigned>(block), static_cast<unsigned>(group), 0};
      run_block();
      if (!error.empty()) throw std::runtime_error("emulated kernel: " + error);
    }
  }
}

// Every lane gives a value and sees those of its warp, kSlot bytes apart, until the next exchange.
template <typename Value>
const unsigned char* exchange_slots(const char* tag, const Value& mine) {
  static_assert(sizeof(Value) <= kSlot);
  Warp& warp = warps[current / kWarp];
  const int slot = fibers[current].collectives++ & 1;
  if (warp.arrived == 0) warp.tag = tag;
  if (warp.tag != tag) fail(std::string("a warp meets in ") + tag + " and in " + warp.tag);
  std::memcpy(warp.slots[slot][current % kWarp], &mine, sizeof mine);
  wait(&warp.epoch, &warp.arrived, kWarp);
  return warp.slots[slot][0];
}

template <typename Value>
Value lane_value(const unsigned char* slots, int lane) {
  Value value;
  std::memcpy(&value, slots + lane * kSlot, sizeof value);
  return value;
}

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

inline void __syncthreads() {
  emulate::wait(&emulate::block_epoch, &emulate::block_arrived, emulate::num_threads);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulate::whole_warp(mask);
  emulate::exchange_slots("__syncwarp", 0);
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

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
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

inline unsigned char* shared_memory() { return emulate::shared.data(); }

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

inline void copy_async(void* shared, const void* global) {
  emulate::aligned(shared);
  emulate::aligned(global);
  emulate::Fiber& fiber = emulate::fibers[emulate::current];
  fiber.copies.push_back({shared, global, fiber.group});
}

inline void commit_copies() { ++emulate::fibers[emulate::current].group; }

template <int Pending>
void wait_copies() {
  emulate::Fiber& fiber = emulate::fibers[emulate::current];
  std::vector<emulate::Copy> later;
  for (const emulate::Copy& copy : fiber.copies) {
    if (copy.group < fiber.group - Pending) {
      std::memcpy(copy.target, copy.source, 16);
    } else {
      later.push_back(copy);
    }
  }
  fiber.copies = std::move(later);
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

// For values that a half holds exactly, infinity and NaN.
inline uint16_t half_bits(float value) {
  const uint32_t word = __float_as_uint(value), sign = word >> 16 & 0x8000u;
  const uint32_t magnitude = word & 0x7fffffffu;
  uint32_t bits = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  if (magnitude < 0x7f800000u) bits = __float_as_uint(__uint_as_float(magnitude) * 0x1p-112f) >> 13;
  return static_cast<uint16_t>(sign | bits);
}

inline float exp2_fast(float value) { return __builtin_exp2f(value); }

}  // namespace kvevict
