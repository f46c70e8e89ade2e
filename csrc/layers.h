// One address per layer, handed to a kernel by value: no table on the device, and graphs record it.
#pragma once

#include "sizes.h"

namespace kvevict {

// `Byte` is const where the launch only reads.
template <typename Byte>
struct Layers {
  Byte* at[kMaxLayers];
};

}  // namespace kvevict
