// csrc as one translation unit for the host: the torch headers are read once.
#include "../../csrc/allocate.cu"
#include "../../csrc/binding.cpp"
#include "../../csrc/compact.cu"
#include "../../csrc/observe.cu"
#include "../../csrc/page_table.cu"
#include "../../csrc/pool.cu"
#include "../../csrc/score.cu"
#include "../../csrc/score_bf16.cu"
#include "../../csrc/score_f16.cu"
#include "../../csrc/score_f32.cu"
#include "../../csrc/select.cu"

extern "C" void kvevict_emulation_order(int reverse) { emulate::order = reverse; }
