// One address per layer, handed to a kernel by value: no table on the device, and graphs record it.
#pragma once

namespace kvevict {

constexpr int kMaxLayers = 128;

struct Layers {
  void* at[kMaxLayers];
};

}  // namespace kvevict
