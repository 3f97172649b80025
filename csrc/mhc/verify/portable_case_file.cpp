#include "portable_case_file.hpp"

#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

namespace mhc::portable {

namespace {

static_assert(std::endian::native == std::endian::little, "the case file is read and written as it lies in memory");

constexpr char kMagic[] = "mhc-case-file-1\n";
constexpr std::size_t kMagicSize = sizeof(kMagic) - 1;
constexpr std::uint32_t kFloat32 = 1, kBf16 = 2;
constexpr std::uint32_t kMostText = 255, kMostRank = 8;

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    const File file(std::fopen(path.c_str(), "rb"));
    char chunk[1 << 16];
    for (std::size_t got = 1; file && got > 0;) {
      got = std::fread(chunk, 1, sizeof(chunk), file.get());
      bytes_.insert(bytes_.end(), chunk, chunk + got);
    }
    if (!file || std::ferror(file.get())) throw CaseError(path + ": cannot be read");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw CaseError(path_ + ": byte " + std::to_string(next_) + ": " + what);
  }

  // Sizes come from the file, so the multiplication must not wrap.
  void take(void* target, std::uint64_t count, std::size_t width) {
    if (count > (bytes_.size() - next_) / width) fail("the file ends too early");
    const auto size = static_cast<std::size_t>(count) * width;
    if (size != 0) std::memcpy(target, bytes_.data() + next_, size);
    next_ += size;
  }

  template <typename Value>
  std::vector<Value> elements(std::uint64_t count) {
    if (count > (bytes_.size() - next_) / sizeof(Value)) fail("the file ends too early");
    std::vector<Value> values(static_cast<std::size_t>(count));
    take(values.data(), count, sizeof(Value));
    return values;
  }

  template <typename Number>
  Number number() {
    Number value;
    take(&value, 1, sizeof(value));
    return value;
  }

  std::string text() {
    const auto size = number<std::uint32_t>();
    if (size > kMostText) fail("a text of " + std::to_string(size) + " bytes, want at most 255");
    std::string value(size, '\0');
    take(value.data(), size, 1);
    return value;
  }

  void magic() {
    char start[kMagicSize] = {};
    take(start, kMagicSize, 1);
    if (std::memcmp(start, kMagic, kMagicSize) != 0) throw CaseError(path_ + ": not a case file");
  }

  void end() const {
    if (next_ != bytes_.size()) fail("bytes left over after the last case");
  }

 private:
  std::string path_;
  std::vector<char> bytes_;
  std::size_t next_ = 0;
};

Tensor read_tensor(Reader& in) {
  Tensor tensor;
  tensor.name = in.text();
  const auto dtype = in.number<std::uint32_t>();
  if (dtype != kFloat32 && dtype != kBf16) in.fail(tensor.name + ": dtype " + std::to_string(dtype) + ", want 1 or 2");
  const auto rank = in.number<std::uint32_t>();
  if (rank > kMostRank) in.fail(tensor.name + ": rank " + std::to_string(rank) + ", want at most 8");
  std::uint64_t count = 1;
  for (std::uint32_t i = 0; i < rank; ++i) {
    const auto size = in.number<std::uint64_t>();
    if (__builtin_mul_overflow(count, size, &count)) in.fail(tensor.name + ": too large");
    tensor.shape.push_back(static_cast<std::size_t>(size));
  }
  tensor.is_bf16 = dtype == kBf16;
  if (tensor.is_bf16) {
    tensor.bf16s = in.elements<Bf16>(count);
  } else {
    tensor.floats = in.elements<float>(count);
  }
  return tensor;
}

class Writer {
 public:
  explicit Writer(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "wb")) {
    if (!file_) fail();
  }

  void raw(const void* source, std::size_t size) {
    if (size != 0 && std::fwrite(source, 1, size, file_.get()) != size) fail();
  }

  template <typename Number>
  void number(std::size_t value) {
    const auto narrow = static_cast<Number>(value);
    raw(&narrow, sizeof(narrow));
  }

  void text(const std::string& value) {
    number<std::uint32_t>(value.size());
    raw(value.data(), value.size());
  }

  void close() {
    if (std::fclose(file_.release()) != 0) fail();
  }

 private:
  [[noreturn]] void fail() const { throw CaseError(path_ + ": cannot be written"); }

  std::string path_;
  File file_;
};

void write_tensor(Writer& out, const Tensor& tensor) {
  out.text(tensor.name);
  out.number<std::uint32_t>(tensor.is_bf16 ? kBf16 : kFloat32);
  out.number<std::uint32_t>(tensor.shape.size());
  for (const std::size_t size : tensor.shape) out.number<std::uint64_t>(size);
  out.raw(tensor.floats.data(), tensor.floats.size() * sizeof(float));
  out.raw(tensor.bf16s.data(), tensor.bf16s.size() * sizeof(Bf16));
}

const Tensor& checked(const Case& owner, const std::string& name, const Shape& shape, bool is_bf16) {
  const Tensor& tensor = owner.get(name);
  const std::string field = owner.name + ": " + name + ": got ";
  if (tensor.is_bf16 != is_bf16) {
    throw CaseError(field + (tensor.is_bf16 ? "bfloat16, want float32" : "float32, want bfloat16"));
  }
  if (tensor.shape != shape) throw CaseError(field + shape_text(tensor.shape) + ", want " + shape_text(shape));
  return tensor;
}

}  // namespace

const Tensor& Case::get(const std::string& tensor) const {
  for (const Tensor& candidate : tensors) {
    if (candidate.name == tensor) return candidate;
  }
  throw CaseError(name + ": " + tensor + ": missing");
}

const Floats& Case::floats(const std::string& tensor, const Shape& shape) const {
  return checked(*this, tensor, shape, false).floats;
}

const Bf16s& Case::bf16s(const std::string& tensor, const Shape& shape) const {
  return checked(*this, tensor, shape, true).bf16s;
}

void Case::add(const std::string& tensor, const Shape& shape, Floats values) {
  tensors.push_back({tensor, shape, std::move(values), {}, false});
}

void Case::add(const std::string& tensor, const Shape& shape, Bf16s values) {
  tensors.push_back({tensor, shape, {}, std::move(values), true});
}

std::vector<Case> read_cases(const std::string& path) {
  Reader in(path);
  in.magic();
  std::vector<Case> cases;
  for (auto left = in.number<std::uint32_t>(); left > 0; --left) {
    Case item;
    item.kind = in.text();
    item.name = in.text();
    for (auto tensors = in.number<std::uint32_t>(); tensors > 0; --tensors) item.tensors.push_back(read_tensor(in));
    cases.push_back(std::move(item));
  }
  in.end();
  return cases;
}

void write_cases(const std::string& path, const std::vector<Case>& cases) {
  Writer out(path);
  out.raw(kMagic, kMagicSize);
  out.number<std::uint32_t>(cases.size());
  for (const Case& item : cases) {
    out.text(item.kind);
    out.text(item.name);
    out.number<std::uint32_t>(item.tensors.size());
    for (const Tensor& tensor : item.tensors) write_tensor(out, tensor);
  }
  out.close();
}

}  // namespace mhc::portable
