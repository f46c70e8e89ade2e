// Every kernel but score's, as one translation unit without torch: nvcc reads it once per GPU.
#include "allocate.cuh"
#include "compact.cuh"
#include "defend.cuh"
#include "keep.cuh"
#include "network.cuh"
#include "pool.cuh"
#include "probe.cuh"
#include "reach.cuh"
#include "rows.cuh"
#include "select.cuh"
#include "sort.cuh"

#ifndef KVEVICT_EMULATE
namespace kvevict {

// In launchers.h, which needs torch.
int64_t cuda_serves() {
  cudaFuncAttributes found;
  const bool serves = cudaFuncGetAttributes(&found, rows_kernel) == cudaSuccess;
  cudaGetLastError();  // Or the next launch would be blamed.
  return serves;
}

}  // namespace kvevict
#endif
