// Python's door to the native core: checks spans, lets go of the GIL, cuts the work into pieces.
// Shapes and dtypes are checked again in Python, with better words; here they are what keeps memory safe.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace nb = nanobind;

namespace megatrain {
namespace {

template <typename T>
using Span = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// 1 MiB of each fp32 array: long enough for the prefetchers, short enough to share out evenly.
constexpr uint64_t kPiece = uint64_t{1} << 18;

const Kernels& pick(const std::string& isa) {
  const Kernels* kernels = find_kernels(isa.c_str());
  if (kernels == nullptr) throw nb::value_error(("instruction set " + isa + " is not available here").c_str());
  return *kernels;
}

template <typename First, typename... Rest>
uint64_t common_size(const First& first, const Rest&... rest) {
  if (((rest.shape(0) != first.shape(0)) || ...)) throw nb::value_error("spans of one update differ in length");
  return first.shape(0);
}

std::vector<std::string> isas() {
  int count = 0;
  const Kernels* const* all = all_kernels(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    if (supported(*all[i])) names.emplace_back(all[i]->name);
  }
  return names;
}

void update_fp32(Span<float> w, Span<float> m, Span<float> v, Span<const float> grad, Span<const float> constants,
                 int threads, const std::string& isa) {
  const Kernels& kernels = pick(isa);
  const uint64_t count = common_size(w, m, v, grad);
  if (constants.shape(0) != 8) throw nb::value_error("a step has 8 constants");
  const float* c = constants.data();
  const Scalars s{c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
  float *pw = w.data(), *pm = m.data(), *pv = v.data();
  const float* pg = grad.data();
  nb::gil_scoped_release unlocked;
  parallel_for(count, kPiece, threads, [&](uint64_t begin, uint64_t end) {
    kernels.adamw_fp32(pw + begin, pm + begin, pv + begin, pg + begin, end - begin, s);
  });
}

void update_split(Span<uint16_t> hi, Span<int16_t> lo, Span<float> m, Span<float> v, Span<const float> grad,
                  Span<const float> constants, int threads, const std::string& isa) {
  const Kernels& kernels = pick(isa);
  const uint64_t count = common_size(hi, lo, m, v, grad);
  if (constants.shape(0) != 8) throw nb::value_error("a step has 8 constants");
  const float* c = constants.data();
  const Scalars s{c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
  uint16_t* ph = hi.data();
  int16_t* pl = lo.data();
  float *pm = m.data(), *pv = v.data();
  const float* pg = grad.data();
  nb::gil_scoped_release unlocked;
  parallel_for(count, kPiece, threads, [&](uint64_t begin, uint64_t end) {
    kernels.adamw_split(ph + begin, pl + begin, pm + begin, pv + begin, pg + begin, end - begin, s);
  });
}

double tensor_sum_squares(Span<const float> grad, uint64_t num_leaves, int threads, const std::string& isa) {
  const Kernels& kernels = pick(isa);
  const uint64_t count = grad.shape(0);
  if (count == 0) return 0.0;
  if (num_leaves == 0 || count % num_leaves != 0) throw nb::value_error("leaves do not divide the tensor");
  if (num_leaves > SIZE_MAX / sizeof(double)) throw nb::value_error("too many leaves");
  const float* pg = grad.data();
  nb::gil_scoped_release unlocked;
  const uint64_t leaf = count / num_leaves;
  const std::unique_ptr<double[]> values(new double[num_leaves]);
  const uint64_t piece = std::max<uint64_t>(1, kPiece / leaf);
  parallel_for(num_leaves, piece, threads, [&](uint64_t begin, uint64_t end) {
    if (leaf == 1) {  // a 1-D tensor: every element is a leaf, its value the square
      for (uint64_t i = begin; i < end; ++i) values[i] = static_cast<double>(pg[i]) * static_cast<double>(pg[i]);
    } else {
      for (uint64_t i = begin; i < end; ++i) values[i] = kernels.leaf_sum_squares(pg + i * leaf, leaf);
    }
  });
  return reduce_lanes(values.get(), num_leaves);
}

}  // namespace
}  // namespace megatrain

NB_MODULE(_native, module) {
  using namespace megatrain;
  module.doc() = "Fast forms of megatrain.optim.spec over flat CPU arrays; the same bits. Use megatrain.optim instead.";
  module.def("isas", &isas, "Names of the instruction sets this processor can run, narrowest first.");
  module.def("update_fp32", &update_fp32, nb::arg("w").noconvert(), nb::arg("m").noconvert(), nb::arg("v").noconvert(),
             nb::arg("grad").noconvert(), nb::arg("constants").noconvert(), nb::arg("threads"), nb::arg("isa"));
  module.def("update_split", &update_split, nb::arg("hi").noconvert(), nb::arg("lo").noconvert(),
             nb::arg("m").noconvert(), nb::arg("v").noconvert(), nb::arg("grad").noconvert(),
             nb::arg("constants").noconvert(), nb::arg("threads"), nb::arg("isa"));
  module.def("tensor_sum_squares", &tensor_sum_squares, nb::arg("grad").noconvert(), nb::arg("num_leaves"),
             nb::arg("threads"), nb::arg("isa"));
}
