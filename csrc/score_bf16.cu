#include <type_traits>

#include "score_dispatch.h"

namespace kvevict {

KVEVICT_SCORE(BFloat16)

}  // namespace kvevict
