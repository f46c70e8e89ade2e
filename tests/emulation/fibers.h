// A block's threads as fibers on one thread of the host, and what they meet at.
//
// A fiber runs until it waits, or reaches an atomic in a shuffled order. In what order is chosen by
// `order`: 0 forwards, 1 backwards, more is the seed of a shuffle, anew each round.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "sanitizers.h"

struct Index3 { unsigned x = 0, y = 0, z = 0; };
inline Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

// A stack has a cache line more than a power of two, so that those of a block are in different sets.
constexpr int kWarp = 32, kMaxThreads = 1024, kStack = (128 << 10) + 64, kSlot = 64, kGuard = 256;
constexpr int kMaxCopies = 512;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
// The compiler's own jumps: no sanitizer mistakes one to another stack for an unwinding.
#define EMULATION_SET(buffer) __builtin_setjmp(buffer)
#define EMULATION_JUMP(buffer) __builtin_longjmp(buffer, 1)
using JumpBuffer = void*[5];
#else
#define EMULATION_SET(buffer) _setjmp(buffer)
#define EMULATION_JUMP(buffer) _longjmp(buffer, 1)
using JumpBuffer = jmp_buf;
#endif

struct Copy {
  void* target;
  const void* source;
  int group;
};

struct Fiber {
  JumpBuffer point;
  ucontext_t context;
  void* known;  // to ThreadSanitizer
  unsigned collectives;
  int group;
  int num_copies;
};

// What each round reads of every fiber.
struct State {
  const uint64_t* epoch;  // what it waits for ...
  uint64_t awaited;       // ... to reach
  bool started, done;
};

struct Warp {
  uint64_t epoch;
  int arrived;
  const char* tag;
  alignas(16) unsigned char slots[2][kWarp][kSlot];
};

inline Fiber fibers[kMaxThreads];
inline State states[kMaxThreads];
inline Copy copies[kMaxThreads][kMaxCopies];
inline Warp warps[kMaxThreads / kWarp];
inline uint64_t block_epoch;
inline int block_arrived, num_threads, current, order;
inline std::mt19937 shuffler;
inline std::function<void()> body;
inline std::string error;
inline unsigned char* stacks;
// Of this block, and of those before it in the launch: blocks may not be ordered by reused memory.
inline unsigned char* shared;
inline std::vector<std::unique_ptr<unsigned char[]>> shared_of_launch;
inline void* main_fiber;

inline JumpBuffer scheduler;

EMULATION_UNSEEN __attribute__((noinline)) inline void yield() {
  enter_fiber(main_fiber);
  if (EMULATION_SET(fibers[current].point) == 0) EMULATION_JUMP(scheduler);
}

[[noreturn]] EMULATION_UNSEEN __attribute__((noinline)) inline void leave() {
  enter_fiber(main_fiber);
  EMULATION_JUMP(scheduler);
}

EMULATION_UNSEEN __attribute__((noinline)) inline void resume(int thread) {
  current = thread;
  threadIdx.x = thread;
  enter_fiber(fibers[thread].known);
  if (EMULATION_SET(scheduler) != 0) return;
  if (states[thread].started) EMULATION_JUMP(fibers[thread].point);
  states[thread].started = true;
  setcontext(&fibers[thread].context);
}

// Ends the kernel with an error.
[[noreturn]] EMULATION_UNSEEN inline void fail(const std::string& message) {
  if (error.empty()) {
    error = message + " (block " + std::to_string(blockIdx.x) + ", thread " +
            std::to_string(current) + ")";
  }
  leave();
}

// Others may run here, and nothing is ordered.
EMULATION_UNSEEN inline void pause() {
  if (order > 1) yield();
}

// `orders`: whether what a thread wrote before is seen by all that leave.
EMULATION_UNSEEN inline void wait(uint64_t* epoch, int* arrived, int expected, bool orders) {
  const uint64_t mine = *epoch + 1;
  // An object for each of four generations: who wakes late must not see the next one's releases.
  char* const object = reinterpret_cast<char*>(epoch) + 1 + mine % 4;
  if (orders) release(object);
  if (++*arrived == expected) {
    *arrived = 0;
    ++*epoch;
  } else {
    states[current].epoch = epoch;
    states[current].awaited = mine;
    yield();
  }
  if (orders) acquire(object);
}

EMULATION_UNSEEN inline void enter() {
  acquire(&body);
  body();
  release(&main_fiber);
  states[current].done = true;
  leave();
}

