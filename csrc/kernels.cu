// Every kernel but score's, as one translation unit without torch: nvcc reads it once per GPU.
#include "allocate.cuh"
#include "compact.cuh"
#include "defend.cuh"
#include "pool.cuh"
#include "rows.cuh"
#include "select.cuh"
#include "sort.cuh"
