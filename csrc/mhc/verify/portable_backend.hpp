// What the driver asks of an implementation besides the operators of portable_block.hpp. There are two of them: the
// scalar one of portable_*.cpp, and in native_*.cpp the native backend behind the same functions.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace mhc::portable {

extern const char* const kProgram;  // before each message

// The levels of instructions to choose from, the best last: those that were compiled and that this processor runs.
std::vector<std::string> levels();
// The best is chosen until this is called; `level` is one of them.
void choose_level(const std::string& level);

enum class Function { kExp, kRsqrt, kSqrt, kSigmoid };

// y[i] = f(x[i]), in the portable profile.
void elementary(Function function, std::span<const float> x, std::span<float> y);

}  // namespace mhc::portable
