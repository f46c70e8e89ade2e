// csrc as one translation unit for the host: the torch headers are read once.
#include "../../csrc/allocate.cpp"
#include "../../csrc/binding.cpp"
#include "../../csrc/compact.cpp"
#include "../../csrc/defend.cpp"
#include "../../csrc/keep.cpp"
#include "../../csrc/kernels.cu"
#include "../../csrc/network.cpp"
#include "../../csrc/pool.cpp"
#include "../../csrc/probe.cpp"
#include "../../csrc/rows.cpp"
#include "../../csrc/score.cpp"
#include "../../csrc/score_bf16.cu"
#include "../../csrc/score_f16.cu"
#include "../../csrc/score_f32.cu"
#include "../../csrc/select.cpp"
#include "../../csrc/versions.cpp"

extern "C" void kvevict_emulation_order(int order) { emulate::order = order; }
