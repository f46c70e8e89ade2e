// What ThreadSanitizer has to know of fibers and barriers; nothing in other builds.
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_write16(void*);
// Code of the emulation itself, whose accesses are nobody's race.
#define EMULATION_UNSEEN __attribute__((no_sanitize_thread, noinline))
#elif defined(__SANITIZE_ADDRESS__)
#define EMULATION_UNSEEN __attribute__((no_sanitize_address))
#else
#define EMULATION_UNSEEN
#endif

namespace emulate {

#if defined(__SANITIZE_THREAD__)
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* new_fiber() { return __tsan_create_fiber(0); }
// Without ordering memory: only what releases and acquires does.
inline void enter_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }
inline void release(void* object) { __tsan_release(object); }
inline void acquire(void* object) { __tsan_acquire(object); }
inline void asynchronous_write(void* target) { __tsan_write16(target); }
#else
inline void* this_fiber() { return nullptr; }
inline void* new_fiber() { return nullptr; }
inline void enter_fiber(void*) {}
inline void release(void*) {}
inline void acquire(void*) {}
inline void asynchronous_write(void*) {}
#endif

}  // namespace emulate
