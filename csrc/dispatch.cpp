// Which of the compiled kernel sets this processor can run.
#include <cstring>

#include "kernels.h"

namespace megatrain {

extern const Kernels kernels_scalar;
extern const Kernels kernels_baseline;  // what every processor of the architecture has: SSE2, NEON
#if defined(MEGATRAIN_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

static const Kernels* const kAll[] = {
    &kernels_scalar,
    &kernels_baseline,
#if defined(MEGATRAIN_X86)
    &kernels_avx2,
    &kernels_avx512,
#endif
};

const Kernels* const* all_kernels(int* count) {
  *count = static_cast<int>(sizeof kAll / sizeof kAll[0]);
  return kAll;
}

bool supported(const Kernels& kernels) {
#if defined(MEGATRAIN_X86)
  __builtin_cpu_init();
  if (&kernels == &kernels_avx2) return __builtin_cpu_supports("avx2");
  if (&kernels == &kernels_avx512) {  // the set of every AVX-512 server since Skylake; CMakeLists.txt names the same
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  (void)kernels;
  return true;
}

const Kernels* find_kernels(const char* name) {
  for (const Kernels* kernels : kAll) {
    if (std::strcmp(kernels->name, name) == 0) return supported(*kernels) ? kernels : nullptr;
  }
  return nullptr;
}

double reduce_lanes(const double* values, uint64_t count) {
  double lanes[kNumLanes] = {};
  for (uint64_t i = 0; i < count; ++i) lanes[i % kNumLanes] += values[i];
  for (uint64_t half = kNumLanes / 2; half; half /= 2) {
    for (uint64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace megatrain
