// Rounding to nearest with subnormals kept, whatever the caller's thread is set to (torch.set_flush_denormal).
#pragma once

#include <cfenv>

namespace dce {
namespace cpu {

class DefaultRounding {
 public:
  DefaultRounding() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultRounding() { std::fesetenv(&saved_); }
  DefaultRounding(const DefaultRounding&) = delete;
  DefaultRounding& operator=(const DefaultRounding&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace cpu
}  // namespace dce
