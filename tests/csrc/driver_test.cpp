// Launches kernels that were compiled for the compute capabilities that the arguments name, such as 80, with and
// without overlap, and in clusters.
#include "runtime/driver.h"

int main(int argc, char** argv) {
  namespace driver = attn::driver;
  for (int i = 1; i < argc; ++i) {
    const driver::Kernel kernel = driver::load_kernel(argv[i], "a_kernel", 0, 0);
    driver::Launch shape{1, 1, 32};
    driver::launch(kernel, shape, nullptr, nullptr);
    shape.overlaps_previous = true;
    driver::launch(kernel, shape, nullptr, nullptr);
    shape.cluster_x = 2;
    driver::launch(kernel, shape, nullptr, nullptr);
  }
  return 0;
}
