// The inner loops of the optimizer over raw spans, one set per instruction set.
//
// kernels.cpp is compiled once per instruction set with other flags; the flags decide how wide the loops are, never what
// they compute: every set gives the bits of src/megatrain/optim/spec.py. No globals, no allocation, no threads here.
#pragma once

#include <cstdint>

namespace megatrain {

// The fp32 constants of one step (spec.py, class Scalars). decay_mul is 1 for a span without weight decay.
struct Scalars {
  float coefficient, lerp, beta2, square, step_size, bias2_sqrt, epsilon, decay_mul;
};

inline constexpr uint64_t kNumLanes = 256;

// Spans of one call must not overlap.
struct Kernels {
  const char* name;
  void (*adamw_fp32)(float* w, float* m, float* v, const float* grad, uint64_t count, const Scalars& s);
  void (*adamw_split)(uint16_t* hi, int16_t* lo, float* m, float* v, const float* grad, uint64_t count,
                      const Scalars& s);
  // The sum of squares of one leaf, by 256 lanes and halving.
  double (*leaf_sum_squares)(const float* leaf, uint64_t count);
};

// The sets compiled in, narrowest first; those this processor cannot run are marked by supported() == false.
const Kernels* find_kernels(const char* name);  // nullptr if unknown or not supported
const Kernels* const* all_kernels(int* count);
bool supported(const Kernels& kernels);

// Sums values by 256 lanes and halving, without squaring.
double reduce_lanes(const double* values, uint64_t count);

}  // namespace megatrain
