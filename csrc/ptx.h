// Instructions without a CUDA C++ spelling on all targets: asynchronous copies and matrix products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvevict {

// 16 bytes from global to shared memory; both addresses are multiples of 16.
__device__ inline void copy_async(void* shared, const void* global) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target), "l"(global) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `Pending` of this thread's groups of copies are under way.
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

__device__ inline uint4 load16(const void* address) {
  return *static_cast<const uint4*>(address);
}

__device__ inline void store16(void* address, uint4 value) {
  *static_cast<uint4*>(address) = value;
}

// c += a b with a [16, 16] row-major and b [16, 8] column-major fragments, c in float32.
__device__ inline void multiply_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_bfloat16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

__device__ inline uint16_t half_bits(float value) { return __half_as_ushort(__float2half_rn(value)); }

// Within 2^-22 relative; results below the smallest normal number are 0.
__device__ inline float exp2_fast(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

}  // namespace kvevict
