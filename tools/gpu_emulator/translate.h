// CUDA C++ as C++ that g++ compiles with device.h in front of it.
#pragma once

#include <string>

namespace emulator {

// Throws std::runtime_error with what is wrong, for people.
std::string translate(const std::string& source, const std::string& file);

} // namespace emulator
