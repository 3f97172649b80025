// The file that carries cases in and results out. All numbers are little-endian, nothing is padded:
//
//   file    magic "mhc-case-file-1\n" (16 bytes), u32 cases, case...
//   case    text kind, text name, u32 tensors, tensor...
//   tensor  text name, u32 dtype (1 float32, 2 bfloat16), u32 rank, u64 size[rank], its elements in row-major order
//   text    u32 length (at most 255), bytes
//
// verify_portable.py is the other end of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "portable_operators.hpp"

namespace mhc::portable {

// What is wrong with a file or a case, for a person to read.
struct CaseError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Shape = std::vector<std::size_t>;

struct Tensor {
  std::string name;
  Shape shape;
  Floats floats;       // the elements, in one of the two
  Bf16s bf16s;
  bool is_bf16 = false;
};

struct Case {
  std::string kind, name;
  std::vector<Tensor> tensors;

  // The tensor of that name; CaseError where the case lacks it, or its dtype or shape is another.
  const Tensor& get(const std::string& tensor) const;
  const Floats& floats(const std::string& tensor, const Shape& shape) const;
  const Bf16s& bf16s(const std::string& tensor, const Shape& shape) const;

  void add(const std::string& tensor, const Shape& shape, Floats values);
  void add(const std::string& tensor, const Shape& shape, Bf16s values);
};

std::vector<Case> read_cases(const std::string& path);
void write_cases(const std::string& path, const std::vector<Case>& cases);

}  // namespace mhc::portable
