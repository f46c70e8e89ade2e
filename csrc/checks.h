// What launchers ask of their tensors. Errors name the tensor, what was given and what is valid.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <limits>
#include <string>

#include "cuda_types.h"
#include "sizes.h"
#include "stream.h"

namespace kvevict {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAny = -1;

inline bool on_device(const Tensor& tensor) {
#ifdef KVEVICT_EMULATE
  return tensor.is_cpu();
#else
  return tensor.is_cuda();
#endif
}

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

inline void check_device(const Tensor& tensor, const char* name, const Tensor& first) {
  STD_TORCH_CHECK(on_device(tensor) && tensor.get_device_index() == first.get_device_index(), name,
                  " must be on the CUDA device of the other tensors");
}

inline void check_dtype(const Tensor& tensor, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " must be ",
                  torch::headeronly::toString(dtype), ", not ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

inline void check_sizes(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
  bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
  std::string wanted = "[";
  int64_t i = 0;
  for (const int64_t size : sizes) {
    same = same && (size == kAny || tensor.size(i) == size);
    wanted += (i++ ? ", " : "") + (size == kAny ? std::string("any") : std::to_string(size));
  }
  STD_TORCH_CHECK(same, name, " must have shape ", wanted, "], not ", shape_of(tensor));
}

// A contiguous tensor on the device of `first`.
inline void check(const Tensor& tensor, const char* name, ScalarType dtype,
                  std::initializer_list<int64_t> sizes, const Tensor& first) {
  check_device(tensor, name, first);
  check_dtype(tensor, name, dtype);
  check_sizes(tensor, name, sizes);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

// Rows that may lie apart, each contiguous.
inline void check_rows(const Tensor& tensor, const char* name, ScalarType dtype,
                       std::initializer_list<int64_t> sizes, const Tensor& first) {
  check_device(tensor, name, first);
  check_dtype(tensor, name, dtype);
  check_sizes(tensor, name, sizes);
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, name, " must have contiguous rows");
}

inline void check_aligned(const Tensor& tensor, const char* name, uintptr_t bytes) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0, name,
                  " must start at a multiple of ", bytes, " bytes");
}

inline int narrow(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), name,
                  " must be between 0 and 2**31 - 1, not ", value);
  return static_cast<int>(value);
}

#define KVEVICT_COMMA(size) size,

inline void check_among(int64_t value, const char* name, std::initializer_list<int64_t> valid) {
  std::string all;
  bool found = false;
  for (const int64_t one : valid) {
    found = found || value == one;
    all += (all.empty() ? "" : ", ") + std::to_string(one);
  }
  STD_TORCH_CHECK(found, name, " must be one of ", all, ", not ", value);
}

inline void check_block_size(int64_t block_size) {
  check_among(block_size, "block size", {KVEVICT_BLOCK_SIZES(KVEVICT_COMMA)});
}

inline void check_layers(size_t layers) {
  STD_TORCH_CHECK(layers >= 1 && layers <= kMaxLayers, "one launch takes 1 to ", kMaxLayers,
                  " layers, not ", layers);
}

template <typename Value>
const Value* in(const Tensor& tensor) {
  return static_cast<const Value*>(tensor.const_data_ptr());
}

template <typename Value>
Value* out(const Tensor& tensor) {
  return static_cast<Value*>(tensor.mutable_data_ptr());
}

// The device and stream that a launcher works on.
class Launch {
 public:
  explicit Launch(const Tensor& first)
#ifdef KVEVICT_EMULATE
  {
    device_of(first);
  }
#else
      : guard_(device_of(first)), stream_(current_stream(first.get_device_index())) {
  }
#endif

  Stream stream() const { return stream_; }

  void check() const {
#ifndef KVEVICT_EMULATE
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, "a kernel was not launched, or one before it failed: ", cudaGetErrorString(error));
#endif
  }

 private:
  static int32_t device_of(const Tensor& first) {
    STD_TORCH_CHECK(on_device(first), "tensors must be on a CUDA device");
    return first.get_device_index();
  }

#ifndef KVEVICT_EMULATE
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  Stream stream_{};
};

}  // namespace kvevict
