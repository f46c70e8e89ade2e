// What launchers need of CUDA: no device code, so any C++ compiler reads it.
#pragma once

#include <cstdint>

#ifdef KVEVICT_EMULATE
#include "cuda_emulation.h"
#else
#include <cuda_runtime_api.h>

namespace kvevict {

using Stream = cudaStream_t;

}  // namespace kvevict
#endif
