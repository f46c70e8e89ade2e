// torch's current CUDA stream.
#pragma once

#ifndef KVEVICT_EMULATE

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "cuda_types.h"

namespace kvevict {

// Looked up at run time: linked against libtorch_cuda, the module would not load on a CPU build of
// torch, where its checks and schemas are tested. The stable accelerator API hands out the native
// stream from torch 2.13 on only.
inline cudaStream_t current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
                   : nullptr;
  }();
  STD_TORCH_CHECK(function, "this build of torch has no CUDA streams");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "torch gave no CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace kvevict

#endif
