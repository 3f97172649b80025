// Run the recipes of elementary.hpp on every FP32 input (or every N-th) and hold them against a higher precision.
//
// exp is compared with a __float128 evaluation of another kind (256 steps an octave, Taylor polynomial), rsqrt with the
// exact criterion x*m*m < 1 < x*M*M for the two rounding boundaries m, M around the result (74 bits, exact in __float128),
// sqrt with the instruction. Prints, for each function, how many inputs ran, how many results were wrong, a checksum over
// all results, and the inputs that come nearest to a rounding boundary.
#include <quadmath.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "checksum.hpp"
#include "mhc/elementary.hpp"

namespace {

using Bits = std::uint32_t;

struct Hard {
  double distance;  // to the nearest rounding boundary, in ULPs of the result
  Bits input;
  bool operator<(const Hard& other) const {
    return distance != other.distance ? distance < other.distance : input < other.input;
  }
};

struct Tally {
  std::uint64_t count = 0, wrong = 0, checksum = 0;
  Bits first_wrong = 0;
  std::vector<Hard> hard;
};

float as_float(Bits bits) { return std::bit_cast<float>(bits); }
Bits as_bits(float value) { return std::bit_cast<Bits>(value); }

constexpr int kOctave = 256;

struct QuadExp {
  __float128 power[kOctave];
  __float128 step = logq(2) / kOctave;

  QuadExp() {
    __float128 root = 2;
    for (int i = 0; i < 8; ++i) root = sqrtq(root);
    power[0] = 1;
    for (int i = 1; i < kOctave; ++i) power[i] = power[i - 1] * root;
  }

  __float128 operator()(float x) const {
    const long k = std::lrint(static_cast<double>(x) * (kOctave / M_LN2));
    const __float128 r = static_cast<__float128>(x) - step * k;
    __float128 sum = 1;
    for (int n = 8; n >= 1; --n) sum = 1 + sum * r / n;
    return ldexpq(power[k & (kOctave - 1)] * sum, static_cast<int>(k >> 8));
  }
};

const QuadExp quad_exp;

// The distance of v to the nearest rounding boundary in ULPs of FP32, for v in its normal range.
double boundary_distance(__float128 v) {
  int exponent;
  const __float128 scaled = ldexpq(frexpq(v, &exponent), 24);
  const __float128 fraction = scaled - floorq(scaled);
  return static_cast<double>(fabsq(fraction - static_cast<__float128>(0.5)));
}

bool check_exp(Bits input, float got, std::vector<Hard>& hard) {
  const float x = as_float(input);
  if (std::isnan(x)) return as_bits(got) == 0x7fc00000;
  // e^89 is above the largest FP32 number, e^-104 below half of the smallest, |e^x - 1| < 2^-25.9 for |x| < 2^-26.
  if (x > 89.0f) return as_bits(got) == 0x7f800000;
  if (x < -104.0f) return as_bits(got) == 0;
  if (std::fabs(x) < 0x1p-26f) return got == 1.0f;
  const __float128 v = quad_exp(x);
  const double nearby = static_cast<double>(v);
  const auto below = static_cast<std::int64_t>(std::bit_cast<std::uint64_t>(nearby) & ((1u << 29) - 1));
  if (nearby >= 0x1p-126 && std::llabs(below - (1 << 28)) < (1 << 14)) hard.push_back({boundary_distance(v), input});
  return as_bits(got) == as_bits(static_cast<float>(v));
}

bool check_rsqrt(Bits input, float got, std::vector<Hard>& hard) {
  const float x = as_float(input);
  if (std::isnan(x) || x < 0.0f) return as_bits(got) == 0x7fc00000;
  if (x == 0.0f) return as_bits(got) == (0x7f800000 | (input & 0x80000000));
  if (std::isinf(x)) return as_bits(got) == 0;
  const double lower = (static_cast<double>(got) + std::nextafterf(got, 0.0f)) / 2;
  const double upper = (static_cast<double>(got) + std::nextafterf(got, INFINITY)) / 2;
  const __float128 at_lower = static_cast<__float128>(x) * (lower * lower);
  const __float128 at_upper = static_cast<__float128>(x) * (upper * upper);
  if (x >= 1.0f && x < 4.0f) {
    const double ulp = upper - lower;
    const double nearest = std::min(static_cast<double>(1 - at_lower), static_cast<double>(at_upper - 1)) / 2;
    if (nearest < 0x1p-24 / 512) hard.push_back({nearest * got / ulp, input});
  }
  return at_lower < 1 && 1 < at_upper;
}

bool check_sqrt(Bits input, float got, std::vector<Hard>&) {
  const float x = as_float(input);
  const double wide = std::sqrt(static_cast<double>(x));
  return std::isnan(wide) ? as_bits(got) == 0x7fc00000 : as_bits(got) == as_bits(static_cast<float>(wide));
}

struct Function {
  const char* name;
  float (*recipe)(float);
  bool (*check)(Bits, float, std::vector<Hard>&);
};

const Function kFunctions[] = {
    {"exp", mhc::exp_rn, check_exp},
    {"rsqrt", mhc::rsqrt_rn, check_rsqrt},
    {"sqrt", mhc::sqrt_rn, check_sqrt},
    {"sigmoid", mhc::sigmoid_rn, nullptr},
};

struct Options {
  std::uint64_t stride = 1;
  unsigned threads = 2;
  bool reference = true;
  std::size_t keep = 10000;
  std::string hardest_in, hardest_out;
};

constexpr std::uint64_t kInputs = std::uint64_t{1} << 32;
constexpr std::uint64_t kBlock = std::uint64_t{1} << 22;

void visit(const Function& function, const Options& options, Bits input, Tally& tally) {
  const float got = function.recipe(as_float(input));
  ++tally.count;
  tally.checksum += mhc::mix(input, as_bits(got));
  if (options.reference && function.check && !function.check(input, got, tally.hard)) {
    if (tally.wrong++ == 0) tally.first_wrong = input;
  }
}

void keep_hardest(std::vector<Hard>& hard, std::size_t keep) {
  std::sort(hard.begin(), hard.end());
  if (hard.size() > keep) hard.resize(keep);
}

Tally sweep(const Function& function, const Options& options) {
  Tally total;
  std::mutex lock;
  std::atomic<std::uint64_t> next{0};
  const bool terminal = isatty(STDERR_FILENO);
  auto work = [&] {
    Tally mine;
    for (std::uint64_t start; (start = next.fetch_add(kBlock)) < kInputs;) {
      const std::uint64_t first = (start + options.stride - 1) / options.stride * options.stride;
      for (std::uint64_t i = first; i < start + kBlock; i += options.stride) {
        visit(function, options, static_cast<Bits>(i), mine);
      }
      keep_hardest(mine.hard, options.keep);
      if (terminal) std::fprintf(stderr, "\r%-8s %3d %%", function.name, static_cast<int>(start * 100 / kInputs));
    }
    const std::lock_guard guard(lock);
    total.count += mine.count;
    total.checksum += mine.checksum;
    if (mine.wrong && !total.wrong) total.first_wrong = mine.first_wrong;
    total.wrong += mine.wrong;
    total.hard.insert(total.hard.end(), mine.hard.begin(), mine.hard.end());
  };
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < options.threads; ++i) workers.emplace_back(work);
  for (auto& worker : workers) worker.join();
  if (terminal) std::fprintf(stderr, "\r%20s\r", "");
  keep_hardest(total.hard, options.keep);
  return total;
}

