#include "cuda_types.h"
#include "launchers.h"

namespace kvevict {

#ifdef KVEVICT_EMULATE
int64_t cuda_built() { return 0; }
int64_t cuda_driver() { return 0; }
int64_t cuda_serves() { return 0; }
#else
int64_t cuda_built() { return CUDART_VERSION; }

int64_t cuda_driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
#endif

}  // namespace kvevict
