#include "score.cuh"

namespace kvevict {

KVEVICT_SCORE(BFloat16)

}  // namespace kvevict
