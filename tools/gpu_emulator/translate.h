// Translates CUDA C++ to C++ that g++ compiles with device.h in front of it.
#pragma once

#include <string>

namespace emulator {

// Throws std::runtime_error with a message.
std::string translate(const std::string& source, const std::string& file);

} // namespace emulator
