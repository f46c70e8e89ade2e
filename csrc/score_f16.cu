#include "score.cuh"

namespace kvevict {

KVEVICT_SCORE(Half)

}  // namespace kvevict