EMULATION_UNSEEN inline void start(int thread) {
  Fiber& fiber = fibers[thread];
  states[thread] = {};
  fiber.collectives = fiber.group = fiber.num_copies = 0;
  // The same for a thread of every block, as its stack is.
  if (!fiber.known) fiber.known = new_fiber();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks + static_cast<size_t>(thread) * kStack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

// Rounds in which every fiber that can run does, until all are done.
EMULATION_UNSEEN inline void run_fibers() {
  std::vector<int> turns(num_threads);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  const std::string place = " (block " + std::to_string(blockIdx.x) + ")";
  for (int left = num_threads; left > 0;) {
    bool progress = false;
    if (order > 1) std::shuffle(turns.begin(), turns.end(), shuffler);
    for (const int thread : turns) {
      State& state = states[thread];
      if (state.done || (state.epoch && *state.epoch < state.awaited)) continue;
      state.epoch = nullptr;
      resume(thread);
      if (!error.empty()) return;
      progress = true;
      if (state.done) --left;
    }
    if (!progress) {
      error = "a barrier that not all threads reach" + place;
      return;
    }
    // Threads that left cannot arrive any more.
    if (left > 0 && left < num_threads && block_arrived == left) {
      error = "__syncthreads after a thread has returned" + place;
      return;
    }
  }
}

EMULATION_UNSEEN inline void run_block(size_t bytes) {
  block_epoch = block_arrived = 0;
  for (Warp& warp : warps) warp.epoch = warp.arrived = 0;
  // As aligned as shared memory is on a GPU; what it holds is NaN.
  shared_of_launch.push_back(std::make_unique<unsigned char[]>(bytes + kGuard));
  shared = shared_of_launch.back().get();
  for (size_t i = 0; i < bytes + kGuard; ++i) static_cast<volatile unsigned char*>(shared)[i] = 0xff;
  for (int thread = 0; thread < num_threads; ++thread) start(thread);
  release(&body);
  run_fibers();
  for (size_t i = bytes; error.empty() && i < bytes + kGuard; ++i) {
    if (shared[i] != 0xff) {
      error = "a write past the shared memory (block " + std::to_string(blockIdx.x) + ")";
    }
  }
#if !defined(__SANITIZE_THREAD__)
  shared_of_launch.clear();
#endif
}

EMULATION_UNSEEN inline void run(int64_t blocks, int groups, int threads, size_t bytes,
                                 std::function<void()> kernel) {
  if (threads % kWarp || threads > kMaxThreads) throw std::runtime_error("threads of a block");
  if (bytes > kvevict::kMaxShared) throw std::runtime_error("more shared memory than every target has");
  if (!stacks) stacks = static_cast<unsigned char*>(std::malloc(size_t{kMaxThreads} * kStack));
  num_threads = threads;
  body = std::move(kernel);
  error.clear();
  shuffler.seed(order);
  main_fiber = this_fiber();
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(blocks), static_cast<unsigned>(groups), 1};
  std::vector<int64_t> turns(blocks * groups);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  if (order > 1) std::shuffle(turns.begin(), turns.end(), shuffler);
  for (const int64_t turn : turns) {
    blockIdx = {static_cast<unsigned>(turn % blocks), static_cast<unsigned>(turn / blocks), 0};
    run_block(bytes);
    if (!error.empty()) break;
  }
  // The launch is over: what follows in the stream sees all of it.
  acquire(&main_fiber);
  shared_of_launch.clear();
  if (!error.empty()) throw std::runtime_error("emulated kernel: " + error);
}

// Every lane gives a value and sees those of its warp, kSlot bytes apart, until the next exchange.
template <typename Value>
EMULATION_UNSEEN const unsigned char* exchange_slots(const char* tag, const Value& mine,
                                                     bool orders = false) {
  static_assert(sizeof(Value) <= kSlot);
  Warp& warp = warps[current / kWarp];
  const int slot = fibers[current].collectives++ & 1;
  if (warp.arrived == 0) warp.tag = tag;
  if (warp.tag != tag) fail(std::string("a warp meets in ") + tag + " and in " + warp.tag);
  std::memcpy(warp.slots[slot][current % kWarp], &mine, sizeof mine);
  wait(&warp.epoch, &warp.arrived, kWarp, orders);
  return warp.slots[slot][0];
}

template <typename Value>
EMULATION_UNSEEN Value lane_value(const unsigned char* slots, int lane) {
  Value value;
  std::memcpy(&value, slots + lane * kSlot, sizeof value);
  return value;
}

}  // namespace emulate
