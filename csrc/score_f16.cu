#include <type_traits>

#include "score_dispatch.h"

namespace kvevict {

KVEVICT_SCORE(Half)

}  // namespace kvevict
