#include "score.cuh"

namespace kvevict {

KVEVICT_SCORE(float)

}  // namespace kvevict