// A file of lines "function input", the input in hexadecimal.
Tally listed(const Function& function, const Options& options) {
  Tally tally;
  std::ifstream file(options.hardest_in);
  for (std::string name, input; file >> name >> input;) {
    if (name == function.name) visit(function, options, static_cast<Bits>(std::stoul(input, nullptr, 16)), tally);
  }
  return tally;
}

int report(const char* set, const Function& function, const Options& options, const Tally& tally) {
  std::printf("%-8s %-8s inputs %10" PRIu64 "  wrong ", function.name, set, tally.count);
  const bool checked = options.reference && function.check;
  if (checked) {
    std::printf("%" PRIu64, tally.wrong);
  } else {
    std::printf("-");
  }
  std::printf("  checksum %016" PRIx64 "\n", tally.checksum);
  if (tally.wrong) std::printf("  first wrong: input 0x%08x\n", tally.first_wrong);
  for (std::size_t i = 0; i < std::min<std::size_t>(3, tally.hard.size()); ++i) {
    std::printf("  hard: 0x%08x (%.9g), 2^%.2f ULP from a boundary\n", tally.hard[i].input,
                as_float(tally.hard[i].input), std::log2(tally.hard[i].distance));
  }
  std::fflush(stdout);
  return tally.wrong != 0;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--no-reference") {
      options.reference = false;
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "verify_elementary: %s: unknown, or its value is missing\n", name.c_str());
      std::exit(2);
    }
    const char* value = argv[++i];
    if (name == "--stride") {
      options.stride = std::max(1ULL, std::strtoull(value, nullptr, 10));
    } else if (name == "--threads") {
      options.threads = std::max(1UL, std::strtoul(value, nullptr, 10));
    } else if (name == "--hardest") {
      options.hardest_in = value;
    } else if (name == "--write-hardest") {
      options.hardest_out = value;
    } else {
      std::fprintf(stderr, "verify_elementary: %s: unknown option\n", name.c_str());
      std::exit(2);
    }
  }
  if (!options.hardest_in.empty() && !std::ifstream(options.hardest_in)) {
    std::fprintf(stderr, "verify_elementary: --hardest: cannot read %s\n", options.hardest_in.c_str());
    std::exit(2);
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  int failed = 0;
  std::ofstream hardest;
  if (!options.hardest_out.empty()) hardest.open(options.hardest_out);
  for (const Function& function : kFunctions) {
    const Tally all = sweep(function, options);
    failed |= report("sweep", function, options, all);
    for (const Hard& hard : all.hard) {
      if (hardest.is_open()) hardest << function.name << " " << std::hex << hard.input << "\n";
    }
    if (!options.hardest_in.empty()) failed |= report("hardest", function, options, listed(function, options));
  }
  return failed;
}
